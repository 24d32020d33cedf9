/* mn_plan_start.c - the task that starts next for any worker, if the window and the memory limit
 * allow it. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>

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

/* ---- workers that idle behind a straggler: when work past the window starts, and when more is
 * planned ---- */

/* Idle workers start nothing past the window for mn_plan_patience_ns. The exception: the sample
 * that holds up the others has been running for this long, and for this many times the typical
 * cost. That is longer than a busy machine takes a core away. */
#define HELD_NS (INT64_C(20) * 1000 * 1000)
#define HELD_TIMES 4
/* With less work left than this, the program is asked to plan more: it looks every few
 * milliseconds, and drawing some batches takes one. */
#define DRY_NS (INT64_C(25) * 1000 * 1000)

/* Returns for how long a task must have run to count as a straggler; INT64_MAX: not known yet. */
static int64_t
straggler_ns(const struct mn_plan *p)
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
    uint64_t done = p->cfg.in_order ? (uint64_t)f->ready : 0;
    uint64_t off = mn_plan_block(p, p->view.order.head + done);
    return off != 0 && f->running_ns(f->arg, off) >= straggler_ns(p);
}

bool
mn_plan_starved(struct mn_plan *p, const struct mn_plan_facts *f)
{
    if (f->queued != 0 && p->stall.starved_ns == 0) {
        return false;
    }
    p->stall.starved_ns = p->stall.starved_ns == 0 ? f->now_ns : p->stall.starved_ns;
    int64_t idle_ns = (int64_t)(f->now_ns - p->stall.starved_ns);
    bool idle = f->queued == 0 && idle_ns >= mn_plan_patience_ns(p->view.batch_bytes);
    return idle || held_by_slow(p, f);
}

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

/* How much should be queued: work for this time, or a quarter of a task per worker. */
#define QUEUED_NS 1000000
/* Memory for batches that lie finished past the steady window, so that stragglers of small samples
 * hold up no other worker. A tenth of what Python and torch take in the program and its workers. */
#define SPARE_BYTES (UINT64_C(32) << 20)

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
        return 2 * workers; /* no costs are known yet */
    }
    uint64_t by_time = workers * QUEUED_NS / typical;
    return by_time > by_count ? by_time : by_count;
}

/* Returns the batch that the program gets next, or would get if batches came in the planned
 * order. */
static int64_t
first_wanted(const struct mn_plan *p)
{
    return (int64_t)(p->cfg.forms ? p->formed_first
                                  : p->view.order.head - mn_a64_load_relaxed(&p->prefetched));
}

int64_t
mn_plan_period(const struct mn_plan *p, const struct mn_plan_batch *b)
{
    const struct mn_costs_view *v = &p->view.known;
    int64_t rows = b->nrows != 0 ? b->nrows : 1;
    int64_t mean = v->mean_ns + (b->whole ? v->collate_ns / rows : 0);
    return mn_dispatch_period(p->view.consumer_ns, mean, rows, p->pace.active);
}

/* Numbers of batches that take memory: they have started, and the program has not got them. */
struct started {
    uint64_t all;
    uint64_t lying;   /* of them, without the ones that a straggler holds up */
    uint64_t resting; /* of them, from a sequence on and not being made */
};

static struct started
count_started(const struct mn_plan *p, const struct mn_plan_facts *f, uint64_t from)
{
    int64_t straggles_ns = straggler_ns(p);
    /* where batches are formed, what has ended is no longer planned */
    uint64_t taken = p->cfg.forms ? (uint64_t)f->ready : mn_a64_load_relaxed(&p->prefetched);
    struct started n = {taken, taken, 0};
    for (uint64_t i = p->view.order.head; i < p->view.order.begun; i++) {
        const struct mn_planned *q = mn_plan_at(p, i);
        if (q != NULL && q->block_off != 0) {
            int64_t ns = q->state == MN_BATCH_DONE ? -1 : f->running_ns(f->arg, q->block_off);
            n.all++;
            n.lying += ns < straggles_ns;
            n.resting += i >= from && ns < 0;
        }
    }
    return n;
}

