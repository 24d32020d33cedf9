/* mn_plan_shares.c - neighbours kept together: which worker starts what next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tasks go from a worker's share (mn_plan_locality.c) to its own run queue, only as many ahead as
 * keep it busy. A worker that has nothing of its own to start takes, in this order:
 *   1. the piece of least slack that has no owner, with all that is planned of its chain. It
 *      never enters a chain of another worker, because such chains are in that worker's share;
 *   2. the far half of another worker's share (mn_plan_take_over.c);
 *   3. the tasks that wait on the queue of a worker that its current task holds up.
 *
 * No deadlock: the head is never refused memory. Its tasks are first in any share that has them,
 * because shares are in the order of delivery. The shares of workers that do not exist go back to
 * the dispatcher at each look.
 */

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "schedule/mn_plan_state.h"

/* Work that waits on a worker's own queue in addition to its current task. It must not run out
 * while the engine wakes up, some fifty microseconds. A task longer than LONG_NS should not risk
 * waiting behind a slow one. */
#define AHEAD_NS (INT64_C(1) * 1000 * 1000)
#define LONG_NS (INT64_C(10) * 1000 * 1000)

/* Returns how many tasks should wait on a busy worker's own queue. None before costs are known:
 * tasks may be long, and workers that are just being started would idle then. */
static uint64_t
depth(const struct mn_plan *p)
{
    int64_t ns = mn_plan_share_task_ns(p);
    if (ns >= LONG_NS || ns == 0) {
        return 0;
    }
    uint64_t n = ns < AHEAD_NS ? (uint64_t)(AHEAD_NS / ns) : 1;
    return n < p->cfg.own_tasks ? n : p->cfg.own_tasks;
}

static bool
has_chain(const struct mn_planned *q, uint64_t chain)
{
    for (uint32_t i = 0; q != NULL && i < q->npieces; i++) {
        if (q->pieces[i].chain == chain) {
            return true;
        }
    }
    return false;
}

/* Gives a worker a piece that the dispatcher had, and with it what is planned of its chain. Where
 * neighbours are known to belong together, that includes the pieces before it. */
static void
adopt(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    uint64_t chain = x->chain, n = x->batch->sequence;
    while (mn_plan_together(p) && n > p->order.head && has_chain(mn_plan_at(p, n - 1), chain)) {
        n--;
    }
    mn_dispatch_take(&p->dispatch, x->node);
    x->node = MN_NO_NODE;
    mn_share_give(p, w, x);
    p->shares.of[w].chain = chain;
    struct mn_planned *q;
    for (; n < p->order.next && ((q = mn_plan_at(p, n)) == NULL || has_chain(q, chain)); n++) {
        for (uint32_t i = 0; q != NULL && i < q->npieces; i++) {
            struct mn_piece *y = &q->pieces[i];
            if (y->chain == chain && y->node != MN_NO_NODE) {
                mn_dispatch_take(&p->dispatch, y->node);
                y->node = MN_NO_NODE;
                mn_share_give(p, w, y);
            }
        }
    }
}

static struct mn_piece *
piece_of(const struct mn_plan *p, const struct mn_dispatch_choice *c)
{
    uint32_t number;
    struct mn_planned *q = mn_plan_tagged(p, c->task.tag, &number);
    mn_assert(q != NULL);
    return &q->pieces[number];
}

/* Returns the piece of least slack that has no owner; NULL if none may start. */
static struct mn_piece *
unowned(struct mn_plan *p, struct mn_plan_round *r)
{
    struct mn_dispatch_choice c;
    if (mn_dispatch_peek(&p->dispatch, &r->view, &c) != MN_OK
        || (c.why == MN_DISPATCH_AHEAD && !mn_plan_may_ahead(p, r))) {
        return NULL;
    }
    struct mn_dispatch_choice head;
    if (p->cfg.in_order && mn_dispatch_first(&p->dispatch, &head) == MN_OK
        && head.task.batch == (int64_t)p->order.head) {
        c = head; /* the caller waits for it, or will first */
    }
    struct mn_piece *x = piece_of(p, &c);
    bool held, ignored;
    if (mn_plan_memory_allows(p, &r->facts, x->batch, c.why, &held)) {
        return x;
    }
    r->held = r->held || held;
    if (mn_dispatch_first(&p->dispatch, &c) != MN_OK) {
        return NULL;
    }
    x = piece_of(p, &c);
    return mn_plan_memory_allows(p, &r->facts, x->batch, c.why, &ignored) ? x : NULL;
}

/* Returns the first piece of a share that may start. If one may not start, those behind it that
 * have started still may: they may have been taken over. */
static struct mn_piece *
startable(struct mn_plan *p, struct mn_plan_round *r, uint32_t w)
{
    struct mn_piece *x = p->shares.of[w].first;
    if (x == NULL || mn_plan_piece_may_start(p, r, x)) {
        return x;
    }
    for (uint32_t looks = 0; x != NULL && looks < 64; looks++, x = x->next) {
        if (x->batch->block_off != 0) {
            return x;
        }
    }
    return NULL;
}

static int64_t
slack_of(const struct mn_plan *p, const struct mn_piece *x)
{
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence,
                                    .cost_ns = mn_piece_samples_ns(x)};
    return mn_dispatch_slack(&p->dispatch, &task);
}

