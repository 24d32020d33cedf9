/* mn_plan.c - planned batches, from add to taken, and how they are cut into tasks. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"
#include "schedule/mn_plan_state.h"

/* ---- how many neighbouring samples form one task ----
 *
 * Purpose
 *   A task costs `overhead` to publish, claim, wake for and report, whatever is in it.
 *   One sample per task is best for spreading work, but wasteful when a sample takes
 *   microseconds.
 *
 * Rule, for a batch of samples that cost about `cost` each
 *   target  = max(MN_CHUNK_TARGET_NS, MN_CHUNK_AMORTISE * overhead). A task this long spends at
 *             most 1/MN_CHUNK_AMORTISE of itself on overhead. Costlier samples go alone.
 *   size    = as many samples as reach the target, but no more than the batch has.
 *   When the batch is wanted now and `idle` workers could share it, latency counts: at
 *   most ceil(batch / idle) samples per task. But no task is shorter than MN_CHUNK_SPREAD /
 *   MN_CHUNK_AMORTISE of the target (that many times the overhead). Below that, waking another
 *   worker takes longer than doing the work.
 *   The result is evened out: ceil(batch / ceil(batch / size)), so that 10 samples in
 *   tasks of at most 7 become 5 + 5.
 *   In the steady state (idle 0) different batches keep different workers busy, and
 *   splitting one batch finer has no benefit.
 *
 * mn_chunk_next cuts by the samples' own predicted costs. A sample whose cost reaches the target is
 * always alone, so that no cheap neighbour waits for it and it can be started early.
 */

/* A cross-process futex round trip was measured at 50 us; six of them. */
#define MN_CHUNK_TARGET_NS 300000
#define MN_CHUNK_AMORTISE 16
#define MN_CHUNK_SPREAD 2

static int64_t
ceil_div(int64_t a, int64_t b)
{
    return a / b + (a % b != 0);
}

static int64_t
chunk_target(int64_t overhead_ns)
{
    int64_t amortised = overhead_ns * MN_CHUNK_AMORTISE;
    return amortised > MN_CHUNK_TARGET_NS ? amortised : MN_CHUNK_TARGET_NS;
}

/* Returns samples per task, in [1, batch]; 1 when the cost is not known (0). batch < 1 counts as 1.
 * idle: workers without work while the caller waits for this batch, 0 in the steady state. */
static int64_t
mn_chunk_size(int64_t cost_ns, int64_t overhead_ns, int64_t batch, int64_t idle)
{
    if (batch <= 1 || cost_ns <= 0) {
        return 1;
    }
    int64_t target = chunk_target(overhead_ns);
    int64_t size = ceil_div(target, cost_ns);
    if (idle > 1) {
        int64_t share = ceil_div(batch, idle);
        int64_t least = ceil_div(target / MN_CHUNK_AMORTISE * MN_CHUNK_SPREAD, cost_ns);
        int64_t spread = share > least ? share : least;
        size = size < spread ? size : spread;
    }
    size = size < batch ? size : batch;
    return ceil_div(batch, ceil_div(batch, size));
}

/* Returns the length of the task that begins at costs_ns[0], in [1, n] (0 only for n 0). n samples
 * of the batch are left. limit: most samples that a task may have (mn_chunk_size). */
static int64_t
mn_chunk_next(const int64_t *costs_ns, int64_t n, int64_t overhead_ns, int64_t limit)
{
    int64_t target = chunk_target(overhead_ns);
    int64_t sum = 0;
    int64_t i = 0;
    for (; i < n && (i == 0 || i < limit); i++) {
        int64_t c = costs_ns[i] > 0 ? costs_ns[i] : 0;
        if (i > 0 && (c >= target || sum >= target - c)) {
            /* A costly sample begins its own task; one that fills the target joins. */
            return c >= target ? i : i + 1;
        }
        sum += c;
        if (sum >= target) {
            return i + 1;
        }
    }
    return i;
}

/* ---- how batches are cut into tasks ---- */

/* The cost of a task in addition to its samples: claim, report, a share of a wake-up. */
#define TASK_OVERHEAD_NS 5000

