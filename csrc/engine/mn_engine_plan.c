/* mn_engine_plan.c - what the user's thread tells the plan. See mn_engine.h, mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine.h"

#include <errno.h>

#include "base/mn_assert.h"
#include "base/mn_fault.h"
#include "engine/mn_engine_state.h"
#include "engine/mn_engine_parts.h"
#include "engine/mn_shared_costs.h"

static void
start_due_and_unlock(struct mn_engine *e)
{
    e->crew.wakes.workers += mn_start_due(e);
    mn_engine_unlock(e);
}

uint64_t
mn_engine_next_sequence(const struct mn_engine *e)
{
    return mn_plan_next_sequence(e->plan);
}

int
mn_engine_plan(struct mn_engine *e, const struct mn_plan_batch *b)
{
    struct mn_plan_batch own = *b;
    own.integers = b->index_kind != MN_INDEX_PICKLE;
    mn_mutex_lock(&e->mutex);
    mn_shared_costs_lock(e->cfg.costs);
    int rc = mn_plan_add(e->plan, &own);
    mn_shared_costs_unlock(e->cfg.costs);
    start_due_and_unlock(e);
    return rc;
}

void
mn_engine_set_form(struct mn_engine *e, const struct mn_form *form)
{
    mn_mutex_lock(&e->mutex);
    e->form = *form;
    struct mn_plan_rows rows = {form->nfields, form->row_bytes, MN_ARENA_PAGE};
    mn_plan_set_rows(e->plan, &rows);
    mn_engine_unlock(e);
}

void
mn_engine_plan_end(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    mn_plan_end(e->plan);
    mn_engine_unlock(e);
}

void
mn_engine_plan_clear(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    struct mn_plan_order order = mn_plan_order(e->plan);
    for (uint64_t n = order.head; n < order.next; n++) {
        uint64_t off = mn_plan_block(e->plan, n);
        if (off != 0) {
            mn_batch_abandon(e, off);
        }
    }
    if (mn_plan_forming(e->plan) != NULL) {
        mn_ready_rows_drop(e);
    }
    mn_plan_clear(e->plan);
    e->done.n = e->done.at = 0;
    e->stuck_ns = 0;
    mn_waits_forget(&e->waits); /* do not count the caller's time between epochs */
    mn_engine_unlock(e);
}

/* The batch was read: learns what it cost, and frees its memory. */
static void
retire(struct mn_engine *e, uint64_t block_off)
{
    struct mn_batch *b = mn_batch_find(e, block_off);
    mn_assert(b != NULL);
    mn_learn_costs(e, b);
    mn_batch_learn_envelopes(e, b);
    mn_batch_drop(e, b);
}

void
mn_engine_retire(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    retire(e, block_off);
    mn_engine_unlock(e);
}

int
mn_engine_taken(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    if (!mn_next_delivery_may_take(e, sequence, block_off)) {
        mn_engine_unlock(e);
        return -EINVAL;
    }
    if (mn_plan_forming(e->plan) != NULL) {
        mn_ready_rows_taken(e);
    }
    else {
        if (block_off != 0) { /* else it was refused */
            retire(e, block_off);
        }
        MN_FAULT("engine.taken");
        mn_plan_taken(e->plan, sequence);
    }
    if (e->waits.served) { /* another batch was taken already: this one is prefetched */
        (void)mn_plan_prefetched(e->plan, 1);
    }
    e->waits.served = e->waits.spanned;
    e->delivered++;
    start_due_and_unlock(e);
    return 0;
}
