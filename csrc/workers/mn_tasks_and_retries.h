/* mn_tasks_and_retries.h - the life of a task: queued by the trainer, claimed and done by a worker,
 * or taken back after its worker's death and tried again.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The records are in mn_records.h. This is what both sides do with them: the queues, the trainer's
 * table of tasks, a worker's side, and the memory that workers lease for results outside of rows.
 *
 * The task word is the truth. A task that its worker will not finish is published again on the
 * express queue with a new generation, up to its number of retries. Then it is LOST, which ends its
 * batch with an error. No task is left in between.
 *
 * Lock. None of its own. The trainer's functions need the lock that guards the arena, except to
 * read an accepted result, which belongs to the owner of the batch. They make no system call. A
 * worker's functions need no lock: one thread per worker calls them.
 */
#ifndef MN_TASKS_AND_RETRIES_H
#define MN_TASKS_AND_RETRIES_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/mn_arena.h"
#include "os/mn_proc.h"
#include "workers/mn_records.h"

/* ---- the queues: the claim order, filled by the trainer, emptied by workers ----
 *
 * Actors. One producer (the trainer, under the engine's mutex); any number of workers.
 *
 * A queue is a ring of 64-bit entries {generation, task number}.  An entry is only advice: the task
 * word decides. A worker reads entries from the queue's hint on. It claims the first whose task
 * word is QUEUED with the entry's generation, by one compare-and-swap QUEUED -> RUNNING(worker). So
 * a worker that dies anywhere either owns the task or does not.
 *
 * Before the claim, a worker writes in its own entry which task it is about to claim [A1]. A task
 * that no entry names is owned by no worker, whatever a worker may have written over its word.
 *
 * Owners. tail and the ring: trainer. hint: any worker, forward only (CAS from the value it
 * scanned from). Task words: see mn_records.h.
 *
 * Invariants.
 *   I1  An entry whose task was seen not QUEUED with the entry's generation never becomes claimable
 *       again. A re-issue moves the generation and writes a new entry. Hence a worker may move the
 *       hint past every entry that it has seen in that state.
 *   I2  The producer never overwrites an entry that is still claimable. It has its own
 *       head, moves it over entries that are not claimable, and refuses (MN_FULL) when the
 *       ring is full between head and tail.
 *
 * Order pairs.
 *   [P1] publish: tail, seq_cst store     with [P2] claim: tail, seq_cst load: the entry and,
 *        through [T1], the task and its block are seen. seq_cst because the publisher looks
 *        at sleepers' events next (mn_event.h: publish, then look).
 *   [P3] claim: hint, seq_cst CAS         with [P4] the engine: hint, seq_cst load, between
 *        prepare_wait and commit_wait. A worker that takes the run queues below the low water
 *        mark notifies the engine next (mn_event.h): the engine sees the hint, or is notified.
 *   [T1]/[T2] the task word itself, see mn_records.h.
 *   Relaxed: entries themselves (ordered by tail). As advice to claims the hint needs no
 *   order: a stale one costs a longer scan, and I1 makes a too-new one impossible.
 *
 * Wrap. tail and hint are 64-bit counts and do not wrap; positions are taken modulo the ring.
 *   A worker that stalls between reading tail and an entry may read a newer entry at that
 *   place. That is just as good: the CAS decides.
 *
 * Crash. A worker killed before its CAS leaves only its entry's statement, until it is swept. After
 * the CAS, it leaves a RUNNING word that names it.
 *
 *   may run at once      publish   claim   cancel
 *   publish                no        yes     no
 *   claim                  yes       yes     yes
 *   cancel (trainer)       no        yes     no
 */

/* The trainer's private side of a queue. */
struct mn_queue_head {
    uint64_t head;
};

/* Returns the entries of a worker's own queue that may wait to be claimed: counts from *first up
 * to, but not including, the returned one. */
uint64_t
mn_runqueue_own_entries(const struct mn_shm *shm, uint32_t queue, uint64_t *first);

/* Returns whether the entry of a queue at a count before its tail waits to be claimed, and which
 * task it names. An entry may have been claimed, or taken back, while those before it wait. */
bool
mn_runqueue_waits(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task);

/* Returns how many entries of a worker's own queue wait to be claimed. */
uint64_t
mn_runqueue_waiting(const struct mn_shm *shm, uint32_t queue);

/* Takes back the task of an entry of a queue, at a count before its tail, if no worker has claimed
 * it. Returns whether it did, and which task. */
