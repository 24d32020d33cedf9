/* mn_plan_worker_shares.c - neighbours kept together: what starts next for one worker. See
 * mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>

#include "base/mn_base.h"
#include "schedule/mn_plan_state.h"

/* ---- neighbours kept together ----
 *
 * A group has an owner, and an idle worker takes half of the largest rest.
 *
 * Where samples are cheaper next to their neighbours (policy_locality.h), or while that is not
 * known, single tasks are not offered to any worker. Instead the plan gives whole pieces to
 * workers: each has a share, in the order of delivery. Tasks go from a worker's share to its own
 * run queue, only as many ahead as keep it busy. A piece that continues a chain goes to the chain's
 * worker. A piece that was cheaper where it was made last time (home) goes to that worker. The rest
 * has no owner and goes to the dispatcher. A worker takes, in this order:
 *   1. if it has nothing of its own to start, or if that piece comes first (comes_first()): the
 *      piece of least slack that has no owner (in order: the head's, if there is one), with all
 *      that is planned of its chain. It never enters a chain of another worker, because such
 *      chains are in that worker's share;
 *   2. the next task of its own share;
 *   3. if it is idle: the far half of another worker's share;
 *   4. else, if it is idle: the tasks that wait on the queue of a worker that its current task
 *      holds up.
 *
 * No deadlock: the head is never refused memory, except for a moment (may_lie()). Its tasks are
 * first in any share that has them, because shares are in the order of delivery. The shares of
 * workers that do not exist return to the dispatcher at each look.
 */

#define NO_NODE UINT32_MAX

/* The cost that decides how early a piece starts: that of its samples. Opening its group is not
 * part of it, because every group has that cost. Early starts of all groups would only open them in
 * more workers. */
static int64_t
samples_ns(const struct mn_piece *x)
{
    return x->cost_ns - x->opens_ns;
}

static uint32_t
tasks_of(const struct mn_piece *x)
{
    return x->t1 - x->t0;
}

/* Returns whether neighbours are known to belong together: then a slow sample is no reason to
 * separate them. */
static bool
together(const struct mn_plan *p)
{
    return p->together.declared || p->view.known.near == MN_CONTRAST_YES;
}

/* How long opening a group may take while that is unknown. */
#define UNKNOWN_NS (INT64_C(200) * 1000 * 1000)

/* Returns what a task of a share takes, by what is known. */
static int64_t
share_task_ns(const struct mn_plan *p)
{
    int64_t tasks = (int64_t)p->shares.tasks;
    return tasks != 0 ? p->shares.cost_ns / tasks : p->view.known.median_ns;
}

/* ---- shares ------------------------------------------------------------------------- */

/* Returns whether piece x comes before y in the order of delivery. */
static bool
before(const struct mn_piece *x, const struct mn_piece *y)
{
    return x->batch->sequence < y->batch->sequence || (x->batch == y->batch && x->t0 < y->t0);
}

/* Puts a piece into a worker's share, in the order of delivery. */
static void
share_give(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    struct mn_share *s = &p->shares.of[w];
    /* most go to the end: they are planned in order */
    bool at_end = s->first != NULL && before(s->last, x);
    struct mn_piece **at = at_end ? &s->last->next : &s->first;
    while (*at != NULL && before(*at, x)) {
        at = &(*at)->next;
    }
    x->next = *at;
    *at = x;
    s->last = x->next == NULL ? x : s->last;
    s->cost_ns += x->cost_ns;
    s->tasks += tasks_of(x);
    p->shares.cost_ns += x->cost_ns;
    p->shares.tasks += tasks_of(x);
    if (x->chain == p->shares.chain.number) {
        p->shares.chain.owner = w;
    }
}

