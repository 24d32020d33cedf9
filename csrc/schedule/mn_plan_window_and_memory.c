/* mn_plan_window_and_memory.c - whether the prefetch window and the memory limit let a task start.
 * See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_base.h"
#include "schedule/mn_plan_state.h"

/* ---- work past the window: workers that idle behind a straggler ---------------------------- */

/* Idle workers start nothing past the window for mn_plan_patience_ns. The exception: the sample
 * that holds up the others has been running for this long, and for this many times the typical
 * cost. That is longer than a busy machine takes a core away. */
#define HELD_NS (INT64_C(20) * 1000 * 1000)
#define HELD_TIMES 4

/* Returns for how long a task must have run to count as a straggler; INT64_MAX: not known yet. */
static int64_t
straggler_ns(const struct mn_plan *p)
{
    int64_t typical = p->dispatch.rates.typical_ns;
    if (typical == 0 || typical > INT64_MAX / HELD_TIMES) {
        return INT64_MAX;
    }
    return HELD_TIMES * typical > HELD_NS ? HELD_TIMES * typical : HELD_NS;
}

/* Returns whether a straggler holds up the first batch that is not done. */
static bool
held_by_slow(const struct mn_plan *p, const struct mn_plan_facts *f)
{
    uint64_t done = p->cfg.in_order ? (uint64_t)f->ready : 0;
    uint64_t off = mn_plan_block(p, p->view.order.head + done);
    return off != 0 && f->running_ns(f->arg, off) >= straggler_ns(p);
}

bool
mn_plan_starved(struct mn_plan *p, const struct mn_plan_facts *f)
{
    if (f->queued != 0 && p->stall.starved_ns == 0) {
        return false;
    }
    p->stall.starved_ns = p->stall.starved_ns == 0 ? f->now_ns : p->stall.starved_ns;
    int64_t idle_ns = (int64_t)(f->now_ns - p->stall.starved_ns);
    bool idle = f->queued == 0 && idle_ns >= mn_plan_patience_ns(p->view.batch_bytes);
    return idle || held_by_slow(p, f);
}

/* ---- the window ---------------------------------------------------------------------------- */

/* Memory for batches that lie finished past the steady window, so that stragglers of small samples
 * hold up no other worker. A tenth of what Python and torch take in the program and its workers. */
#define SPARE_BYTES (UINT64_C(32) << 20)

int64_t
mn_plan_first_wanted(const struct mn_plan *p)
{
    return (int64_t)(p->cfg.forms ? p->formed_first
                                  : p->view.order.head - mn_a64_load_relaxed(&p->prefetched));
}

/* Numbers of batches that take memory: they have started, and the program has not got them. */
struct started {
    uint64_t all;
    uint64_t lying;   /* of them, without the ones that a straggler holds up */
    uint64_t resting; /* of them, from a sequence on and not being made */
};

static struct started
count_started(const struct mn_plan *p, const struct mn_plan_facts *f, uint64_t from)
{
    int64_t straggles_ns = straggler_ns(p);
    /* where batches are formed, what has ended is no longer planned */
    uint64_t taken = p->cfg.forms ? (uint64_t)f->ready : mn_a64_load_relaxed(&p->prefetched);
    struct started n = {taken, taken, 0};
    for (uint64_t i = p->view.order.head; i < p->view.order.begun; i++) {
        const struct mn_planned *q = mn_plan_at(p, i);
        if (q != NULL && q->block_off != 0) {
            int64_t ns = q->state == MN_BATCH_DONE ? -1 : f->running_ns(f->arg, q->block_off);
            n.all++;
            n.lying += ns < straggles_ns;
            n.resting += i >= from && ns < 0;
        }
    }
    return n;
}

/* Returns whether the batch may start, as it may lie finished in memory before its turn. If the
 * program is the slow part, it may if fewer than the steady window have started. Else it always
 * may within that window. Beyond, a batch may start for each one that a straggler holds up, so no
 * more lie finished than the window has; and so may samples that are known to be slow, because they
 * are being made until their turn has come. As they may turn out fast, at most half a window of
 * them lies finished. Small batches may be more by SPARE_BYTES, once the program is known not to be
 * the slow part.
 *
 * The program usually has its next batch before it releases the one before, so for a moment it has
 * two. A large batch that would start then, as the last of `most`, would need fresh memory, all of
 * which the loader would then use in turn. It starts once the program has released that one, asks
 * for another, or has let a worker idle for long. */
static bool
may_lie(struct mn_plan *p, const struct mn_plan_facts *f, const struct mn_planned *q,
        uint64_t bytes, enum mn_dispatch_why why)
{
    bool slow_program = mn_plan_period(p, &q->batch) <= p->view.consumer_ns;
    uint64_t from = (uint64_t)mn_plan_first_wanted(p), end = from + p->pace.steady;
    bool fast_program = !slow_program && p->view.consumer_ns != 0; /* 0: not known yet */
    uint64_t spare = fast_program ? SPARE_BYTES : MN_PLAN_LARGE_BYTES;
    uint64_t most = p->pace.steady + (bytes != 0 ? spare / bytes : 0);
    bool within = q->sequence == p->view.order.head || p->view.order.begun - from < most
                  || (q->sequence < end && !slow_program);
    bool has_two = bytes > MN_PLAN_LARGE_BYTES
                   && ((uint64_t)f->memory_kept + bytes / 2) / bytes == 2;
    if (within && !has_two) {
        return true;
    }
    struct started n = count_started(p, f, end);
    if (has_two && n.all + 1 >= most && !mn_plan_starved(p, f)) {
        p->view.unreleased = true;
        return false;
    }
    if (within) {
        return true;
    }
    bool slow = why == MN_DISPATCH_EARLY || why == MN_DISPATCH_FINALE_LPT;
    return (!slow_program || n.all < most)
           && (slow ? n.resting < (most + 1) / 2 : n.lying < most);
}

/* ---- the memory limit ----
 *
 * A task of the head starts whatever is used, unless a formed batch waits: that one was the head.
 * Another starts if what is used, its batch, and a reserve for the largest batch known fit the
 * limit. So a batch over the limit passes alone.
 * No deadlock: the head, or the formed batch, is delivered and frees its memory, and the next batch
 * becomes the head. may_lie() may delay a head, but not longer than a worker idles.
 * Bound: a task past the head leaves at most limit - reserve in use, and the head uses at most the
 * reserve. If the reserve was too small, the excess is one batch, and nothing else starts until it
 * is gone. Delivered batches that the program retains are used memory, too: the code that delivers
 * must bound them.
 */

bool
mn_plan_memory_allows(struct mn_plan *p, const struct mn_plan_facts *f,
                      const struct mn_planned *q, enum mn_dispatch_why why, bool *held)
{
    *held = false;
    if (q->block_off != 0) {
        return true; /* its memory is allocated already */
    }
    bool head = q->sequence == p->view.order.head && !f->formed;
    uint64_t used = (uint64_t)f->memory_used + p->view.batch_bytes;
    uint64_t limit = (uint64_t)f->memory_limit;
    uint64_t bytes = mn_plan_rows_bytes(p, q->batch.nrows);
    if (p->pace.rows_of.nfields == 0) {
        bytes = f->result_bytes; /* not known before it is made */
        used += p->view.by_piece ? bytes * p->unmade : 0; /* not in used yet */
    }
    if (!may_lie(p, f, q, bytes, why)) {
        return false;
    }
    bool tasks = f->free_tasks >= q->ntasks + MN_PLAN_BATCH_TASKS; /* some are for the head */
    *held = !head && !(tasks && used <= limit && bytes <= limit - used);
    return !*held;
}