bool
mn_runqueue_withdraw(const struct mn_shm *shm, uint32_t queue, uint64_t at, uint32_t *task);

/* ---- the trainer's table of tasks ----
 *
 * Owns which descriptors are free; where each task was published, with which generation, and how
 * often it may be retried. Also owns the accepted results, and the death by which each lost task
 * was lost. It owns the trainer's side of the queues, too. All of it is private memory, because
 * workers write to the descriptors, too.
 */

/* Which part of a worker's records makes no sense. The numbers are those of minato/errors.py. */
enum mn_damage {
    MN_SOUND = 0,
    MN_DAMAGE_WORD = 1,     /* the state of a task */
    MN_DAMAGE_TIMES = 2,    /* when it was done, and how long it took */
    MN_DAMAGE_REPORTS = 3,  /* its reports on rows */
    MN_DAMAGE_ENVELOPE = 4, /* the place of its result */
    MN_DAMAGE_PARTS = 5,    /* the parts of its result */
    MN_DAMAGE_LEASE = 6,    /* the memory that it has used and asks for */
};

/* Exit status of a worker that could not be started: this plus the errno. */
#define MN_STATUS_NOT_STARTED 1000
/* Exit status of a worker that was ended for damage: this plus enum mn_damage. */
#define MN_STATUS_DAMAGED 2000
/* Exit status of a worker that was ended because a sample took too long. */
#define MN_STATUS_LATE 3000

/* A worker's death, for messages. */
struct mn_death {
    uint32_t worker;
    uint32_t pid;
    int32_t status;
    uint64_t row; /* row of its batch on which it worked, by its own entry; or MN_NO_ROW */
};

#define MN_NO_ROW UINT64_MAX

#define MN_NO_QUEUE UINT32_MAX

/* The record of a finished task, as it was when it was accepted, together with the trainer's own
 * fields. */
struct mn_result {
    uint64_t block_off;   /* by the trainer, like the next three; 0: the descriptor is free */
    uint32_t row0, nrows;
    uint32_t kind;
    uint32_t flags;
    uint32_t worker;
    bool accepted;         /* its results were read, and are never read again */
    uint32_t retries_left; /* written by the trainer, like queue */
    uint32_t queue;        /* of its last entry, or MN_NO_QUEUE */
    uint64_t env_off, env_len;
    uint64_t wall_ns, cpu_ns, done_ns;
    struct mn_envelope envelope;
};

struct mn_tasks {
    struct mn_shm shm;
    uint32_t nfree;
    uint32_t *free;            /* [nfree], with space for all */
    uint32_t *gens;            /* [ntasks] */
    struct mn_death *lost;     /* [ntasks], for tasks that are LOST */
    struct mn_result *results; /* [ntasks] */
    struct mn_queue_head *heads; /* [nqueues] */
    uint32_t max_retries;
    uint64_t retries;          /* tasks published again after a death, so far */
};

/* Opens the table with all descriptors of the mapping free. Returns 0 or -ENOMEM; close it in
 * either case. */
int
mn_tasks_open(struct mn_tasks *t, const struct mn_shm *shm, uint32_t max_retries);

void
mn_tasks_close(struct mn_tasks *t);

/* Takes a free descriptor, which must exist, for rows of a block. It is PLANNED. */
uint32_t
mn_tasks_take(struct mn_tasks *t, uint64_t block_off, uint32_t kind, uint32_t row0,
              uint32_t nrows);

/* Takes one that waits, on no queue, until the others of its block are done. */
uint32_t
mn_tasks_take_collate(struct mn_tasks *t, uint64_t block_off, uint32_t nrows);

/* Frees a descriptor that no worker has. */
void
mn_tasks_give(struct mn_tasks *t, uint32_t task);

/* Returns the word of a task that is not free. If its status or its worker does not exist, a worker
 * has overwritten it: it reads as RUNNING by MN_TASK_NOBODY until it is swept. */
static inline uint64_t
mn_tasks_word(const struct mn_tasks *t, uint32_t task)
{
    uint64_t word = mn_a64_load_seqcst(&mn_task_at(&t->shm, task)->word); /* [T3], [T4] */
    enum mn_task_status st = mn_word_status(word);
    bool held = st == MN_TASK_RUNNING || st == MN_TASK_DONE;
    bool exists = st != MN_TASK_FREE && st <= MN_TASK_WAITING
                  && (!held || mn_word_worker(word) < t->shm.ctl->nworkers);
    return exists ? word
                  : mn_task_word(mn_word_gen(word), MN_TASK_NOBODY, 0, MN_TASK_RUNNING);
}

