/* mn_plan_learn.c - replans after finished batches have taught their costs. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_plan_state.h"

/* A sample may turn out slower than most by this without being known to be slow. Its batch in the
 * next epoch is then cut again. */
#define NEWS_NS (INT64_C(1) * 1000 * 1000)

/* Cuts again after the answer to whether batches are split has changed, or (all) after bytes have
 * begun to predict costs. */
static void
recut_planned(struct mn_plan *p, bool all)
{
    for (uint64_t n = p->order.head; n < p->order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->stale || all || q->batch.splits;
        }
    }
    mn_plan_recut(p);
}

/* Marks planned batches that contain a sample. Returns whether there are any. */
static bool
mark_stale(struct mn_plan *p, uint64_t epoch, int64_t index)
{
    bool any = false;
    for (uint64_t n = p->order.next; n-- > p->order.head;) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q == NULL) {
            continue; /* taken, out of order */
        }
        if (q->batch.epoch == epoch) {
            break; /* the next epoch's batches are the last ones */
        }
        const int64_t *at = q->block_off == 0 ? mn_planned_index(&q->batch) : NULL;
        for (uint32_t i = 0; at != NULL && i < q->batch.nrows; i++) {
            q->stale = q->stale || at[i] == index;
            any = any || at[i] == index;
        }
    }
    return any;
}

bool
mn_plan_is_news(struct mn_plan *p, uint64_t epoch, const int64_t *index, const uint64_t *wall_ns,
                size_t step, uint32_t rows)
{
    const struct mn_planned *last = p->order.next != 0 ? mn_plan_at(p, p->order.next - 1) : NULL;
    if (last == NULL || last->batch.epoch == epoch || index == NULL) {
        return false;
    }
    bool any = false;
    int64_t slow = 2 * mn_costs_look(p->cfg.costs).median_ns + NEWS_NS;
    for (uint32_t i = 0; i < rows; i++) {
        int64_t guess, ns = (int64_t)wall_ns[i * step];
        if (ns > slow) {
            mn_costs_predict(p->cfg.costs, &index[i], NULL, 1, false, &guess);
            any = (guess < ns / 2 && mark_stale(p, epoch, index[i])) || any;
        }
    }
    return any;
}

void
mn_plan_learned(struct mn_plan *p, bool news)
{
    struct mn_costs_view known = mn_costs_look(p->cfg.costs);
    bool all = known.revision != p->pace.revision;
    if (all || known.split != p->pace.split) {
        p->pace.split = known.split;
        p->pace.revision = known.revision;
        recut_planned(p, all);
    }
    else if (news) {
        mn_plan_recut(p);
    }
    mn_plan_look(p); /* the next dispatch acts on it */
}
