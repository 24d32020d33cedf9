/* mn_planned.c - a planned batch, and how many of its rows make a task. See mn_planned.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_plan_state.h"

#include <stdlib.h>
#include <string.h>

#include "schedule/policy_chunk.h"

struct mn_planned *
mn_planned_make(const struct mn_plan_batch *b)
{
    struct mn_planned *q;
    size_t starts = ((size_t)b->nrows + 2) * sizeof(uint32_t);
    starts = (starts + 7) & ~(size_t)7;
    size_t rows = ((size_t)b->nrows + 1 + 7) & ~(size_t)7;
    size_t flags = rows * (sizeof(*q->sent) + sizeof(*q->border));
    size_t index_bytes = (b->index_bytes + 7) & ~(size_t)7; /* of a pickle it is any number */
    size_t hint_bytes = b->hint != NULL ? rows * sizeof(*b->hint) : 0;
    size_t bytes = sizeof(struct mn_planned) + starts + index_bytes + hint_bytes + flags;
    q = calloc(1, bytes + (b->begins != NULL ? b->nrows : 0));
    if (q == NULL) {
        return NULL;
    }
    q->sent = (uint16_t *)(void *)((char *)q + bytes - flags);
    q->border = (uint8_t *)(q->sent + rows);
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
mn_planned_free(struct mn_planned *q)
{
    if (q != NULL) {
        free(q->pieces);
        free(q);
    }
}

struct mn_planned **
mn_plan_place(const struct mn_plan *p, uint64_t sequence)
{
    return &p->batches[sequence & (p->capacity - 1)];
}

struct mn_planned *
mn_plan_at(const struct mn_plan *p, uint64_t sequence)
{
    struct mn_planned *q = *mn_plan_place(p, sequence);
    return q != NULL && q->sequence == sequence ? q : NULL;
}

uint64_t
mn_plan_block(const struct mn_plan *p, uint64_t sequence)
{
    const struct mn_planned *q = mn_plan_at(p, sequence);
    return q != NULL ? q->block_off : 0;
}

bool
mn_plan_begins(const struct mn_plan *p)
{
    const struct mn_planned *q = mn_plan_at(p, p->order.head);
    return q != NULL && q->batch.number == 0;
}

uint64_t
mn_plan_waiting(const struct mn_plan *p)
{
    return p->together.by_piece ? p->shares.piece_tasks : p->dispatch.count;
}

uint64_t
mn_plan_rows_bytes(const struct mn_plan *p, uint32_t nrows)
{
    const struct mn_plan_rows *r = &p->pace.rows_of;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < r->nfields; i++) {
        uint64_t field = r->row_bytes[i] * nrows;
        bytes += (field + r->page - 1) / r->page * r->page;
    }
    return bytes;
}

struct mn_plan_order
mn_plan_order(const struct mn_plan *p)
{
    return p->order;
}

uint64_t
mn_plan_next_sequence(const struct mn_plan *p)
{
    return p->order.next;
}

struct mn_forming *
mn_plan_forming(const struct mn_plan *p)
{
    return p->forming;
}

const struct mn_costs_view *
mn_plan_known(const struct mn_plan *p)
{
    return &p->known;
}

bool
mn_plan_by_piece(const struct mn_plan *p)
{
    return p->together.by_piece;
}

bool
mn_plan_finds(const struct mn_plan *p)
{
    return p->together.finding != 0;
}

struct mn_plan_window
mn_plan_window(const struct mn_plan *p)
{
    const struct mn_dispatch_rates *r = &p->dispatch.rates;
    return (struct mn_plan_window){r->window, r->starved_below,
                                   mn_a64_load_relaxed(&p->prefetched)};
}

uint64_t
mn_plan_batch_bytes(const struct mn_plan *p)
{
    return p->pace.batch_bytes;
}

uint32_t
mn_plan_batches_most(const struct mn_plan *p)
{
    return p->capacity;
}

int64_t
mn_plan_consumer_ns(const struct mn_plan *p)
{
    return p->pace.consumer_ns;
}

bool
mn_plan_held(const struct mn_plan *p)
{
    return p->stall.held;
}

struct mn_plan_counts
mn_plan_counts(const struct mn_plan *p)
{
    struct mn_plan_counts c = {.helped = p->shares.helped};
    memcpy(c.starts, p->starts, sizeof(c.starts));
    return c;
}

/* ---- what was done and seen --------------------------------------------------------------- */

void
mn_plan_tries(struct mn_plan *p, const struct mn_planned *q)
{
    uint64_t bytes = q->batch.whole ? 0 : mn_plan_rows_bytes(p, q->batch.nrows);
    p->pace.batch_bytes = bytes > p->pace.batch_bytes ? bytes : p->pace.batch_bytes;
}

void
mn_plan_begun(struct mn_plan *p, struct mn_planned *q, uint64_t block_off)
{
    p->order.begun = q->sequence >= p->order.begun ? q->sequence + 1 : p->order.begun;
    p->unmade++;
    q->block_off = block_off;
}

void
mn_plan_set_done(struct mn_plan *p, struct mn_planned *q)
{
    p->unmade -= q->block_off != 0 && !q->done;
    q->done = true;
}

/* ---- how many rows make a task, and how many tasks a batch ---- */

/* The cost of a task in addition to its samples: claim, report, a share of a wake-up. */
#define TASK_OVERHEAD_NS 5000

int64_t
mn_plan_sum(const int64_t *v, uint32_t n)
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
    int64_t opening = p->together.by_piece ? p->known.opening_ns / (8 * MN_CHUNK_AMORTISE) : 0;
    return opening > TASK_OVERHEAD_NS ? opening : TASK_OVERHEAD_NS;
}

int64_t
mn_plan_chunk_limit(const struct mn_plan *p, const struct mn_plan_batch *b,
                    const int64_t *cost, uint32_t n)
{
    /* The caller waits for the first batch of an epoch: spread it. */
    int64_t idle = b->number == 0 ? (int64_t)p->pace.active : 0;
    return mn_chunk_size(mn_plan_sum(cost, n) / (n != 0 ? n : 1), overhead_ns(p), n, idle);
}

uint32_t
mn_plan_chunk(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost,
              uint32_t n, bool parts, int64_t limit)
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

uint64_t
mn_plan_tasks_most(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint64_t most = b->whole ? p->cfg.parts : MN_PLAN_BATCH_TASKS;
    uint64_t there = mn_plan_waiting(p) + others;
    uint64_t left = there < MN_PLAN_TASKS ? MN_PLAN_TASKS - there : 1;
    return most < left ? most : left;
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

bool
mn_plan_room(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint32_t most = (b->whole && !b->splits) || b->nrows == 0 ? 1 : b->nrows;
    most = most < MN_PLAN_BATCH_TASKS ? most : MN_PLAN_BATCH_TASKS;
    return mn_plan_waiting(p) + most + others <= MN_PLAN_TASKS;
}

/* Returns the cost to use when judging whether a task is slow. A start past the window holds memory
 * for one more batch, and saves at most the task's time beyond the typical. So where batches are
 * large, an excess within noise (mn_plan_patience_ns) does not count. */
int64_t
mn_plan_worth(const struct mn_plan *p, int64_t cost_ns, int64_t bytes)
{
    int64_t typical = p->dispatch.rates.typical_ns;
    int64_t excess = typical > 0 ? cost_ns - typical : 0;
    bool large = (uint64_t)bytes > MN_PLAN_LARGE_BYTES;
    bool little = large && excess > 0 && excess < mn_plan_patience_ns((uint64_t)bytes);
    return little ? typical : cost_ns;
}
