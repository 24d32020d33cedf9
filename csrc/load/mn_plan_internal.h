/* mn_plan_internal.h - a planned batch, for the files of the plan.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_PLAN_INTERNAL_H
#define MN_PLAN_INTERNAL_H

#include "load/mn_engine.h"

struct mn_planned {
    uint64_t sequence;
    uint64_t block_off; /* 0: not started */
    uint64_t rows;      /* planned before it */
    uint32_t ntasks;
    bool stale;         /* cut by what is known better now */
    bool done;          /* its block was seen done, or lost: both are final */
    struct mn_refusal refusal; /* it cannot be made */
    struct mn_plan_batch batch; /* index points behind row0 */
    uint32_t row0[];            /* [ntasks + 1] */
};

/* NULL when it is not planned, or was taken. */
struct mn_planned *
mn_plan_at(const struct mn_plan *p, uint64_t sequence);

/* What the rows of a batch take in the arena. */
uint64_t
mn_form_bytes(const struct mn_form *f, uint32_t nrows);

/* Whether the batch is there to be delivered, as data or as an error. */
bool
mn_planned_done(struct mn_engine *e, struct mn_planned *q);

/* Makes the block of a batch that has none. MN_OK; MN_EMPTY: not now; MN_CLOSED: it cannot be
 * made and is an error, and its tasks are planned no more. */
int
mn_plan_begin(struct mn_engine *e, struct mn_planned *q);

/* Cuts anew what is stale and has not started. */
void
mn_plan_recut(struct mn_engine *e);

#endif