static int64_t
sum(const int64_t *v, uint32_t n)
{
    int64_t s = 0;
    for (uint32_t i = 0; i < n; i++) {
        s += v[i];
    }
    return s;
}

/* Returns what a task costs in addition to its samples. While neighbours are kept together, tasks
 * may be as long as an eighth of opening a group: taking over less than that never pays. */
static int64_t
overhead_ns(const struct mn_plan *p)
{
    int64_t opening = p->view.by_piece ? p->view.known.opening_ns / (8 * MN_CHUNK_AMORTISE) : 0;
    return opening > TASK_OVERHEAD_NS ? opening : TASK_OVERHEAD_NS;
}

/* Returns the largest number of rows that a task may have in a stretch of n rows. */
static int64_t
chunk_limit(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost, uint32_t n)
{
    /* The caller waits for the first batch of an epoch (not of a resumed one): spread it. */
    int64_t idle = b->number == 0 ? (int64_t)p->pace.active : 0;
    return mn_chunk_size(sum(cost, n) / (n != 0 ? n : 1), overhead_ns(p), n, idle);
}

/* Returns the number of rows of the next task. n: rows left. parts: split a batch that one worker
 * could make. limit: from chunk_limit(). */
static uint32_t
chunk(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost, uint32_t n,
      bool parts, int64_t limit)
{
    if (b->whole && !parts) {
        return n;
    }
    int64_t most = b->whole ? p->cfg.parts : MN_PLAN_BATCH_TASKS;
    int64_t least = (b->nrows + most - 1) / most;
    int64_t rows = mn_chunk_next(cost, n, overhead_ns(p), limit);
    rows = rows < least ? least : rows;
    return rows < n ? (uint32_t)rows : n;
}

/* Returns into how many tasks the batch may be cut, with capacity left for one of each of
 * `others`. */
static uint64_t
tasks_most(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint64_t most = b->whole ? p->cfg.parts : MN_PLAN_BATCH_TASKS;
    uint64_t there = mn_plan_waiting(p) + others;
    uint64_t left = there < MN_PLAN_TASKS ? MN_PLAN_TASKS - there : 1;
    return most < left ? most : left;
}

/* Cuts a batch into at most this many tasks, ignoring costs. */
static void
cut_evenly(struct mn_planned *q, uint64_t most)
{
    uint32_t nrows = q->batch.nrows;
    uint32_t each = (uint32_t)((nrows + most - 1) / most);
    q->ntasks = 0;
    for (uint32_t from = 0; from < nrows; from += each) {
        q->row0[++q->ntasks] = nrows - from < each ? nrows : from + each;
    }
}

/* Returns whether there is capacity for all tasks that it may be cut into, and for others. */
static bool
has_room(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint32_t most = (b->whole && !b->splits) || b->nrows == 0 ? 1 : b->nrows;
    most = most < MN_PLAN_BATCH_TASKS ? most : MN_PLAN_BATCH_TASKS;
    return mn_plan_waiting(p) + most + others <= MN_PLAN_TASKS;
}

/* In one of this many batches, one worker makes two neighbours, to see whether that is cheaper.
 * Never in the first batch of an epoch, for which the caller waits. */
#define PROBE_EVERY 4u
#define PROBE_FIRST 1u

/* One more row for a task of one costly sample, once in some batches, somewhere in the batch. */
static uint32_t
probe(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost, uint32_t from,
      uint32_t rows)
{
    if (!p->together.may || rows != 1 || b->nrows < 2 || b->number % PROBE_EVERY != PROBE_FIRST) {
        return 0;
    }
    uint64_t place = b->number / PROBE_EVERY % (b->nrows - 1);
    bool costly = cost[from] > 2 * p->dispatch.rates.typical_ns
                  || cost[from + (from + 1 < b->nrows)] > 2 * p->dispatch.rates.typical_ns;
    return place == from && !costly ? 1 : 0;
}

/* Cuts the rows into tasks by their predicted costs. Fills row0 and returns their number. parts:
 * also if one worker could make the batch. */
