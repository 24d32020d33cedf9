/* mn_plan_shares.c - neighbours kept together: which worker starts what next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tasks go from a worker's share (mn_plan_locality.c) to its own run queue, only as many ahead as
 * keep it busy. A worker that has nothing of its own to start takes, in this order:
 *   1. the piece of least slack that has no owner, with all that is planned of its chain. It
 *      never enters a chain of another worker, because such chains are in that worker's share;
 *   2. the far half of another worker's share (mn_plan_shares.c);
 *   3. the tasks that wait on the queue of a worker that its current task holds up.
 *
 * No deadlock: the head is never refused memory. Its tasks are first in any share that has them,
 * because shares are in the order of delivery. The shares of workers that do not exist go back to
 * the dispatcher at each look.
 */
#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "schedule/mn_plan_state.h"

/* ---- neighbours kept together: which workers help with the very first batch ----
 *
 * The caller waits for it, and nothing is known: policy_locality.h says what to do.
 */

/* Spreads the part of the head that has not started over all workers, in equal parts. The parts of
 * workers that do not exist yet go to the first idle worker. */
static void
spread(struct mn_plan *p, uint32_t owner)
{
    struct mn_piece *x = p->shares.of[owner].first;
    if (x == NULL || x->batch->sequence != p->order.head) {
        return;
    }
    uint32_t tasks = mn_piece_tasks(x), from = x->t0, workers = p->cfg.max_workers;
    for (uint32_t i = p->pace.active - 1; i > 0; i--) {
        uint32_t at = from + tasks * i / p->pace.active, w = (owner + i) % workers;
        if (at <= x->t0 || at >= x->t1) {
            continue; /* fewer tasks than workers */
        }
        struct mn_piece *part = mn_share_split(p, owner, x, at);
        if (p->shares.of[w].usable) {
            mn_share_give(p, w, part);
        }
        else {
            mn_piece_offer(p, part);
        }
    }
}

/* Finds out whether the first batch is a group (policy_locality.h), and has all workers help with
 * it if it is not. Returns true while that is unknown. */
static bool
mn_plan_find_first(struct mn_plan *p, const struct mn_locality_pairs *pairs)
{
    uint64_t finding = p->together.finding;
    const struct mn_planned *q = finding != 0 ? mn_plan_at(p, finding - 1) : NULL;
    if (q == NULL || q->done || q->sequence != p->order.head || mn_plan_together(p)) {
        p->together.finding = 0;
        return false;
    }
    if (mn_locality_spreads(pairs) && q->maker != 0) {
        spread(p, (uint32_t)q->maker - 1);
        p->together.finding = 0;
    }
    return pairs->alike + pairs->opened == 0;
}

/* ---- an idle worker takes over part of another worker's share ----
 *
 * It takes the far half of the share of the worker that has the head, or else of the one with the
 * most to do. It does so only if that half would have waited there for longer than it costs to
 * open its group again.
 */

/* A task must run for this long, and for this many times the typical cost, before the tasks behind
 * it go to another worker. */
#define STUCK_NS (INT64_C(5) * 1000 * 1000)
#define STUCK_TIMES 3
/* Work is taken over only if it would otherwise wait for longer than 1 + 1/HELP_MARGIN times what
 * it costs to begin it elsewhere. */
#define HELP_MARGIN 4

/* Returns what another worker pays for a piece in addition to its samples. opened: the piece
 * continues a group that its own worker has opened, so another worker must open it again. */
static int64_t
price(const struct mn_plan *p, const struct mn_piece *x, bool opened)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    int64_t away = x->home >= 0 ? rows * p->known.away_ns : 0;
    int64_t opening = p->known.opening_ns;
    if (p->together.declared && opening == 0) { /* not measured yet: assume a high cost */
        opening = 32 * p->known.median_ns;
    }
    return away + (opened ? opening : 0);
}

/* Moves `takes` tasks of the victim's share, behind `stay` others that stay, to the helper, and
 * with them the rest of their chain. */
