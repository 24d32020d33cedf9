/* mn_plan_cut.c - how batches that were planned are cut into tasks, and cut anew. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"
#include "engine/mn_plan_internal.h"
#include "schedule/policy_chunk.h"

/* What a task costs beside its samples: claim, report, a share of a wake-up. */
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

/* What a task costs beside its samples. In a piece whose group was dear to open tasks may be
 * longer: nobody takes a short one over. */
static int64_t
overhead_ns(const struct mn_plan *p)
{
    int64_t opening = p->by_piece ? p->known.opening_ns / (8 * MN_CHUNK_AMORTISE) : 0;
    return opening > TASK_OVERHEAD_NS ? opening : TASK_OVERHEAD_NS;
}

int64_t
mn_plan_chunk_limit(const struct mn_engine *e, const struct mn_plan_batch *b,
                    const int64_t *cost, uint32_t n)
{
    /* The first batches of an epoch are waited for by everybody: spread them. */
    int64_t idle = b->number == 0 ? (int64_t)e->active : 0;
    return mn_chunk_size(sum(cost, n) / (n != 0 ? n : 1), overhead_ns(e->plan), n, idle);
}

uint32_t
mn_plan_chunk(const struct mn_engine *e, const struct mn_plan_batch *b, const int64_t *cost,
              uint32_t n, bool parts, int64_t limit)
{
    if (b->whole && !parts) {
        return n;
    }
    int64_t most = b->whole ? MN_PARTS_MOST : MN_PLAN_BATCH_TASKS;
    int64_t least = (b->nrows + most - 1) / most;
    int64_t rows = mn_chunk_next(cost, n, overhead_ns(e->plan), limit);
    rows = rows < least ? least : rows;
    return rows < n ? (uint32_t)rows : n;
}

/* Batches of which two neighbours are made by one worker, to see whether that is cheaper:
 * one in so many. */
#define PROBE_EVERY 4u

/* A row more for a task of one costly sample, once in some batches, somewhere in the batch. */
static uint32_t
probe(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost, uint32_t from,
      uint32_t rows)
{
    if (!p->keeps || rows != 1 || b->nrows < 2 || b->number % PROBE_EVERY != 0) {
        return 0;
    }
    uint64_t place = b->number / PROBE_EVERY % (b->nrows - 1);
    bool costly = cost[from] > 2 * p->dispatch.rates.typical_ns
                  || cost[from + (from + 1 < b->nrows)] > 2 * p->dispatch.rates.typical_ns;
    return place == from && !costly ? 1 : 0;
}

/* Cuts the rows into tasks by their predicted costs; fills row0 and returns how many. parts:
 * also where one worker could make the batch. */
static uint32_t
cut(const struct mn_engine *e, const struct mn_plan_batch *b, const int64_t *cost, bool parts,
    uint32_t *row0)
{
    row0[0] = 0;
    if ((b->whole && !parts) || b->nrows == 0) {
        row0[1] = b->nrows;
        return 1;
    }
    int64_t limit = mn_plan_chunk_limit(e, b, cost, b->nrows);
    uint32_t n = 0;
    while (row0[n] < b->nrows) {
        uint32_t from = row0[n];
        uint32_t rows = mn_plan_chunk(e, b, cost + from, b->nrows - from, parts, limit);
        row0[++n] = from + rows + probe(e->plan, b, cost, from, rows);
    }
    return n;
}

uint64_t
mn_plan_tasks_most(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint64_t most = b->whole ? MN_PARTS_MOST : MN_PLAN_BATCH_TASKS;
    uint64_t there = (p->by_piece ? p->piece_tasks : p->dispatch.count) + others;
    uint64_t room = there < MN_PLAN_TASKS ? MN_PLAN_TASKS - there : 1;
    return most < room ? most : room;
}

void
mn_plan_cut_evenly(struct mn_planned *q, uint64_t most)
{
    uint32_t nrows = q->batch.nrows;
    uint32_t each = (uint32_t)((nrows + most - 1) / most);
    q->ntasks = 0;
    for (uint32_t from = 0; from < nrows; from += each) {
        q->row0[++q->ntasks] = nrows - from < each ? nrows : from + each;
    }
}