static uint32_t
cut(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost, bool parts,
    uint32_t *row0)
{
    row0[0] = 0;
    if ((b->whole && !parts) || b->nrows == 0) {
        row0[1] = b->nrows;
        return 1;
    }
    int64_t limit = chunk_limit(p, b, cost, b->nrows);
    uint32_t n = 0;
    while (row0[n] < b->nrows) {
        uint32_t from = row0[n];
        uint32_t rows = chunk(p, b, cost + from, b->nrows - from, parts, limit);
        row0[++n] = from + rows + probe(p, b, cost, from, rows);
    }
    return n;
}

/* Marks the rows at which pieces begin: where chains begin, and where the home changes. */
static void
mark_borders(struct mn_plan *p, struct mn_planned *q, const uint16_t *home, const uint8_t *marks)
{
    const struct mn_plan_batch *b = &q->batch;
    uint64_t ahead = p->view.order.next - p->view.order.head + 1;
    uint64_t window = ahead > p->cfg.window ? ahead : p->cfg.window;
    bool near = p->together.declared || p->view.known.near != MN_CONTRAST_NO;
    /* The caller waits for the first batch. That also holds for later epochs of which nothing is
     * known. */
    bool unknown = p->view.known.near == MN_CONTRAST_UNKNOWN && !p->together.declared;
    bool spread = b->number == 0 && unknown;
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
        breaks = breaks || !near || mn_locality_breaks(&p->cfg.costs->locality, &place);
        if (breaks) {
            p->shares.chain = (struct mn_chain){++p->shares.chains, 0, -1};
        }
        if (i == 0) {
            q->first_chain = p->shares.chain.number;
            q->later_chain = p->shares.chains + 1;
        }
        p->shares.chain.length++;
        bool begins = i == 0 || home[i] != home[i - 1] || (near && breaks);
        /* A known cost does not include opening the group, unless the sample's group begins
         * there. */
        bool opens = breaks && p->view.known.near == MN_CONTRAST_YES && !(marks[i] & MN_COST_OPENS);
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
        int64_t limit = chunk_limit(p, b, cost + from, end - from);
        while (from < end) {
            from += chunk(p, b, cost + from, end - from, parts, limit);
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

/* Cuts a batch that has not started into tasks and pieces. Returns 0 or -ENOMEM. */
static int
cut_pieces(struct mn_plan *p, struct mn_planned *q, const int64_t *cost, bool parts,
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
    mark_borders(p, q, home, marks);
    free(home);
    /* Homes, and then groups, that change too fast for the number of tasks are ignored. */
    uint64_t most = tasks_most(p, b, others);
    cut_at(p, q, cost, parts, CHAIN | PIECE);
    if (q->ntasks > most) {
        cut_at(p, q, cost, parts, CHAIN);
    }
    if (q->ntasks > most) {
        cut_at(p, q, cost, parts, 0);
    }
    if (q->ntasks > most) {
        cut_evenly(q, most);
    }
    return 0;
}

/* Predicts the cost of each row of a batch, and returns that of its collate task. */
static int64_t
predict_rows(const struct mn_plan *p, const struct mn_plan_batch *b, int64_t *cost)
{
    memset(cost, 0, b->nrows * sizeof(*cost));
    if (p->cfg.costs == NULL) {
        return 0;
    }
    mn_costs_predict(p->cfg.costs, mn_planned_index(b), b->hint, b->nrows, p->view.by_piece,
                     cost);
    return b->whole ? mn_costs_look(p->cfg.costs).collate_ns : 0;
}

/* Gives the dispatcher those tasks of a batch that are not queued. */
static void
insert_tasks(struct mn_plan *p, const struct mn_planned *q, const int64_t *cost, int64_t collate)
{
    int64_t bytes = (int64_t)mn_plan_rows_bytes(p, q->batch.nrows);
    for (uint32_t t = 0; t < q->ntasks; t++) {
        if (q->sent[t]) {
            continue;
        }
        uint32_t from = q->row0[t];
        /* in parts, the last part to end collates: it may be any of them */
        int64_t ns = sum(cost + from, q->row0[t + 1] - from) + collate / q->ntasks;
        struct mn_dispatch_task task = {
            .position = (int64_t)(q->rows + from),
            .batch = (int64_t)q->sequence,
            .cost_ns = mn_plan_worth(p, ns, bytes),
            .tag = mn_plan_tag(q, t),
        };
        int rc = mn_dispatch_insert(&p->dispatch, &task, NULL);
        mn_assert(rc == MN_OK);
        (void)rc;
    }
}

/* Cuts a batch into tasks, unless it has started, and passes on those that are not queued. Leaves
 * capacity for one task of each of `others` batches. cost: space for the cost of each row. Returns
 * 0 or -ENOMEM. */
static int
cut_batch(struct mn_plan *p, struct mn_planned *q, int64_t *cost, uint64_t others)
{
    const struct mn_plan_batch *b = &q->batch;
    int64_t collate = predict_rows(p, b, cost);
    bool parts = b->splits && p->pace.split && has_room(p, b, others);
    if (p->view.by_piece) {
        int rc = q->block_off == 0 ? cut_pieces(p, q, cost, parts, others) : 0;
        return rc < 0 ? rc : mn_pieces_insert(p, q, cost);
    }
    if (q->block_off == 0) {
        q->ntasks = cut(p, b, cost, parts, q->row0);
        uint64_t most = tasks_most(p, b, others);
        if (q->ntasks > most) { /* finer than when it was planned */
            cut_evenly(q, most);
        }
    }
    insert_tasks(p, q, cost, collate);
    return 0;
}

/* Replans everything that is not queued, after a change of whether neighbours are kept together. */
static int
replan(struct mn_plan *p, int64_t *cost)
{
    mn_dispatch_drop(&p->dispatch, NULL, NULL);
    mn_pieces_reset(p);
    for (int begun = 1; begun >= 0; begun--) { /* started ones first: they are not cut again */
        for (uint64_t n = p->view.order.head; n < p->view.order.next; n++) {
            struct mn_planned *q = mn_plan_at(p, n);
            if (q == NULL || q->refusal.why != MN_REFUSED_NOT || (q->block_off != 0) != begun) {
                continue;
            }
            q->npieces = 0;
            int rc = cut_batch(p, q, cost, p->view.order.next - n);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}

/* Refreshes what is known of costs, and derives whether neighbours should be kept together. */
static void
look_at_costs(struct mn_plan *p)
{
    p->view.known = mn_costs_look(p->cfg.costs);
    bool near = p->together.declared || p->view.known.near != MN_CONTRAST_NO;
    bool home = p->view.known.home == MN_CONTRAST_YES;
    p->together.wanted = p->together.may && p->cfg.max_workers > 1 && (near || home);
}

static uint32_t
stance_of(const struct mn_plan *p)
{
    return p->view.known.near | p->view.known.home << 2 | (uint32_t)p->view.known.joins << 4
           | (uint32_t)p->view.known.believes << 5;
}

bool
mn_plan_unsettled(const struct mn_plan *p)
{
    const struct mn_plan_together *t = &p->together;
    bool by_piece = p->view.by_piece;
    return t->wanted != by_piece || (by_piece && stance_of(p) != t->stance);
}

void
mn_plan_settle(struct mn_plan *p)
{
    if (!mn_plan_unsettled(p)) {
        return;
    }
    uint32_t rows = 0;
    for (uint64_t n = p->view.order.head; n < p->view.order.next; n++) {
        const struct mn_planned *q = mn_plan_at(p, n);
        rows = q != NULL && q->batch.nrows > rows ? q->batch.nrows : rows;
    }
    int64_t *cost = malloc(((size_t)rows + 1) * sizeof(*cost));
    if (cost == NULL) {
        return; /* it is tried again */
    }
    p->view.by_piece = p->together.wanted;
    p->together.stance = stance_of(p);
    if (replan(p, cost) < 0) { /* pieces need memory; tasks do not */
        p->view.by_piece = p->together.wanted = p->together.may = false;
        (void)replan(p, cost);
    }
    p->together.parted = !p->view.by_piece;
    free(cost);
}

bool
mn_plan_shares_ended(struct mn_plan *p)
{
    bool parted = p->together.parted;
    p->together.parted = false;
    return parted;
}

static bool
is_stale(const struct mn_dispatch_task *t, void *arg)
{
    return mn_plan_at(arg, (uint64_t)t->batch)->stale;
}

/* Leaves only those batches stale that can be cut again. Returns the rows of the largest. */
static uint32_t
find_stale(struct mn_plan *p)
{
    uint32_t rows = 0;
    for (uint64_t n = p->view.order.head; n < p->view.order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->stale && q->block_off == 0 && q->refusal.why == MN_REFUSED_NOT;
            rows = q->stale && q->batch.nrows > rows ? q->batch.nrows : rows;
        }
    }
    return rows;
}

/* Cuts again every stale batch that has not started. */
static void
recut(struct mn_plan *p)
{
    uint32_t rows = find_stale(p);
    int64_t *cost = rows != 0 ? malloc(rows * sizeof(*cost)) : NULL;
    if (cost == NULL) {
        return; /* without memory the old cut stays */
    }
    mn_dispatch_drop(&p->dispatch, is_stale, p);
    struct mn_chain last = p->shares.chain;
    bool whole = true;
    for (uint64_t n = p->view.order.head; n < p->view.order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && q->stale) {
            q->stale = false;
            mn_pieces_forget(p, q);
            p->shares.chain = q->chain;
            whole = whole && cut_batch(p, q, cost, p->view.order.next - n) == 0;
            last = n + 1 == p->view.order.next ? p->shares.chain : last;
        }
    }
    p->shares.chain = last;
    if (!whole) { /* no memory for pieces: replan everything without them */
        p->together.wanted = p->together.may = false;
        mn_plan_settle(p);
    }
    free(cost);
}

/* ---- replans after finished batches have taught their costs ---- */

/* A sample may turn out slower than most by this without being known to be slow. Its batch in the
 * next epoch is then cut again. */
#define NEWS_NS (INT64_C(1) * 1000 * 1000)

/* Cuts again after the answer to whether batches are split has changed, or (all) after bytes have
 * begun to predict costs. */
static void
recut_planned(struct mn_plan *p, bool all)
{
    for (uint64_t n = p->view.order.head; n < p->view.order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->stale || all || q->batch.splits;
        }
    }
    recut(p);
}

/* Marks planned batches that contain a sample. Returns whether there are any. */
static bool
mark_stale(struct mn_plan *p, uint64_t epoch, int64_t index)
{
    bool any = false;
    for (uint64_t n = p->view.order.next; n-- > p->view.order.head;) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q == NULL) {
            continue; /* taken, out of order */
        }
        if (q->batch.epoch == epoch) {
            break; /* the next epoch's batches are the last ones */
        }
        const int64_t *at = q->block_off == 0 ? mn_planned_index(&q->batch) : NULL;
        for (uint32_t i = 0; at != NULL && i < q->batch.nrows; i++) {
            q->stale = q->stale || at[i] == index;
            any = any || at[i] == index;
        }
    }
    return any;
}

