/* mn_engine_watch.c - leases, deaths, the zygote. See mn_engine.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <sched.h>
#include <unistd.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"
#include "os/mn_clock.h"
#include "os/mn_memfd.h"
#include "os/mn_proc.h"

/* After this many deaths in a row without one finished task a worker is not replaced: the
 * cause is not in a sample. */
#define BARREN_DEATHS 3u

static bool
wants_lease(struct mn_engine *e, uint32_t w)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    return mn_a32_load_seqcst(&k->lease_state) == MN_LEASE_WANT; /* [L2], before a sleep */
}

/* Place in the order of delivery of the batch a waiting worker is at, for "oldest first". */
static uint64_t
sequence_of(struct mn_engine *e, uint32_t w)
{
    uint64_t running = mn_a64_load_relaxed(&mn_worker_at(&e->shm, w)->running); /* by [L2] */
    const struct mn_batch *b =
        running != 0 && running <= e->shm.ctl->ntasks ? e->by_task[running - 1] : NULL;
    return b != NULL ? b->sequence : UINT64_MAX;
}

static void
answer_lease(struct mn_engine *e, uint32_t w, uint64_t off, uint64_t len,
             enum mn_lease_state answer)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    k->lease_off = off;
    k->lease_len = len;
    mn_a32_store_seqcst(&k->lease_state, answer); /* [L3] */
    mn_bell_ring(&k->room);
}

/* Whether the trainer sleeps until a batch is done, and none is. One that was rung and is not
 * awake yet will take a batch, and free it. */
static bool
trainer_waits(struct mn_engine *e)
{
    uint64_t wanted = mn_a64_load_seqcst(&e->shm.ctl->wanted);
    return wanted != MN_WANT_NONE && !mn_engine_has_done(e, wanted);
}

/* In its loop, without a task, and about to look for one. */
static bool
is_idle(struct mn_engine *e, uint32_t w)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    return mn_a32_load_acquire(&k->state) == MN_WORKER_READY && !wants_lease(e, w)
           && mn_a64_load_relaxed(&k->running) == 0 && mn_a32_load_relaxed(&k->leave) == 0;
}

/* Whether there is a task on the board that an idle worker may claim. */
static bool
idle_worker_has_work(struct mn_engine *e)
{
    uint32_t n = e->shm.ctl->nworkers, idle = 0;
    while (idle < n && !is_idle(e, idle)) {
        idle++;
    }
    for (const struct mn_batch *b = e->batches; idle < n && b != NULL; b = b->next) {
        struct mn_block *block = mn_block_at(&e->shm, b->block_off);
        for (uint32_t i = 0; i < block->ntasks; i++) {
            const struct mn_task *t = mn_task_at(&e->shm, mn_block_tasks(block)[i]);
            if (mn_word_status(mn_a64_load_acquire(&t->word)) == MN_TASK_QUEUED
                && (t->lane < MN_LANE_WORKER
                    || (t->lane - MN_LANE_WORKER < n && is_idle(e, t->lane - MN_LANE_WORKER)))) {
                return true;
            }
        }
    }
    return false;
}

/* An idle worker that leaves a task on the board for so long has stopped. */
#define STOPPED_NS UINT64_C(2000000000)

/* Whether nobody can go on before room is made: neither the trainer nor a worker. A trainer at
 * its own work will take batches, and free them. */
static bool
all_wait(struct mn_engine *e)
{
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        if (mn_a32_load_acquire(&k->state) == MN_WORKER_READY && !wants_lease(e, w)
            && mn_a64_load_relaxed(&k->running) != 0 /* a look: there will be another */) {
            return false;
        }
    }
    if (!trainer_waits(e)) {
        return false;
    }
    if (!idle_worker_has_work(e)) {
        return true;
    }
    uint64_t now = mn_now_ns();
    e->idle_ns = e->idle_ns == 0 ? now : e->idle_ns;
    return now - e->idle_ns > STOPPED_NS;
}

/* Whether no batch before this one is still to be handed over. What was started first need not
 * be that: slow ones start early. */
static bool
is_head(const struct mn_engine *e, uint64_t sequence)
{
    if (e->plan != NULL) {
        return sequence <= e->plan->head;
    }
    const struct mn_batch *b = e->batches; /* static: in the order of delivery */
    while (b != NULL && b->abandoned) {
        b = b->next;
    }
    return b == NULL || sequence <= b->sequence;
}

/* One grant: the oldest batch that waits. Over the limit only when nobody could go on
 * otherwise, so that one huge result passes alone and nothing hangs. */
