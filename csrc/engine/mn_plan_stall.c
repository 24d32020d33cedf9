/* mn_plan_stall.c - workers that idle behind a slow sample: when work past the window starts,
 * and when more is planned. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"
#include "engine/mn_plan.h"
#include "os/mn_clock.h"

/* Workers that idle start nothing past the window for mn_plan_patience_ns, unless the sample
 * that holds up the others has been running for so long and so many times the typical cost:
 * longer than a busy machine takes a core away. */
#define HELD_NS (INT64_C(20) * 1000 * 1000)
#define HELD_TIMES 4
/* With less work left than for so long the program is asked to plan more: it looks every few
 * milliseconds, and drawing some batches takes one. */
#define DRY_NS (INT64_C(25) * 1000 * 1000)

uint64_t
mn_plan_queued(const struct mn_engine *e)
{
    const struct mn_queue *l = mn_queue_at(&e->shm, MN_QUEUE_NORMAL);
    uint64_t hint = mn_a64_load_seqcst(&l->hint); /* [P4]; the difference is an estimate */
    uint64_t tail = mn_a64_load_relaxed(&l->tail); /* ours */
    uint64_t queued = tail > hint ? tail - hint : 0;
    for (uint32_t w = 0; e->plan->by_piece && w < e->shm.ctl->nworkers; w++) {
        queued += mn_runqueue_waiting(&e->shm, MN_QUEUE_WORKER + w);
    }
    return queued;
}

/* Whether a slow sample holds up the first batch that is not done. */
static bool
held_by_slow(struct mn_engine *e, int64_t ready, uint64_t now)
{
    const struct mn_plan *p = e->plan;
    uint64_t off = mn_plan_block(p, p->head + (p->in_order ? (uint64_t)ready : 0));
    int64_t typical = p->dispatch.rates.typical_ns;
    if (off == 0 || typical == 0 || typical > INT64_MAX / HELD_TIMES) {
        return false;
    }
    int64_t limit = HELD_TIMES * typical > HELD_NS ? HELD_TIMES * typical : HELD_NS;
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        uint32_t task;
        uint64_t since;
        if (mn_worker_at_work(mn_worker_at(&e->shm, w), e->shm.ctl->ntasks, &task, &since)
            && since < now && (int64_t)(now - since) >= limit
            && mn_task_at(&e->shm, task)->block_off == off) {
            return true;
        }
    }
    return false;
}

bool
mn_plan_starved(struct mn_engine *e, int64_t ready, uint64_t queued)
{
    struct mn_plan *p = e->plan;
    if (queued != 0 && p->starved_ns == 0) {
        return false;
    }
    uint64_t now = mn_now_ns();
    if (p->starved_ns == 0) {
        p->starved_ns = now;
    }
    bool idle = queued == 0
                && (int64_t)(now - p->starved_ns) >= mn_plan_patience_ns(p->batch_bytes);
    return idle || held_by_slow(e, ready, now);
}

/* Teaches the cost model what is done and not delivered yet: while one sample holds up the
 * first batches of all, that is all there is to know. */
static void
learn_waiting(struct mn_engine *e)
{
    for (struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (!b->abandoned && mn_engine_poll(e, b->block_off) == MN_BLOCK_DONE
            && mn_batch_accept(e, b) == MN_BLOCK_DONE) {
            mn_plan_learn(e, b);
        }
    }
}

int64_t
mn_plan_lasts(const struct mn_plan *p, uint32_t workers)
{
    const struct mn_dispatch *d = &p->dispatch;
    if (d->closed || p->told == p->next) {
        return INT64_MAX;
    }
    int64_t left = (d->work_ns + p->shared_ns) / (int64_t)workers;
    bool unknown = d->work_ns + p->shared_ns == 0 && d->count + p->shared_tasks >= 4 * workers;
    return unknown ? 1 : left > DRY_NS ? left - DRY_NS : 0;
}

bool
mn_plan_starving(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    bool idle = p->starved_ns != 0 || (p->dispatch.count + p->shared_tasks == 0 && mn_plan_queued(e) == 0);
    if (!idle || mn_plan_lasts(p, e->active) != 0) {
        return false;
    }
    int64_t ready = mn_plan_ready(e);
    if (ready >= p->dispatch.rates.starved_below || !mn_plan_starved(e, ready, 0)) {
        return false;
    }
    p->told = p->next;
    if (p->costs != NULL) {
        learn_waiting(e);
    }
    return true;
}

int64_t
mn_plan_nap(const struct mn_plan *p, int64_t nap_ns)
{
    int64_t patience = mn_plan_patience_ns(p->batch_bytes);
    int64_t idle = p->starved_ns != 0 ? (int64_t)(mn_now_ns() - p->starved_ns) : patience;
    return idle < patience && patience - idle < nap_ns ? patience - idle : nap_ns;
}
