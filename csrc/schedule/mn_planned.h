/* mn_planned.h - a planned batch.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_PLANNED_H
#define MN_PLANNED_H

#include "schedule/mn_plan.h"

/* Neighbouring samples that belong together (policy_locality.h), as far as they were planned. */
struct mn_chain {
    uint64_t number;
    int64_t length; /* samples so far; 0: a new one begins */
    int64_t owner;  /* worker that it was given to, -1: to nobody yet */
};

#define MN_SENT_ANY UINT16_MAX /* for whoever takes it */

struct mn_planned {
    uint64_t sequence;
    uint64_t block_off; /* its owner's name of it; 0: not started */
    uint64_t rows;      /* planned before it */
    uint32_t ntasks;
    bool stale;         /* cut by what is known better now */
    bool done;          /* its block was seen done, or lost: both are final */
    struct mn_chain chain;   /* as it was before its first row */
    struct mn_piece *pieces; /* [ntasks] of room, while neighbours are kept together */
    uint32_t npieces;
    int64_t *cost_ns;        /* [ntasks] what each is expected to take; behind the pieces */
    int64_t *opens_ns;       /* [ntasks] of that, for groups that begin in it; behind that */
    uint16_t *sent;          /* [ntasks] it is queued, or was: 1 + for which worker, or
                              * MN_SENT_ANY; 0: not; behind row0 */
    uint8_t *border;         /* [nrows] a piece begins here; behind that */
    uint64_t first_chain;    /* that its first row belongs to; 0: it was not cut for pieces */
    uint64_t later_chain;    /* the first of those that begin after that row */
    int32_t maker;           /* 1 + the worker that was given a task of it last; 0: nobody */
    struct mn_refusal refusal; /* it cannot be made */
    struct mn_plan_batch batch; /* index points behind row0 */
    uint32_t row0[];            /* [ntasks + 1] */
};

/* NULL without memory. */
struct mn_planned *
mn_planned_make(const struct mn_plan_batch *b);

void
mn_planned_free(struct mn_planned *q);

/* Where the ring has it, or would have it. */
struct mn_planned **
mn_plan_place(const struct mn_plan *p, uint64_t sequence);

/* What the rows of a batch take. */
uint64_t
mn_plan_rows_bytes(const struct mn_plan *p, uint32_t nrows);

/* By what costs of the batch's rows are known, or NULL. */
static inline const int64_t *
mn_planned_index(const struct mn_plan_batch *b)
{
    return b->integers ? b->index : NULL;
}

#endif