bool
mn_plan_is_news(struct mn_plan *p, uint64_t epoch, const int64_t *index, const uint64_t *wall_ns,
                size_t step, uint32_t rows)
{
    uint64_t next = p->view.order.next;
    const struct mn_planned *last = next != 0 ? mn_plan_at(p, next - 1) : NULL;
    if (last == NULL || last->batch.epoch == epoch || index == NULL) {
        return false;
    }
    bool any = false;
    int64_t slow = 2 * mn_costs_look(p->cfg.costs).median_ns + NEWS_NS;
    for (uint32_t i = 0; i < rows; i++) {
        int64_t guess, ns = (int64_t)wall_ns[i * step];
        if (ns > slow) {
            mn_costs_predict(p->cfg.costs, &index[i], NULL, 1, false, &guess);
            any = (guess < ns / 2 && mark_stale(p, epoch, index[i])) || any;
        }
    }
    return any;
}

void
mn_plan_learned(struct mn_plan *p, bool news)
{
    struct mn_costs_view known = mn_costs_look(p->cfg.costs);
    bool all = known.revision != p->pace.revision;
    if (all || known.split != p->pace.split) {
        p->pace.split = known.split;
        p->pace.revision = known.revision;
        recut_planned(p, all);
    }
    else if (news) {
        recut(p);
    }
    look_at_costs(p); /* the next dispatch acts on it */
}