/* Returns whether the batch may start, as it may lie finished in memory before its turn. If the
 * program is the slow part, it may if fewer than the steady window have started. Else it always
 * may within that window. Beyond, a batch may start for each one that a straggler holds up, so no
 * more lie finished than the window has; and so may samples that are known to be slow, because they
 * are being made until their turn has come. As they may turn out fast, at most half a window of
 * them lies finished. Small batches may be more by SPARE_BYTES, once the program is known not to be
 * the slow part.
 *
 * The program usually has its next batch before it releases the one before, so for a moment it has
 * two. A large batch that would start then, as the last of `most`, would need fresh memory, all of
 * which the loader would then use in turn. It starts once the program has released that one, asks
 * for another, or has let a worker idle for long. */
static bool
may_lie(struct mn_plan *p, const struct mn_plan_facts *f, const struct mn_planned *q,
        uint64_t bytes, enum mn_dispatch_why why)
{
    bool slow_program = mn_plan_period(p, &q->batch) <= p->view.consumer_ns;
    uint64_t from = (uint64_t)first_wanted(p), end = from + p->pace.steady;
    bool fast_program = !slow_program && p->view.consumer_ns != 0; /* 0: not known yet */
    uint64_t spare = fast_program ? SPARE_BYTES : MN_PLAN_LARGE_BYTES;
    uint64_t most = p->pace.steady + (bytes != 0 ? spare / bytes : 0);
    bool within = q->sequence == p->view.order.head || p->view.order.begun - from < most
                  || (q->sequence < end && !slow_program);
    bool has_two = bytes > MN_PLAN_LARGE_BYTES
                   && ((uint64_t)f->memory_kept + bytes / 2) / bytes == 2;
    if (within && !has_two) {
        return true;
    }
    struct started n = count_started(p, f, end);
    if (has_two && n.all + 1 >= most && !mn_plan_starved(p, f)) {
        p->view.unreleased = true;
        return false;
    }
    if (within) {
        return true;
    }
    bool slow = why == MN_DISPATCH_EARLY || why == MN_DISPATCH_FINALE_LPT;
    return (!slow_program || n.all < most)
           && (slow ? n.resting < (most + 1) / 2 : n.lying < most);
}

/* ---- the memory limit ----
 *
 * A task of the head starts whatever is used, unless a formed batch waits: that one was the head.
 * Another starts if what is used, its batch, and a reserve for the largest batch known fit the
 * limit. So a batch over the limit passes alone.
 * No deadlock: the head, or the formed batch, is delivered and frees its memory, and the next batch
 * becomes the head. may_lie() may delay a head, but not longer than a worker idles.
 * Bound: a task past the head leaves at most limit - reserve in use, and the head uses at most the
 * reserve. If the reserve was too small, the excess is one batch, and nothing else starts until it
 * is gone. Delivered batches that the program retains are used memory, too: the code that delivers
 * must bound them.
 */

bool
mn_plan_memory_allows(struct mn_plan *p, const struct mn_plan_facts *f,
                      const struct mn_planned *q, enum mn_dispatch_why why, bool *held)
{
    *held = false;
    if (q->block_off != 0) {
        return true; /* its memory is allocated already */
    }
    bool head = q->sequence == p->view.order.head && !f->formed;
    uint64_t used = (uint64_t)f->memory_used + p->view.batch_bytes;
    uint64_t limit = (uint64_t)f->memory_limit;
    uint64_t bytes = mn_plan_rows_bytes(p, q->batch.nrows);
    if (p->pace.rows_of.nfields == 0) {
        bytes = f->result_bytes; /* not known before it is made */
        used += p->view.by_piece ? bytes * p->unmade : 0; /* not in used yet */
    }
    if (!may_lie(p, f, q, bytes, why)) {
        return false;
    }
    bool tasks = f->free_tasks >= q->ntasks + MN_PLAN_BATCH_TASKS; /* some are for the head */
    *held = !head && !(tasks && used <= limit && bytes <= limit - used);
    return !*held;
}

struct mn_planned *
mn_plan_tagged(const struct mn_plan *p, uint64_t tag, uint32_t *number)
{
    *number = (uint32_t)(tag & 0xffffff);
    return mn_plan_at(p, tag >> 24);
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
    struct mn_dispatch_view view = {.head_batch = first_wanted(p),
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
