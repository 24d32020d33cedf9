/* mn_plan_locality.c - neighbours kept together: cuts batches into pieces, and gives them owners.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Where samples are cheaper next to their neighbours (policy_locality.h), or while that is not
 * known, single tasks are not offered to any worker. Instead the plan gives whole pieces to
 * workers: each has a share, in the order of delivery, from which mn_plan_shares.c starts tasks. A
 * piece that continues a chain goes to the chain's worker. A piece that was cheaper where it was
 * made last time (home) goes to that worker. The rest goes to the dispatcher, until a worker has
 * nothing else to do.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "schedule/mn_plan_state.h"

/* ---- shares ------------------------------------------------------------------------- */

/* Returns whether piece x comes before y in the order of delivery. */
static bool
before(const struct mn_piece *x, const struct mn_piece *y)
{
    return x->batch->sequence < y->batch->sequence || (x->batch == y->batch && x->t0 < y->t0);
}

/* Puts a piece into a worker's share, in the order of delivery. */
void
mn_share_give(struct mn_plan *p, uint32_t w, struct mn_piece *x)
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
    s->tasks += mn_piece_tasks(x);
    p->shares.cost_ns += x->cost_ns;
    p->shares.tasks += mn_piece_tasks(x);
    if (x->chain == p->shares.chain.number) {
        p->shares.chain.owner = w;
    }
}

void
mn_share_take_behind(struct mn_plan *p, uint32_t w, struct mn_piece *behind, struct mn_piece *x)
{
    struct mn_share *s = &p->shares.of[w];
    struct mn_piece **at = behind != NULL ? &behind->next : &s->first;
    mn_assert(*at == x);
    *at = x->next;
    s->last = s->last == x ? behind : s->last;
    x->next = NULL;
    s->cost_ns -= x->cost_ns;
    s->tasks -= mn_piece_tasks(x);
    p->shares.cost_ns -= x->cost_ns;
    p->shares.tasks -= mn_piece_tasks(x);
}

void
mn_share_take(struct mn_plan *p, uint32_t w, struct mn_piece *x)
{
    struct mn_piece *behind = NULL;
    for (struct mn_piece *y = p->shares.of[w].first; y != x; y = y->next) {
        mn_assert(y != NULL);
        behind = y;
    }
    mn_share_take_behind(p, w, behind, x);
}

struct mn_piece *
mn_share_split(struct mn_plan *p, uint32_t w, struct mn_piece *x, uint32_t at)
{
    struct mn_planned *q = x->batch;
    mn_share_take(p, w, x);
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
    mn_share_give(p, w, x);
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

void
mn_piece_offer(struct mn_plan *p, struct mn_piece *x)
{
    const struct mn_planned *q = x->batch;
    int64_t bytes = (int64_t)mn_plan_rows_bytes(p, q->batch.nrows);
    struct mn_dispatch_task task = {
        .position = (int64_t)(q->rows + q->row0[x->t0]),
        .batch = (int64_t)q->sequence,
        .cost_ns = mn_plan_worth(p, mn_piece_samples_ns(x), bytes),
        .tag = mn_plan_tag(q, (uint32_t)(x - q->pieces)),
    };
    int rc = mn_dispatch_insert(&p->dispatch, &task, &x->node);
    mn_assert(rc == MN_OK); /* at most as many pieces as tasks, which have capacity */
    (void)rc;
}

/* Offers the share of a worker that has died or was asked to exit to any worker again. */
void
mn_share_disown(struct mn_plan *p, uint32_t w)
{
    struct mn_piece *x;
    while ((x = p->shares.of[w].first) != NULL) {
        mn_share_take(p, w, x);
        mn_piece_offer(p, x);
    }
    if (p->shares.chain.owner == (int64_t)w) {
        p->shares.chain.owner = -1;
    }
}

void
mn_pieces_forget(struct mn_plan *p, struct mn_planned *q)
{
    uint32_t left = 0; /* tasks that are not queued: none if the batch was made */
    for (uint32_t i = 0; i < q->npieces && p->together.by_piece; i++) {
        left += mn_piece_tasks(&q->pieces[i]);
    }
    p->shares.piece_tasks -= left;
    q->npieces = 0;
    for (uint32_t w = 0; w < p->cfg.max_workers && left != 0; w++) {
        struct mn_piece *behind = NULL, *next;
        for (struct mn_piece *x = p->shares.of[w].first; x != NULL; x = next) {
            next = x->next;
            if (x->batch == q) {
                mn_share_take_behind(p, w, behind, x);
            }
            else {
                behind = x;
            }
        }
    }
}

/* ---- cutting ------------------------------------------------------------------------ */

static bool
is_slow(const struct mn_plan *p, int64_t sample_ns)
{
    return mn_slow_starts_alone(sample_ns, p->dispatch.rates.typical_ns);
}

bool
mn_piece_slow(const struct mn_plan *p, const struct mn_piece *x)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    return is_slow(p, mn_piece_samples_ns(x) / (rows > 1 ? rows : 1));
}

