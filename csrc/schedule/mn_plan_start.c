/* mn_plan_start.c - the task that starts next for any worker; when the program plans more. See
 * mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_base.h"
#include "schedule/mn_plan_state.h"

/* How much should be queued: work for this time, or a quarter of a task per worker. */
#define QUEUED_NS 1000000

uint64_t
mn_plan_dispatch_begins(struct mn_plan *p)
{
    p->view.held = p->view.unreleased = false;
    uint64_t workers = p->pace.active;
    uint64_t by_count = workers / 4 + 1;
    uint64_t typical = 0;
    const struct mn_dispatch *d = &p->dispatch;
    if (d->count != 0) {
        typical = (uint64_t)d->work_ns / d->count;
    }
    if (typical == 0) {
        return 2 * workers; /* no costs are known yet, or no task is left */
    }
    uint64_t by_time = workers * QUEUED_NS / typical;
    return by_time > by_count ? by_time : by_count;
}

/* Returns whether memory allows what the dispatcher chose. */
static bool
offer(struct mn_plan *p, const struct mn_plan_facts *f, const struct mn_dispatch_choice *c,
      struct mn_plan_start *out)
{
    uint32_t task;
    struct mn_planned *q = mn_plan_tagged(p, c->task.tag, &task);
    mn_assert(q != NULL);
    *out = (struct mn_plan_start){.batch = q, .task = task, .why = c->why, .node = c->node};
    return mn_plan_memory_allows(p, f, q, c->why, &p->view.held);
}

bool
mn_plan_next_in_order(struct mn_plan *p, const struct mn_plan_facts *f,
                      struct mn_plan_start *out)
{
    struct mn_dispatch_choice c;
    bool may = mn_dispatch_first(&p->dispatch, &c) == MN_OK && offer(p, f, &c, out);
    out->in_order = may;
    return may;
}

bool
mn_plan_next_task(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_start *out)
{
    int64_t prefetched = (int64_t)mn_a64_load_relaxed(&p->prefetched);
    struct mn_dispatch_view view = {.head_batch = mn_plan_first_wanted(p),
                                    .ready_batches = f->ready + prefetched,
                                    .last_batch = (int64_t)p->horizon - 1};
    struct mn_dispatch_choice c;
    p->view.held = false;
    if (mn_dispatch_peek(&p->dispatch, &view, &c) != MN_OK
        || (c.why == MN_DISPATCH_AHEAD && !mn_plan_starved(p, f))) {
        return false;
    }
    return offer(p, f, &c, out) || mn_plan_next_in_order(p, f, out);
}

void
mn_plan_started(struct mn_plan *p, const struct mn_plan_start *s)
{
    s->batch->sent[s->task] = MN_SENT_ANY;
    p->view.starts[s->why]++;
    if (s->piece == NULL) {
        mn_dispatch_take(&p->dispatch, s->node);
    }
}

/* ---- when the program plans more ---------------------------------------------------------- */

/* With less work left than this, the program is asked to plan more: it looks every few
 * milliseconds, and drawing some batches takes one. */
#define DRY_NS (INT64_C(25) * 1000 * 1000)

int64_t
mn_plan_lasts(const struct mn_plan *p)
{
    const struct mn_dispatch *d = &p->dispatch;
    if (d->closed || p->stall.told == p->view.order.next) {
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
    p->stall.told = starving ? p->view.order.next : p->stall.told;
    return starving;
}

int64_t
mn_plan_nap(const struct mn_plan *p, uint64_t now_ns, int64_t nap_ns)
{
    int64_t patience = mn_plan_patience_ns(p->view.batch_bytes);
    int64_t idle = p->stall.starved_ns != 0 ? (int64_t)(now_ns - p->stall.starved_ns) : patience;
    return idle < patience && patience - idle < nap_ns ? patience - idle : nap_ns;
}
