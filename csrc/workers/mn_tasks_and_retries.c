/* mn_tasks_and_retries.c - the life of a task, on both sides. See mn_tasks_and_retries.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "workers/mn_tasks_and_retries.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_thread.h"

/* ---- the queues: the trainer publishes, workers claim ---- */

static inline mn_a64 *
ring_of(const struct mn_shm *shm, const struct mn_queue *queue)
{
    return (mn_a64 *)mn_at(shm, queue->ring_off);
}

static inline uint64_t
entry_of(uint32_t gen, uint32_t task)
{
    return (uint64_t)gen << 32 | task;
}

/* Returns whether the task that an entry names may still be claimed through it. */
static inline bool
claimable(const struct mn_shm *shm, uint64_t entry, uint64_t *word)
{
    struct mn_task *t = mn_task_at(shm, (uint32_t)entry);
    *word = mn_a64_load_relaxed(&t->word); /* the CAS that follows orders */
#ifdef MN_BUG_GENERATION
    return mn_word_status(*word) == MN_TASK_QUEUED;
#else
    return mn_word_status(*word) == MN_TASK_QUEUED
           && mn_word_gen(*word) == (uint32_t)(entry >> 32);
#endif
}

/* Moves the head to the first entry that may still be claimed, or to the tail. */
static void
move_head(const struct mn_shm *shm, struct mn_queue_head *head, const struct mn_queue *q)
{
    const mn_a64 *ring = ring_of(shm, q);
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by this thread */
    uint64_t word;
    while (head->head != tail
           && !claimable(shm, mn_a64_load_relaxed(&ring[head->head & q->mask]), &word)) {
        head->head++;
    }
}

/* Makes a task claimable. Its descriptor and block must be complete. Returns MN_OK or MN_FULL. */
static int
mn_runqueue_publish(const struct mn_shm *shm, struct mn_queue_head *head, uint32_t queue,
                    uint32_t task, uint32_t gen, uint32_t attempt)
{
    struct mn_queue *q = mn_queue_at(shm, queue);
    mn_a64 *ring = ring_of(shm, q);
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by this thread */
    move_head(shm, head, q);
    if (tail - head->head > q->mask) {
        return MN_FULL;
    }
    struct mn_task *t = mn_task_at(shm, task);
    mn_a64_store_release(&t->word, mn_task_word(gen, 0, attempt, MN_TASK_QUEUED)); /* [T1] */
    MN_FAULT("runqueue.publish.word");
    mn_a64_store_relaxed(&ring[tail & q->mask], entry_of(gen, task));
    mn_a64_store_seqcst(&q->tail, tail + 1); /* [P1] */
    return MN_OK;
}

static int
claim_from(const struct mn_shm *shm, struct mn_queue *q, uint32_t worker, uint32_t *task)
{
    mn_a64 *ring = ring_of(shm, q), *running = &mn_worker_at(shm, worker)->running;
    uint64_t hint = mn_a64_load_acquire(&q->hint); /* so that tail below is at least as new */
    uint64_t tail = mn_a64_load_seqcst(&q->tail);  /* [P2]; seq_cst: the look after prepare_wait */
    uint64_t from = hint;
    if (tail - from > q->mask + 1) {
        from = tail - q->mask - 1; /* older places have been overwritten, see I2 */
    }
    for (uint64_t at = from; at != tail; at++) {
        uint64_t entry = mn_a64_load_relaxed(&ring[at & q->mask]); /* ordered by [P2] */
        uint64_t word;
        if (!claimable(shm, entry, &word)) {
            if (at == from) {
                from++;
            }
            continue;
        }
        uint64_t mine = mn_task_word(mn_word_gen(word), worker, mn_word_attempt(word),
                                     MN_TASK_RUNNING);
        mn_a64_store_relaxed(running, (uint64_t)(uint32_t)entry + 1); /* [A1], by the CAS */
        MN_FAULT("runqueue.claim.before");
        mn_a64 *its_word = &mn_task_at(shm, (uint32_t)entry)->word;
#ifdef MN_BUG_CLAIM
        mn_a64_store_release(its_word, mine);
        bool claimed = true;
#else
        bool claimed = mn_a64_cas_acqrel(its_word, &word, mine); /* [T2] */
#endif
        if (claimed) {
            MN_FAULT("runqueue.claim.after");
            *task = (uint32_t)entry;
            if (at == from) {
                from++;
            }
            if (from != hint) {
                (void)mn_a64_cas_seqcst(&q->hint, &hint, from); /* [P3] */
            }
            return MN_OK;
        }
        mn_a64_store_relaxed(running, 0);
        if (at == from) {
            from++; /* another worker has it: not claimable any more, I1 */
        }
    }
    if (from != hint) {
        (void)mn_a64_cas_seqcst(&q->hint, &hint, from); /* [P3] */
    }
    return MN_EMPTY;
}