static void
share_take_behind(struct mn_plan *p, uint32_t w, struct mn_piece *behind, struct mn_piece *x)
{
    struct mn_share *s = &p->shares.of[w];
    struct mn_piece **at = behind != NULL ? &behind->next : &s->first;
    mn_assert(*at == x);
    *at = x->next;
    s->last = s->last == x ? behind : s->last;
    x->next = NULL;
    s->cost_ns -= x->cost_ns;
    s->tasks -= tasks_of(x);
    p->shares.cost_ns -= x->cost_ns;
    p->shares.tasks -= tasks_of(x);
}

static void
share_take(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    struct mn_piece *behind = NULL;
    for (struct mn_piece *y = p->shares.of[w].first; y != x; y = y->next) {
        mn_assert(y != NULL);
        behind = y;
    }
    share_take_behind(p, w, behind, x);
}

static struct mn_piece *
share_split(struct mn_plan *p, uint32_t w, struct mn_piece *x, uint32_t at)
{
    struct mn_planned *q = x->batch;
    share_take(p, w, x);
    struct mn_piece *y = &q->pieces[q->npieces++];
    *y = *x;
    y->t0 = at;
    y->cost_ns = y->opens_ns = 0;
    for (uint32_t t = at; t < y->t1; t++) {
        y->cost_ns += q->cost_ns[t];
        y->opens_ns += q->opens_ns[t];
    }
    x->t1 = at;
    x->cost_ns -= y->cost_ns;
    x->opens_ns -= y->opens_ns;
    share_give(p, w, x);
    return y;
}

void
mn_pieces_reset(struct mn_plan *p)
{
    for (uint32_t w = 0; w < p->cfg.max_workers; w++) { /* workers keep their chains */
        struct mn_share *s = &p->shares.of[w];
        s->first = s->last = NULL;
        s->cost_ns = s->tasks = 0;
    }
    p->shares.cost_ns = 0;
    p->shares.tasks = p->shares.piece_tasks = 0;
    p->shares.chain.length = 0;
    p->shares.chain.owner = -1;
}

/* Gives a piece that has no owner to the dispatcher. */
static void
piece_offer(struct mn_plan *p, struct mn_piece *x)
{
    const struct mn_planned *q = x->batch;
    int64_t bytes = (int64_t)mn_plan_rows_bytes(p, q->batch.nrows);
    struct mn_dispatch_task task = {
        .position = (int64_t)(q->rows + q->row0[x->t0]),
        .batch = (int64_t)q->sequence,
        .cost_ns = mn_plan_worth(p, samples_ns(x), bytes),
        .tag = mn_plan_tag(q, (uint32_t)(x - q->pieces)),
    };
    int rc = mn_dispatch_insert(&p->dispatch, &task, &x->node);
    mn_assert(rc == MN_OK); /* at most as many pieces as tasks, which have capacity */
    (void)rc;
}

/* Offers the share of a worker that has died or was asked to exit to any worker again. */
static void
share_disown(struct mn_plan *p, uint32_t w)
{
    struct mn_piece *x;
    while ((x = p->shares.of[w].first) != NULL) {
        share_take(p, w, x);
        piece_offer(p, x);
    }
    if (p->shares.chain.owner == (int64_t)w) {
        p->shares.chain.owner = -1;
    }
}

void
mn_pieces_forget(struct mn_plan *p, struct mn_planned *q)
{
    uint32_t left = 0; /* tasks that are not queued: none if the batch was made */
    for (uint32_t i = 0; i < q->npieces && p->view.by_piece; i++) {
        left += tasks_of(&q->pieces[i]);
    }
    p->shares.piece_tasks -= left;
    q->npieces = 0;
    for (uint32_t w = 0; w < p->cfg.max_workers && left != 0; w++) {
        struct mn_piece *behind = NULL, *next;
        for (struct mn_piece *x = p->shares.of[w].first; x != NULL; x = next) {
            next = x->next;
            if (x->batch == q) {
                share_take_behind(p, w, behind, x);
            }
            else {
                behind = x;
            }
        }
    }
}

/* ---- pieces ------------------------------------------------------------------------- */

static bool
is_slow(const struct mn_plan *p, int64_t sample_ns)
{
    return mn_slow_starts_alone(sample_ns, p->dispatch.rates.typical_ns);
}

