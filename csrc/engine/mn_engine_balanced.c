/* mn_engine_balanced.c - what the user's thread tells the plan. See mn_engine.h, mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_assert.h"
#include "engine/mn_engine_internal.h"

static void
pump_and_unlock(struct mn_engine *e)
{
    uint32_t n = mn_plan_pump(e);
    mn_mutex_unlock(&e->mutex);
    if (n != 0) {
        mn_engine_ring_workers(e, n);
    }
}

int
mn_engine_plan(struct mn_engine *e, const struct mn_plan_batch *b)
{
    mn_mutex_lock(&e->mutex);
    int rc = mn_plan_add(e, b);
    pump_and_unlock(e);
    return rc;
}

void
mn_engine_set_form(struct mn_engine *e, const struct mn_form *form)
{
    mn_mutex_lock(&e->mutex);
    e->plan->form = *form;
    mn_mutex_unlock(&e->mutex);
}

void
mn_engine_plan_end(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    mn_dispatch_close(&e->plan->dispatch);
    mn_mutex_unlock(&e->mutex);
}

void
mn_engine_plan_clear(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    for (uint64_t n = e->plan->head; n < e->plan->next; n++) {
        uint64_t off = mn_plan_block(e->plan, n);
        if (off != 0) {
            mn_batch_abandon(e, off);
        }
    }
    mn_plan_clear(e->plan);
    e->given_ns = 0; /* what the caller does between epochs is no time for a batch */
    mn_mutex_unlock(&e->mutex);
}

static void
advance_and_unlock(struct mn_engine *e, uint64_t sequence)
{
    mn_plan_taken(e->plan, sequence);
    e->delivered++;
    pump_and_unlock(e);
}

void
mn_engine_taken(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    if (block_off != 0) { /* else it was refused */
        mn_batch_retire(e, block_off);
    }
    if (e->served) { /* with another already */
        (void)mn_plan_in_hand(e->plan, 1);
    }
    e->served = e->spanned;
    advance_and_unlock(e, sequence);
}

void
mn_engine_detach(struct mn_engine *e, uint64_t sequence)
{
    mn_mutex_lock(&e->mutex);
    uint64_t off = mn_plan_block(e->plan, sequence);
    if (off != 0) { /* else it was refused */
        struct mn_batch *b = mn_batch_find(e, off);
        mn_assert(b != NULL);
        b->detached = true;
    }
    advance_and_unlock(e, sequence);
}

void
mn_engine_set_horizon(struct mn_engine *e, uint64_t sequence)
{
    mn_mutex_lock(&e->mutex);
    e->plan->horizon = sequence;
    pump_and_unlock(e);
}