/* Claims the next task for worker. Its own queue comes first, because no other worker claims from
 * it; then tasks that were taken back, for which the head may have waited long. Returns MN_OK or
 * MN_EMPTY. */
static int
mn_runqueue_claim(const struct mn_shm *shm, uint32_t worker, uint32_t *task)
{
    if (claim_from(shm, mn_queue_at(shm, MN_QUEUE_WORKER + worker), worker, task) == MN_OK) {
        return MN_OK;
    }
    if (claim_from(shm, mn_queue_at(shm, MN_QUEUE_EXPRESS), worker, task) == MN_OK) {
        return MN_OK;
    }
    return claim_from(shm, mn_queue_at(shm, MN_QUEUE_NORMAL), worker, task);
}

bool
mn_runqueue_waits(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task)
{
    const struct mn_queue *q = mn_queue_at(shm, queue);
    uint64_t entry = mn_a64_load_relaxed(&ring_of(shm, q)[at & q->mask]); /* ours */
    uint64_t word;
    *task = (uint32_t)entry;
    return claimable(shm, entry, &word);
}

uint64_t
mn_runqueue_own_entries(const struct mn_shm *shm, uint32_t queue, uint64_t *first)
{
    const struct mn_queue *q = mn_queue_at(shm, queue);
    uint64_t hint = mn_a64_load_seqcst(&q->hint); /* [P4]; bounds a damaged hint */
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by this thread */
    uint64_t n = tail > hint ? tail - hint : 0;
    *first = tail - (n < MN_QUEUE_OWN_TASKS ? n : MN_QUEUE_OWN_TASKS);
    return tail;
}

uint64_t
mn_runqueue_waiting(const struct mn_shm *shm, uint32_t queue)
{
    uint64_t at, waiting = 0, end = mn_runqueue_own_entries(shm, queue, &at);
    for (; at < end; at++) {
        uint32_t task;
        waiting += mn_runqueue_waits(shm, queue, at, &task);
    }
    return waiting;
}

bool
mn_runqueue_withdraw(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task)
{
    const struct mn_queue *q = mn_queue_at(shm, queue);
    uint64_t entry = mn_a64_load_relaxed(&ring_of(shm, q)[at & q->mask]); /* ours */
    uint64_t word;
    if (!claimable(shm, entry, &word)) {
        return false;
    }
    *task = (uint32_t)entry;
    return mn_a64_cas_acqrel(&mn_task_at(shm, *task)->word, &word,
                             mn_task_word(mn_word_gen(word), 0, 0, MN_TASK_CANCELLED));
}

/* Takes back a task that no worker has claimed yet. Returns whether it did. */
static bool
mn_runqueue_cancel(const struct mn_shm *shm, uint32_t task)
{
    struct mn_task *t = mn_task_at(shm, task);
    uint64_t word = mn_a64_load_relaxed(&t->word); /* the CAS decides */
    while (mn_word_status(word) == MN_TASK_QUEUED || mn_word_status(word) == MN_TASK_WAITING) {
        uint64_t none = mn_task_word(mn_word_gen(word), 0, 0, MN_TASK_CANCELLED);
        if (mn_a64_cas_acqrel(&t->word, &word, none)) {
            MN_FAULT("runqueue.cancelled");
            return true;
        }
    }
    return false;
}

/* ---- the trainer's table of tasks ---- */

int
mn_tasks_open(struct mn_tasks *t, const struct mn_shm *shm, uint32_t max_retries)
{
    uint32_t n = shm->ctl->ntasks;
    *t = (struct mn_tasks){.shm = *shm, .max_retries = max_retries};
    t->free = calloc(n, sizeof(*t->free));
    t->gens = calloc(n, sizeof(*t->gens));
    t->lost = calloc(n, sizeof(*t->lost));
    t->results = calloc(n, sizeof(*t->results));
    t->heads = calloc(shm->ctl->nqueues, sizeof(*t->heads));
    if (!t->free || !t->gens || !t->lost || !t->results || !t->heads) {
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        t->free[i] = n - 1 - i;
    }
    t->nfree = n;
    return 0;
}

void
mn_tasks_close(struct mn_tasks *t)
{
    free(t->free);
    free(t->gens);
    free(t->lost);
    free(t->results);
    free(t->heads);
    *t = (struct mn_tasks){0};
}

/* Writes what workers read of the task. They may have overwritten what was written before. */
static void
fill(struct mn_tasks *t, uint32_t task)
{
    struct mn_task *d = mn_task_at(&t->shm, task);
    const struct mn_result *r = &t->results[task];
    d->block_off = r->block_off;
    d->row0 = r->row0;
    d->nrows = r->nrows;
    d->kind = r->kind;
    d->flags = 0;
    d->env_off = d->env_len = 0;
}