/* Whether there is room for as many tasks as the batch may be cut into, and for others. */
bool
mn_plan_room(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint32_t most = (b->whole && !b->splits) || b->nrows == 0 ? 1 : b->nrows;
    most = most < MN_PLAN_BATCH_TASKS ? most : MN_PLAN_BATCH_TASKS;
    uint64_t there = p->by_piece ? p->piece_tasks : p->dispatch.count;
    return there + most + others <= MN_PLAN_TASKS;
}

/* What a task counts as slow by. A start past the window holds memory for one batch more, and
 * saves no more time than the task takes beyond the typical: where batches are large, what is
 * little more than noise does not count. */
int64_t
mn_plan_worth(const struct mn_plan *p, int64_t cost_ns, int64_t bytes)
{
    int64_t typical = p->dispatch.rates.typical_ns;
    int64_t excess = typical > 0 ? cost_ns - typical : 0;
    bool large = (uint64_t)bytes > MN_PLAN_LARGE_BYTES;
    bool little = large && excess > 0 && excess < mn_plan_patience_ns((uint64_t)bytes);
    return little ? typical : cost_ns;
}

/* Predicts what each row of a batch costs, and returns what its collate task does. */
static int64_t
predict(const struct mn_plan *p, const struct mn_plan_batch *b, int64_t *cost)
{
    memset(cost, 0, b->nrows * sizeof(*cost));
    if (p->costs == NULL) {
        return 0;
    }
    const int64_t *index = b->index_kind == MN_INDEX_INT64 ? b->index : NULL;
    mn_costs_predict(p->costs, index, b->nrows, p->by_piece, cost);
    return b->whole ? mn_costs_look(p->costs).collate_ns : 0;
}

/* Hands the dispatcher those tasks of a batch that are not queued. */
static void
insert_tasks(struct mn_plan *p, const struct mn_planned *q, const int64_t *cost, int64_t collate)
{
    int64_t bytes = (int64_t)mn_form_bytes(&p->form, q->batch.nrows);
    for (uint32_t t = 0; t < q->ntasks; t++) {
        if (q->sent[t]) {
            continue;
        }
        uint32_t from = q->row0[t];
        /* in parts the last to end collates: any of them may be it */
        int64_t ns = sum(cost + from, q->row0[t + 1] - from) + collate / q->ntasks;
        struct mn_dispatch_task task = {
            .position = (int64_t)(q->rows + from),
            .batch = (int64_t)q->sequence,
            .cost_ns = mn_plan_worth(p, ns, bytes),
            .bytes = bytes,
            .tag = q->sequence << 24 | t,
        };
        int rc = mn_dispatch_insert(&p->dispatch, &task, NULL);
        mn_assert(rc == MN_OK);
        (void)rc;
    }
}

/* Cuts a batch that has not started into tasks and hands them on, with room left for one task
 * of each of `others`. cost: room for its rows'. 0 or -ENOMEM. */
int
mn_plan_cut(struct mn_engine *e, struct mn_planned *q, int64_t *cost, uint64_t others)
{
    struct mn_plan *p = e->plan;
    const struct mn_plan_batch *b = &q->batch;
    int64_t collate = predict(p, b, cost);
    bool parts = b->splits && p->split && mn_plan_room(p, b, others);
    if (p->by_piece) {
        int rc = mn_pieces_cut(e, q, cost, parts, others);
        return rc < 0 ? rc : mn_pieces_insert(e, q, cost);
    }
    q->ntasks = cut(e, b, cost, parts, q->row0);
    uint64_t most = mn_plan_tasks_most(p, b, others);
    if (q->ntasks > most) { /* finer than when it was planned */
        mn_plan_cut_evenly(q, most);
    }
    insert_tasks(p, q, cost, collate);
    return 0;
}

static bool
every(const struct mn_dispatch_task *t, void *arg)
{
    (void)t;
    (void)arg;
    return true;
}

/* Hands on what is not queued of a batch that has begun. */
static int
insert_rest(struct mn_engine *e, struct mn_planned *q, int64_t *cost)
{
    int64_t collate = predict(e->plan, &q->batch, cost);
    if (e->plan->by_piece) {
        return mn_pieces_insert(e, q, cost);
    }
    insert_tasks(e->plan, q, cost, collate);
    return 0;
}

/* Whether neighbours are kept together has changed: everything that is not queued is
 * planned anew. */
