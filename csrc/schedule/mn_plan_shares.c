/* mn_plan_shares.c - neighbours kept together: which worker starts what next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Tasks go from a worker's share (mn_plan_pieces.c) to its own run queue, as few ahead as
 * keep it busy. A worker that has nothing of its own to start takes, in this order:
 *   1. the piece of least slack that nobody has, with all that is planned of its chain. It never
 *      enters what others work on, because their chains are in their shares;
 *   2. the far half of what another worker has before it: of the one that has the batch to
 *      deliver next, or else of the one with the most to do. Only if that half would have
 *      waited there for longer than it costs to open its group again;
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
/* A task runs for so long, and so many times the typical cost, before what waits behind it
 * goes to somebody else. */
#define STUCK_NS (INT64_C(5) * 1000 * 1000)
#define STUCK_TIMES 3
/* ... and longer, while it is not known what it costs to open a group. */
#define UNKNOWN_NS (INT64_C(200) * 1000 * 1000)
/* Work waits for longer than it costs to open its group again, by this part of that, before it is
 * taken over. */
#define HELP_MARGIN 4

/* ---- who starts what ---------------------------------------------------------------- */

/* What a task takes, as far as known. */
static int64_t
task_ns(const struct mn_plan *p)
{
    return p->shares.tasks != 0 ? p->shares.cost_ns / (int64_t)p->shares.tasks : p->known.median_ns;
}

/* Tasks that should wait on a busy worker's own queue. */
static uint64_t
depth(const struct mn_plan *p)
{
    int64_t ns = task_ns(p);
    if (ns >= LONG_NS) {
        return 0;
    }
    uint64_t n = ns > 0 && ns < AHEAD_NS ? (uint64_t)(AHEAD_NS / ns) : 1;
    return n < p->cfg.own_tasks ? n : p->cfg.own_tasks;
}

static bool
may_ahead(struct mn_plan *p, struct mn_plan_round *r)
{
    bool may = r->idle && mn_plan_starved(p, &r->facts);
    r->soon = r->soon || (r->idle && !may);
    return may;
}

static bool
may_start(struct mn_plan *p, struct mn_plan_round *r, const struct mn_piece *x)
{
    if (x->batch->block_off != 0) {
        return true;
    }
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence,
                                    .cost_ns = mn_piece_samples_ns(x)};
    enum mn_dispatch_why why;
    if (mn_dispatch_may(&p->dispatch, &r->view, &task, &why) != MN_OK
        || (why == MN_DISPATCH_AHEAD && !may_ahead(p, r))) {
        return false;
    }
    if (!mn_plan_memory_allows(p, &r->facts, x->batch)) {
        r->held = true;
        return false;
    }
    return true;
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
    struct mn_planned *q = mn_plan_at(p, c->task.tag >> 24);
    mn_assert(q != NULL);
    return &q->pieces[c->task.tag & 0xffffff];
}