static uint32_t
take(struct mn_tasks *t, uint64_t block_off, uint32_t kind, uint32_t row0, uint32_t nrows)
{
    uint32_t task = t->free[--t->nfree];
    struct mn_result *r = &t->results[task];
    r->block_off = block_off;
    r->row0 = row0;
    r->nrows = nrows;
    r->kind = kind;
    r->flags = 0;
    r->accepted = false;
    r->retries_left = t->max_retries;
    r->queue = MN_NO_QUEUE;
    fill(t, task);
    mn_task_at(&t->shm, task)->why = 0;
    return task;
}

uint32_t
mn_tasks_take(struct mn_tasks *t, uint64_t block_off, uint32_t kind, uint32_t row0,
              uint32_t nrows)
{
    uint32_t task = take(t, block_off, kind, row0, nrows);
    /* Relaxed: on no queue, so no worker looks at it. */
    mn_a64_store_relaxed(&mn_task_at(&t->shm, task)->word,
                         mn_task_word(0, 0, 0, MN_TASK_PLANNED));
    return task;
}

/* seq_cst, like every word that other threads look at, although no part of its block is on a queue
 * yet if the task is new. */
static void
await_parts(struct mn_tasks *t, uint32_t task)
{
    t->results[task].queue = MN_NO_QUEUE;
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(++t->gens[task], 0, 0, MN_TASK_WAITING));
}

uint32_t
mn_tasks_take_collate(struct mn_tasks *t, uint64_t block_off, uint32_t nrows)
{
    uint32_t task = take(t, block_off, MN_KIND_COLLATE, 0, nrows);
    await_parts(t, task);
    return task;
}

void
mn_tasks_give(struct mn_tasks *t, uint32_t task)
{
    t->results[task].block_off = 0;
    /* Relaxed: no other thread may touch a task that no worker has. */
    mn_a64_store_relaxed(&mn_task_at(&t->shm, task)->word, 0);
    t->free[t->nfree++] = task;
}

int
mn_tasks_publish(struct mn_tasks *t, uint32_t task, uint32_t queue)
{
    struct mn_result *r = &t->results[task];
    uint32_t attempt = t->max_retries - r->retries_left;
    int rc = mn_runqueue_publish(&t->shm, &t->heads[queue], queue, task, ++t->gens[task], attempt);
    if (rc == MN_OK) {
        r->queue = queue;
    }
    return rc;
}

/* Gives up a task that no worker will make: its batch is delivered as an error. */
static void
give_up(struct mn_tasks *t, uint32_t task, const struct mn_death *death)
{
    t->lost[task] = *death;
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(t->gens[task], 0, 0, MN_TASK_LOST));
}

/* Returns whether the parts of a collate task's block are all done. */
static bool
parts_done(const struct mn_tasks *t, struct mn_block *block)
{
    const uint32_t *tasks = mn_block_tasks(block);
    uint32_t done = 0;
    while (done + 1 < block->ntasks
           && mn_word_status(mn_tasks_word(t, tasks[done])) == MN_TASK_DONE) {
        done++;
    }
    return done + 1 == block->ntasks;
}

/* Takes back a task that its worker will not finish: another worker retries it, or it is lost with
 * that death. A collate task whose parts are not done waits for them. */
static void
take_back(struct mn_tasks *t, uint32_t task, const struct mn_death *death)
{
    struct mn_result *r = &t->results[task];
    bool waits = r->kind == MN_KIND_COLLATE
                 && !parts_done(t, mn_block_at(&t->shm, r->block_off));
    fill(t, task); /* its worker's envelope is freed with the lease */
    r->flags = 0;
    r->accepted = false; /* its new result is checked again */
    if (r->retries_left == 0) {
        give_up(t, task, death);
        return;
    }
    r->retries_left--;
    t->retries++;
    if (waits) {
        await_parts(t, task);
    }
    else if (mn_tasks_publish(t, task, MN_QUEUE_EXPRESS) != MN_OK) {
        give_up(t, task, death);
    }
}

void
mn_tasks_reject(struct mn_tasks *t, uint32_t task, uint64_t word)
{
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(mn_word_gen(word), mn_word_worker(word),
                                     mn_word_attempt(word), MN_TASK_RUNNING));
}

void
mn_tasks_abandon(struct mn_tasks *t, uint32_t task)
{
    t->results[task].retries_left = 0;
    (void)mn_runqueue_cancel(&t->shm, task);
}

void
mn_tasks_put(struct mn_tasks *t, uint32_t task, uint32_t queue)
{
    if (mn_tasks_publish(t, task, queue) != MN_OK) {
        /* The queues have space for all tasks there are: a full queue is damaged. */
        struct mn_death no_worker = {0, 0, MN_STATUS_DAMAGED + MN_DAMAGE_WORD, MN_NO_ROW};
        give_up(t, task, &no_worker);
    }
}

