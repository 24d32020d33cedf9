/* mn_next_delivery.c - see mn_next_delivery.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_next_delivery.h"

#include <stdlib.h>

#include "engine/mn_checked_results.h"
#include "schedule/mn_forming.h"
#include "schedule/mn_planned.h"
#include "engine/mn_ready_rows.h"

/* Returns whether the batch can be delivered, as data or as an error. */
static bool
is_done(struct mn_engine *e, struct mn_planned *q)
{
    if (!q->done /* each look at a block reads many cache lines of other CPUs */
        && (q->refusal.why != MN_REFUSED_NOT
            || (q->block_off != 0 && mn_engine_poll(e, q->block_off) != MN_BLOCK_BUSY
                && mn_batch_accept(e, mn_batch_find(e, q->block_off)) != MN_BLOCK_BUSY))) {
        mn_plan_set_done(e->plan, q);
    }
    return q->done;
}

int64_t
mn_next_delivery_ready(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    int64_t ready = 0;
    if (mn_plan_forming(p) != NULL) {
        return mn_ready_rows_batches(e);
    }
    struct mn_plan_order order = mn_plan_order(p);
    int64_t enough = mn_plan_window(p).starved_below;
    for (uint64_t n = order.head; n < order.begun; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        bool done = q != NULL && is_done(e, q);
        ready += done;
        if (!done && (e->cfg.in_order || ready >= enough)) {
            break;
        }
    }
    return ready;
}

/* ---- out of order ------------------------------------------------------------------------- */

static int
by_time(const void *a, const void *b)
{
    uint64_t x = ((const struct mn_found *)a)->done_ns, y = ((const struct mn_found *)b)->done_ns;
    return (x > y) - (x < y);
}

/* Looks at all batches that have started; the next look comes when all that were found are
 * taken. */
static void
find_done(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_done *d = &e->done;
    d->n = d->at = 0;
    struct mn_plan_order order = mn_plan_order(p);
    for (uint64_t n = order.head; n < order.begun; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && is_done(e, q)) {
            uint64_t ns = q->block_off != 0 ? mn_engine_done_ns(e, q->block_off) : 0;
            d->found[d->n++] = (struct mn_found){n, ns};
        }
    }
    if (d->n > 1) {
        qsort(d->found, d->n, sizeof(*d->found), by_time);
    }
}

/* Returns the sequence of the batch to deliver next; UINT64_MAX: none. */
static uint64_t
first_done(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_done *d = &e->done;
    if (e->cfg.in_order) {
        uint64_t head = mn_plan_order(p).head;
        struct mn_planned *q = mn_plan_at(p, head);
        return q != NULL && is_done(e, q) ? head : UINT64_MAX;
    }
    for (int turn = 0; turn < 2; turn++) {
        while (d->at < d->n) {
            uint64_t sequence = d->found[d->at].sequence;
            if (mn_plan_at(p, sequence) != NULL) {
                return sequence;
            }
            d->at++; /* already taken */
        }
        if (turn == 0) {
            find_done(e);
        }
    }
    return UINT64_MAX;
}

/* ---- next --------------------------------------------------------------------------------- */

bool
mn_next_delivery_pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off)
{
    const struct mn_forming *f = mn_plan_forming(e->plan);
    if (f != NULL) {
        bool formed = mn_ready_rows_form(e);
        *sequence = formed ? f->runs[0].sequence : 0;
        *block_off = formed ? f->runs[0].block_off : 0;
        return formed;
    }
    uint64_t first = first_done(e);
    if (first == UINT64_MAX) {
        return false;
    }
    *sequence = first;
    *block_off = mn_plan_block(e->plan, first);
    return true;
}

bool
mn_next_delivery_any(struct mn_engine *e)
{
    return mn_plan_forming(e->plan) != NULL ? mn_ready_rows_any(e) : first_done(e) != UINT64_MAX;
}

bool
mn_next_delivery_may_take(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    const struct mn_forming *f = mn_plan_forming(e->plan);
    if (f != NULL) {
        return f->nruns != 0 && f->runs[0].sequence == sequence;
    }
    struct mn_planned *q = mn_plan_at(e->plan, sequence);
    return q != NULL && mn_plan_block(e->plan, sequence) == block_off && is_done(e, q);
}