enum { CHAIN = 1, PIECE = 2, OPENING = 4 }; /* what begins at a row: mn_planned.border */

/* Marks the rows at which pieces begin: where chains begin, where the home changes, and around
 * samples that are known to be slow. Those may have to start alone. */
static void
mark_borders(struct mn_plan *p, struct mn_planned *q, const uint16_t *home,
             const uint8_t *marks, const int64_t *cost)
{
    const struct mn_plan_batch *b = &q->batch;
    uint64_t ahead = p->order.next - p->order.head + 1;
    uint64_t window = ahead > p->cfg.window ? ahead : p->cfg.window;
    bool near = p->together.declared || p->known.near != MN_CONTRAST_NO;
    /* The caller waits for the first batch. That also holds for later epochs of which nothing is
     * known. */
    bool first = b->number == 0 && p->known.near == MN_CONTRAST_UNKNOWN && !p->together.declared;
    bool finds = first && !b->whole && mn_locality_finds(b->nrows, p->pace.active);
    bool spread = first && !finds;
    p->together.finding = finds ? q->sequence + 1 : p->together.finding;
    uint32_t part = (b->nrows + p->pace.active - 1) / p->pace.active;
    for (uint32_t i = 0; i < b->nrows; i++) {
        struct mn_locality_place place = {.declared = b->begins != NULL,
                                          .begins = b->begins != NULL && b->begins[i] != 0,
                                          .batch = i == 0,
                                          .marks = marks[i],
                                          .number = q->rows + i,
                                          .length = p->shares.chain.length,
                                          .rows = (int64_t)b->nrows,
                                          .most = (int64_t)(window * b->nrows / p->pace.active)};
        bool breaks = spread && i % part == 0;
        breaks = breaks || !near || mn_costs_breaks(p->cfg.costs, &place);
        if (breaks) {
            p->shares.chain = (struct mn_chain){++p->shares.chains, 0, -1};
        }
        if (i == 0) {
            q->first_chain = p->shares.chain.number;
            q->later_chain = p->shares.chains + 1;
        }
        p->shares.chain.length++;
        /* Where neighbours are cheaper they stay together, even next to a slow sample. */
        bool slow = p->known.near != MN_CONTRAST_YES && !p->together.declared
                    && (is_slow(p, cost[i]) || (i != 0 && is_slow(p, cost[i - 1])));
        bool moves = i == 0 || home[i] != home[i - 1] || slow;
        bool begins = moves || (near && breaks);
        /* A known cost does not include opening the group, unless the sample's group begins
         * there. */
        bool opens = breaks && p->known.near == MN_CONTRAST_YES && !(marks[i] & MN_COST_OPENS);
        q->border[i] =
            (uint8_t)((breaks ? CHAIN : 0) | (begins ? PIECE : 0) | (opens ? OPENING : 0));
    }
}

/* Cuts a batch into tasks that end where one of `what` begins (CHAIN, PIECE). parts: also if one
 * worker could make the batch. */
