/* mn_engine_step.c - one step of the engine thread: deaths, leases, abandoned batches, starts.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Composes the crew, tasks and leases (workers/), which do not know batches. Mutex held.
 */
#include "engine/mn_engine_state.h"

#include "base/mn_base.h"
#include "engine/mn_batches.h"
#include "os/mn_thread.h"

bool
mn_engine_has_done(struct mn_engine *e, uint64_t wanted)
{
    if (wanted != MN_WANT_ANY) {
        return wanted > MN_WANT_CHANGE && mn_engine_poll(e, wanted) != MN_BLOCK_BUSY;
    }
    if (e->plan != NULL) {
        return e->delivery->any(e);
    }
    bool done = false;
    for (struct mn_batch *b = e->flight.first; b != NULL && !done; b = b->next) {
        done = b->planned.state != MN_BATCH_ABANDONED
               && mn_engine_poll(e, b->planned.block_off) != MN_BLOCK_BUSY;
    }
    return done;
}

/* ---- leases -------------------------------------------------------------------------- */

static bool
wants_lease(struct mn_engine *e, uint32_t w)
{
    return mn_arena_leases_wanted(&e->leases, w);
}

/* Returns the batch that a waiting worker works on; NULL: its entry names no existing batch. */
static const struct mn_batch *
batch_of(struct mn_engine *e, uint32_t w)
{
    uint64_t running = mn_a64_load_relaxed(&mn_worker_at(&e->shm, w)->running); /* by [L2] */
    return running != 0 && running <= e->shm.ctl->ntasks ? e->flight.by_task[running - 1] : NULL;
}

/* Returns its position in the order of delivery, for "oldest first". */
static uint64_t
sequence_of(struct mn_engine *e, uint32_t w)
{
    const struct mn_batch *b = batch_of(e, w);
    return b != NULL ? b->planned.sequence : UINT64_MAX;
}

/* Returns whether the trainer sleeps until a batch is done, and none is. A trainer that was
 * notified but is not awake yet will take a batch and free it. */
static bool
trainer_waits(struct mn_engine *e)
{
    uint64_t wanted = mn_a64_load_seqcst(&e->shm.ctl->wanted);
    return wanted != MN_WANT_NONE && !mn_engine_has_done(e, wanted);
}

/* Returns whether the worker is in its loop, without a task, and about to look for one. */
static bool
is_idle(struct mn_engine *e, uint32_t w)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    return mn_a32_load_acquire(&k->state) == MN_WORKER_READY && !wants_lease(e, w)
           && mn_a64_load_relaxed(&k->running) == 0 && mn_a32_load_relaxed(&k->exit_request) == 0;
}

/* Returns whether a queued task exists that an idle worker may claim. */
static bool
idle_worker_has_work(struct mn_engine *e)
{
    uint32_t n = e->shm.ctl->nworkers, idle = 0;
    while (idle < n && !is_idle(e, idle)) {
        idle++;
    }
    for (const struct mn_batch *b = e->flight.first; idle < n && b != NULL; b = b->next) {
        struct mn_block *block = mn_block_at(&e->shm, b->planned.block_off);
        for (uint32_t i = 0; i < block->ntasks; i++) {
            uint32_t task = mn_block_tasks(block)[i];
            uint32_t queue = e->tasks.results[task].queue, own = queue - MN_QUEUE_WORKER;
            if (mn_word_status(mn_tasks_word(&e->tasks, task)) == MN_TASK_QUEUED
                && (queue < MN_QUEUE_WORKER || (own < n && is_idle(e, own)))) {
                return true;
            }
        }
    }
    return false;
}

/* An idle worker that leaves a task queued for this long has stopped. */
#define CLAIMS_NOTHING_NS UINT64_C(2000000000)

/* Returns whether neither the trainer nor a worker can go on before memory is free. A trainer that
 * is busy outside the engine will take batches and free them. */
static bool
all_wait(struct mn_engine *e)
{
    bool claims = false; /* a worker is about to claim or to begin a task */
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        uint32_t task;
        uint64_t since_ns;
        if (mn_a32_load_acquire(&k->state) == MN_WORKER_READY && !wants_lease(e, w)) {
            if (mn_worker_at_work(k, e->shm.ctl->ntasks, &task, &since_ns)) {
                e->idle_ns = 0;
                return false;
            }
            claims |= mn_a64_load_relaxed(&k->running) != 0; /* a glance: there will be another */
        }
    }
    if (!trainer_waits(e)) {
        e->idle_ns = 0;
        return false;
    }
    if (!claims && !idle_worker_has_work(e)) {
        return true;
    }
    uint64_t now = mn_now_ns();
    e->idle_ns = e->idle_ns == 0 ? now : e->idle_ns;
    return now - e->idle_ns > CLAIMS_NOTHING_NS;
}

/* Returns whether no batch before this one is still to be delivered. The batch that was started
 * first need not be that one: slow batches start early. */
static bool
is_head(const struct mn_engine *e, uint64_t sequence)
{
    if (e->plan != NULL) {
        return sequence <= mn_plan_view(e->plan)->order.head;
    }
    const struct mn_batch *b = e->flight.first; /* static: in the order of delivery */
    while (b != NULL && b->planned.state == MN_BATCH_ABANDONED) {
        b = b->next;
    }
    return b == NULL || sequence <= b->planned.sequence;
}