/* ---- life ---- */

/* Returns NULL if memory is short. */
static struct mn_planned *
make(const struct mn_plan *p, const struct mn_plan_batch *b)
{
    struct mn_planned *q;
    size_t own = p->cfg.batch_bytes != 0 ? (p->cfg.batch_bytes + 7) & ~(size_t)7 : sizeof(*q);
    size_t starts = ((size_t)b->nrows + 2) * sizeof(uint32_t);
    starts = (starts + 7) & ~(size_t)7;
    size_t rows = ((size_t)b->nrows + 1 + 7) & ~(size_t)7;
    size_t flags = rows * (sizeof(*q->sent) + sizeof(*q->border));
    size_t index_bytes = (b->index_bytes + 7) & ~(size_t)7; /* of a pickle it is any number */
    size_t hint_bytes = b->hint != NULL ? rows * sizeof(*b->hint) : 0;
    size_t bytes = own + starts + index_bytes + hint_bytes + flags;
    q = calloc(1, bytes + (b->begins != NULL ? b->nrows : 0));
    if (q == NULL) {
        return NULL;
    }
    q->sent = (uint16_t *)(void *)((char *)q + bytes - flags);
    q->border = (uint8_t *)(q->sent + rows);
    q->row0 = (uint32_t *)(void *)((char *)q + own);
    q->holders = 1;
    q->sequence = b->sequence;
    q->batch = *b;
    char *index = (char *)q->row0 + starts;
    if (b->index_bytes != 0) {
        memcpy(index, b->index, b->index_bytes);
    }
    q->batch.index = index;
    if (b->hint != NULL) {
        q->batch.hint = memcpy(index + index_bytes, b->hint, b->nrows * sizeof(*b->hint));
    }
    if (b->begins != NULL) {
        q->batch.begins = memcpy((char *)q + bytes, b->begins, b->nrows);
    }
    return q;
}