/* Puts a task on a queue for the first time. Returns MN_OK or MN_FULL. */
int
mn_tasks_publish(struct mn_tasks *t, uint32_t task, uint32_t queue);

/* Puts a task that was taken from a queue on another one, for other workers to claim. */
void
mn_tasks_put(struct mn_tasks *t, uint32_t task, uint32_t queue);

/* Makes a DONE task, whose record is damaged, RUNNING by the same worker again. The sweep of that
 * worker takes it back. */
void
mn_tasks_reject(struct mn_tasks *t, uint32_t task, uint64_t word);

/* Abandons a task. If no worker has claimed it, no worker gets it any more; else its present worker
 * is the last. */
void
mn_tasks_abandon(struct mn_tasks *t, uint32_t task);

/* Takes back a dead worker's tasks: those it was running, and those that wait on its own queue. The
 * latter go to others, or are lost if only_it could run them. late: the word of a task that is not
 * retried, because the worker was ended for it; 0: none. Also takes back tasks with overwritten
 * words that no other worker's entry names: a worker that finds its word overwritten dies. */
void
mn_tasks_sweep(struct mn_tasks *t, uint32_t worker, bool only_it, const struct mn_death *death,
               uint64_t late);

/* Publishes the collate task of a block whose other tasks are all done. A dead worker may have
 * ended the last part without claiming it, and no other worker will claim it. A living worker that
 * is just about to claim it finds it cancelled. */
void
mn_tasks_publish_collate(struct mn_tasks *t, struct mn_block *block,
                         const struct mn_death *death);

/* ---- leases: the arena memory of each worker for results that do not fit in rows ----
 *
 * Owns, in private memory, what each worker was granted and no accepted envelope has taken: the
 * worker owes that. An envelope must lie in memory that its worker owes. So no record, whatever
 * it contains, frees memory of others, or frees memory twice. When a worker is dead, all that it
 * owes is freed.
 *
 * A worker asks by lease_state WANT [L1] and sleeps on its lease event. The answer is stored here
 * [L3], and the owner of this struct notifies that event after it has released its lock.
 */

struct mn_arena_lease {
    uint64_t off, len;     /* the present lease; len 0: none */
    struct mn_ranges owed; /* what no accepted envelope has taken of this and earlier leases */
};

struct mn_arena_leases {
    struct mn_shm shm;
    struct mn_arena *arena;
    struct mn_arena_lease *at; /* [nworkers] */
    uint64_t grain;            /* bytes of a lease, unless its worker wants more */
};

/* Returns 0 or -ENOMEM. The arena must have its limit by now, and must outlive this. */
int
mn_arena_leases_open(struct mn_arena_leases *l, const struct mn_shm *shm, struct mn_arena *arena);

/* Frees the records. Granted memory is the arena's. */
void
mn_arena_leases_close(struct mn_arena_leases *l);

/* Returns whether the worker waits for an answer. */
bool
mn_arena_leases_wanted(const struct mn_arena_leases *l, uint32_t worker);

/* Returns whether a worker's statements about its lease make sense: the end of its used part, and
 * how much it wants. */
bool
mn_arena_leases_sound(const struct mn_arena_leases *l, uint32_t worker, uint64_t used_end,
                      uint64_t want);

/* Frees the rest of its lease, behind used_end. */
void
mn_arena_leases_end(struct mn_arena_leases *l, uint32_t worker, uint64_t used_end);

/* Grants len bytes, or refuses them if the arena does not have them. The worker must have no
 * lease. */
void
mn_arena_leases_grant(struct mn_arena_leases *l, uint32_t worker, uint64_t len);

/* Refuses a request: it can never be granted. */
void
mn_arena_leases_refuse(struct mn_arena_leases *l, uint32_t worker);

/* Removes the range from what the worker owes. Returns 0; -EINVAL: it does not owe that;
 * -ENOMEM. */
int
mn_arena_leases_take(struct mn_arena_leases *l, uint32_t worker, uint64_t off, uint64_t bytes);

/* Frees all that the worker owes. The worker must be dead. */
void
mn_arena_leases_forget(struct mn_arena_leases *l, uint32_t worker);

/* ---- a worker's side ----
 *
 * A worker owns only the task that it has RUNNING and its lease (mn_records.h). It waits on its own
 * event, never longer than the given time, so that its caller can check whether the trainer still
 * lives.
 */

