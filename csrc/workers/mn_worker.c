/* mn_worker.c - see mn_worker.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_worker.h"

#include <errno.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_fault.h"
#include "base/mn_error.h"
#include "workers/mn_runqueue.h"
#include "os/mn_clock.h"

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
low_water(const struct mn_worker_side *w)
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
    if (mn_worker_stopped(w) || mn_a32_load_seqcst(&w->me->exit_request) != 0) {
        return MN_CLOSED;
    }
    int rc = mn_runqueue_claim(&w->shm, w->number, task);
    if (rc == MN_OK) {
        hold(w, *task);
    }
    /* Even if there was nothing. Two workers that claim at once may leave the hint behind, and then
     * neither of them saw the run queues run low. */
    low_water(w);
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
    if (mn_word_status(seen) != MN_TASK_WAITING || mn_worker_stopped(w)) {
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