static void
take_over(struct mn_plan *p, uint32_t victim, uint32_t helper, uint32_t stay, uint32_t takes)
{
    struct mn_share *s = &p->shares.of[victim];
    bool has_chain = p->shares.chain.owner == (int64_t)victim;
    uint64_t chain = 0;
    struct mn_piece *x = s->first, *last = NULL;
    while (x != NULL && stay >= mn_piece_tasks(x)) {
        stay -= mn_piece_tasks(x);
        last = x;
        x = x->next;
    }
    if (x != NULL && stay != 0) {
        struct mn_piece *y = mn_share_split(p, victim, x, x->t0 + stay);
        last = x;
        x = x->next;
        chain = y->chain;
        takes -= takes < mn_piece_tasks(y) ? takes : mn_piece_tasks(y);
        mn_share_give(p, helper, y);
    }
    while (x != NULL && (takes != 0 || x->chain == chain)) {
        struct mn_piece *next = x->next;
        takes -= takes < mn_piece_tasks(x) ? takes : mn_piece_tasks(x);
        mn_share_take_behind(p, victim, last, x);
        chain = x->chain;
        mn_share_give(p, helper, x);
        x = next;
    }
    p->shares.helped++;
    if (has_chain && chain != p->shares.chain.number) {
        p->shares.chain.owner = victim;
    }
}

/* The best place to cut a share in two. */
struct border {
    uint32_t stay, takes;
    int64_t before_ns; /* what the victim has to do until then */
    int64_t price_ns;  /* what it costs to begin there */
    bool any;
};

/* Returns the border of two groups that is nearest to the middle, or else the middle itself. */
static struct border
best_border(struct mn_plan *p, struct mn_plan_round *r, uint32_t victim, int64_t before_ns)
{
    const struct mn_share *s = &p->shares.of[victim];
    uint32_t tasks = 0;
    int64_t ns = 0, done_ns = 0, nearest = INT64_MAX;
    const struct mn_piece *last = NULL;
    for (const struct mn_piece *x = s->first; x != NULL && mn_plan_piece_may_start(p, r, x);
         x = x->next) {
        tasks += mn_piece_tasks(x);
        ns += x->cost_ns;
        last = x;
    }
    if (last == NULL) {
        return (struct border){0};
    }
    struct border best = {0};
    uint64_t chain = s->chain;
    uint32_t stay = 0;
    for (const struct mn_piece *x = s->first; stay < tasks; x = x->next) {
        int64_t off = 2 * done_ns > ns ? 2 * done_ns - ns : ns - 2 * done_ns;
        /* Where groups are known to end with batches, a chain over batches is a guess. */
        bool edge = x->chain != chain || (stay != 0 && x->t0 == 0 && !p->known.joins);
        if (edge && off < nearest) {
            nearest = off;
            best = (struct border){stay, tasks - stay, before_ns + done_ns, price(p, x, false),
                                   true};
        }
        chain = x->chain;
        stay += mn_piece_tasks(x);
        done_ns += x->cost_ns;
    }
    if (!best.any) {
        int64_t half_ns = tasks > 1 ? ns * (tasks / 2) / tasks : 0;
        best = (struct border){tasks / 2, tasks - tasks / 2, before_ns + half_ns,
                               price(p, last, true), true};
    }
    return best;
}

/* Returns the time until an idle worker may begin work that has no owner, that is until the head is
 * made. It counts what the head's worker is making, and the pieces of the head in that worker's
 * share. Queued tasks are left out, because they may belong to a later batch. INT64_MAX if no more
 * work is planned. */
static int64_t
more_in(const struct mn_plan *p, const struct mn_plan_round *r)
{
    const struct mn_planned *q = mn_plan_at(p, p->order.head);
    bool last = p->dispatch.closed && p->dispatch.count == 0;
    if (last || !p->cfg.in_order || q == NULL || q->maker == 0) {
        return INT64_MAX;
    }
    uint32_t w = (uint32_t)q->maker - 1;
    int64_t left = r->facts.workers[w].present_ns;
    const struct mn_piece *x = p->shares.of[w].first;
    for (; x != NULL && x->batch == q; x = x->next) {
        left += x->cost_ns;
    }
    return left;
}

