/* mn_tasks_and_retries.h - the trainer's side of the task descriptors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns which descriptors are free; where each task was published, with which generation, and how
 * often it may be retried. Also owns the accepted results, and the death by which each lost task
 * was lost. It owns the trainer's side of the queues, too. All of it is private memory, because
 * workers write to the descriptors, too.
 *
 * The task word is the truth (mn_records.h, mn_runqueue.h). A task that its worker will not finish
 * is published again on the express queue with a new generation, up to its number of retries. Then
 * it is LOST, which ends its batch with an error. No task is left in between.
 *
 * Lock. None of its own: all functions need the owner's lock, except to read an accepted result,
 * which belongs to the owner of the batch. No system call.
 */
#ifndef MN_TASKS_H
#define MN_TASKS_H

#include <stdbool.h>
#include <stdint.h>

#include "workers/mn_runqueue.h"
#include "workers/mn_records.h"

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

/* Takes back a task that its worker will not finish: another worker retries it, or it is lost with
 * that death. A collate task whose parts are not done waits for them. */
void
mn_tasks_take_back(struct mn_tasks *t, uint32_t task, const struct mn_death *death);

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

#endif
