/* mn_planned.h - a planned batch.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_PLANNED_H
#define MN_PLANNED_H

#include "schedule/mn_plan.h"

/* Neighbouring samples that belong together (policy_locality.h), up to the last planned one. */
struct mn_chain {
    uint64_t number;
    int64_t length; /* samples so far; 0: a new one begins */
    int64_t owner;  /* worker that it was given to; -1: none yet */
};

#define MN_SENT_ANY UINT16_MAX /* for any worker */

struct mn_planned {
    uint64_t sequence;
    uint64_t block_off; /* the owner's name for its block; 0: not started */
    uint64_t rows;      /* planned before it */
    uint32_t ntasks;
    bool stale;         /* its cut is based on outdated costs */
    bool done;          /* its block was seen done or lost; both are final */
    struct mn_chain chain;   /* as it was before the batch's first row */
    struct mn_piece *pieces; /* space for [ntasks], while neighbours are kept together */
    uint32_t npieces;
    int64_t *cost_ns;        /* [ntasks] expected durations; stored behind the pieces */
    int64_t *opens_ns;       /* [ntasks] the part for groups that begin there; behind cost_ns */
    uint16_t *sent;          /* [ntasks] queued now or earlier: 1 + the worker, or MN_SENT_ANY; 0:
                              * not; stored behind row0 */
    uint8_t *border;         /* [nrows] a piece begins here; stored behind sent */
    uint64_t first_chain;    /* of its first row; 0: it was not cut for pieces */
    uint64_t later_chain;    /* the first of the chains that begin after that row */
    int32_t maker;           /* 1 + the worker that was given a task of it last; 0: none */
    struct mn_refusal refusal; /* why it cannot be made */
    struct mn_plan_batch batch; /* index points behind row0 */
    uint32_t row0[];            /* [ntasks + 1] */
};

/* Returns NULL if memory is short. */
struct mn_planned *
mn_planned_make(const struct mn_plan_batch *b);

void
mn_planned_free(struct mn_planned *q);

/* Returns the ring slot that holds or would hold the batch. */
struct mn_planned **
mn_plan_place(const struct mn_plan *p, uint64_t sequence);

/* Returns the memory that the rows of a batch take. */
uint64_t
mn_plan_rows_bytes(const struct mn_plan *p, uint32_t nrows);

/* Returns the indices by which the costs of the batch's rows are known, or NULL. */
static inline const int64_t *
mn_planned_index(const struct mn_plan_batch *b)
{
    return b->integers ? b->index : NULL;
}

#endif
