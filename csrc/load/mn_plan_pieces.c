/* mn_plan_pieces.c - neighbours kept together: pieces, and each worker's share of them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Where samples are cheaper beside their neighbours (policy_locality.h), or as long as that is
 * not known, the plan does not put single tasks where any worker takes them. It gives whole
 * pieces to workers: each has a share, in the sampler's order, and tasks go from there to its own
 * lane of the board, as few ahead as keep it busy.
 *
 * A worker that has nothing of its own to start takes, in this order:
 *   1. the piece of least slack that nobody has, with all that is planned of its chain: what
 *      others work on it does not enter, because their chains are in their shares;
 *   2. the far half of what another worker has before it: of the one that has the batch to
 *      deliver next, or else of the one with the most to do. Only if that half would have
 *      waited there for longer than it costs to open its group again;
 *   3. the last task that waits on the lane of a worker that is held up by its present one.
 * What goes on with a chain goes to the worker that has it; what was cheaper where it was made
 * last time (home), to that worker.
 *
 * No deadlock: the batch to deliver next is never refused memory, its tasks are first in
 * whatever share they are in (shares are in the order of delivery), and the shares of workers that
 * are not there go back to the dispatcher at each look.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "load/mn_board.h"
#include "load/mn_engine_internal.h"
#include "load/mn_plan_internal.h"
#include "os/mn_clock.h"

/* Work that waits on a worker's own lane beside the task in hand: while the engine is woken,
 * some fifty microseconds, it must not run out; what is longer than LONG_NS is not worth the
 * risk to wait behind a slow one. */
#define AHEAD_NS (INT64_C(1) * 1000 * 1000)
#define LONG_NS (INT64_C(10) * 1000 * 1000)
/* A task runs for so long, and so many times the typical cost, before what waits behind it
 * goes to somebody else. */
#define STUCK_NS (INT64_C(5) * 1000 * 1000)
#define STUCK_TIMES 3

/* ---- shares ------------------------------------------------------------------------- */

static uint32_t
tasks_of(const struct mn_piece *x)
{
    return x->t1 - x->t0;
}

/* Puts a piece into a worker's share, in the order of delivery. */
static void
give(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    struct mn_share *s = &p->shares[w];
    struct mn_piece **at = &s->first;
    while (*at != NULL
           && ((*at)->batch->sequence < x->batch->sequence
               || ((*at)->batch == x->batch && (*at)->t0 < x->t0))) {
        at = &(*at)->next;
    }
    x->next = *at;
    *at = x;
    s->cost_ns += x->cost_ns;
    s->tasks += tasks_of(x);
    p->shared_ns += x->cost_ns;
    p->shared_tasks += tasks_of(x);
    if (x->chain == p->chain.number) {
        p->chain.owner = w;
    }
}

static void
take_from(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    struct mn_share *s = &p->shares[w];
    struct mn_piece **at = &s->first;
    while (*at != x) {
        mn_assert(*at != NULL);
        at = &(*at)->next;
    }
    *at = x->next;
    x->next = NULL;
    s->cost_ns -= x->cost_ns;
    s->tasks -= tasks_of(x);
    p->shared_ns -= x->cost_ns;
    p->shared_tasks -= tasks_of(x);
}

void
mn_pieces_reset(struct mn_plan *p)
{
    memset(p->shares, 0, p->nshares * sizeof(*p->shares));
    p->shared_ns = 0;
    p->shared_tasks = p->piece_tasks = 0;
    p->chain.length = 0;
    p->chain.owner = -1;
}

static bool
is_there(const struct mn_engine *e, uint32_t w)
{
    const struct mn_worker *k = mn_worker_at(&e->shm, w);
    return mn_a32_load_acquire(&k->state) == MN_WORKER_READY
           && mn_a32_load_relaxed(&k->leave) == 0 /* ours */ && !k->retired;
}

static void
offer(struct mn_plan *p, struct mn_piece *x)
{
    const struct mn_planned *q = x->batch;
    int64_t bytes = (int64_t)mn_plan_form_bytes(&p->form, q->batch.nrows);
    struct mn_dispatch_task task = {
        .position = (int64_t)(q->rows + q->row0[x->t0]),
        .batch = (int64_t)q->sequence,
        .cost_ns = mn_plan_worth(p, x->cost_ns, bytes),
        .bytes = bytes,
        .tag = q->sequence << 24 | (uint64_t)(x - q->pieces),
    };
    int rc = mn_dispatch_insert(&p->dispatch, &task, &x->node);
    mn_assert(rc == MN_OK); /* pieces are no more than tasks, for which there is room */
    (void)rc;
}