void
mn_planned_let_go(struct mn_planned *q)
{
    if (--q->holders == 0) {
        free(q->pieces);
        free(q);
    }
}

/* Starved workers sleep, and waking them costs more than cheap samples do. So the window is at
 * least this much work, unless its batches are large. It is also as much as lasts while the slowest
 * samples are made. When several of those coincide, the consumer then has batches to take
 * meanwhile. If the consumer is as fast as the workers, no worker has idled. */
#define WINDOW_NS (INT64_C(2) * 1000 * 1000)

int
mn_plan_open(struct mn_plan **out, const struct mn_plan_config *cfg)
{
    struct mn_plan *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -ENOMEM;
    }
    p->cfg = *cfg;
    p->pace.active = cfg->workers;
    p->pace.steady = cfg->window;
    p->together.may = cfg->group_neighbours && cfg->costs != NULL;
    p->shares.of = calloc(cfg->max_workers, sizeof(*p->shares.of));
    p->shares.chain.owner = -1;
    p->horizon = INT64_MAX;
    p->view.capacity = MN_PLAN_BATCHES;
    while (p->view.capacity < cfg->batches && p->view.capacity < MN_PLAN_BATCHES_MOST) {
        p->view.capacity *= 2;
    }
    p->memory = malloc(mn_dispatch_bytes(MN_PLAN_TASKS));
    p->batches = calloc(p->view.capacity, sizeof(struct mn_planned *));
    struct mn_dispatch_rates rates = {.period_ns = 1000000,
                                      .window = cfg->window,
                                      .starved_below = cfg->window,
                                      .workers = cfg->workers};
    if (p->memory == NULL || p->batches == NULL || p->shares.of == NULL
        || mn_dispatch_init(&p->dispatch, p->memory, MN_PLAN_TASKS, &rates) < 0) {
        mn_plan_close(p);
        return -ENOMEM;
    }
    if (p->cfg.costs != NULL) {
        mn_costs_new_workers(p->cfg.costs);
        p->view.known = mn_costs_look(p->cfg.costs);
    }
    *out = p;
    return 0;
}