/* Returns the memory that the head may come to need, which workers on other batches must leave
 * free. It is as in mn_plan_window_and_memory.c, for results whose size was unknown when their task
 * started. Before the first delivery it is what the worker's own batch needs if all of its results
 * are like this one. */
static uint64_t
reserve_for_head(struct mn_engine *e, uint32_t w, uint64_t want)
{
    uint64_t head = mn_plan_block(e->plan, mn_plan_view(e->plan)->order.head);
    if (head != 0 && mn_block_at(&e->shm, head)->nfields != 0) {
        return 0; /* it has its rows */
    }
    uint64_t rows = mn_plan_view(e->plan)->batch_bytes, mean = e->flight.mean_envelope_bytes;
    const struct mn_batch *b = batch_of(e, w);
    uint64_t tasks = b != NULL ? mn_block_at(&e->shm, b->planned.block_off)->ntasks : 1;
    uint64_t known = rows > mean ? rows : mean;
    return known != 0 ? known : tasks * want;
}

/* Makes one grant, for the oldest batch that waits. Goes over the limit only if neither the trainer
 * nor a worker could go on otherwise: then one huge result passes alone, and nothing hangs. */
static bool
grant_one(struct mn_engine *e)
{
    uint32_t n = e->shm.ctl->nworkers, oldest = n;
    for (uint32_t w = 0; w < n; w++) {
        if (wants_lease(e, w) && (oldest == n || sequence_of(e, w) < sequence_of(e, oldest))) {
            oldest = w;
        }
    }
    e->arena.room_waits = false;
    if (oldest == n) {
        e->idle_ns = 0;
        return false;
    }
    struct mn_worker *k = mn_worker_at(&e->shm, oldest);
    uint64_t want = mn_page_round(k->want_bytes), used_end = k->used_end; /* by [L2] */
    e->crew.wakes.leases = true;
    if (!mn_arena_leases_sound(&e->leases, oldest, used_end, want)) {
        mn_crew_damaged(&e->crew, oldest, MN_DAMAGE_LEASE);
        mn_arena_leases_refuse(&e->leases, oldest);
        return true;
    }
    mn_arena_leases_end(&e->leases, oldest, used_end);
    if (want > e->shm.ctl->arena_bytes) { /* no wait could make that possible */
        mn_arena_leases_refuse(&e->leases, oldest);
        return true;
    }
    uint64_t len = want > e->leases.grain ? want : e->leases.grain;
    bool head = is_head(e, sequence_of(e, oldest));
    uint64_t reserve = head || e->plan == NULL ? 0 : reserve_for_head(e, oldest, want);
    if (mn_arena_exceeds(&e->arena, len + reserve)) {
        len = want;
        if (!head && mn_arena_exceeds(&e->arena, len + reserve) && !all_wait(e)) {
            e->arena.room_waits = true;
            return false;
        }
    }
    e->idle_ns = 0;
    mn_arena_leases_grant(&e->leases, oldest, len);
    return true;
}

/* ---- deaths ------------------------------------------------------------------------ */

static void
sweep(struct mn_engine *e, uint32_t w)
{
    uint64_t late = e->crew.members[w].late;
    struct mn_death death = mn_crew_record_death(&e->crew, w, mn_now_ns());
    MN_FAULT("engine.sweep.buried");
    /* First accept the results that the dead worker has sent, so that it no longer owns them. Find
     * its damage before another worker takes its place. */
    for (struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (b->planned.state == MN_BATCH_ABANDONED) {
            mn_batch_note_envelopes(e, b);
        }
        else {
            mn_batch_accept_some(e, b);
        }
    }
    mn_arena_leases_forget(&e->leases, w);
    mn_tasks_sweep(&e->tasks, w, e->plan == NULL, &death, late);
    for (struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (b->planned.state != MN_BATCH_ABANDONED) {
            mn_tasks_publish_collate(&e->tasks, mn_block_at(&e->shm, b->planned.block_off), &death);
        }
    }
    MN_FAULT("engine.sweep.tasks");
    mn_crew_swept(&e->crew, w);
    MN_FAULT("engine.sweep.done");
}

static bool
drop_abandoned(struct mn_engine *e)
{
    bool any = false;
    struct mn_batch *next;
    for (struct mn_batch *b = e->flight.first; b != NULL; b = next) {
        next = b->next;
        if (b->planned.state == MN_BATCH_ABANDONED && mn_batch_idle(e, b)) {
            mn_batch_drop(e, b);
            any = true;
        }
    }
    return any;
}

bool
mn_engine_step(struct mn_engine *e)
{
    bool any = false;
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        if (mn_crew_exited(&e->crew, w)) {
            sweep(e, w);
            any = true;
        }
    }
    while (grant_one(e)) {
        any = true;
    }
    any |= drop_abandoned(e);
    if (e->plan != NULL && !e->closing) {
        uint32_t n = mn_start_due(e);
        e->crew.wakes.workers += n;
        any |= n != 0;
    }
    return any;
}