/* Returns whether the entry of any worker except one says that it runs the task, or is about to
 * claim it. */
static bool
other_entry_names_task(const struct mn_shm *shm, uint32_t task, uint32_t but)
{
    uint32_t w = 0;
    while (w < shm->ctl->nworkers
           && (w == but
               || mn_a64_load_acquire(&mn_worker_at(shm, w)->running) /* [A2], [A4] */
                      != (uint64_t)task + 1)) {
        w++;
    }
    return w < shm->ctl->nworkers;
}

void
mn_tasks_sweep(struct mn_tasks *t, uint32_t worker, bool only_it, const struct mn_death *death,
               uint64_t late)
{
    for (uint32_t i = 0; i < t->shm.ctl->ntasks; i++) {
        if (t->results[i].block_off == 0) {
            continue;
        }
        uint64_t word = mn_tasks_word(t, i);
        enum mn_task_status st = mn_word_status(word);
        uint32_t by = mn_word_worker(word);
        bool runs_it = st == MN_TASK_RUNNING
                       && (by == worker || (by == MN_TASK_NOBODY
                                            && !other_entry_names_task(&t->shm, i, worker)));
#ifdef MN_BUG_SWEEP
        runs_it = false;
#endif
        if (runs_it) {
            if (word == late) {
                t->results[i].retries_left = 0;
            }
            take_back(t, i, death);
        }
        else if (st == MN_TASK_QUEUED && t->results[i].queue == MN_QUEUE_WORKER + worker
                 && mn_runqueue_cancel(&t->shm, i)) {
            if (only_it) {
                give_up(t, i, death);
            }
            else {
                mn_tasks_put(t, i, MN_QUEUE_EXPRESS);
            }
        }
    }
}

void
mn_tasks_publish_collate(struct mn_tasks *t, struct mn_block *block,
                         const struct mn_death *death)
{
    if (block->ntasks < 2 || !parts_done(t, block)) {
        return;
    }
    uint32_t last = mn_block_tasks(block)[block->ntasks - 1];
    if (mn_word_status(mn_tasks_word(t, last)) == MN_TASK_WAITING
        && mn_runqueue_cancel(&t->shm, last)
        && mn_tasks_publish(t, last, MN_QUEUE_EXPRESS) != MN_OK) {
        give_up(t, last, death);
    }
}

/* ---- a worker: claims a task, and makes it DONE ---- */

int
mn_worker_attach(struct mn_worker_side *w, const struct mn_shm *shm, uint32_t number)
{
    if (shm->ctl->magic != MN_MAGIC || shm->ctl->sizes != mn_sizes_word()) {
        return -EPROTO;
    }
    memset(w, 0, sizeof(*w));
    w->shm = *shm;
    w->number = number;
    w->me = mn_worker_at(shm, number);
    mn_a32_store_relaxed(&w->me->lease_state, MN_LEASE_IDLE); /* ours until we want one */
    return 0;
}

/* Returns whether the loader is closed: then no task is claimed any more. */
static bool
is_stopped(const struct mn_worker_side *w)
{
    return mn_a32_load_seqcst(&w->shm.ctl->stop) != 0;
}

static bool
runs_low(const struct mn_worker_side *w, uint32_t queue, uint32_t mark)
{
    const struct mn_queue *q = mn_queue_at(&w->shm, queue);
    uint64_t hint = mn_a64_load_acquire(&q->hint); /* the difference is an estimate */
    uint64_t tail = mn_a64_load_acquire(&q->tail);
    return tail - hint < mark;
}

/* Notifies the engine when the run queues run low, or this worker's own queue does, while the
 * engine has more to put there. */
static void
notify_low_water(const struct mn_worker_side *w)
{
    struct mn_ctl *c = w->shm.ctl;
    uint32_t mark = mn_a32_load_seqcst(&c->low_water);
    uint32_t own = mn_a32_load_seqcst(&w->me->low_own);
    if ((mark != 0 && runs_low(w, MN_QUEUE_NORMAL, mark))
        || (own != 0 && runs_low(w, MN_QUEUE_WORKER + w->number, own))) {
        mn_event_notify(&c->engine);
    }
}

/* Copies the trainer's fields of a task that was just claimed. */
static void
hold(struct mn_worker_side *w, uint32_t task)
{
    const struct mn_task *t = mn_task_at(&w->shm, task);
    w->held.block_off = t->block_off;
    w->held.row0 = t->row0;
    w->held.nrows = t->nrows;
    w->held.kind = t->kind;
}