static void
cut_at(const struct mn_plan *p, struct mn_planned *q, const int64_t *cost, bool parts, int what)
{
    const struct mn_plan_batch *b = &q->batch;
    uint32_t from = 0;
    q->row0[0] = 0;
    q->ntasks = 0;
    while (from < b->nrows) {
        uint32_t end = from + 1;
        while (end < b->nrows && (!(q->border[end] & what) || (b->whole && !parts))) {
            end++;
        }
        int64_t limit = mn_plan_chunk_limit(p, b, cost + from, end - from);
        while (from < end) {
            from += mn_plan_chunk(p, b, cost + from, end - from, parts, limit);
            q->row0[++q->ntasks] = from;
        }
    }
    if (b->nrows == 0) {
        q->row0[++q->ntasks] = 0;
    }
    for (uint32_t i = 1; i < b->nrows; i++) { /* a piece ends only where a task ends */
        q->border[i] &= (uint8_t)(what | ~PIECE);
    }
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

int
mn_pieces_cut(struct mn_plan *p, struct mn_planned *q, const int64_t *cost, bool parts,
              uint64_t others)
{
    const struct mn_plan_batch *b = &q->batch;
    uint16_t *home = calloc((size_t)b->nrows + 1, sizeof(*home) + 1);
    if (home == NULL) {
        return -ENOMEM;
    }
    uint8_t *marks = (uint8_t *)(home + b->nrows + 1);
    mn_costs_places(p->cfg.costs, mn_planned_index(b), b->nrows, home, marks);
    q->chain = p->shares.chain;
    mark_borders(p, q, home, marks, cost);
    free(home);
    /* Homes, and then groups, that change too fast for the number of tasks are ignored. */
    uint64_t most = mn_plan_tasks_most(p, b, others);
    cut_at(p, q, cost, parts, CHAIN | PIECE);
    if (q->ntasks > most) {
        cut_at(p, q, cost, parts, CHAIN);
    }
    if (q->ntasks > most) {
        cut_at(p, q, cost, parts, 0);
    }
    if (q->ntasks > most) {
        mn_plan_cut_evenly(q, most);
    }
    return 0;
}

static int32_t
home_of(const struct mn_plan *p, const struct mn_planned *q, uint32_t task)
{
    uint16_t home = 0;
    uint8_t marks;
    const int64_t *index = mn_planned_index(&q->batch);
    if (p->known.home == MN_CONTRAST_YES && index != NULL && q->batch.nrows != 0) {
        mn_costs_places(p->cfg.costs, index + q->row0[task], 1, &home, &marks);
    }
    return home != 0 && home <= p->cfg.max_workers ? home - 1 : -1;
}

/* Computes what a task takes, and the part of it for groups that begin in it: what their first
 * samples cost beyond a usual one. */
static void
cost_of(const struct mn_plan *p, struct mn_planned *q, const int64_t *cost, uint32_t task)
{
    bool near = p->known.near == MN_CONTRAST_YES;
    q->cost_ns[task] = q->opens_ns[task] = 0;
    for (uint32_t i = q->row0[task]; i < q->row0[task + 1]; i++) {
        int64_t opens = q->border[i] & OPENING ? p->known.opening_ns : 0;
        bool alone = i + 1 == q->batch.nrows || (q->border[i + 1] & CHAIN);
        bool first = (near || (p->together.declared && !alone)) && (q->border[i] & CHAIN);
        if (first && opens == 0 && cost[i] > p->known.median_ns) {
            q->opens_ns[task] += cost[i] - p->known.median_ns; /* it is part of the known cost */
        }
        q->cost_ns[task] += cost[i] + opens;
        q->opens_ns[task] += opens;
    }
}

/* Returns whether a piece saves more at its home than next to the one before it. */
static bool
belongs_home(const struct mn_plan *p, const struct mn_piece *x)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    return x->home >= 0 && p->shares.of[x->home].usable
           && rows * p->known.away_ns > p->known.opening_ns;
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
    return more_ns > part_ns / 4 + rows * p->known.away_ns;
}

/* Places a new piece: with the worker that is at it, with the owner of its chain, at its home, or
 * in the dispatcher. */
static void
place(struct mn_plan *p, struct mn_piece *x)
{
    const struct mn_chain *before = &x->batch->chain; /* its first rows may continue this chain */
    bool full = x->home >= 0 && home_is_full(p, x);
    int64_t w = mn_piece_slow(p, x) || full ? -1 : x->home;
    if (belongs_home(p, x) && !full) {
        w = x->home;
    }
    else if (x->chain == p->shares.chain.number && p->shares.chain.owner >= 0) {
        w = p->shares.chain.owner;
    }
    else if (x->chain == before->number && before->owner >= 0) {
        w = before->owner;
    }
    uint16_t begun = x->t0 != 0 ? x->batch->sent[x->t0 - 1] : 0;
    if (begun != 0 && begun != MN_SENT_ANY) { /* started, and planned again */
        w = begun - 1;
    }
    x->node = MN_NO_NODE;
    p->shares.piece_tasks += mn_piece_tasks(x);
    if (w >= 0 && p->shares.of[w].usable) {
        mn_share_give(p, (uint32_t)w, x);
    }
    else {
        mn_piece_offer(p, x);
    }
}

int
mn_pieces_insert(struct mn_plan *p, struct mn_planned *q, const int64_t *cost)
{
    bool near = p->together.declared || p->known.near != MN_CONTRAST_NO;
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