static bool
grant_one(struct mn_engine *e)
{
    uint32_t n = e->shm.ctl->nworkers, oldest = n;
    for (uint32_t w = 0; w < n; w++) {
        if (wants_lease(e, w) && (oldest == n || sequence_of(e, w) < sequence_of(e, oldest))) {
            oldest = w;
        }
    }
    e->room_waits = false;
    if (oldest == n) {
        return false;
    }
    struct mn_worker *k = mn_worker_at(&e->shm, oldest);
    uint64_t want = mn_page_round(k->want_bytes), used_end = k->used_end; /* by [L2] */
    if (!mn_lease_sound(e, oldest, used_end, want)) {
        mn_worker_damaged(e, oldest, MN_DAMAGE_LEASE);
        answer_lease(e, oldest, 0, 0, MN_LEASE_REFUSED);
        return true;
    }
    uint64_t len = want > e->lease_bytes ? want : e->lease_bytes;
    mn_lease_end(e, oldest, used_end);
    uint64_t used = mn_extents_used(e->arena);
    if (want > e->shm.ctl->arena_bytes) { /* it need not wait for that */
        answer_lease(e, oldest, 0, 0, MN_LEASE_REFUSED);
        return true;
    }
    if (used + len > e->limit) {
        len = want;
        if (used + len > e->limit && !is_head(e, sequence_of(e, oldest)) && !all_wait(e)) {
            e->room_waits = true;
            return false;
        }
    }
    e->idle_ns = 0;
    uint64_t off;
    if (mn_extents_alloc(e->arena, len, &off) < 0) {
        answer_lease(e, oldest, 0, 0, MN_LEASE_REFUSED);
        return true;
    }
    if (mn_lease_give(e, oldest, off, len) < 0) {
        mn_range_free(e->arena, off, len);
        answer_lease(e, oldest, 0, 0, MN_LEASE_REFUSED);
        return true;
    }
    answer_lease(e, oldest, off, len, MN_LEASE_GRANTED);
    return true;
}

void
mn_engine_room(struct mn_engine *e)
{
    if (e->room_waits) {
        e->room_waits = false;
        (void)mn_bell_ring_released(&e->shm.ctl->engine);
    }
}

/* ---- deaths ------------------------------------------------------------------------ */

/* Nobody will make it: its batch is delivered as an error. */
static void
give_up(struct mn_engine *e, uint32_t task, uint64_t word, const struct mn_death *death)
{
    e->lost[task] = *death;
    mn_a64_store_seqcst(&mn_task_at(&e->shm, task)->word,
                        mn_task_word(mn_word_gen(word), 0, mn_word_attempt(word), MN_TASK_LOST));
}

void
mn_task_take_back(struct mn_engine *e, uint32_t task, uint64_t word,
                  const struct mn_death *death)
{
    uint32_t attempt = mn_word_attempt(word);
    mn_task_at(&e->shm, task)->flags = 0; /* an envelope of its worker's goes with the lease */
    e->results[task].flags = 0;
    e->results[task].accepted = false; /* what comes of it now is looked at anew */
    if (attempt < e->cfg.max_retries
        && mn_board_publish(&e->shm, &e->heads[MN_LANE_EXPRESS], MN_LANE_EXPRESS, task,
                            ++e->gens[task], attempt + 1)
               == MN_OK) {
        e->retries++;
        return;
    }
    give_up(e, task, word, death);
}

/* Results that the dead worker has sent are not its any more. Those that make no sense are taken
 * back when their batch is read. */
static void
sweep_envelopes(struct mn_engine *e, uint32_t w)
{
    for (struct mn_batch *b = e->batches; b != NULL; b = b->next) {
        if (!b->accepted) {
            mn_batch_accept_envelopes(e, b);
        }
    }
    mn_lease_forget(e, w);
}

/* Puts a task that was taken from a lane on another one. */
void
mn_task_put(struct mn_engine *e, uint32_t task, uint32_t lane)
{
    uint32_t gen = ++e->gens[task];
    if (mn_board_publish(&e->shm, &e->heads[lane], lane, task, gen, 0) != MN_OK) {
        /* The lanes have room for all tasks there are: what is full is damaged. */
        struct mn_death nobody = {0, 0, MN_STATUS_DAMAGED + MN_DAMAGE_WORD, -1};
        mn_task_take_back(e, task, mn_task_word(gen, 0, 0xff, MN_TASK_QUEUED), &nobody);
    }
}