static int
replan(struct mn_engine *e, int64_t *cost)
{
    struct mn_plan *p = e->plan;
    mn_dispatch_drop(&p->dispatch, every, NULL);
    mn_pieces_reset(p);
    for (int begun = 1; begun >= 0; begun--) { /* what has begun cannot be cut anew: it is first */
        for (uint64_t n = p->head; n < p->next; n++) {
            struct mn_planned *q = mn_plan_at(p, n);
            if (q == NULL || q->refusal.why != MN_REFUSED_NOT || (q->block_off != 0) != begun) {
                continue;
            }
            q->npieces = 0;
            int rc = begun ? insert_rest(e, q, cost) : mn_plan_cut(e, q, cost, p->next - n);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}

/* Begins or ends to keep neighbours together, or cuts the pieces anew, where what is known has
 * changed. */
void
mn_plan_settle(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    uint32_t stance = p->known.near | p->known.home << 2 | (uint32_t)p->known.joins << 4;
    if (p->wanted == p->by_piece && (!p->by_piece || stance == p->stance)) {
        return;
    }
    uint32_t rows = 0;
    for (uint64_t n = p->head; n < p->next; n++) {
        const struct mn_planned *q = mn_plan_at(p, n);
        rows = q != NULL && q->batch.nrows > rows ? q->batch.nrows : rows;
    }
    int64_t *cost = malloc(((size_t)rows + 1) * sizeof(*cost));
    if (cost == NULL) {
        return; /* it is tried again */
    }
    p->by_piece = p->wanted;
    p->stance = stance;
    if (replan(e, cost) < 0) { /* pieces need memory; tasks do not */
        p->by_piece = p->wanted = p->keeps = false;
        (void)replan(e, cost);
    }
    if (!p->by_piece) {
        mn_a64_store_relaxed(&e->shm.ctl->group_milli, 0);
    }
    for (uint32_t w = 0; w < e->shm.ctl->nworkers && !p->by_piece; w++) {
        mn_a32_store_seqcst(&mn_worker_at(&e->shm, w)->low_own, 0);
        p->moved += mn_pieces_withdraw(e, w, MN_QUEUE_EXPRESS); /* they are anybody's again */
    }
    free(cost);
}

static bool
is_stale(const struct mn_dispatch_task *t, void *arg)
{
    return mn_plan_at(arg, (uint64_t)t->batch)->stale;
}

/* Whether the batch goes on with the chain of the one before it. */
static bool
goes_on(const struct mn_planned *q)
{
    return q->chain.length != 0 && q->first_chain == q->chain.number;
}

/* Of what is stale leaves what can be cut anew, and adds what goes on with chains of it. Returns
 * the rows of the largest. */
static uint32_t
find_stale(struct mn_plan *p)
{
    uint32_t rows = 0;
    bool before = false; /* the batch before is cut anew */
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->stale || (before && p->by_piece && goes_on(q));
            q->stale = q->stale && q->block_off == 0 && q->refusal.why == MN_REFUSED_NOT;
            rows = q->stale && q->batch.nrows > rows ? q->batch.nrows : rows;
        }
        before = q != NULL && q->stale;
    }
    return rows;
}

/* Cuts anew what is stale. False without memory for pieces. */
static bool
recut(struct mn_engine *e, int64_t *cost)
{
    struct mn_plan *p = e->plan;
    struct mn_chain last = p->chain;
    bool whole = true, before = false;
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q == NULL || !q->stale) {
            before = false;
            continue;
        }
        q->stale = false;
        mn_pieces_forget(p, q);
        p->chain = before ? p->chain : q->chain;
        whole = whole && mn_plan_cut(e, q, cost, p->next - n) == 0;
        last = n + 1 == p->next ? p->chain : last;
        before = true;
    }
    p->chain = last;
    return whole;
}

void
mn_plan_recut(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    uint32_t rows = find_stale(p);
    int64_t *cost = rows != 0 ? malloc(rows * sizeof(*cost)) : NULL;
    if (cost == NULL) {
        return; /* without memory what is planned stays as it was cut */
    }
    mn_dispatch_drop(&p->dispatch, is_stale, p);
    if (!recut(e, cost)) { /* no memory for pieces: everything is planned anew, without */
        p->wanted = p->keeps = false;
        mn_plan_settle(e);
    }
    free(cost);
}