static bool
piece_slow(const struct mn_plan *p, const struct mn_piece *x)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    return is_slow(p, samples_ns(x) / (rows > 1 ? rows : 1));
}

/* Allocates a piece for each task at most, and the costs of each task. Returns 0 or -ENOMEM. */
static int
make_room(struct mn_planned *q)
{
    size_t each = sizeof(*q->pieces) + sizeof(*q->cost_ns) + sizeof(*q->opens_ns);
    struct mn_piece *pieces = realloc(q->pieces, q->ntasks * each);
    if (pieces == NULL) {
        return -ENOMEM;
    }
    q->pieces = pieces;
    q->cost_ns = (int64_t *)(void *)(pieces + q->ntasks);
    q->opens_ns = q->cost_ns + q->ntasks;
    return 0;
}

static int32_t
home_of(const struct mn_plan *p, const struct mn_planned *q, uint32_t task)
{
    uint16_t home = 0;
    uint8_t marks;
    const int64_t *index = mn_planned_index(&q->batch);
    if (p->view.known.home == MN_CONTRAST_YES && index != NULL && q->batch.nrows != 0) {
        mn_costs_places(p->cfg.costs, index + q->row0[task], 1, &home, &marks);
    }
    return home != 0 && home <= p->cfg.max_workers ? home - 1 : -1;
}

/* Computes what a task takes, and the part of it for groups that begin in it: what their first
 * samples cost beyond a usual one. */
static void
cost_of(const struct mn_plan *p, struct mn_planned *q, const int64_t *cost, uint32_t task)
{
    bool near = p->view.known.near == MN_CONTRAST_YES;
    q->cost_ns[task] = q->opens_ns[task] = 0;
    for (uint32_t i = q->row0[task]; i < q->row0[task + 1]; i++) {
        int64_t opens = q->border[i] & OPENING ? p->view.known.opening_ns : 0;
        bool alone = i + 1 == q->batch.nrows || (q->border[i + 1] & CHAIN);
        bool first = (near || (p->together.declared && !alone)) && (q->border[i] & CHAIN);
        if (first && opens == 0 && cost[i] > p->view.known.median_ns) {
            q->opens_ns[task] += cost[i] - p->view.known.median_ns; /* part of the known cost */
        }
        q->cost_ns[task] += cost[i] + opens;
        q->opens_ns[task] += opens;
    }
}

/* Returns whether the home of a piece has so much planned that another worker would make the piece
 * sooner. That is so above an equal part of everything, by a quarter of that part and by what the
 * piece costs elsewhere. One worker may be home to all samples, if the program was slow while they
 * were made. */
static bool
home_is_full(const struct mn_plan *p, const struct mn_piece *x)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    int64_t all_ns = p->shares.cost_ns + p->dispatch.work_ns + x->cost_ns;
    int64_t part_ns = all_ns / (int64_t)p->pace.active;
    int64_t more_ns = p->shares.of[x->home].cost_ns - part_ns;
    return more_ns > part_ns / 4 + rows * p->view.known.away_ns;
}

/* Places a new piece: with the worker that is at it, with the owner of its chain, at its home, or
 * in the dispatcher. */
static void
place(struct mn_plan *p, struct mn_piece *x)
{
    const struct mn_chain *before = &x->batch->chain; /* its first rows may continue this chain */
    bool full = x->home >= 0 && home_is_full(p, x);
    int64_t w = piece_slow(p, x) || full ? -1 : x->home;
    if (x->chain == p->shares.chain.number && p->shares.chain.owner >= 0) {
        w = p->shares.chain.owner;
    }
    else if (x->chain == before->number && before->owner >= 0) {
        w = before->owner;
    }
    uint16_t begun = x->t0 != 0 ? x->batch->sent[x->t0 - 1] : 0;
    if (begun != 0 && begun != MN_SENT_ANY) { /* started, and planned again */
        w = begun - 1;
    }
    x->node = NO_NODE;
    p->shares.piece_tasks += tasks_of(x);
    if (w >= 0 && p->shares.of[w].usable) {
        share_give(p, (uint32_t)w, x);
    }
    else {
        piece_offer(p, x);
    }
}

