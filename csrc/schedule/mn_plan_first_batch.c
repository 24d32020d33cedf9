/* mn_plan_first_batch.c - neighbours kept together: which workers help with the very first batch.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The caller waits for it, and nothing is known: policy_locality.h says what to do.
 */
#include "schedule/mn_plan_state.h"

/* Spreads the part of the head that has not started over all workers, in equal parts. The parts of
 * workers that do not exist yet go to the first idle worker. */
static void
spread(struct mn_plan *p, uint32_t owner)
{
    struct mn_piece *x = p->shares.of[owner].first;
    if (x == NULL || x->batch->sequence != p->order.head) {
        return;
    }
    uint32_t tasks = mn_piece_tasks(x), from = x->t0, workers = p->cfg.max_workers;
    for (uint32_t i = p->pace.active - 1; i > 0; i--) {
        uint32_t at = from + tasks * i / p->pace.active, w = (owner + i) % workers;
        if (at <= x->t0 || at >= x->t1) {
            continue; /* fewer tasks than workers */
        }
        struct mn_piece *part = mn_share_split(p, owner, x, at);
        if (p->shares.of[w].usable) {
            mn_share_give(p, w, part);
        }
        else {
            mn_piece_offer(p, part);
        }
    }
}

bool
mn_plan_find_first(struct mn_plan *p, const struct mn_locality_pairs *pairs)
{
    uint64_t finding = p->together.finding;
    const struct mn_planned *q = finding != 0 ? mn_plan_at(p, finding - 1) : NULL;
    if (q == NULL || q->done || q->sequence != p->order.head || mn_plan_together(p)) {
        p->together.finding = 0;
        return false;
    }
    if (mn_locality_spreads(pairs) && q->maker != 0) {
        spread(p, (uint32_t)q->maker - 1);
        p->together.finding = 0;
    }
    return pairs->alike + pairs->opened == 0;
}