/* What a worker that has died, or was asked to leave, has before it is anybody's again. */
static void
disown(struct mn_plan *p, uint32_t w)
{
    struct mn_piece *x;
    while ((x = p->shares[w].first) != NULL) {
        take_from(p, w, x);
        offer(p, x);
    }
    if (p->chain.owner == (int64_t)w) {
        p->chain.owner = -1;
    }
}

void
mn_pieces_forget(struct mn_plan *p, struct mn_planned *q)
{
    for (uint32_t w = 0; w < p->nshares && q->npieces != 0 && p->by_piece; w++) {
        struct mn_piece *next;
        for (struct mn_piece *x = p->shares[w].first; x != NULL; x = next) {
            next = x->next;
            if (x->batch == q) {
                take_from(p, w, x);
            }
        }
    }
    for (uint32_t i = 0; i < q->npieces && p->by_piece; i++) {
        p->piece_tasks -= tasks_of(&q->pieces[i]);
    }
    q->npieces = 0;
}

/* ---- cutting ------------------------------------------------------------------------ */

enum { CHAIN = 1, PIECE = 2 }; /* what begins at a row: mn_planned.border */

/* Marks the rows at which pieces begin: where chains do, and where the home changes. */
static void
mark_borders(struct mn_engine *e, struct mn_planned *q, const uint16_t *home,
             const uint8_t *marks)
{
    struct mn_plan *p = e->plan;
    const struct mn_plan_batch *b = &q->batch;
    uint64_t ahead = p->next - p->head + 1;
    uint64_t window = ahead > p->window ? ahead : p->window;
    bool near = p->declared || p->known.near != MN_CONTRAST_NO;
    /* The first batch is waited for by everybody; so are those of an epoch of which nothing
     * is known. */
    uint64_t rows = p->unit_rows != 0 ? p->unit_rows : b->nrows;
    uint64_t first = p->unit_rows != 0 ? b->number : 0; /* of the rows, within its batch */
    bool spread = (p->unit_rows != 0 ? b->number < rows : b->number == 0)
                  && p->known.near == MN_CONTRAST_UNKNOWN && !p->declared;
    uint64_t part = (rows + e->active - 1) / e->active;
    for (uint32_t i = 0; i < b->nrows; i++) {
        struct mn_locality_place place = {.declared = b->begins != NULL,
                                          .begins = b->begins != NULL && b->begins[i] != 0,
                                          .batch = (first + i) % rows == 0,
                                          .marks = marks[i],
                                          .number = q->rows + i,
                                          .length = p->chain.length,
                                          .rows = (int64_t)rows,
                                          .most = (int64_t)(window * b->nrows / e->active)};
        bool breaks = spread && (first + i) % part == 0;
        breaks = breaks || !near || mn_costs_breaks(p->costs, &place);
        if (breaks) {
            p->chain = (struct mn_chain){p->chain.number + 1, 0, -1};
        }
        if (i == 0) {
            q->first_chain = p->chain.number;
        }
        p->chain.length++;
        bool moves = i == 0 || home[i] != home[i - 1];
        bool begins = moves || (near && breaks);
        q->border[i] = (uint8_t)((breaks ? CHAIN : 0) | (begins ? PIECE : 0));
    }
}

int
mn_pieces_cut(struct mn_engine *e, struct mn_planned *q, const int64_t *cost, bool parts)
{
    const struct mn_plan_batch *b = &q->batch;
    uint16_t *home = calloc((size_t)b->nrows + 1, sizeof(*home) + 1);
    if (home == NULL) {
        return -ENOMEM;
    }
    uint8_t *marks = (uint8_t *)(home + b->nrows + 1);
    mn_costs_places(e->plan->costs, b->index_kind == MN_INDEX_INT64 ? b->index : NULL, b->nrows,
                    home, marks);
    q->chain = e->plan->chain;
    mark_borders(e, q, home, marks);
    free(home);
    q->row0[0] = 0;
    q->ntasks = 0;
    for (uint32_t from = 0; from < b->nrows || q->ntasks == 0;) {
        uint32_t end = from + 1;
        while (end < b->nrows && !q->border[end]) {
            end++;
        }
        end = end < b->nrows && !(b->whole && !parts) ? end : b->nrows;
        int64_t limit = mn_plan_chunk_limit(e, b, cost + from, end - from);
        while (from < end) {
            from += mn_plan_chunk(e, b, cost + from, end - from, parts, limit);
            q->row0[++q->ntasks] = from;
        }
        if (b->nrows == 0) {
            q->row0[++q->ntasks] = 0;
        }
    }
    struct mn_piece *pieces = realloc(q->pieces, q->ntasks * sizeof(*pieces));
    if (pieces == NULL) {
        return -ENOMEM;
    }
    q->pieces = pieces;
    return 0;
}

