/* mn_plan_shares.c - neighbours kept together: which worker starts what next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tasks go from a worker's share (mn_plan_locality.c) to its own run queue, as few ahead as
 * keep it busy. A worker that has nothing of its own to start takes, in this order:
 *   1. the piece of least slack that nobody has, with all that is planned of its chain. It never
 *      enters what others work on, because their chains are in their shares;
 *   2. the far half of what another worker has before it (mn_plan_take_over.c);
 *   3. the tasks that wait on the queue of a worker that is held up by its present one.
 *
 * No deadlock: the batch to deliver next is never refused memory, its tasks are first in
 * whatever share they are in (shares are in the order of delivery), and the shares of workers
 * that are not there go back to the dispatcher at each look.
 */

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "schedule/mn_plan_state.h"

/* Work that waits on a worker's own queue beside the task in hand: while the engine is woken,
 * some fifty microseconds, it must not run out; what is longer than LONG_NS is not worth the
 * risk to wait behind a slow one. */
#define AHEAD_NS (INT64_C(1) * 1000 * 1000)
#define LONG_NS (INT64_C(10) * 1000 * 1000)

/* Tasks that should wait on a busy worker's own queue. None before anything is known of costs: they
 * may be long, and others that are just being started idle then. */
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

/* Gives a worker a piece that the dispatcher had, and with it what is planned of its chain: also
 * what comes before it, where neighbours are known to belong together. */
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

/* The piece of least slack that nobody has, or NULL when none may start. */
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
        c = head; /* it is waited for, or will be first */
    }
    struct mn_piece *x = piece_of(p, &c);
    if (!mn_plan_memory_allows(p, &r->facts, x->batch)) {
        r->held = true;
        if (mn_dispatch_first(&p->dispatch, &c) != MN_OK) {
            return NULL;
        }
        x = piece_of(p, &c);
        return mn_plan_memory_allows(p, &r->facts, x->batch) ? x : NULL;
    }
    return x;
}

/* The first piece of a share that may start. One that may not is no reason to leave out those
 * behind it that have begun, as what was taken over may have. */
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

/* Whether a piece that nobody has comes before what the worker has itself. One that is known to
 * be slow does as soon as its time has come, even in the middle of a chain if that is worth what
 * it costs to come back to it. */
static bool
comes_first(const struct mn_plan *p, const struct mn_piece *x, const struct mn_piece *own,
            bool goes_on)
{
    if (x->batch->sequence == p->order.head && own->batch->block_off == 0) {
        return true; /* what has not begun may find no room, and the head must not wait for it */
    }
    if (mn_piece_slow(p, x)) {
        int64_t back = p->known.near == MN_CONTRAST_UNKNOWN ? MN_PLAN_UNKNOWN_NS
                                                            : p->known.opening_ns;
        return slack_of(p, x) + (goes_on ? back : 0) < slack_of(p, own);
    }
    return !goes_on && x->batch->sequence < own->batch->sequence;
}

/* What the worker is to start next, in its share; NULL: nothing now. */
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
        return own != NULL ? own : x; /* it may start, also where it could not from a share */
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
        return MN_PLAN_NOTHING; /* what it will take is not known: it begins when it is made */
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
        /* Nothing waits behind samples whose costs decide who makes what. */
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