void
mn_plan_close(struct mn_plan *p)
{
    if (p == NULL) {
        return;
    }
    if (p->batches != NULL && p->shares.of != NULL) {
        mn_plan_clear(p);
    }
    free(p->batches);
    free(p->shares.of);
    free(p->memory);
    free(p);
}

void
mn_plan_clear(struct mn_plan *p)
{
    struct mn_plan_order *o = &p->view.order;
    for (uint64_t n = o->head; n < o->next; n++) { /* no other place holds one */
        struct mn_planned *q = *mn_plan_place(p, n);
        if (q != NULL) {
            *mn_plan_place(p, n) = NULL;
            mn_planned_let_go(q);
        }
    }
    mn_pieces_reset(p);
    mn_dispatch_clear(&p->dispatch);
    o->head = o->begun = o->next;
    p->refused = p->unmade = 0;
    p->stall.full = false;
    p->stall.starved_ns = 0;
    mn_a64_store_relaxed(&p->prefetched, 0);
}

void
mn_plan_set_active(struct mn_plan *p, uint32_t workers)
{
    p->pace.active = workers;
}

void
mn_plan_set_span(struct mn_plan *p, uint64_t first, uint64_t end)
{
    p->formed_first = first;
    p->horizon = end;
}

void
mn_plan_set_rows(struct mn_plan *p, const struct mn_plan_rows *rows)
{
    p->pace.rows_of = *rows;
}

/* ---- planning ---------------------------------------------------------------------- */

static void
retime(struct mn_plan *p, const struct mn_plan_batch *b)
{
    if (p->cfg.costs == NULL) {
        return;
    }
    struct mn_costs_view v = p->view.known;
    struct mn_dispatch_rates r = p->dispatch.rates;
    const struct mn_plan_pace *pace = &p->pace;
    r.typical_ns = pace->cut_tasks != 0 ? v.median_ns * pace->cut_rows / pace->cut_tasks
                                        : v.median_ns;
    r.period_ns = mn_plan_period(p, b);
    r.workers = pace->active;
    r.window = (int64_t)p->cfg.window * pace->active / p->cfg.workers;
    /* Before any worker exists, no planned batch has a block, so its size is computed here. */
    uint64_t bytes = b->whole ? 0 : mn_plan_rows_bytes(p, b->nrows);
    bytes = bytes > p->view.batch_bytes ? bytes : p->view.batch_bytes;
    if (r.period_ns > 0 && bytes != 0) {
        int64_t lasts = v.slowest_ns > WINDOW_NS ? v.slowest_ns : WINDOW_NS;
        int64_t cheap = mn_min_i64(lasts / r.period_ns,
                              (int64_t)(MN_PLAN_LARGE_BYTES / bytes));
        r.window = cheap > r.window ? cheap : r.window;
    }
    p->pace.steady = (uint64_t)r.window;
    if (p->view.by_piece) { /* a chain for each worker */
        int64_t chains = (int64_t)(v.group / (b->nrows != 0 ? b->nrows : 1) + 1.0) * pace->active;
        chains = mn_min_i64(chains, (int64_t)(p->view.order.next - p->view.order.head) + 1);
        r.window = chains > r.window ? chains : r.window;
    }
    r.starved_below = r.window > 1 ? r.window / 2 : 1;
    r.consumer_ns = p->view.consumer_ns;
    if (r.period_ns > 0) {
        (void)mn_dispatch_retime(&p->dispatch, &r);
    }
}