/* Moves on what the dead worker had: its running tasks and its own lane. */
static void
sweep_tasks(struct mn_engine *e, uint32_t w, const struct mn_death *death)
{
    for (uint32_t i = 0; i < e->shm.ctl->ntasks; i++) {
        struct mn_task *t = mn_task_at(&e->shm, i);
        uint64_t word = mn_a64_load_acquire(&t->word); /* [T4] */
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_RUNNING && mn_word_worker(word) == w) {
            mn_task_take_back(e, i, word, death);
        }
        else if (st == MN_TASK_QUEUED && t->lane == MN_LANE_WORKER + w
                 && mn_board_cancel(&e->shm, i)) {
            if (e->plan != NULL) { /* it was only meant for it */
                mn_task_put(e, i, MN_LANE_EXPRESS);
            }
            else { /* static scheduling: nobody else may do it */
                mn_task_take_back(e, i, mn_task_word(mn_word_gen(word), 0, 0xff, st), death);
            }
        }
    }
}

/* The dead may have ended the last part of a batch and not claimed its collate task yet, and
 * nobody else will. A living worker that is just about to finds it cancelled. */
static void
publish_collates(struct mn_engine *e, const struct mn_death *death)
{
    for (struct mn_batch *b = e->batches; b != NULL; b = b->next) {
        struct mn_block *block = mn_block_at(&e->shm, b->block_off);
        if (b->abandoned || block->ntasks < 2) {
            continue;
        }
        const uint32_t *tasks = mn_block_tasks(block);
        uint32_t last = block->ntasks - 1, done = 0;
        while (done < last
               && mn_word_status(mn_a64_load_acquire(&mn_task_at(&e->shm, tasks[done])->word))
                      == MN_TASK_DONE) { /* [T4] */
            done++;
        }
        uint64_t word = mn_a64_load_relaxed(&mn_task_at(&e->shm, tasks[last])->word);
        if (done == last && mn_word_status(word) == MN_TASK_WAITING
            && mn_board_cancel(&e->shm, tasks[last])
            && mn_board_publish(&e->shm, &e->heads[MN_LANE_EXPRESS], MN_LANE_EXPRESS,
                                tasks[last], ++e->gens[tasks[last]], 0)
                   != MN_OK) {
            give_up(e, tasks[last], word, death);
        }
    }
}

/* An exit code, a signal or the number of an error, whatever stands there. */
static int32_t
status_of(int32_t status)
{
    return status > -128 && status < MN_STATUS_DAMAGED ? status : 255;
}

static void
sweep(struct mn_engine *e, uint32_t w)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    struct mn_lease *l = &e->leases[w];
    bool stopping = mn_a32_load_acquire(&e->shm.ctl->stop) != 0;
    bool damaged = l->damage != MN_SOUND; /* it was counted when that was found */
    bool left = mn_a32_load_relaxed(&k->leave) != 0 && !damaged; /* ours */
    uint64_t tasks = mn_a64_load_relaxed(&k->tasks_done); /* it is gone: nobody counts now */
    struct mn_death death = {w, k->pid, status_of(k->exit_status), -1};
    if (damaged) {
        death.status = MN_STATUS_DAMAGED + (int32_t)l->damage;
    }
    mn_a32_store_relaxed(&k->leave, 0);
    if (!stopping && !left) {
        e->ndeaths += !damaged;
        e->death = death;
        l->barren = tasks != l->tasks ? 0 : l->barren + 1;
    }
    l->tasks = tasks;
    l->damage = MN_SOUND;
    sweep_envelopes(e, w);
    sweep_tasks(e, w, &death);
    publish_collates(e, &death);
    mn_a64_store_relaxed(&k->since_ns, 0);
    mn_a64_store_relaxed(&k->running, 0);
    mn_a32_store_relaxed(&k->lease_state, MN_LEASE_IDLE);
    mn_bell_kick(&k->bell);
    mn_bell_kick(&k->room);
    k->respawn = !stopping && !left && e->cfg.respawn && l->barren < BARREN_DEATHS && !k->retired;
    mn_a32_store_seqcst(&k->state, MN_WORKER_SWEPT);
    mn_engine_poke_zygote(e);
    for (uint32_t i = 0; i < e->shm.ctl->nworkers; i++) {
        mn_bell_ring(&mn_worker_at(&e->shm, i)->bell); /* there may be work again */
    }
    mn_bell_kick(&e->shm.ctl->trainer); /* the dead one may have claimed it without waking */
}

void
mn_engine_poke_zygote(struct mn_engine *e)
{
    if (e->zygote_cmd >= 0) {
        ssize_t n = write(e->zygote_cmd, "!", 1);
        (void)n; /* full: it has been poked already; closed: its death is seen elsewhere */
        return;
    }
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) { /* threads: each its own zygote */
        mn_bell_ring(&mn_worker_at(&e->shm, w)->bell);
    }
}

