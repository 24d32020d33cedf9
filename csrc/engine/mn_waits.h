/* mn_waits.h - measures how long the caller waits for a batch, and how long it uses one.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A stopwatch that is given the time: no clock, no lock. Only the caller's thread changes it;
 * other threads may read the numbers under the engine's mutex.
 *
 *   ask   the caller begins to wait for a batch. A call without a result, as after a timeout,
 *         is part of a longer wait, which the next call continues.
 *   give  the wait ends, with a batch or without
 */
#ifndef MN_WAITS_H
#define MN_WAITS_H

#include <stdbool.h>
#include <stdint.h>

struct mn_waits {
    uint64_t n;        /* waits that ended with a batch */
    uint64_t wait_ns;  /* sum of all waits */
    uint64_t max_ns;   /* the longest wait */
    uint64_t first_ns; /* the first wait, which includes the workers' start */
    uint64_t starts;   /* waits that ended with the first batch of a later epoch */
    uint64_t starts_ns; /* sum of these */
    uint64_t steady_max_ns; /* the longest of all other waits but the first */
    uint64_t used_ns;  /* time of the caller between two waits */
    uint64_t asked_ns; /* when the last wait began */
    uint64_t part_ns;  /* when the last part of that wait began */
    uint64_t given_ns; /* when it ended; 0: without a batch, or the epoch is over */
    bool asking;       /* the last call gave no batch: the wait may go on */
    bool starting;     /* the wait is for the first batch of an epoch */
    bool spanned;      /* the caller says when a wait begins and ends */
    bool served;       /* the batch that it waits for was taken */
};

/* Begins a wait. Returns how long the caller used the previous batch, or -1 if that time does not
 * count as use of a batch. */
int64_t
mn_waits_ask(struct mn_waits *w, uint64_t now_ns);

/* Ends a wait. got: with a batch. */
void
mn_waits_give(struct mn_waits *w, uint64_t now_ns, bool got);

/* The caller's time until its next wait does not count as use of a batch. */
void
mn_waits_forget(struct mn_waits *w);

#endif
