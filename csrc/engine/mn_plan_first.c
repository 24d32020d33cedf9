/* mn_plan_first.c - neighbours kept together: who helps with the first batch of all.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Everybody waits for it, and nothing is known: policy_locality.h says what is done.
 */
#include "engine/mn_engine_internal.h"
#include "engine/mn_plan_internal.h"

/* What the first two samples of the batches say that workers have begun with. */
static struct mn_locality_pairs
first_pairs(struct mn_engine *e)
{
    const struct mn_plan *p = e->plan;
    struct mn_locality_pairs pairs = {0, 0};
    for (uint64_t n = p->head; n < p->begun && n < p->head + e->active; n++) {
        uint64_t off = mn_plan_block(p, n);
        struct mn_batch *b = off != 0 ? mn_batch_find(e, off) : NULL;
        if (b == NULL || mn_block_at(&e->shm, off)->nrows < 2) {
            continue;
        }
        mn_batch_accept_some(e, b);
        const struct mn_report *r = b->reports;
        if (r[0].wall_ns != 0 && r[1].wall_ns != 0) {
            mn_locality_pair(&pairs, (int64_t)r[0].wall_ns, (int64_t)r[1].wall_ns);
        }
    }
    return pairs;
}

/* What has not started of the batch that everybody waits for goes to all, in equal parts; those of
 * workers that are not there yet to whoever is first to have nothing to do. */
static void
spread(struct mn_engine *e, uint32_t owner)
{
    struct mn_plan *p = e->plan;
    struct mn_piece *x = p->shares[owner].first;
    if (x == NULL || x->batch->sequence != p->head) {
        return;
    }
    uint32_t tasks = mn_piece_tasks(x), from = x->t0, workers = e->shm.ctl->nworkers;
    for (uint32_t i = e->active - 1; i > 0; i--) {
        uint32_t at = from + tasks * i / e->active, w = (owner + i) % workers;
        if (at <= x->t0 || at >= x->t1) {
            continue; /* there are fewer tasks than workers */
        }
        struct mn_piece *part = mn_share_split(p, owner, x, at);
        if (mn_share_usable(e, w)) {
            mn_share_give(p, w, part);
        }
        else {
            mn_piece_offer(p, part);
        }
    }
}

bool
mn_pieces_find_first(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    const struct mn_planned *q = p->finding != 0 ? mn_plan_at(p, p->finding - 1) : NULL;
    if (q == NULL || q->done || q->sequence != p->head || mn_plan_together(p)) {
        p->finding = 0;
        return false;
    }
    struct mn_locality_pairs pairs = first_pairs(e);
    if (mn_locality_spreads(&pairs) && q->maker != 0) {
        spread(e, (uint32_t)q->maker - 1);
        p->finding = 0;
    }
    return pairs.alike + pairs.opened == 0;
}