/* A worker without tasks checks this often whether the trainer still lives. It also bounds the
 * delay of a notification whose notifier is held up off its core: mn_event.h. */
#define MN_WORKER_IDLE_NS (INT64_C(1000) * 1000 * 1000)

struct mn_worker_side {
    struct mn_shm shm;
    uint32_t number;
    struct mn_worker *me;
    const struct mn_lifeline_end *trainer; /* NULL: a thread of the trainer */
    struct mn_task held; /* the trainer's fields of the current task, copied when it was claimed: a
                          * stray write to the record does no harm */
    uint64_t lease_off, lease_end, used_end;
    bool begun;         /* it has made a sample, so epoch and position are known */
    uint64_t epoch;     /* of the last sample that it made */
    uint64_t position;  /* the place after that sample in the sampler's order */
};

/* Attaches to an entry. Returns 0, or -EPROTO if another version of this code made the mapping. */
int
mn_worker_attach(struct mn_worker_side *w, const struct mn_shm *shm, uint32_t number);

/* Claims a task without waiting. Returns MN_OK, MN_EMPTY, or MN_CLOSED on stop. */
int
mn_worker_try(struct mn_worker_side *w, uint32_t *task);

/* Claims a task. Returns MN_OK, MN_CLOSED on stop, or MN_EMPTY: after timeout_ns without
 * one, or when another worker took the one that it was woken for. */
int
mn_worker_claim(struct mn_worker_side *w, int64_t timeout_ns, uint32_t *task);

/* Gets memory for an envelope, page aligned, and waits for it if necessary. Returns 0, -ENOMEM
 * (refused), or MN_CLOSED (the loader was stopped or dismissed meanwhile, or its process is
 * gone). */
int
mn_worker_lease(struct mn_worker_side *w, uint64_t bytes, uint64_t *off);

#define MN_NO_TASK UINT32_MAX

/* Makes the task DONE, and notifies the trainer if it waits for this. If that was the last part of
 * the block, returns its collate task, which is then RUNNING in this worker; else MN_NO_TASK. */
uint32_t
mn_worker_done(struct mn_worker_side *w, uint32_t task);

/* ---- what a task has cost its worker, by both clocks ----
 *
 * Owned by the worker's thread, like its entry's counters.
 */

struct mn_worker_clock {
    uint64_t begin_ns;     /* start of the current task */
    uint64_t lap_ns;       /* when its last timed row was done, or it began */
    uint64_t cpu_begin_ns; /* CPU time of this thread at begin_ns; 0: not read, because the tasks
                            * are very cheap */
};

/* The thread has waited, or has just begun: that time does not count for the next task. */
void
mn_worker_waited(struct mn_worker_clock *clock);

/* Starts the clock of the claimed task. */
void
mn_worker_begin(struct mn_worker_side *w, struct mn_worker_clock *clock);

/* Returns the time since the task began, or since the last call: what a row has taken. */
uint64_t
mn_worker_lap(struct mn_worker_clock *clock);

/* Stops the clock, and adds the times to the task and the entry's counters. Call it before
 * mn_worker_done(). */
void
mn_worker_account(struct mn_worker_side *w, struct mn_worker_clock *clock, uint32_t task);

/* ---- the entry of a worker that is a thread of the trainer ----
 *
 * The thread manages the entry itself, because there is no zygote. WANTED -> READY: the thread
 * begins. READY -> EXITED: it was asked to exit. SWEPT -> EMPTY: the engine has looked. Then it
 * waits until it is wanted again. A thread cannot be killed, so the engine waits for its task and
 * never gives it to another worker. Only a thread that ends by its own error sets EXITED while it
 * runs a task.
 *
 * Only that thread calls these functions. It holds no lock and, where it waits, no GIL.
 */

/* Returns whether the loader closes, or the interpreter exits: the thread begins nothing more, and
 * does not publish its current task. */
bool
mn_entry_over(const struct mn_worker_side *w);

/* Waits until this worker is wanted; it is not READY yet. Returns false if it is over. */
bool
mn_entry_await(struct mn_worker_side *w);

/* Waits likewise, and makes it READY. Returns false if it is over. */
bool
mn_entry_begin(struct mn_worker_side *w);

/* The worker was asked to exit: ends in order, or as terminate() ends a process. */
void
mn_entry_leave(struct mn_worker_side *w);

#endif
