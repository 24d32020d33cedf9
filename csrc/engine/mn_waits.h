/* mn_waits.h - when the caller waits for a batch, how long, and how long it uses one.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A stopwatch that is told the time: no clock, no lock.  The caller's thread alone works it; the
 * engine's mutex is for others, who may look at the numbers.
 *
 *   ask   the caller begins to wait for a batch.  A call that gave nothing, as after a timeout,
 *         is a part of the wait that the next one goes on with.
 *   give  the wait ends, with a batch or without
 */
#ifndef MN_WAITS_H
#define MN_WAITS_H

#include <stdbool.h>
#include <stdint.h>

struct mn_waits {
    uint64_t n;        /* waits that gave a batch */
    uint64_t wait_ns;  /* all of them together */
    uint64_t max_ns;   /* the longest */
    uint64_t first_ns; /* the first: workers start meanwhile */
    uint64_t used_ns;  /* the caller between two waits */
    uint64_t asked_ns; /* when the last wait began */
    uint64_t part_ns;  /* when the last part of it began */
    uint64_t given_ns; /* when it ended; 0: it gave nothing, or the epoch is over */
    bool asking;       /* the last call gave nothing: its wait may go on */
    bool spanned;      /* the caller says when a wait begins and ends, */
    bool served;       /* and what it waits for was taken */
};

/* How long the caller has used the batch before, -1 where that is no time for a batch. */
int64_t
mn_waits_ask(struct mn_waits *w, uint64_t now_ns);

void
mn_waits_give(struct mn_waits *w, uint64_t now_ns, bool got);

/* What the caller does until its next wait is no time for a batch. */
void
mn_waits_forget(struct mn_waits *w);

#endif
