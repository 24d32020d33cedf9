/* mn_plan_starved.c - workers that idle behind a straggler: when work past the window starts, and
 * when more is planned. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_plan_state.h"

/* Idle workers start nothing past the window for mn_plan_patience_ns. The exception: the sample
 * that holds up the others has been running for this long, and for this many times the typical
 * cost. That is longer than a busy machine takes a core away. */
#define HELD_NS (INT64_C(20) * 1000 * 1000)
#define HELD_TIMES 4
/* With less work left than this, the program is asked to plan more: it looks every few
 * milliseconds, and drawing some batches takes one. */
#define DRY_NS (INT64_C(25) * 1000 * 1000)

int64_t
mn_plan_straggles_ns(const struct mn_plan *p)
{
    int64_t typical = p->dispatch.rates.typical_ns;
    if (typical == 0 || typical > INT64_MAX / HELD_TIMES) {
        return INT64_MAX;
    }
    return HELD_TIMES * typical > HELD_NS ? HELD_TIMES * typical : HELD_NS;
}

/* Returns whether a straggler holds up the first batch that is not done. */
static bool
held_by_slow(const struct mn_plan *p, const struct mn_plan_facts *f)
{
    uint64_t off = mn_plan_block(p, p->order.head + (p->cfg.in_order ? (uint64_t)f->ready : 0));
    return off != 0 && f->running_ns(f->arg, off) >= mn_plan_straggles_ns(p);
}

bool
mn_plan_starved(struct mn_plan *p, const struct mn_plan_facts *f)
{
    if (f->queued != 0 && p->stall.starved_ns == 0) {
        return false;
    }
    p->stall.starved_ns = p->stall.starved_ns == 0 ? f->now_ns : p->stall.starved_ns;
    int64_t idle_ns = (int64_t)(f->now_ns - p->stall.starved_ns);
    bool idle = f->queued == 0 && idle_ns >= mn_plan_patience_ns(p->pace.batch_bytes);
    return idle || held_by_slow(p, f);
}

int64_t
mn_plan_lasts(const struct mn_plan *p)
{
    const struct mn_dispatch *d = &p->dispatch;
    if (d->closed || p->stall.told == p->order.next) {
        return INT64_MAX;
    }
    int64_t work_ns = d->work_ns + p->shares.cost_ns, left = work_ns / (int64_t)p->pace.active;
    bool unknown = work_ns == 0 && d->count + p->shares.tasks >= 4 * p->pace.active;
    return unknown ? 1 : left > DRY_NS ? left - DRY_NS : 0;
}

bool
mn_plan_idles(const struct mn_plan *p, uint64_t queued)
{
    bool idle = p->stall.starved_ns != 0
                || (p->dispatch.count + p->shares.tasks == 0 && queued == 0);
    return idle && mn_plan_lasts(p) == 0;
}

bool
mn_plan_starving(struct mn_plan *p, const struct mn_plan_facts *f)
{
    bool starving = f->ready < p->dispatch.rates.starved_below && mn_plan_starved(p, f);
    p->stall.told = starving ? p->order.next : p->stall.told;
    return starving;
}

int64_t
mn_plan_nap(const struct mn_plan *p, uint64_t now_ns, int64_t nap_ns)
{
    int64_t patience = mn_plan_patience_ns(p->pace.batch_bytes);
    int64_t idle = p->stall.starved_ns != 0 ? (int64_t)(now_ns - p->stall.starved_ns) : patience;
    return idle < patience && patience - idle < nap_ns ? patience - idle : nap_ns;
}