static int32_t
home_of(const struct mn_plan *p, const struct mn_planned *q, uint32_t task)
{
    uint16_t home = 0;
    uint8_t marks;
    if (p->known.home != MN_CONTRAST_NO && q->batch.index_kind == MN_INDEX_INT64
        && q->batch.nrows != 0) {
        mn_costs_places(p->costs, (const int64_t *)q->batch.index + q->row0[task], 1, &home,
                        &marks);
    }
    /* As long as it is not known whether that is cheaper, one in four is made elsewhere. */
    bool tries = p->known.home == MN_CONTRAST_UNKNOWN && (q->rows + q->row0[task]) % 4 == 3;
    return home != 0 && home <= p->nshares && !tries ? home - 1 : -1;
}

static int64_t
cost_of(const struct mn_planned *q, const int64_t *cost, uint32_t task)
{
    int64_t ns = 0;
    for (uint32_t i = q->row0[task]; i < q->row0[task + 1]; i++) {
        ns += cost[i];
    }
    return ns;
}

/* Where a new piece goes: to who has its chain, to its home, or to the dispatcher. */
static void
place(struct mn_engine *e, struct mn_piece *x)
{
    struct mn_plan *p = e->plan;
    bool goes_on = x->chain == p->chain.number && p->chain.owner >= 0;
    int64_t w = goes_on ? p->chain.owner : x->home;
    x->node = MN_NO_NODE;
    p->piece_tasks += tasks_of(x);
    if (w >= 0 && is_there(e, (uint32_t)w)) {
        give(p, (uint32_t)w, x);
    }
    else {
        offer(p, x);
    }
}

