/* mn_plan_chunks.c - how many rows make a task, and how many tasks a batch. See mn_plan_state.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_plan_state.h"
#include "schedule/policy_chunk.h"

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