int
mn_worker_try(struct mn_worker_side *w, uint32_t *task)
{
    if (is_stopped(w) || mn_a32_load_seqcst(&w->me->exit_request) != 0) {
        return MN_CLOSED;
    }
    int rc = mn_runqueue_claim(&w->shm, w->number, task);
    if (rc == MN_OK) {
        hold(w, *task);
    }
    /* Even if there was nothing. Two workers that claim at once may leave the hint behind, and then
     * neither of them saw the run queues run low. */
    notify_low_water(w);
    return rc;
}

int
mn_worker_claim(struct mn_worker_side *w, int64_t timeout_ns, uint32_t *task)
{
    int rc = mn_worker_try(w, task);
    uint64_t until = 0;
    while (rc == MN_EMPTY && mn_event_spin(w->shm.ctl->spin_ns, &until)) {
        rc = mn_worker_try(w, task);
    }
    if (rc != MN_EMPTY) {
        return rc;
    }
    mn_event_prepare_wait(&w->me->event);
    rc = mn_worker_try(w, task);
    if (rc != MN_EMPTY) {
        mn_event_cancel_wait(&w->me->event);
        return rc;
    }
    (void)mn_event_commit_wait(&w->me->event, timeout_ns);
    return mn_worker_try(w, task);
}

#define SIBLINGS 64u
MN_STATIC_ASSERT(SIBLINGS > MN_PARTS_MOST, "parts and their collate task");

/* Reads the tasks of a block while our task keeps the block alive: after DONE the trainer may
 * retire it. If there are more than fit here, the trainer is notified for each task. */
static uint32_t
siblings(const struct mn_worker_side *w, const struct mn_task *t, uint32_t *ids)
{
    struct mn_block *b = mn_block_at(&w->shm, t->block_off);
    bool wanted = mn_a64_load_relaxed(&w->shm.ctl->wanted) == t->block_off; /* a guess */
    if (b->ntasks > SIBLINGS || !(wanted || t->kind == MN_KIND_PART)) {
        return 0;
    }
    memcpy(ids, mn_block_tasks(b), b->ntasks * sizeof(*ids));
    return b->ntasks;
}

/* Returns whether the block is complete. The last of two workers that finish together sees the
 * other's DONE, because words are exchanged and looked at in one total order. The answer may be
 * wrong if a descriptor is used again by now: then no thread waits for the block. With n 0, where
 * siblings() has read none, it is yes. */
static bool
complete(const struct mn_worker_side *w, const uint32_t *ids, uint32_t n)
{
    bool waiting = false, lost = false;
    for (uint32_t i = 0; i < n; i++) {
        uint64_t word = mn_a64_load_seqcst(&mn_task_at(&w->shm, ids[i])->word); /* [C1] */
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_QUEUED || st == MN_TASK_RUNNING || st == MN_TASK_PLANNED) {
            return false;
        }
        waiting |= st == MN_TASK_WAITING;
        lost |= st == MN_TASK_LOST;
    }
    return !waiting || lost; /* nothing is collated any more once a part is lost */
}

/* Returns whether all parts are done; of two workers that end together at least one sees it
 * [C1]. */
static bool
all_done(const struct mn_worker_side *w, const uint32_t *ids, uint32_t n)
{
    uint32_t i = 0;
    while (i < n
           && mn_word_status(mn_a64_load_seqcst(&mn_task_at(&w->shm, ids[i])->word)) /* [C1] */
                  == MN_TASK_DONE) {
        i++;
    }
    return i == n;
}

/* Claims a WAITING task if its word is still the one that was seen while the block was surely
 * alive. An abandoned block has cancelled it, and generations differ. */
static bool
claim_waiting(struct mn_worker_side *w, uint32_t task, uint64_t seen)
{
    if (mn_word_status(seen) != MN_TASK_WAITING || is_stopped(w)) {
        return false;
    }
    uint64_t mine = mn_task_word(mn_word_gen(seen), w->number, mn_word_attempt(seen),
                                 MN_TASK_RUNNING);
    mn_a64_store_relaxed(&w->me->running, (uint64_t)task + 1); /* [A1], by the CAS */
    if (!mn_a64_cas_acqrel(&mn_task_at(&w->shm, task)->word, &seen, mine)) { /* [T2] */
        mn_a64_store_relaxed(&w->me->running, 0);
        return false;
    }
    hold(w, task);
    MN_FAULT("worker.collate.claimed");
    return true;
}

/* Records whether the task's first sample came right after the one that this worker made last. */
static void
note_place(struct mn_worker_side *w, struct mn_task *made)
{
    const struct mn_task *t = &w->held;
    if (t->kind == MN_KIND_RESUME || t->kind == MN_KIND_COLLATE) {
        return;
    }
    const struct mn_block *b = mn_block_at(&w->shm, t->block_off);
    uint64_t first = b->position + t->row0;
    bool follows = w->begun && b->epoch == w->epoch && first == w->position;
    made->made = follows ? MN_MADE_NEXT : w->begun ? MN_MADE_APART : MN_MADE_FIRST;
    w->begun = true;
    w->epoch = b->epoch;
    w->position = first + t->nrows;
}