/* Gives half of what a worker has to do to an idle one, if that pays. Returns whether it did. */
static bool
help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper, uint32_t victim)
{
    const struct mn_worker_view *v = &r->facts.workers[victim];
    struct border b = best_border(p, r, victim, v->left_ns);
    /* The victim is about to begin. */
    bool idles = b.stay == 0 && v->running_ns < 0 && v->queued == 0;
    /* Work without an owner has no extra cost, so wait for it, but only briefly. Work past the
     * window starts only while the head stands still. */
    uint64_t idle_ns = p->shares.of[helper].idle_ns;
    bool waits = idle_ns == 0
                 || (int64_t)(r->facts.now_ns - idle_ns) < mn_plan_patience_ns(p->pace.batch_bytes);
    if (r->soon && waits && (b.price_ns > 0 || p->known.near == MN_CONTRAST_UNKNOWN)) {
        return false;
    }
    /* Opening a group again for next to no gain takes the processor from others. */
    int64_t worth = b.price_ns + b.price_ns / HELP_MARGIN;
    if (!b.any || idles || (p->known.median_ns != 0 && b.before_ns <= worth)) {
        return false;
    }
    bool head = p->shares.of[victim].first->batch->sequence == p->order.head;
    if (!head && b.price_ns > 0 && more_in(p, r) <= b.price_ns) {
        return false; /* the helper may get other work before that cost has paid off */
    }
    take_over(p, victim, helper, b.stay, b.takes);
    return true;
}

/* Gives the helper, which is idle, half of another worker's share, where that pays. Returns whether
 * it did. */
static bool
mn_plan_find_help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper)
{
    int64_t most = -1, each_ns = mn_plan_share_task_ns(p);
    uint32_t victim = 0, head = UINT32_MAX;
    each_ns = each_ns > 0 ? each_ns : 1; /* no cost is known */
    if (p->order.next - p->order.head < p->cfg.window && !p->dispatch.closed && !r->held
        && !p->stall.full) {
        return false; /* more is about to be planned, and the helper may begin with that */
    }
    if (r->facts.ready >= p->dispatch.rates.starved_below) {
        return false; /* the consumer is the slow part: nothing to gain */
    }
    for (uint32_t w = 0; w < p->cfg.max_workers; w++) {
        const struct mn_share *s = &p->shares.of[w];
        if (w == helper || s->first == NULL) {
            continue;
        }
        if (s->first->batch->sequence == p->order.head) {
            head = w;
        }
        int64_t much = s->cost_ns > 0 ? s->cost_ns : (int64_t)s->tasks * each_ns;
        if (much > most) {
            most = much;
            victim = w;
        }
    }
    if (head != UINT32_MAX && help(p, r, helper, head)) {
        return true;
    }
    return most >= 0 && victim != head && help(p, r, helper, victim);
}

/* Returns the worker whose current task goes on and on while tasks wait on its queue; the number of
 * workers if there is none. */
static uint32_t
mn_plan_find_stuck(const struct mn_plan *p, const struct mn_plan_round *r,
                   uint32_t helper)
{
    int64_t stuck = STUCK_TIMES * mn_plan_share_task_ns(p);
    stuck = stuck > STUCK_NS ? stuck : STUCK_NS;
    /* Its worker may be opening a group. While the time for that is unknown, allow more. */
    stuck += 2 * (p->known.away_ns + p->known.opening_ns);
    if (p->known.near == MN_CONTRAST_UNKNOWN) {
        stuck += MN_PLAN_UNKNOWN_NS;
    }
    uint32_t w = 0;
    while (w < p->cfg.max_workers
           && (w == helper || r->facts.workers[w].queued == 0
               || r->facts.workers[w].running_ns < stuck)) {
        w++;
    }
    return w;
}

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