int
mn_pieces_insert(struct mn_plan *p, struct mn_planned *q, const int64_t *cost)
{
    bool near = p->together.declared || p->view.known.near != MN_CONTRAST_NO;
    if (q->first_chain == 0) { /* it was cut before neighbours were kept together */
        p->shares.chain = (struct mn_chain){++p->shares.chains, 0, -1};
        q->first_chain = p->shares.chain.number;
    }
    uint64_t chain = q->first_chain, later = q->later_chain;
    if (make_room(q) < 0) { /* it may have been cut finer since it had pieces */
        return -ENOMEM;
    }
    struct mn_piece *x = NULL;
    for (uint32_t t = 0; t < q->ntasks; t++) {
        bool begins = x == NULL || (q->border[q->row0[t]] & PIECE) || (!near && x->home < 0);
        for (uint32_t i = q->row0[t]; i < q->row0[t + 1]; i++) {
            chain = i != 0 && (q->border[i] & CHAIN) ? later++ : chain;
        }
        if (q->sent[t] || begins) {
            if (x != NULL) {
                place(p, x);
            }
            x = NULL;
        }
        if (q->sent[t]) {
            continue;
        }
        if (x == NULL) {
            x = &q->pieces[q->npieces++];
            *x = (struct mn_piece){.batch = q, .t0 = t, .home = home_of(p, q, t)};
        }
        x->t1 = t + 1;
        x->chain = chain;
        cost_of(p, q, cost, t);
        x->cost_ns += q->cost_ns[t];
        x->opens_ns += q->opens_ns[t];
    }
    if (x != NULL) {
        place(p, x);
    }
    return 0;
}

/* ---- what may start ----------------------------------------------------------------- */

/* Returns whether work beyond the window may start in this round: a worker is idle, and has been
 * for long enough. */
static bool
may_ahead(struct mn_plan *p, struct mn_plan_round *r)
{
    bool may = r->idle && mn_plan_starved(p, &r->facts);
    r->soon = r->soon || (r->idle && !may);
    return may;
}

/* Returns whether a piece may start now; notes in the round what holds it back. */
static bool
may_start(struct mn_plan *p, struct mn_plan_round *r, const struct mn_piece *x)
{
    if (x->batch->block_off != 0) {
        return true;
    }
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence,
                                    .cost_ns = samples_ns(x)};
    enum mn_dispatch_why why;
    if (mn_dispatch_may(&p->dispatch, &r->view, &task, &why) != MN_OK
        || (why == MN_DISPATCH_AHEAD && !may_ahead(p, r))) {
        return false;
    }
    bool held, allowed = mn_plan_memory_allows(p, &r->facts, x->batch, why, &held);
    r->held = r->held || held;
    return allowed;
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

/* Returns what another worker pays for a piece in addition to its samples. */
static int64_t
price(const struct mn_plan *p, const struct mn_piece *x)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    int64_t away = x->home >= 0 ? rows * p->view.known.away_ns : 0;
    int64_t opening = p->view.known.opening_ns;
    if (p->together.declared && opening == 0) { /* not measured yet: assume a high cost */
        opening = 32 * p->view.known.median_ns;
    }
    return away + opening;
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
    while (x != NULL && stay >= tasks_of(x)) {
        stay -= tasks_of(x);
        last = x;
        x = x->next;
    }
    if (x != NULL && stay != 0) {
        struct mn_piece *y = share_split(p, victim, x, x->t0 + stay);
        last = x;
        x = x->next;
        chain = y->chain;
        takes -= takes < tasks_of(y) ? takes : tasks_of(y);
        share_give(p, helper, y);
    }
    while (x != NULL && (takes != 0 || x->chain == chain)) {
        struct mn_piece *next = x->next;
        takes -= takes < tasks_of(x) ? takes : tasks_of(x);
        share_take_behind(p, victim, last, x);
        chain = x->chain;
        share_give(p, helper, x);
        x = next;
    }
    p->view.helped++;
    if (has_chain && chain != p->shares.chain.number) {
        p->shares.chain.owner = victim;
    }
}