uint32_t
mn_worker_done(struct mn_worker_side *w, uint32_t task)
{
    struct mn_ctl *c = w->shm.ctl;
    struct mn_task *t = mn_task_at(&w->shm, task);
    uint64_t block_off = w->held.block_off, collate_word = 0;
    uint32_t ids[SIBLINGS], collate = MN_NO_TASK;
    uint32_t n = siblings(w, &w->held, ids);
    if (w->held.kind == MN_KIND_PART) {
        collate = ids[n - 1];
        collate_word = mn_a64_load_relaxed(&mn_task_at(&w->shm, collate)->word); /* CAS decides */
    }
    note_place(w, t);
    t->done_ns = mn_now_ns();
    /* Relaxed: written by this worker alone. */
    mn_a64_store_relaxed(&w->me->tasks_done, mn_a64_load_relaxed(&w->me->tasks_done) + 1);
    mn_a64_store_relaxed(&w->me->since_ns, 0); /* first: it is not the next task's */
    mn_a64_store_release(&w->me->running, 0); /* [A3]: its rows are written */
    uint64_t word = mn_a64_load_relaxed(&t->word); /* ours while RUNNING */
    mn_assert(mn_word_status(word) == MN_TASK_RUNNING
              && mn_word_worker(word) == w->number);
    uint64_t done = mn_task_word(mn_word_gen(word), w->number, mn_word_attempt(word),
                                 MN_TASK_DONE);
    MN_FAULT("worker.done.before");
#ifdef MN_BUG_DONE_ORDER
    bool was_mine = true;
    mn_a64_store_relaxed(&t->word, done);
#else
    bool was_mine = mn_a64_cas_seqcst(&t->word, &word, done); /* [T3] */
#endif
    mn_assert(was_mine);
    (void)was_mine;
    MN_FAULT("worker.done.after");
    uint64_t wanted = mn_a64_load_seqcst(&c->wanted); /* [W2] */
    if (wanted == MN_WANT_ANY || wanted == MN_WANT_CHANGE
        || (wanted == block_off && complete(w, ids, n))) {
        mn_event_notify(&c->trainer);
    }
    if (collate != MN_NO_TASK && all_done(w, ids, n - 1)
        && claim_waiting(w, collate, collate_word)) {
        return collate;
    }
    return MN_NO_TASK;
}

/* ---- leases: a worker asks for memory for a result outside of rows ---- */

/* How often it checks meanwhile whether the trainer still lives. */
#define POLL_NS (INT64_C(200) * 1000 * 1000)

/* Returns whether the trainer is gone, which would end this worker. Threads of it are gone, too. */
static bool
orphaned(const struct mn_worker_side *w)
{
    return w->trainer != NULL && mn_lifeline_is_cut(w->trainer);
}

/* Returns the trainer's answer, or WANT if there will be none. */
static uint32_t
await_lease(struct mn_worker_side *w)
{
    struct mn_worker *me = w->me;
    int slept = 0;
    for (;;) {
        mn_event_prepare_wait(&me->lease_event);
        uint32_t st = mn_a32_load_seqcst(&me->lease_state); /* [L4] */
        if (st != MN_LEASE_WANT || is_stopped(w)
            || mn_a32_load_seqcst(&w->shm.ctl->dismissed) != 0
            || (slept == -ETIMEDOUT && orphaned(w))) {
            mn_event_cancel_wait(&me->lease_event);
            return st;
        }
        slept = mn_event_commit_wait(&me->lease_event, POLL_NS);
    }
}

int
mn_worker_lease(struct mn_worker_side *w, uint64_t bytes, uint64_t *off)
{
    bytes = (bytes + MN_PAGE - 1) & ~(uint64_t)(MN_PAGE - 1);
    if (bytes > w->lease_end - w->used_end) {
        struct mn_worker *me = w->me;
        me->want_bytes = bytes;
        me->used_end = w->used_end;
        mn_a32_store_seqcst(&me->lease_state, MN_LEASE_WANT); /* [L1] */
        MN_FAULT("worker.lease.want");
        mn_event_notify(&w->shm.ctl->engine);
        uint32_t st = await_lease(w);
        if (st == MN_LEASE_WANT) {
            return MN_CLOSED;
        }
        MN_FAULT("worker.lease.granted");
        w->lease_off = w->used_end = me->lease_off;
        w->lease_end = me->lease_off + me->lease_len;
        mn_a32_store_relaxed(&me->lease_state, MN_LEASE_IDLE); /* ours again */
        if (st == MN_LEASE_REFUSED) {
            return -ENOMEM;
        }
    }
    *off = w->used_end;
    w->used_end += bytes;
    return 0;
}