int
mn_plan_add(struct mn_plan *p, const struct mn_plan_batch *b)
{
    if (b->sequence != p->view.order.next) {
        return -EINVAL;
    }
    if (p->cfg.costs != NULL) {
        p->together.declared = b->begins != NULL;
        if (p->together.may && b->integers) {
            struct mn_costs *c = p->cfg.costs;
            mn_locality_drawn(&c->locality, b->index, b->nrows, c->model.n);
        }
        look_at_costs(p);
        mn_plan_settle(p);
    }
    if (b->hint != NULL && (p->cfg.costs == NULL || mn_costs_hinted(p->cfg.costs) < 0)) {
        return -ENOMEM;
    }
    p->stall.full = *mn_plan_place(p, b->sequence) != NULL || !has_room(p, b, 0);
    if (p->stall.full) {
        return MN_FULL;
    }
    int64_t *cost = malloc(((size_t)b->nrows + 1) * sizeof(*cost));
    struct mn_planned *q = cost != NULL ? make(p, b) : NULL;
    if (q == NULL) {
        free(cost);
        return -ENOMEM;
    }
    if (p->cfg.costs != NULL && p->view.order.head == p->view.order.next) {
        struct mn_costs_view known = mn_costs_look(p->cfg.costs);
        p->pace.split = known.split; /* nothing else is planned */
        p->pace.revision = known.revision;
    }
    retime(p, b);
    q->rows = p->rows;
    if (cut_batch(p, q, cost, 0) < 0) {
        mn_planned_let_go(q);
        free(cost);
        return -ENOMEM;
    }
    *mn_plan_place(p, b->sequence) = q;
    p->dispatch.closed = false; /* it was not the end, or a next epoch begins */
    p->pace.cut_rows = b->nrows;
    p->pace.cut_tasks = p->view.by_piece && q->npieces != 0 ? q->npieces : q->ntasks;
    p->view.order.next++;
    p->rows += b->nrows;
    free(cost);
    return MN_OK;
}

void
mn_plan_end(struct mn_plan *p)
{
    p->dispatch.closed = true;
}

void
mn_plan_used(struct mn_plan *p, int64_t used_ns)
{
    int64_t mean = p->view.consumer_ns;
    mean = mean == 0 ? used_ns : (3 * mean + used_ns) / 4;
    p->view.consumer_ns = mean > 0 ? mean : 1; /* 0: unknown */
}

static bool
is_of_batch(const struct mn_dispatch_task *t, void *sequence)
{
    return (uint64_t)t->batch == *(const uint64_t *)sequence;
}

void
mn_plan_refuse(struct mn_plan *p, struct mn_planned *q, const struct mn_refusal *why)
{
    uint64_t sequence = q->sequence;
    q->refusal = *why;
    q->state = MN_BATCH_DONE;
    p->refused++;
    p->view.order.begun = sequence >= p->view.order.begun ? sequence + 1 : p->view.order.begun;
    mn_dispatch_drop(&p->dispatch, is_of_batch, &sequence);
    mn_pieces_forget(p, q);
}

bool
mn_plan_prefetched(struct mn_plan *p, int more)
{
    uint64_t n = mn_a64_load_relaxed(&p->prefetched); /* written by this thread */
    if (!p->cfg.in_order || (n == 0 && more < 0)) {
        return false;
    }
    mn_a64_store_relaxed(&p->prefetched, n + (uint64_t)(int64_t)more);
    return true;
}

void
mn_plan_taken(struct mn_plan *p, uint64_t sequence)
{
    struct mn_planned *q = mn_plan_at(p, sequence);
    if (q != NULL) {
        p->refused -= q->refusal.why != MN_REFUSED_NOT;
        p->unmade -= q->state == MN_BATCH_QUEUED;
        q->state = MN_BATCH_TAKEN;
        *mn_plan_place(p, sequence) = NULL;
        mn_pieces_forget(p, q);
        mn_planned_let_go(q);
    }
    struct mn_plan_order *o = &p->view.order;
    while (o->head < o->next && *mn_plan_place(p, o->head) == NULL) {
        o->head++;
        p->stall.starved_ns = 0;
    }
}