/* Returns the time until an idle worker may begin work that has no owner, that is until the head is
 * made. It counts what the head's worker is making, and the pieces of the head in that worker's
 * share. Queued tasks are left out, because they may belong to a later batch. INT64_MAX if no more
 * work is planned. */
static int64_t
more_in(const struct mn_plan *p, const struct mn_plan_round *r)
{
    const struct mn_planned *q = mn_plan_at(p, p->view.order.head);
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
    const struct mn_piece *last = NULL;
    uint32_t tasks = 0;
    int64_t ns = 0;
    for (const struct mn_piece *x = p->shares.of[victim].first;
         x != NULL && may_start(p, r, x); x = x->next) {
        tasks += tasks_of(x);
        ns += x->cost_ns;
        last = x;
    }
    uint32_t stay = tasks / 2;
    if (last == NULL || (stay == 0 && v->running_ns < 0 && v->queued == 0)) {
        return false; /* nothing may start, or the victim is about to begin its only task */
    }
    int64_t before_ns = v->left_ns + ns * stay / tasks, price_ns = price(p, last);
    /* Work without an owner has no extra cost, so wait for it, but only briefly. Work past the
     * window starts only while the head stands still. */
    uint64_t idle_ns = p->shares.of[helper].idle_ns;
    bool waits = idle_ns == 0
                 || (int64_t)(r->facts.now_ns - idle_ns) < mn_plan_patience_ns(p->view.batch_bytes);
    if (r->soon && waits && (price_ns > 0 || p->view.known.near == MN_CONTRAST_UNKNOWN)) {
        return false;
    }
    /* Opening a group again for next to no gain takes the processor from others. */
    if (p->view.known.median_ns != 0 && before_ns <= price_ns + price_ns / HELP_MARGIN) {
        return false;
    }
    bool head = p->shares.of[victim].first->batch->sequence == p->view.order.head;
    if (!head && price_ns > 0 && more_in(p, r) <= price_ns) {
        return false; /* the helper may get other work before that cost has paid off */
    }
    take_over(p, victim, helper, stay, tasks - stay);
    return true;
}

/* Gives the helper, which is idle, half of another worker's share, where that pays. Returns whether
 * it did. */
