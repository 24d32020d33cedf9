/* mn_delivery.h - which batch is delivered next: one interface, three orders.
 * SPDX-License-Identifier: Apache-2.0
 *
 *     in order   the head of the plan                                      mn_delivery.c
 *     as done    the batch that was done first                             mn_delivery.c
 *     ready      a batch that is formed of the samples that are ready      mn_delivery_ready.c
 *
 * The plan (schedule/mn_plan.h) says what starts next; the order says which of the results the
 * program gets next. Balanced scheduling only. All functions need the engine's mutex. Those that
 * learn from finished batches take the lock of the costs; add needs it.
 */
#ifndef MN_DELIVERY_H
#define MN_DELIVERY_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/mn_plan.h"

struct mn_engine;

/* Neighbouring rows of one planned batch. */
struct mn_run {
    uint64_t sequence;
    uint64_t block_off; /* 0: it cannot be made */
    uint32_t row0;
    uint32_t nrows;
};

struct mn_delivery {
    /* Plans a batch: mn_plan_add(), which says what is returned. */
    int (*add)(struct mn_engine *e, const struct mn_plan_batch *b);
    /* Declares that no more batches are planned in this epoch. */
    void (*end)(struct mn_engine *e);
    /* Forgets what was done and not taken. The plan is cleared next. */
    void (*clear)(struct mn_engine *e);
    /* Finds the batch to deliver next. *block_off is 0 if it cannot be made. In ready mode: the
     * first run of the formed batch. Returns false if there is none. */
    bool (*pick)(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off);
    /* Returns whether there is a batch to deliver. */
    bool (*any)(struct mn_engine *e);
    /* Returns how many batches are done and not taken: in order from the head on; else at least as
     * many as the plan's starved_below, if there are that many. */
    int64_t (*ready)(struct mn_engine *e);
    /* Frees the batch that pick() gave, which the caller has read. Returns -EINVAL if it was not
     * given as the next one, or was taken. */
    int (*take)(struct mn_engine *e, uint64_t sequence, uint64_t block_off);
    /* Returns for how long from now the caller may sleep at most if nothing happens. */
    int64_t (*nap)(const struct mn_engine *e);
    void (*close)(struct mn_engine *e);
    bool head_first; /* nothing is delivered before the head of the plan is done */
};

/* Opens the order that the engine's configuration asks for. Returns 0 or -ENOMEM; close it in
 * either case. */
int
mn_delivery_open(struct mn_engine *e);

/* Does the same for ready mode: batches of `batch` rows, and none moves by more than `bound`
 * batches. mixes: rows of several planned batches may make up one. */
int
mn_delivery_open_ready(struct mn_engine *e, uint32_t batch, uint32_t bound, bool mixes);

/* ---- ready mode only; otherwise there are no runs, and nothing moves ------------------------- */

/* Returns the rows that make up the batch that pick() gave, until it is taken; their number is 0 if
 * none is formed. The caller that was given the batch needs no mutex. */
uint32_t
mn_delivery_runs(const struct mn_engine *e, const struct mn_run **runs);

/* Returns why a planned batch that has left the plan cannot be made. */
struct mn_refusal
mn_delivery_refusal(const struct mn_engine *e, uint64_t sequence);

/* Returns how far samples moved from their positions in the sampler's order, in batches. */
int64_t
mn_delivery_displaced(const struct mn_engine *e, int64_t *sum);

#endif