int
mn_pieces_insert(struct mn_engine *e, struct mn_planned *q, const int64_t *cost)
{
    struct mn_plan *p = e->plan;
    bool near = p->declared || p->known.near != MN_CONTRAST_NO;
    if (q->first_chain == 0) { /* it was cut before neighbours were kept together */
        p->chain = (struct mn_chain){p->chain.number + 1, 0, -1};
        q->first_chain = p->chain.number;
    }
    uint64_t chain = q->first_chain;
    if (q->pieces == NULL) {
        q->pieces = malloc(q->ntasks * sizeof(*q->pieces));
        if (q->pieces == NULL) {
            return -ENOMEM;
        }
    }
    struct mn_piece *x = NULL;
    for (uint32_t t = 0; t < q->ntasks; t++) {
        bool begins = x == NULL || (q->border[q->row0[t]] & PIECE) || (!near && x->home < 0);
        for (uint32_t i = q->row0[t]; i < q->row0[t + 1]; i++) {
            chain += i != 0 && (q->border[i] & CHAIN);
        }
        if (q->sent[t] || begins) {
            if (x != NULL) {
                place(e, x);
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
        x->cost_ns += cost_of(q, cost, t);
    }
    if (x != NULL) {
        place(e, x);
    }
    return 0;
}

/* ---- who starts what ---------------------------------------------------------------- */

/* A look at a worker, and at the work that waits on its own lane. */
struct look {
    uint64_t queued;
    int64_t running_ns; /* -1: nothing runs */
};

static struct look
look_at(const struct mn_engine *e, uint32_t w, uint64_t now)
{
    const struct mn_worker *k = mn_worker_at(&e->shm, w);
    const struct mn_lane *l = mn_lane_at(&e->shm, MN_LANE_WORKER + w);
    uint64_t hint = mn_a64_load_acquire(&l->hint); /* an estimate */
    uint64_t tail = mn_a64_load_relaxed(&l->tail); /* ours */
    uint64_t since = mn_a64_load_relaxed(&k->since_ns);
    struct look v = {tail > hint ? tail - hint : 0, -1};
    if (mn_a64_load_relaxed(&k->running) != 0) {
        v.running_ns = since != 0 && since < now ? (int64_t)(now - since) : 0;
    }
    return v;
}

/* What a task takes, as far as known. */
static int64_t
task_ns(const struct mn_plan *p)
{
    return p->shared_tasks != 0 ? p->shared_ns / (int64_t)p->shared_tasks : p->known.median_ns;
}

/* Tasks that should wait on a busy worker's own lane. */
static uint64_t
depth(const struct mn_plan *p)
{
    int64_t ns = task_ns(p);
    if (ns >= LONG_NS) {
        return 0;
    }
    return ns > 0 && ns < AHEAD_NS ? (uint64_t)(AHEAD_NS / ns) : 1;
}

/* What the pump knows of the plan while it runs. */
struct round {
    struct mn_dispatch_view view;
    uint64_t now;
    int64_t ready;
    bool idle; /* the worker that is looked at has nothing at all */
};

static bool
may_ahead(struct mn_engine *e, const struct round *r)
{
    return r->idle && mn_plan_starved(e, r->ready, 0);
}

static bool
may_start(struct mn_engine *e, const struct round *r, const struct mn_piece *x)
{
    struct mn_plan *p = e->plan;
    if (x->batch->block_off != 0) {
        return true;
    }
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence, .cost_ns = x->cost_ns};
    enum mn_dispatch_why why;
    if (mn_dispatch_may(&p->dispatch, &r->view, &task, &why) != MN_OK
        || (why == MN_DISPATCH_AHEAD && !may_ahead(e, r))) {
        return false;
    }
    if (!mn_plan_memory_allows(e, x->batch)) {
        p->held = true;
        return false;
    }
    return true;
}

/* Gives a worker a piece that the dispatcher had, and with it what is planned of its chain. */
static void
adopt(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    uint64_t chain = x->chain;
    mn_dispatch_take(&p->dispatch, x->node);
    x->node = MN_NO_NODE;
    give(p, w, x);
    p->shares[w].chain = chain;
    for (uint64_t n = x->batch->sequence; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        bool any = q == NULL;
        for (uint32_t i = 0; q != NULL && i < q->npieces; i++) {
            struct mn_piece *y = &q->pieces[i];
            any = any || y->chain == chain;
            if (y->chain == chain && y->node != MN_NO_NODE) {
                mn_dispatch_take(&p->dispatch, y->node);
                y->node = MN_NO_NODE;
                give(p, w, y);
            }
        }
        if (!any) {
            return; /* it ended with the batch before */
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
unowned(struct mn_engine *e, const struct round *r)
{
    struct mn_plan *p = e->plan;
    struct mn_dispatch_choice c;
    if (mn_dispatch_peek(&p->dispatch, &r->view, &c) != MN_OK
        || (c.why == MN_DISPATCH_AHEAD && !may_ahead(e, r))) {
        return NULL;
    }
    struct mn_piece *x = piece_of(p, &c);
    if (!mn_plan_memory_allows(e, x->batch)) {
        p->held = true;
        if (mn_dispatch_first(&p->dispatch, &c) != MN_OK) {
            return NULL;
        }
        x = piece_of(p, &c);
        return mn_plan_memory_allows(e, x->batch) ? x : NULL;
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
    if (p->declared && opening == 0) { /* declared and not measured yet: as good as much */
        opening = 32 * p->known.median_ns;
    }
    return away + (opened ? opening : 0);
}

/* Cuts a piece in two before a task; the second is returned, in no share. */
static struct mn_piece *
split_piece(struct mn_plan *p, uint32_t w, struct mn_piece *x, uint32_t at)
{
    struct mn_planned *q = x->batch;
    take_from(p, w, x);
    struct mn_piece *y = &q->pieces[q->npieces++];
    *y = *x;
    y->t0 = at;
    int64_t each = x->cost_ns / (int64_t)tasks_of(x);
    y->cost_ns = each * (int64_t)tasks_of(y);
    x->t1 = at;
    x->cost_ns -= y->cost_ns;
    give(p, w, x);
    return y;
}

/* The victim's share from the middle on becomes the helper's, as a chain of its own. */
static void
take_over(struct mn_plan *p, uint32_t victim, uint32_t helper, uint32_t keeps)
{
    struct mn_share *s = &p->shares[victim];
    bool has_chain = p->chain.owner == (int64_t)victim;
    uint64_t chain = 0;
    struct mn_piece *x = s->first;
    while (x != NULL && keeps >= tasks_of(x)) {
        keeps -= tasks_of(x);
        x = x->next;
    }
    if (x != NULL && keeps != 0) {
        struct mn_piece *y = split_piece(p, victim, x, x->t0 + keeps);
        x = x->next;
        chain = y->chain;
        give(p, helper, y);
    }
    while (x != NULL) {
        struct mn_piece *next = x->next;
        take_from(p, victim, x);
        chain = x->chain;
        give(p, helper, x);
        x = next;
    }
    p->helped++;
    if (has_chain && chain != p->chain.number) {
        p->chain.owner = victim;
    }
}

/* How much a worker has to do before it comes to its share, by what tasks usually take: one
 * that has gone on for longer is taken to last as long again. */
static int64_t
before_share(const struct mn_plan *p, const struct look *v)
{
    int64_t each = task_ns(p);
    int64_t rest = v->running_ns < 0 ? 0 : v->running_ns > each / 2 ? v->running_ns : each / 2;
    return rest + (int64_t)v->queued * each;
}

/* Where a share is best cut in two: how many tasks the victim keeps. */
struct border {
    uint32_t keeps;
    int64_t before_ns; /* what it has to do until then */
    int64_t price_ns;  /* what it costs to begin there */
    bool any;
};

/* The border of two groups nearest to the middle, or else the middle itself. */
static struct border
best_border(struct mn_engine *e, const struct round *r, uint32_t victim, int64_t before_ns)
{
    const struct mn_plan *p = e->plan;
    const struct mn_share *s = &p->shares[victim];
    uint32_t tasks = 0;
    int64_t ns = 0, done_ns = 0, nearest = INT64_MAX;
    const struct mn_piece *last = NULL;
    for (const struct mn_piece *x = s->first; x != NULL && may_start(e, r, x); x = x->next) {
        tasks += tasks_of(x);
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
        if (x->chain != chain && off < nearest) {
            nearest = off;
            best = (struct border){keeps, before_ns + done_ns, price(p, x, false), true};
        }
        chain = x->chain;
        keeps += tasks_of(x);
        done_ns += x->cost_ns;
    }
    if (!best.any) {
        int64_t half_ns = tasks > 1 ? ns * (tasks / 2) / tasks : 0;
        best = (struct border){tasks / 2, before_ns + half_ns, price(p, last, true), true};
    }
    return best;
}

/* Whether half of what a worker has to do may go to one that idles; does it. */
static bool
help(struct mn_engine *e, const struct round *r, uint32_t helper, uint32_t victim)
{
    struct mn_plan *p = e->plan;
    struct look v = look_at(e, victim, r->now);
    struct border b = best_border(e, r, victim, before_share(p, &v));
    bool idles = b.keeps == 0 && v.running_ns < 0 && v.queued == 0; /* it is about to begin */
    if (!b.any || idles || (p->known.median_ns != 0 && b.before_ns <= b.price_ns)) {
        return false;
    }
    take_over(p, victim, helper, b.keeps);
    return true;
}

static bool
find_help(struct mn_engine *e, const struct round *r, uint32_t helper)
{
    struct mn_plan *p = e->plan;
    int64_t most = -1;
    uint32_t victim = 0, head = UINT32_MAX;
    for (uint32_t w = 0; w < p->nshares; w++) {
        const struct mn_share *s = &p->shares[w];
        if (w == helper || s->first == NULL) {
            continue;
        }
        if (s->first->batch->sequence == p->head) {
            head = w;
        }
        int64_t much = s->cost_ns > 0 ? s->cost_ns : (int64_t)s->tasks;
        if (much > most) {
            most = much;
            victim = w;
        }
    }
    if (head != UINT32_MAX && help(e, r, helper, head)) {
        return true;
    }
    return most >= 0 && victim != head && help(e, r, helper, victim);
}

bool
mn_pieces_withdraw(struct mn_engine *e, uint32_t w, uint32_t lane)
{
    const struct mn_lane *l = mn_lane_at(&e->shm, MN_LANE_WORKER + w);
    uint64_t hint = mn_a64_load_acquire(&l->hint); /* never past what may still be claimed */
    for (uint64_t at = mn_a64_load_relaxed(&l->tail); at-- > hint;) { /* tail is ours */
        uint32_t task;
        if (mn_board_withdraw(&e->shm, MN_LANE_WORKER + w, at, &task)) {
            int rc = mn_board_publish(&e->shm, &e->heads[lane], lane, task, ++e->gens[task], 0);
            mn_assert(rc == MN_OK); /* a lane has room for all tasks there are */
            (void)rc;
            return true;
        }
    }
    return false;
}

/* Takes back the last task that waits behind one that goes on and on. */
static bool
rescue(struct mn_engine *e, const struct round *r, uint32_t helper)
{
    struct mn_plan *p = e->plan;
    int64_t stuck = STUCK_TIMES * task_ns(p);
    stuck = stuck > STUCK_NS ? stuck : STUCK_NS;
    stuck += 2 * (p->known.away_ns + p->known.opening_ns); /* it may be opening something */
    for (uint32_t w = 0; w < p->nshares; w++) {
        struct look v = look_at(e, w, r->now);
        if (w == helper || v.queued == 0 || v.running_ns < stuck) {
            continue;
        }
        if (mn_pieces_withdraw(e, w, MN_LANE_WORKER + helper)) {
            return true;
        }
    }
    return false;
}

/* ---- the pump ----------------------------------------------------------------------- */

/* What the worker is to start next, in its share; NULL: nothing now. */
static struct mn_piece *
next_for(struct mn_engine *e, const struct round *r, uint32_t w)
{
    struct mn_plan *p = e->plan;
    struct mn_piece *own = p->shares[w].first;
    own = own != NULL && may_start(e, r, own) ? own : NULL;
    if (own != NULL && own->chain == p->shares[w].chain) {
        return own;
    }
    struct mn_piece *x = unowned(e, r);
    if (x != NULL && (own == NULL || x->batch->sequence < own->batch->sequence)) {
        adopt(p, w, x);
        return x;
    }
    if (own == NULL && r->idle && find_help(e, r, w)) {
        own = p->shares[w].first;
    }
    if (own != NULL) {
        p->shares[w].chain = own->chain;
    }
    return own;
}

static bool
start_next(struct mn_engine *e, const struct round *r, uint32_t w)
{
    struct mn_plan *p = e->plan;
    struct mn_piece *x = next_for(e, r, w);
    if (x == NULL) {
        return r->idle && rescue(e, r, w);
    }
    enum mn_dispatch_why why = MN_DISPATCH_WINDOW;
    struct mn_dispatch_task task = {.batch = (int64_t)x->batch->sequence, .cost_ns = x->cost_ns};
    (void)mn_dispatch_may(&p->dispatch, &r->view, &task, &why);
    why = why != 0 ? why : MN_DISPATCH_ORDER;
    if (!mn_plan_start(e, x->batch, x->t0, MN_LANE_WORKER + w, why)) {
        return false;
    }
    take_from(p, w, x);
    x->cost_ns -= x->cost_ns / (int64_t)tasks_of(x);
    x->t0++;
    p->piece_tasks--;
    if (x->t0 != x->t1) {
        give(p, w, x);
    }
    return true;
}

uint32_t
mn_pieces_pump(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    uint32_t started = 0, workers = e->shm.ctl->nworkers;
    int64_t in_hand = (int64_t)mn_a64_load_relaxed(&p->in_hand);
    p->held = false;
    struct round r = {.now = mn_now_ns(), .ready = mn_plan_ready(e)};
    r.view = (struct mn_dispatch_view){.head_batch = (int64_t)p->head - in_hand,
                                       .ready_batches = r.ready + in_hand,
                                       .last_batch = (int64_t)p->horizon - 1};
    uint64_t most = depth(p);
    for (int pass = 0; pass < 2; pass++) { /* those that idle come first */
        for (uint32_t w = 0; w < workers; w++) {
            if (!is_there(e, w)) {
                disown(p, w);
                continue;
            }
            struct look v = look_at(e, w, r.now);
            uint64_t there = v.queued + (v.running_ns >= 0);
            uint64_t want = pass == 0 ? 1 : 1 + most;
            while (there < want) {
                r.idle = there == 0;
                if (!start_next(e, &r, w)) {
                    break;
                }
                there++;
                started++;
            }
        }
    }
    bool more = p->piece_tasks != 0;
    for (uint32_t w = 0; w < workers; w++) {
        mn_a32_store_seqcst(&mn_worker_at(&e->shm, w)->low_own,
                            more ? (uint32_t)(most / 2 + 1) : 0);
    }
    mn_a32_store_seqcst(&e->shm.ctl->low_water, 0);
    return started;
}
