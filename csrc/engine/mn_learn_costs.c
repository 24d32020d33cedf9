/* mn_learn_costs.c - teaches the cost model from the records of finished batches.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Needs the engine's mutex; takes the lock of the costs.
 */
#include "engine/mn_engine_parts.h"

#include "engine/mn_blocks.h"
#include "engine/mn_checked_results.h"
#include "engine/mn_shared_costs.h"

/* Teaches what the batch took in addition to its samples: its collate task, or the rest of its only
 * task. */
static void
learn_collate(struct mn_engine *e, struct mn_block *b, uint64_t rows_ns)
{
    const struct mn_result *t = &e->tasks.results[mn_block_tasks(b)[b->ntasks - 1]];
    if (!t->accepted) {
        return;
    }
    if (t->kind == MN_KIND_COLLATE) {
        mn_costs_collated(&e->cfg.costs->costs, (int64_t)t->wall_ns);
    }
    else if (t->kind == MN_KIND_BATCH && rows_ns != 0) {
        mn_costs_collated(&e->cfg.costs->costs,
                          t->wall_ns > rows_ns ? (int64_t)(t->wall_ns - rows_ns) : 0);
    }
}

/* Teaches what the rows of each task cost, and which worker made them. Returns the sum. */
static uint64_t
learn_rows(struct mn_engine *e, const struct mn_batch *batch, struct mn_block *b,
           const int64_t *index)
{
    uint64_t sum = 0;
    const struct mn_planned *q = mn_plan_at(e->plan, batch->sequence);
    const float *hint = q != NULL ? q->batch.hint : NULL;
    for (uint32_t i = 0; i < b->ntasks; i++) {
        uint32_t task = mn_block_tasks(b)[i];
        const struct mn_result *t = &e->tasks.results[task];
        if (!t->accepted || t->kind == MN_KIND_COLLATE) {
            continue;
        }
        uint32_t how = mn_task_at(&e->shm, task)->made; /* unchecked: it is only compared */
        struct mn_costs_made made = {.worker = t->worker,
                                     .learn_locality = e->cfg.group_neighbours,
                                     .follows = how == MN_MADE_NEXT,
                                     .newcomer = how == MN_MADE_FIRST,
                                     .edge = t->row0 == 0};
        sum += mn_costs_observe_rows(&e->cfg.costs->costs, index != NULL ? index + t->row0 : NULL,
                                     hint != NULL ? hint + t->row0 : NULL,
                                     &batch->reports[t->row0].wall_ns,
                                     MN_REPORT_STEP, t->nrows,
                                     &made);
    }
    return sum;
}

void
mn_learn_costs(struct mn_engine *e, struct mn_batch *batch)
{
    struct mn_block *b = mn_block_at(&e->shm, batch->block_off);
    if (e->plan == NULL || e->cfg.costs == NULL || b->nrows == 0 || batch->learned) {
        return;
    }
    batch->learned = true;
    const int64_t *index = b->index_kind != MN_INDEX_PICKLE ? mn_block_index(b) : NULL;
    mn_shared_costs_lock(e->cfg.costs);
    bool news = mn_plan_is_news(e->plan, b->epoch, index, &batch->reports->wall_ns,
                                MN_REPORT_STEP, b->nrows);
    uint64_t rows_ns = learn_rows(e, batch, b, index);
    if (b->ntasks != 0) {
        learn_collate(e, b, rows_ns);
    }
    mn_plan_learned(e->plan, news);
    mn_shared_costs_unlock(e->cfg.costs);
}

void
mn_learn_costs_waiting(struct mn_engine *e)
{
    for (struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (!b->abandoned && mn_engine_poll(e, b->block_off) == MN_BLOCK_DONE
            && mn_batch_accept(e, b) == MN_BLOCK_DONE) {
            mn_learn_costs(e, b);
            mn_batch_learn_envelopes(e, b);
        }
    }
}
