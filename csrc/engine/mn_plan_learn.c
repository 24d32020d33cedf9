/* mn_plan_learn.c - what finished batches have cost, and what is planned anew for it.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine_internal.h"
#include "engine/mn_plan_internal.h"

/* A sample that is slower than most by this and was not known to be: what the next epoch has
 * planned of it is cut anew. */
#define NEWS_NS (INT64_C(1) * 1000 * 1000)

/* The answer to whether batches are split has changed. */
static void
recut_splits(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->batch.splits;
        }
    }
    mn_plan_recut(e);
}

/* Marks what is planned of a sample. Returns whether there is any. */
static bool
mark_stale(struct mn_plan *p, uint64_t epoch, int64_t index)
{
    bool any = false;
    for (uint64_t n = p->next; n-- > p->head;) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q == NULL) {
            continue; /* taken, out of order */
        }
        if (q->batch.epoch == epoch) {
            break; /* the next epoch's are the last */
        }
        const int64_t *at = q->batch.index;
        bool ints = q->block_off == 0 && q->batch.index_kind == MN_INDEX_INT64;
        for (uint32_t i = 0; ints && i < q->batch.nrows; i++) {
            q->stale = q->stale || at[i] == index;
            any = any || at[i] == index;
        }
    }
    return any;
}

/* Samples that turn out slow may be planned already for the next epoch, by a guess. Before
 * the reports of a batch are learned. */
static bool
find_news(struct mn_plan *p, uint64_t epoch, const int64_t *index, const struct mn_report *r,
          uint32_t rows)
{
    const struct mn_planned *last = p->next != 0 ? mn_plan_at(p, p->next - 1) : NULL;
    if (last == NULL || last->batch.epoch == epoch || index == NULL) {
        return false;
    }
    bool any = false;
    int64_t slow = 2 * mn_costs_look(p->costs).median_ns + NEWS_NS;
    for (uint32_t i = 0; i < rows; i++) {
        int64_t guess, ns = (int64_t)r[i].wall_ns;
        if (ns > slow) {
            mn_costs_predict(p->costs, &index[i], 1, false, &guess);
            any = (guess < ns / 2 && mark_stale(p, epoch, index[i])) || any;
        }
    }
    return any;
}

/* What the batch took beside its samples: its collate task, or the rest of its only one. */
static void
learn_collate(struct mn_engine *e, struct mn_block *b, uint64_t rows_ns)
{
    const struct mn_result *t = &e->tasks.results[mn_block_tasks(b)[b->ntasks - 1]];
    if (!t->accepted) {
        return;
    }
    if (t->kind == MN_KIND_COLLATE) {
        mn_costs_collated(e->plan->costs, (int64_t)t->wall_ns);
    }
    else if (t->kind == MN_KIND_BATCH && rows_ns != 0) {
        mn_costs_collated(e->plan->costs,
                          t->wall_ns > rows_ns ? (int64_t)(t->wall_ns - rows_ns) : 0);
    }
}

/* Teaches what each task's rows have cost, and where they were made. Returns their sum. */
static uint64_t
learn_rows(struct mn_engine *e, const struct mn_batch *batch, struct mn_block *b,
           const int64_t *index)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < b->ntasks; i++) {
        uint32_t task = mn_block_tasks(b)[i];
        const struct mn_result *t = &e->tasks.results[task];
        if (!t->accepted || t->kind == MN_KIND_COLLATE) {
            continue;
        }
        uint32_t how = mn_task_at(&e->shm, task)->made; /* whatever it is: only compared */
        struct mn_costs_made made = {.worker = t->worker,
                                     .keeps = e->cfg.keeps,
                                     .follows = how == MN_MADE_NEXT,
                                     .newcomer = how == MN_MADE_FIRST,
                                     .edge = t->row0 == 0};
        sum += mn_costs_observe_rows(e->plan->costs, index != NULL ? index + t->row0 : NULL,
                                     batch->reports + t->row0, t->nrows, &made);
    }
    return sum;
}

void
mn_plan_learn(struct mn_engine *e, struct mn_batch *batch)
{
    struct mn_block *b = mn_block_at(&e->shm, batch->block_off);
    if (e->plan == NULL || e->plan->costs == NULL || b->nrows == 0 || batch->learned) {
        return;
    }
    batch->learned = true;
    const struct mn_report *r = batch->reports;
    const int64_t *index = b->index_kind == MN_INDEX_INT64 ? mn_block_index(b) : NULL;
    bool news = find_news(e->plan, b->epoch, index, r, b->nrows);
    uint64_t rows_ns = learn_rows(e, batch, b, index);
    if (b->ntasks != 0) {
        learn_collate(e, b, rows_ns);
    }
    bool split = mn_costs_look(e->plan->costs).split;
    if (split != e->plan->split) {
        e->plan->split = split;
        recut_splits(e);
    }
    if (news) {
        mn_plan_recut(e);
    }
    mn_plan_look(e->plan); /* the next dispatch acts on it */
}