/* ---- leases: the trainer answers ---- */

MN_STATIC_ASSERT(MN_PAGE == MN_ARENA_PAGE, "leases are whole pages");

/* Small enough that idle workers do not use up a small limit. Large enough that a worker with
 * envelopes of a few kilobytes asks once in hundreds of batches. */
#define GRAIN_MOST (UINT64_C(4) << 20)
#define GRAIN_LEAST (16u * MN_PAGE)

int
mn_arena_leases_open(struct mn_arena_leases *l, const struct mn_shm *shm, struct mn_arena *arena)
{
    uint64_t grain = mn_page_round(arena->limit / 16 / shm->ctl->nworkers);
    grain = grain > GRAIN_MOST ? GRAIN_MOST : grain < GRAIN_LEAST ? GRAIN_LEAST : grain;
    *l = (struct mn_arena_leases){.shm = *shm, .arena = arena, .grain = grain};
    l->at = calloc(shm->ctl->nworkers, sizeof(*l->at));
    return l->at != NULL ? 0 : -ENOMEM;
}

void
mn_arena_leases_close(struct mn_arena_leases *l)
{
    for (uint32_t w = 0; l->at != NULL && w < l->shm.ctl->nworkers; w++) {
        mn_ranges_fini(&l->at[w].owed);
    }
    free(l->at);
    *l = (struct mn_arena_leases){0};
}

bool
mn_arena_leases_wanted(const struct mn_arena_leases *l, uint32_t worker)
{
    struct mn_worker *k = mn_worker_at(&l->shm, worker);
    return mn_a32_load_seqcst(&k->lease_state) == MN_LEASE_WANT; /* [L2], before a sleep */
}

bool
mn_arena_leases_sound(const struct mn_arena_leases *l, uint32_t worker, uint64_t used_end,
                      uint64_t want)
{
    const struct mn_arena_lease *x = &l->at[worker];
    if (want == 0 || want > INT64_MAX) {
        return false;
    }
    return x->len == 0
           || (used_end >= x->off && used_end - x->off <= x->len && used_end % MN_PAGE == 0);
}

int
mn_arena_leases_take(struct mn_arena_leases *l, uint32_t worker, uint64_t off, uint64_t bytes)
{
    return mn_ranges_cut(&l->at[worker].owed, off, bytes);
}

void
mn_arena_leases_end(struct mn_arena_leases *l, uint32_t worker, uint64_t used_end)
{
    struct mn_arena_lease *x = &l->at[worker];
    uint64_t left = x->off + x->len - used_end;
    /* If there is no memory to record this, or used_end is before what the worker has sent, the
     * worker continues to owe it. */
    if (x->len != 0 && left != 0 && mn_arena_leases_take(l, worker, used_end, left) == 0) {
        mn_arena_free(l->arena, used_end, left);
    }
    x->off = x->len = 0;
}

static void
answer(struct mn_arena_leases *l, uint32_t worker, uint64_t off, uint64_t len,
       enum mn_lease_state state)
{
    struct mn_worker *k = mn_worker_at(&l->shm, worker);
    k->lease_off = off;
    k->lease_len = len;
    MN_FAULT("lease.answer");
    mn_a32_store_seqcst(&k->lease_state, state); /* [L3] */
}

void
mn_arena_leases_refuse(struct mn_arena_leases *l, uint32_t worker)
{
    answer(l, worker, 0, 0, MN_LEASE_REFUSED);
}

void
mn_arena_leases_grant(struct mn_arena_leases *l, uint32_t worker, uint64_t len)
{
    struct mn_arena_lease *x = &l->at[worker];
    uint64_t off;
    if (mn_arena_alloc(l->arena, len, &off) < 0) {
        mn_arena_leases_refuse(l, worker);
        return;
    }
    if (mn_ranges_add(&x->owed, off, len) < 0) {
        mn_arena_free(l->arena, off, len);
        mn_arena_leases_refuse(l, worker);
        return;
    }
    x->off = off;
    x->len = len;
    answer(l, worker, off, len, MN_LEASE_GRANTED);
}

void
mn_arena_leases_forget(struct mn_arena_leases *l, uint32_t worker)
{
    struct mn_arena_lease *x = &l->at[worker];
    mn_arena_free_ranges(l->arena, &x->owed);
    x->off = x->len = 0;
}

/* ---- times of a task ---- */

/* Tasks cheaper than this are not worth a read of the thread's CPU clock (a system call). */
#define CPU_CLOCK_WORTH_NS UINT64_C(20000)

/* Reads the clock once more for each wait: a small part of what the wake-up costs. */
void
mn_worker_waited(struct mn_worker_clock *clock)
{
    clock->cpu_begin_ns = mn_thread_cpu_ns();
}

