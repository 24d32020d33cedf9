/* mn_plan_state.c - planned batches by sequence; what was done with them. See mn_plan_state.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_base.h"
#include "schedule/mn_plan_state.h"

/* ---- planned batches -------------------------------------------------------------------- */

struct mn_planned **
mn_plan_place(const struct mn_plan *p, uint64_t sequence)
{
    return &p->batches[sequence & (p->view.capacity - 1)];
}

struct mn_planned *
mn_plan_at(const struct mn_plan *p, uint64_t sequence)
{
    struct mn_planned *q = *mn_plan_place(p, sequence);
    return q != NULL && q->sequence == sequence ? q : NULL;
}

struct mn_planned *
mn_plan_tagged(const struct mn_plan *p, uint64_t tag, uint32_t *number)
{
    *number = (uint32_t)(tag & 0xffffff);
    return mn_plan_at(p, tag >> 24);
}

uint64_t
mn_plan_block(const struct mn_plan *p, uint64_t sequence)
{
    const struct mn_planned *q = mn_plan_at(p, sequence);
    return q != NULL ? q->block_off : 0;
}

bool
mn_plan_begins(const struct mn_plan *p)
{
    const struct mn_planned *q = mn_plan_at(p, p->view.order.head);
    return q != NULL && q->batch.number == 0;
}

uint64_t
mn_plan_waiting(const struct mn_plan *p)
{
    return p->view.by_piece ? p->shares.piece_tasks : p->dispatch.count;
}

uint64_t
mn_plan_rows_bytes(const struct mn_plan *p, uint32_t nrows)
{
    const struct mn_plan_rows *r = &p->pace.rows_of;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < r->nfields; i++) {
        uint64_t field = r->row_bytes[i] * nrows;
        bytes += (field + r->page - 1) / r->page * r->page;
    }
    return bytes;
}

const struct mn_plan_view *
mn_plan_view(const struct mn_plan *p)
{
    return &p->view;
}

struct mn_plan_window
mn_plan_window(const struct mn_plan *p)
{
    const struct mn_dispatch_rates *r = &p->dispatch.rates;
    return (struct mn_plan_window){r->window, r->starved_below,
                                   mn_a64_load_relaxed(&p->prefetched)};
}

/* ---- what was done and seen --------------------------------------------------------------- */

void
mn_plan_tries(struct mn_plan *p, const struct mn_planned *q)
{
    uint64_t bytes = q->batch.whole ? 0 : mn_plan_rows_bytes(p, q->batch.nrows);
    p->view.batch_bytes = bytes > p->view.batch_bytes ? bytes : p->view.batch_bytes;
}

void
mn_plan_begun(struct mn_plan *p, struct mn_planned *q, uint64_t block_off)
{
    struct mn_plan_order *o = &p->view.order;
    o->begun = q->sequence >= o->begun ? q->sequence + 1 : o->begun;
    p->unmade++;
    q->block_off = block_off;
    q->state = MN_BATCH_QUEUED;
}

void
mn_plan_done(struct mn_plan *p, struct mn_planned *q)
{
    p->unmade -= q->state == MN_BATCH_QUEUED;
    q->state = MN_BATCH_DONE;
}

/* Returns the cost to use when judging whether a task is slow. A start past the window holds memory
 * for one more batch, and saves at most the task's time beyond the typical. So where batches are
 * large, an excess within noise (mn_plan_patience_ns) does not count. */
int64_t
mn_plan_worth(const struct mn_plan *p, int64_t cost_ns, int64_t bytes)
{
    int64_t typical = p->dispatch.rates.typical_ns;
    int64_t excess = typical > 0 ? cost_ns - typical : 0;
    bool large = (uint64_t)bytes > MN_PLAN_LARGE_BYTES;
    bool little = large && excess > 0 && excess < mn_plan_patience_ns((uint64_t)bytes);
    return little ? typical : cost_ns;
}

int64_t
mn_plan_period(const struct mn_plan *p, const struct mn_plan_batch *b)
{
    const struct mn_costs_view *v = &p->view.known;
    int64_t rows = b->nrows != 0 ? b->nrows : 1;
    int64_t mean = v->mean_ns + (b->whole ? v->collate_ns / rows : 0);
    return mn_dispatch_period(p->view.consumer_ns, mean, rows, p->pace.active);
}