static void
watch_zygote(struct mn_engine *e)
{
    if (e->zygote_pidfd >= 0 && !e->zygote_lost
        && mn_a32_load_acquire(&e->shm.ctl->stop) == 0
        && mn_proc_wait_pidfd(e->zygote_pidfd, 0) == 0) {
        e->zygote_lost = true;
        mn_a32_add_seqcst(&e->shm.ctl->epoch_word, 1);
        mn_bell_ring(&e->shm.ctl->trainer);
    }
}

static bool
drop_abandoned(struct mn_engine *e)
{
    bool any = false;
    struct mn_batch *next;
    for (struct mn_batch *b = e->batches; b != NULL; b = next) {
        next = b->next;
        if (b->abandoned && mn_batch_idle(e, b)) {
            mn_batch_drop(e, b);
            any = true;
        }
    }
    return any;
}

/* ---- memory that goes back to the system --------------------------------------------- */

/* Bytes at a time: a millisecond or so, after which the engine looks after workers again. */
#define RECLAIM_STEP (UINT64_C(4) << 20)

/* Takes the pages of a range away. Mutex held, but not meanwhile: it is a system call. */
static void
punch(struct mn_engine *e, uint64_t off, uint64_t len)
{
    if (mn_extents_lend(e->arena, off, len) < 0) {
        return; /* no memory for a node: the range stays as it is */
    }
    mn_mutex_unlock(&e->mutex);
    (void)mn_memfd_punch_mapped(e->shm.base + off, len);
    mn_mutex_lock(&e->mutex);
    mn_extents_return(e->arena, off, len);
    e->reclaimed_bytes += len;
    mn_engine_room(e); /* an allocation may have failed for it */
}

void
mn_engine_punch_free(struct mn_engine *e)
{
    uint64_t from = e->shm.ctl->arena_off, off, len;
    int rc;
    do {
        rc = mn_extents_cold(e->arena, 0, RECLAIM_STEP, &from, &off, &len);
        if (rc == MN_OK) {
            punch(e, off, len);
        }
    } while (rc != MN_EMPTY);
}

bool
mn_engine_no_lent(struct mn_engine *e)
{
    bool waited = false;
    while (mn_extents_lent(e->arena) != 0) {
        mn_mutex_unlock(&e->mutex);
        (void)sched_yield();
        mn_mutex_lock(&e->mutex);
        waited = true;
    }
    return waited;
}

bool
mn_engine_reclaim(struct mn_engine *e, uint64_t now_ns)
{
    struct mn_reclaim *r = &e->reclaim;
    uint64_t off, len;
    if (mn_reclaim_turn(r, now_ns, mn_extents_allocs(e->arena))) {
        mn_extents_turn(e->arena);
        if (r->age == 0) {
            struct mn_reclaim_view view = {mn_extents_used(e->arena), e->kept_bytes,
                                           mn_extents_warm(e->arena), e->limit};
            mn_reclaim_begin(r, &view);
            e->reclaim_from = e->shm.ctl->arena_off;
        }
    }
    if (r->age == 0) {
        return false;
    }
    int rc = mn_extents_cold(e->arena, r->age, RECLAIM_STEP, &e->reclaim_from, &off, &len);
    if (rc == MN_EMPTY) {
        r->age = 0;
    }
    if (rc == MN_OK) {
        uint64_t keep = mn_page_round(mn_reclaim_keep(r, len));
        if (keep < len) {
            punch(e, off + keep, len - keep);
        }
    }
    return rc != MN_EMPTY;
}

bool
mn_engine_step(struct mn_engine *e)
{
    bool any = false;
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        if (mn_a32_load_seqcst(&k->state) == MN_WORKER_EXITED) { /* [S2], before a sleep */
            sweep(e, w);
            any = true;
        }
    }
    while (grant_one(e)) {
        any = true;
    }
    any |= drop_abandoned(e);
    if (e->plan != NULL && !e->closing) {
        uint32_t n = mn_plan_pump(e);
        if (n != 0) {
            mn_engine_ring_workers(e, n);
            any = true;
        }
    }
    watch_zygote(e);
    return any;
}

uint32_t
mn_engine_live(struct mn_engine *e)
{
    uint32_t live = 0;
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        uint32_t st = mn_a32_load_acquire(&k->state);
        live += st != MN_WORKER_EMPTY && !(st == MN_WORKER_SWEPT && !k->respawn);
    }
    return live;
}