void
mn_worker_begin(struct mn_worker_side *w, struct mn_worker_clock *clock)
{
    clock->begin_ns = clock->lap_ns = mn_now_ns();
    mn_a64_store_relaxed(&w->me->since_ns, clock->begin_ns);
    mn_a64_store_relaxed(&w->me->row, w->held.row0);
}

uint64_t
mn_worker_lap(struct mn_worker_clock *clock)
{
    uint64_t before = clock->lap_ns;
    clock->lap_ns = mn_now_ns();
    return clock->lap_ns - before;
}

void
mn_worker_account(struct mn_worker_side *w, struct mn_worker_clock *clock, uint32_t task)
{
    struct mn_worker *me = w->me;
    struct mn_task *t = mn_task_at(&w->shm, task);
    t->wall_ns = mn_now_ns() - clock->begin_ns;
    t->cpu_ns = 0;
    if (clock->cpu_begin_ns != 0) {
        uint64_t cpu = mn_thread_cpu_ns();
        t->cpu_ns = cpu - clock->cpu_begin_ns;
        clock->cpu_begin_ns = t->wall_ns > CPU_CLOCK_WORTH_NS ? cpu : 0;
    }
    else if (t->wall_ns > CPU_CLOCK_WORTH_NS) {
        clock->cpu_begin_ns = mn_thread_cpu_ns(); /* counts from the next task on */
    }
    /* Relaxed: written here alone. */
    mn_a64_store_relaxed(&me->busy_ns, mn_a64_load_relaxed(&me->busy_ns) + t->wall_ns);
    mn_a64_store_relaxed(&me->cpu_ns, mn_a64_load_relaxed(&me->cpu_ns) + t->cpu_ns);
    uint64_t rows = w->held.kind != MN_KIND_COLLATE ? w->held.nrows : 0; /* counted by its parts */
    mn_a64_store_relaxed(&me->rows_done, mn_a64_load_relaxed(&me->rows_done) + rows);
}

/* ---- the entry of a worker that is a thread ---- */

bool
mn_entry_over(const struct mn_worker_side *w)
{
    const struct mn_ctl *c = w->shm.ctl;
    return mn_a32_load_seqcst(&c->stop) != 0 || mn_a32_load_seqcst(&c->dismissed) != 0;
}

static void
come(struct mn_worker_side *w)
{
    w->lease_off = w->lease_end = w->used_end = 0; /* those of its last life were taken back */
    mn_a32_store_relaxed(&w->me->tid, mn_thread_number());
    mn_worker_set_owner(w->me, mn_worker_starts(w->me) + 1, (uint32_t)getpid());
    mn_a32_store_relaxed(&w->me->exit_status, 0);
    w->me->began = 1;
    mn_a32_store_seqcst(&w->me->state, MN_WORKER_READY); /* [R1] */
}

/* Returns whether there is nothing to do here before another thread moves the entry. */
static bool
must_wait(const struct mn_worker_side *w)
{
    uint32_t state = mn_a32_load_seqcst(&w->me->state);
    return !mn_entry_over(w) && (state == MN_WORKER_EMPTY || state == MN_WORKER_EXITED);
}

bool
mn_entry_await(struct mn_worker_side *w)
{
    struct mn_worker *me = w->me;
    while (!mn_entry_over(w)) {
        uint32_t state = mn_a32_load_acquire(&me->state);
        if (state == MN_WORKER_READY || state == MN_WORKER_WANTED) {
            return true;
        }
        if (state == MN_WORKER_SWEPT) {
            mn_a32_store_seqcst(&me->state, MN_WORKER_EMPTY);
            continue;
        }
        /* EMPTY or EXITED: no thread's entry is ever STARTING. */
        mn_event_prepare_wait(&me->event);
        if (must_wait(w)) {
            (void)mn_event_commit_wait(&me->event, MN_WORKER_IDLE_NS);
        }
        else {
            mn_event_cancel_wait(&me->event);
        }
    }
    return false;
}

bool
mn_entry_begin(struct mn_worker_side *w)
{
    if (!mn_entry_await(w)) {
        return false;
    }
    if (mn_a32_load_acquire(&w->me->state) == MN_WORKER_WANTED) {
        come(w);
    }
    return true;
}

void
mn_entry_leave(struct mn_worker_side *w)
{
    bool ended = mn_a32_load_seqcst(&w->me->exit_request) == MN_EXIT_ENDED;
    if (ended) {
        mn_a32_store_seqcst(&w->me->exit_request, 0); /* so that it counts as a death */
    }
    mn_a32_store_relaxed(&w->me->exit_status, (uint32_t)(ended ? -SIGTERM : 0));
    mn_a32_store_seqcst(&w->me->state, MN_WORKER_EXITED); /* [S1] */
    mn_event_notify(&w->shm.ctl->engine);
}