/* Returns whether a piece without owner comes before the worker's own. A piece that is known to be
 * slow does as soon as it is due. It may interrupt a chain if that is worth the cost of returning
 * to the chain. */
static bool
comes_first(const struct mn_plan *p, const struct mn_piece *x, const struct mn_piece *own,
            bool goes_on)
{
    if (x->batch->sequence == p->order.head && own->batch->block_off == 0) {
        return true; /* own may find no memory, and the head must not wait for it */
    }
    if (mn_piece_slow(p, x)) {
        int64_t back = p->known.near == MN_CONTRAST_UNKNOWN ? MN_PLAN_UNKNOWN_NS
                                                            : p->known.opening_ns;
        return slack_of(p, x) + (goes_on ? back : 0) < slack_of(p, own);
    }
    return !goes_on && x->batch->sequence < own->batch->sequence;
}

/* Returns what the worker should start next from its share; NULL: nothing now. */
static struct mn_piece *
next_for(struct mn_plan *p, struct mn_plan_round *r, uint32_t w)
{
    r->soon = r->held = false;
    struct mn_piece *own = startable(p, r, w);
    struct mn_piece *x = unowned(p, r);
    bool goes_on = own != NULL && own->chain == p->shares.of[w].chain;
    if (x != NULL && (own == NULL || comes_first(p, x, own, goes_on))) {
        adopt(p, w, x);
        own = mn_plan_together(p) ? startable(p, r, w) : NULL;
        return own != NULL ? own : x; /* x may start, even where it could not from a share */
    }
    if (own == NULL && r->idle && mn_plan_find_help(p, r, w)) {
        own = startable(p, r, w);
    }
    if (own != NULL) {
        p->shares.of[w].chain = own->chain;
    }
    return own;
}

enum mn_plan_step
mn_plan_next_for_worker(struct mn_plan *p, struct mn_plan_round *r, uint32_t w,
                        struct mn_plan_start *out)
{
    const struct mn_worker_view *v = &r->facts.workers[w];
    r->idle = v->queued == 0 && v->running_ns < 0;
    struct mn_piece *x = next_for(p, r, w);
    *out = (struct mn_plan_start){.piece = x};
    uint64_t *idle_ns = &p->shares.of[w].idle_ns;
    *idle_ns = x != NULL || !r->idle ? 0 : *idle_ns != 0 ? *idle_ns : r->facts.now_ns;
    if (x == NULL) {
        p->stall.held = p->stall.held || r->held;
        out->helps = r->idle ? mn_plan_find_stuck(p, r, w) : p->cfg.max_workers;
        return out->helps < p->cfg.max_workers ? MN_PLAN_MOVE : MN_PLAN_NOTHING;
    }
    if (!r->idle && x->batch->block_off == 0 && p->pace.rows_of.nfields == 0) {
        return MN_PLAN_NOTHING; /* its size is not known: the batch starts when its turn has come */
    }
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence,
                                    .cost_ns = mn_piece_samples_ns(x)};
    bool may = mn_dispatch_may(&p->dispatch, &r->view, &task, &out->why) == MN_OK;
    out->why = may ? out->why : MN_DISPATCH_ORDER;
    out->batch = x->batch;
    out->task = x->t0;
    return MN_PLAN_START;
}

int64_t
mn_plan_started_for(struct mn_plan *p, const struct mn_plan_start *s, uint32_t w)
{
    struct mn_piece *x = s->piece;
    mn_plan_started(p, s);
    int64_t cost_ns = x->batch->cost_ns[x->t0];
    x->batch->maker = (int32_t)w + 1;
    x->batch->sent[x->t0] = w + 1 < MN_SENT_ANY ? (uint16_t)(w + 1) : MN_SENT_ANY;
    mn_share_take(p, w, x);
    x->cost_ns -= cost_ns;
    x->opens_ns -= x->batch->opens_ns[x->t0];
    x->t0++;
    p->shares.piece_tasks--;
    if (x->t0 != x->t1) {
        mn_share_give(p, w, x);
    }
    return cost_ns;
}

void
mn_plan_round_begin(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_round *r)
{
    int64_t prefetched = (int64_t)mn_a64_load_relaxed(&p->prefetched);
    p->stall.held = false;
    for (uint32_t w = 0; w < p->cfg.max_workers; w++) {
        p->shares.of[w].usable = f->workers[w].usable;
        if (!f->workers[w].usable) {
            mn_share_disown(p, w);
        }
    }
    int64_t held_ns = p->shares.cost_ns;
    bool finds = mn_plan_find_first(p, &f->pairs);
    *r = (struct mn_plan_round){
        .facts = *f,
        /* No task waits behind samples whose costs decide which worker makes what. */
        .depth = finds ? 0 : depth(p),
        .view = {.head_batch = (int64_t)p->order.head - prefetched,
                 .ready_batches = f->ready + prefetched,
                 .last_batch = (int64_t)p->horizon - 1,
                 .held_ns = held_ns},
    };
}

bool
mn_plan_worker_wants(const struct mn_plan_round *r, uint32_t w, bool first)
{
    const struct mn_worker_view *v = &r->facts.workers[w];
    uint64_t there = v->queued + (v->running_ns >= 0), want = first ? 1 : 1 + r->depth;
    return v->usable && there < want && (there == 0 || v->left_ns < AHEAD_NS);
}