static bool
find_help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper)
{
    int64_t most = -1, each_ns = share_task_ns(p);
    uint32_t victim = 0, head = UINT32_MAX;
    each_ns = each_ns > 0 ? each_ns : 1; /* no cost is known */
    if (p->view.order.next - p->view.order.head < p->cfg.window && !p->dispatch.closed && !r->held
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
        if (s->first->batch->sequence == p->view.order.head) {
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
find_stuck(const struct mn_plan *p, const struct mn_plan_round *r, uint32_t helper)
{
    int64_t stuck = STUCK_TIMES * share_task_ns(p);
    stuck = stuck > STUCK_NS ? stuck : STUCK_NS;
    /* Its worker may be opening a group. While the time for that is unknown, allow more. */
    stuck += 2 * (p->view.known.away_ns + p->view.known.opening_ns);
    if (p->view.known.near == MN_CONTRAST_UNKNOWN) {
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
    int64_t ns = share_task_ns(p);
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
    while (together(p) && n > p->view.order.head && has_chain(mn_plan_at(p, n - 1), chain)) {
        n--;
    }
    mn_dispatch_take(&p->dispatch, x->node);
    x->node = NO_NODE;
    share_give(p, w, x);
    p->shares.of[w].chain = chain;
    struct mn_planned *q;
    for (; n < p->view.order.next && ((q = mn_plan_at(p, n)) == NULL || has_chain(q, chain)); n++) {
        for (uint32_t i = 0; q != NULL && i < q->npieces; i++) {
            struct mn_piece *y = &q->pieces[i];
            if (y->chain == chain && y->node != NO_NODE) {
                mn_dispatch_take(&p->dispatch, y->node);
                y->node = NO_NODE;
                share_give(p, w, y);
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

/* Returns the piece of least slack that has no owner; in order the head's, if there is one. NULL if
 * none may start. */
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
        && head.task.batch == (int64_t)p->view.order.head) {
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

/* Returns the first piece of a share if it may start. */
static struct mn_piece *
startable(struct mn_plan *p, struct mn_plan_round *r, uint32_t w)
{
    struct mn_piece *x = p->shares.of[w].first;
    return x != NULL && may_start(p, r, x) ? x : NULL;
}

static int64_t
slack_of(const struct mn_plan *p, const struct mn_piece *x)
{
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence,
                                    .cost_ns = samples_ns(x)};
    return mn_dispatch_slack(&p->dispatch, &task);
}

/* Returns whether a piece without owner comes before the worker's own. A piece that is known to be
 * slow does as soon as it is due. It may interrupt a chain if that is worth the cost of returning
 * to the chain. */
static bool
comes_first(const struct mn_plan *p, const struct mn_piece *x, const struct mn_piece *own,
            bool goes_on)
{
    if (x->batch->sequence == p->view.order.head && own->batch->block_off == 0) {
        return true; /* own may find no memory, and the head must not wait for it */
    }
    if (piece_slow(p, x)) {
        int64_t back = p->view.known.near == MN_CONTRAST_UNKNOWN ? UNKNOWN_NS
                                                            : p->view.known.opening_ns;
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
        own = together(p) ? startable(p, r, w) : NULL;
        return own != NULL ? own : x; /* x may start, even where it could not from a share */
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
    uint64_t *idle_ns = &p->shares.of[w].idle_ns;
    *idle_ns = x != NULL || !r->idle ? 0 : *idle_ns != 0 ? *idle_ns : r->facts.now_ns;
    if (x == NULL) {
        p->view.held = p->view.held || r->held;
        out->helps = r->idle ? find_stuck(p, r, w) : p->cfg.max_workers;
        return out->helps < p->cfg.max_workers ? MN_PLAN_MOVE : MN_PLAN_NOTHING;
    }
    if (!r->idle && x->batch->block_off == 0 && p->pace.rows_of.nfields == 0) {
        return MN_PLAN_NOTHING; /* its size is not known: the batch starts when its turn has come */
    }
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence,
                                    .cost_ns = samples_ns(x)};
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
    share_take(p, w, x);
    x->cost_ns -= cost_ns;
    x->opens_ns -= x->batch->opens_ns[x->t0];
    x->t0++;
    p->shares.piece_tasks--;
    if (x->t0 != x->t1) {
        share_give(p, w, x);
    }
    return cost_ns;
}

void
mn_plan_round_begin(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_round *r)
{
    int64_t prefetched = (int64_t)mn_a64_load_relaxed(&p->prefetched);
    p->view.held = p->view.unreleased = false;
    for (uint32_t w = 0; w < p->cfg.max_workers; w++) {
        p->shares.of[w].usable = f->workers[w].usable;
        if (!f->workers[w].usable) {
            share_disown(p, w);
        }
    }
    *r = (struct mn_plan_round){
        .facts = *f,
        .depth = depth(p),
        .view = {.head_batch = (int64_t)p->view.order.head - prefetched,
                 .ready_batches = f->ready + prefetched,
                 .last_batch = (int64_t)p->horizon - 1,
                 .held_ns = p->shares.cost_ns},
    };
}

bool
mn_plan_worker_wants(const struct mn_plan_round *r, uint32_t w, bool first)
{
    const struct mn_worker_view *v = &r->facts.workers[w];
    uint64_t there = v->queued + (v->running_ns >= 0), want = first ? 1 : 1 + r->depth;
    return v->usable && there < want && (there == 0 || v->left_ns < AHEAD_NS);
}
