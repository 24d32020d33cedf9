/* mn_worker.c - see mn_worker.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE

#include "workers/mn_worker.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "base/mn_fault.h"
#include "os/mn_clock.h"
#include "os/mn_thread.h"
#include "workers/mn_runqueue.h"

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

/* ---- memory for a result outside of rows ---- */

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
        if (st != MN_LEASE_WANT || mn_worker_stopped(w)
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
