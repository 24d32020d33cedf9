/* mn_plan_cut.c - cuts planned batches into tasks, and cuts them again. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "schedule/mn_plan_state.h"

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
    int64_t limit = mn_plan_chunk_limit(p, b, cost, b->nrows);
    uint32_t n = 0;
    while (row0[n] < b->nrows) {
        uint32_t from = row0[n];
        uint32_t rows = mn_plan_chunk(p, b, cost + from, b->nrows - from, parts, limit);
        row0[++n] = from + rows + probe(p, b, cost, from, rows);
    }
    return n;
}

/* Predicts the cost of each row of a batch, and returns that of its collate task. */
static int64_t
predict(const struct mn_plan *p, const struct mn_plan_batch *b, int64_t *cost)
{
    memset(cost, 0, b->nrows * sizeof(*cost));
    if (p->cfg.costs == NULL) {
        return 0;
    }
    mn_costs_predict(p->cfg.costs, mn_planned_index(b), b->hint, b->nrows, p->together.by_piece,
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
        int64_t ns = mn_plan_sum(cost + from, q->row0[t + 1] - from) + collate / q->ntasks;
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

int
mn_plan_cut(struct mn_plan *p, struct mn_planned *q, int64_t *cost, uint64_t others)
{
    const struct mn_plan_batch *b = &q->batch;
    int64_t collate = predict(p, b, cost);
    bool parts = b->splits && p->pace.split && mn_plan_room(p, b, others);
    if (p->together.by_piece) {
        int rc = mn_pieces_cut(p, q, cost, parts, others);
        return rc < 0 ? rc : mn_pieces_insert(p, q, cost);
    }
    q->ntasks = cut(p, b, cost, parts, q->row0);
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

/* Passes on what is not queued of a batch that has started. */
static int
insert_rest(struct mn_plan *p, struct mn_planned *q, int64_t *cost)
{
    int64_t collate = predict(p, &q->batch, cost);
    if (p->together.by_piece) {
        return mn_pieces_insert(p, q, cost);
    }
    insert_tasks(p, q, cost, collate);
    return 0;
}

/* Replans everything that is not queued, after a change of whether neighbours are kept together. */
static int
replan(struct mn_plan *p, int64_t *cost)
{
    mn_dispatch_drop(&p->dispatch, every, NULL);
    mn_pieces_reset(p);
    for (int begun = 1; begun >= 0; begun--) { /* started ones first: they are not cut again */
        for (uint64_t n = p->order.head; n < p->order.next; n++) {
            struct mn_planned *q = mn_plan_at(p, n);
            if (q == NULL || q->refusal.why != MN_REFUSED_NOT || (q->block_off != 0) != begun) {
                continue;
            }
            q->npieces = 0;
            int rc = begun ? insert_rest(p, q, cost) : mn_plan_cut(p, q, cost, p->order.next - n);
            if (rc < 0) {
                return rc;
            }
        }
    }
    return 0;
}

void
mn_plan_look(struct mn_plan *p)
{
    p->known = mn_costs_look(p->cfg.costs);
    bool near = p->together.declared || p->known.near != MN_CONTRAST_NO;
    bool home = p->known.home == MN_CONTRAST_YES;
    p->together.wanted = p->together.may && p->cfg.max_workers > 1 && (near || home);
}

static uint32_t
stance_of(const struct mn_plan *p)
{
    return p->known.near | p->known.home << 2 | (uint32_t)p->known.joins << 4
           | (uint32_t)p->known.believes << 5;
}

bool
mn_plan_unsettled(const struct mn_plan *p)
{
    const struct mn_plan_together *t = &p->together;
    return t->wanted != t->by_piece || (t->by_piece && stance_of(p) != t->stance);
}

void
mn_plan_settle(struct mn_plan *p)
{
    if (!mn_plan_unsettled(p)) {
        return;
    }
    uint32_t rows = 0;
    for (uint64_t n = p->order.head; n < p->order.next; n++) {
        const struct mn_planned *q = mn_plan_at(p, n);
        rows = q != NULL && q->batch.nrows > rows ? q->batch.nrows : rows;
    }
    int64_t *cost = malloc(((size_t)rows + 1) * sizeof(*cost));
    if (cost == NULL) {
        return; /* it is tried again */
    }
    p->together.by_piece = p->together.wanted;
    p->together.stance = stance_of(p);
    if (replan(p, cost) < 0) { /* pieces need memory; tasks do not */
        p->together.by_piece = p->together.wanted = p->together.may = false;
        (void)replan(p, cost);
    }
    p->together.parted = !p->together.by_piece;
    free(cost);
}

bool
mn_plan_parts(struct mn_plan *p)
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

/* Returns whether the batch continues the chain of the batch before it. */
static bool
goes_on(const struct mn_planned *q)
{
    return q->chain.length != 0 && q->first_chain == q->chain.number;
}

/* Leaves only those batches stale that can be cut again, and adds the ones that continue their
 * chains. Returns the rows of the largest. */
static uint32_t
find_stale(struct mn_plan *p)
{
    uint32_t rows = 0;
    bool before = false; /* the batch before is cut again */
    for (uint64_t n = p->order.head; n < p->order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->stale || (before && p->together.by_piece && goes_on(q));
            q->stale = q->stale && q->block_off == 0 && q->refusal.why == MN_REFUSED_NOT;
            rows = q->stale && q->batch.nrows > rows ? q->batch.nrows : rows;
        }
        before = q != NULL && q->stale;
    }
    return rows;
}

/* Cuts stale batches again. Returns false if memory for pieces is short. */
static bool
recut(struct mn_plan *p, int64_t *cost)
{
    struct mn_chain last = p->shares.chain;
    bool whole = true, before = false;
    for (uint64_t n = p->order.head; n < p->order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q == NULL || !q->stale) {
            before = false;
            continue;
        }
        q->stale = false;
        mn_pieces_forget(p, q);
        p->shares.chain = before ? p->shares.chain : q->chain;
        whole = whole && mn_plan_cut(p, q, cost, p->order.next - n) == 0;
        last = n + 1 == p->order.next ? p->shares.chain : last;
        before = true;
    }
    p->shares.chain = last;
    return whole;
}

/* Cuts again every stale batch that has not started. */
static void
mn_plan_recut(struct mn_plan *p)
{
    uint32_t rows = find_stale(p);
    int64_t *cost = rows != 0 ? malloc(rows * sizeof(*cost)) : NULL;
    if (cost == NULL) {
        return; /* without memory the old cut stays */
    }
    mn_dispatch_drop(&p->dispatch, is_stale, p);
    if (!recut(p, cost)) { /* no memory for pieces: replan everything without them */
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
    for (uint64_t n = p->order.head; n < p->order.next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL) {
            q->stale = q->stale || all || q->batch.splits;
        }
    }
    mn_plan_recut(p);
}

/* Marks planned batches that contain a sample. Returns whether there are any. */
static bool
mark_stale(struct mn_plan *p, uint64_t epoch, int64_t index)
{
    bool any = false;
    for (uint64_t n = p->order.next; n-- > p->order.head;) {
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
    const struct mn_planned *last = p->order.next != 0 ? mn_plan_at(p, p->order.next - 1) : NULL;
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
        mn_plan_recut(p);
    }
    mn_plan_look(p); /* the next dispatch acts on it */
}