/* The piece of least slack that nobody has, or NULL when none may start. */
static struct mn_piece *
unowned(struct mn_plan *p, struct mn_plan_round *r)
{
    struct mn_dispatch_choice c;
    if (mn_dispatch_peek(&p->dispatch, &r->view, &c) != MN_OK
        || (c.why == MN_DISPATCH_AHEAD && !may_ahead(p, r))) {
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

/* ---- helping ------------------------------------------------------------------------ */

/* What another worker pays for a piece, beside what its samples cost: more where it is in the
 * middle of a group that the one before it has opened. */
static int64_t
price(const struct mn_plan *p, const struct mn_piece *x, bool opened)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    int64_t away = x->home >= 0 ? rows * p->known.away_ns : 0;
    int64_t opening = p->known.opening_ns;
    if (p->together.declared && opening == 0) { /* declared and not measured yet: as good as much */
        opening = 32 * p->known.median_ns;
    }
    return away + (opened ? opening : 0);
}

/* So many tasks of the victim's share, behind those that it keeps, become the helper's, and what
 * goes on with them. */
static void
take_over(struct mn_plan *p, uint32_t victim, uint32_t helper, uint32_t keeps, uint32_t takes)
{
    struct mn_share *s = &p->shares.of[victim];
    bool has_chain = p->shares.chain.owner == (int64_t)victim;
    uint64_t chain = 0;
    struct mn_piece *x = s->first, *kept = NULL;
    while (x != NULL && keeps >= mn_piece_tasks(x)) {
        keeps -= mn_piece_tasks(x);
        kept = x;
        x = x->next;
    }
    if (x != NULL && keeps != 0) {
        struct mn_piece *y = mn_share_split(p, victim, x, x->t0 + keeps);
        kept = x;
        x = x->next;
        chain = y->chain;
        takes -= takes < mn_piece_tasks(y) ? takes : mn_piece_tasks(y);
        mn_share_give(p, helper, y);
    }
    while (x != NULL && (takes != 0 || x->chain == chain)) {
        struct mn_piece *next = x->next;
        takes -= takes < mn_piece_tasks(x) ? takes : mn_piece_tasks(x);
        mn_share_take_behind(p, victim, kept, x);
        chain = x->chain;
        mn_share_give(p, helper, x);
        x = next;
    }
    p->shares.helped++;
    if (has_chain && chain != p->shares.chain.number) {
        p->shares.chain.owner = victim;
    }
}

/* Where a share is best cut in two: how many tasks the victim keeps. */
struct border {
    uint32_t keeps, takes;
    int64_t before_ns; /* what it has to do until then */
    int64_t price_ns;  /* what it costs to begin there */
    bool any;
};

/* The border of two groups nearest to the middle, or else the middle itself. */
static struct border
best_border(struct mn_plan *p, struct mn_plan_round *r, uint32_t victim, int64_t before_ns)
{
    const struct mn_share *s = &p->shares.of[victim];
    uint32_t tasks = 0;
    int64_t ns = 0, done_ns = 0, nearest = INT64_MAX;
    const struct mn_piece *last = NULL;
    for (const struct mn_piece *x = s->first; x != NULL && may_start(p, r, x); x = x->next) {
        tasks += mn_piece_tasks(x);
        ns += x->cost_ns;
        last = x;
    }
    if (last == NULL) {
        return (struct border){0};
    }
    struct border best = {0};
    uint64_t chain = s->chain;
    uint32_t keeps = 0;
    for (const struct mn_piece *x = s->first; keeps < tasks; x = x->next) {
        int64_t off = 2 * done_ns > ns ? 2 * done_ns - ns : ns - 2 * done_ns;
        /* A chain over batches is a guess where groups are known to end with these. */
        bool edge = x->chain != chain || (keeps != 0 && x->t0 == 0 && !p->known.joins);
        if (edge && off < nearest) {
            nearest = off;
            best = (struct border){keeps, tasks - keeps, before_ns + done_ns, price(p, x, false),
                                   true};
        }
        chain = x->chain;
        keeps += mn_piece_tasks(x);
        done_ns += x->cost_ns;
    }
    if (!best.any) {
        int64_t half_ns = tasks > 1 ? ns * (tasks / 2) / tasks : 0;
        best = (struct border){tasks / 2, tasks - tasks / 2, before_ns + half_ns,
                               price(p, last, true), true};
    }
    return best;
}

/* How long it takes until one that idles may begin something that nobody is at: as long as the
 * batch to be delivered next. What waits on its worker's queue may be of the next one already.
 * Never at the end of all that is planned. */
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

/* Whether half of what a worker has to do may go to one that idles; does it. */
static bool
help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper, uint32_t victim)
{
    const struct mn_worker_view *v = &r->facts.workers[victim];
    struct border b = best_border(p, r, victim, v->left_ns);
    bool idles = b.keeps == 0 && v->running_ns < 0 && v->queued == 0; /* it is about to begin */
    if (r->soon && (b.price_ns > 0 || p->known.near == MN_CONTRAST_UNKNOWN)) {
        return false; /* what nobody is at costs nothing to begin with */
    }
    /* A group that is opened again for next to nothing takes the processor from others. */
    int64_t worth = b.price_ns + b.price_ns / HELP_MARGIN;
    if (!b.any || idles || (p->known.median_ns != 0 && b.before_ns <= worth)) {
        return false;
    }
    bool head = p->shares.of[victim].first->batch->sequence == p->order.head;
    if (!head && b.price_ns > 0 && more_in(p, r) <= b.price_ns) {
        return false; /* it may begin something else before it has paid that */
    }
    take_over(p, victim, helper, b.keeps, b.takes);
    return true;
}

static bool
find_help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper)
{
    int64_t most = -1, each_ns = task_ns(p);
    uint32_t victim = 0, head = UINT32_MAX;
    each_ns = each_ns > 0 ? each_ns : 1; /* nothing is known of any */
    if (p->order.next - p->order.head < p->cfg.window && !p->dispatch.closed && !r->held
        && !p->stall.full) {
        return false; /* more is about to be planned, and it may begin with that */
    }
    if (r->facts.ready >= p->dispatch.rates.starved_below) {
        return false; /* it is the program that takes its time: there is none to win */
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

/* The worker behind whose present task, which goes on and on, tasks wait: no more than AHEAD_NS of
 * work. Or where there is none, how many workers there are. */
static uint32_t
find_stuck(const struct mn_plan *p, const struct mn_plan_round *r, uint32_t helper)
{
    int64_t stuck = STUCK_TIMES * task_ns(p);
    stuck = stuck > STUCK_NS ? stuck : STUCK_NS;
    stuck += 2 * (p->known.away_ns + p->known.opening_ns); /* it may be opening something, */
    if (p->known.near == MN_CONTRAST_UNKNOWN) {            /* for as long as nobody knows */
        stuck += UNKNOWN_NS;
    }
    uint32_t w = 0;
    while (w < p->cfg.max_workers
           && (w == helper || r->facts.workers[w].queued == 0
               || r->facts.workers[w].running_ns < stuck)) {
        w++;
    }
    return w;
}

/* ---- dispatch ------------------------------------------------------------------------- */

/* The first piece of a share that may start. One that may not is no reason to leave out those
 * behind it that have begun, as what was taken over may have. */
static struct mn_piece *
startable(struct mn_plan *p, struct mn_plan_round *r, uint32_t w)
{
    struct mn_piece *x = p->shares.of[w].first;
    if (x == NULL || may_start(p, r, x)) {
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
        int64_t back = p->known.near == MN_CONTRAST_UNKNOWN ? UNKNOWN_NS : p->known.opening_ns;
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
    if (own == NULL && r->idle && find_help(p, r, w)) {
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
    if (x == NULL) {
        p->stall.held = p->stall.held || r->held;
        out->helps = r->idle ? find_stuck(p, r, w) : p->cfg.max_workers;
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
