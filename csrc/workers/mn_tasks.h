/* mn_tasks.h - the trainer's side of the task descriptors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns which descriptors are free, where each was published, with which generation and how often
 * it may be again, what was read of a finished one, and the death that each lost one was lost by;
 * also the trainer's side of the queues.  All of it private memory: the descriptor itself is where
 * workers write, too.
 *
 * The task words are the truth (mn_records.h, mn_runqueue.h), of a task that workers know of.  One
 * that its worker will not finish is published again on the express queue with a new generation,
 * as often as it may be tried; then it is LOST, which ends its batch with an error.  A word that
 * makes no sense tells nobody who runs the task: it is *quarantined* until that is nobody, and
 * RUNNING to whoever asks (engine/mn_quarantine.h).  No task is left in between.
 *
 * Lock.  None of its own: all of it under the lock of whoever owns it, but for reading a result
 * that was accepted, which is whose the batch is.  No system call.
 */
#ifndef MN_TASKS_H
#define MN_TASKS_H

#include <stdbool.h>
#include <stdint.h>

#include "workers/mn_runqueue.h"
#include "workers/mn_records.h"

/* What of a worker's records makes no sense. Numbers of minato/errors.py. */
enum mn_damage {
    MN_SOUND = 0,
    MN_DAMAGE_WORD = 1,     /* the state of a task */
    MN_DAMAGE_TIMES = 2,    /* when it was done, and how long it took */
    MN_DAMAGE_REPORTS = 3,  /* what it says of rows */
    MN_DAMAGE_ENVELOPE = 4, /* where its result lies */
    MN_DAMAGE_PARTS = 5,    /* what that consists of */
    MN_DAMAGE_LEASE = 6,    /* what room it has used and asks for */
    MN_DAMAGE_STATE = 7,    /* the state of its process */
};

/* Exit status in place of that of a worker which could not be made: this and the error. */
#define MN_STATUS_NOT_STARTED 1000
/* In place of that of one which was told to leave: this and the damage. */
#define MN_STATUS_DAMAGED 2000

/* A worker's death, for messages. */
struct mn_death {
    uint32_t worker;
    uint32_t pid;
    int32_t status;
    uint64_t row; /* of its batch, that it was at, as it said itself; MN_NO_ROW: unknown */
};

#define MN_NO_ROW UINT64_MAX

/* Whether workers know of a task. */
enum mn_published {
    MN_PUBLISHED_NOT = 0, /* in nobody's hands yet */
    MN_PUBLISHED_NOW = 1, /* on its way to a queue: its word may be the one of before */
    MN_PUBLISHED = 2,
    MN_PUBLISHED_WAITS = 3, /* to workers by its word alone, which is WAITING */
    MN_PUBLISHED_QUARANTINED = 4, /* its word is damaged, and a worker may run it still */
    MN_PUBLISHED_LOST = 5, /* and given up */
    MN_PUBLISHED_ACCEPTED = 6, /* and DONE: what its worker said was read, and is believed once */
};

#define MN_NO_QUEUE UINT32_MAX

/* A finished task's record, as it was when it was accepted, and what the trainer itself has
 * put there. */
struct mn_result {
    uint64_t block_off;   /* the trainer's, as the next three */
    uint32_t row0, nrows;
    uint32_t kind;
    uint32_t flags;
    uint32_t worker;
    bool accepted;
    bool damaged;          /* of a quarantined one: it is known that whoever names it may lie */
    uint32_t retries_left; /* the trainer's, as all below up to published */
    uint32_t queue;        /* of its last entry, or MN_NO_QUEUE, */
    uint64_t at;           /* and the count of that */
    mn_a32 published; /* enum mn_published. The trainer's; seq_cst, as the words, [T3] */
    uint64_t env_off, env_len;
    uint64_t wall_ns, cpu_ns, done_ns;
    uint64_t issue; /* of mn_envelope_seal.h: what an envelope must be an answer to */
    struct mn_envelope envelope;
};

struct mn_tasks {
    struct mn_shm shm;
    uint32_t nfree;
    uint32_t *free;            /* [nfree], with room for all */
    uint32_t *gens;            /* [ntasks] */
    struct mn_death *lost;     /* [ntasks], of tasks that are LOST */
    struct mn_result *results; /* [ntasks] */
    struct mn_queue_head *heads; /* [nqueues] */
    uint32_t max_retries;
    uint32_t nquarantined;
    uint64_t retries;          /* tasks that were published again for a death, so far */
};

/* All descriptors of the mapping are free. 0 or -ENOMEM; to be closed in any case. */
int
mn_tasks_open(struct mn_tasks *t, const struct mn_shm *shm, uint32_t max_retries);

void
mn_tasks_close(struct mn_tasks *t);

/* A free descriptor, for rows of a block; it is PLANNED. There has to be one. */
uint32_t
mn_tasks_take(struct mn_tasks *t, uint64_t block_off, uint32_t kind, uint32_t row0,
              uint32_t nrows);

/* One that waits until the others of its block are done, on no queue. */
uint32_t
mn_tasks_take_collate(struct mn_tasks *t, uint64_t block_off, uint32_t nrows);

/* It is in nobody's hands, and free again. */
void
mn_tasks_give(struct mn_tasks *t, uint32_t task);

/* Its word. Of a task that no worker may claim, or that was accepted, it is what the trainer knows,
 * whatever a worker may have written there. Else what makes no sense is MN_TASK_FREE: a status
 * that there is not, or that only the trainer gives and has not given, and a worker that there is
 * not. */
static inline uint64_t
mn_tasks_word(const struct mn_tasks *t, uint32_t task)
{
    const struct mn_result *r = &t->results[task];
    uint32_t published = mn_a32_load_seqcst(&r->published);
    if (published == MN_PUBLISHED_NOT || published >= MN_PUBLISHED_QUARANTINED) {
        enum mn_task_status st = published == MN_PUBLISHED_NOT        ? MN_TASK_PLANNED
                                 : published == MN_PUBLISHED_LOST     ? MN_TASK_LOST
                                 : published == MN_PUBLISHED_ACCEPTED ? MN_TASK_DONE
                                                                      : MN_TASK_RUNNING;
        return mn_task_word(0, MN_TASK_NOBODY, 0, st);
    }
    uint64_t word = mn_a64_load_seqcst(&mn_task_at(&t->shm, task)->word); /* [T3], [T4] */
    enum mn_task_status st = mn_word_status(word);
    bool held = st == MN_TASK_RUNNING || st == MN_TASK_DONE;
    bool lie = st > MN_TASK_WAITING || st == MN_TASK_CANCELLED || st == MN_TASK_LOST
               || (st == MN_TASK_PLANNED && published != MN_PUBLISHED_NOW)
               || (st == MN_TASK_WAITING && published != MN_PUBLISHED_WAITS)
               || (held && mn_word_worker(word) >= t->shm.ctl->nworkers);
    return lie ? word - (uint64_t)st + MN_TASK_FREE : word;
}

/* Puts a task on a queue for the first time. MN_OK or MN_FULL. */
int
mn_tasks_publish(struct mn_tasks *t, uint32_t task, uint32_t queue);

/* Puts a task that was taken from a queue on another one, for others to claim; not one that was
 * accepted. */
void
mn_tasks_put(struct mn_tasks *t, uint32_t task, uint32_t queue);

/* Queues whose hints a worker has damaged: what they hide is found again. Whether any was. */
bool
mn_tasks_mend_queues(struct mn_tasks *t);

/* A task that its worker will not finish: somebody else tries, or it is lost with that death. One
 * that collates what is not there yet waits for that. */
void
mn_tasks_take_back(struct mn_tasks *t, uint32_t task, const struct mn_death *death);

/* Its word is damaged: it is RUNNING to the trainer, and no worker can claim it, until it is taken
 * back. False, and nothing done, where one has just claimed it. */
bool
mn_tasks_quarantine(struct mn_tasks *t, uint32_t task, uint64_t word);

static inline bool
mn_tasks_is_quarantined(const struct mn_tasks *t, uint32_t task)
{
    return mn_a32_load_relaxed(&t->results[task].published) /* ours */
           == MN_PUBLISHED_QUARANTINED;
}

/* Nobody wants it any more: it is in nobody's hands where no worker has claimed it, and who has
 * will be the last. */
void
mn_tasks_abandon(struct mn_tasks *t, uint32_t task);

/* Whether a word that says QUEUED is true: an entry that may be claimed stands for it. The head
 * passes no other, so that this is no question of when it is asked. */
bool
mn_tasks_is_queued(const struct mn_tasks *t, uint32_t task, uint64_t word);

/* Moves on what a dead worker had: its running tasks, and what waits on its own queue, which is
 * only meant for it and goes to others, or which only it may do and nobody will. */
void
mn_tasks_sweep(struct mn_tasks *t, uint32_t worker, bool only_it, const struct mn_death *death);

/* Whether the parts of a collate task's block are all done. */
bool
mn_tasks_parts_done(const struct mn_tasks *t, struct mn_block *block);

/* The collate task of a block whose other tasks are all done: the dead may have ended the last
 * part and not claimed it, and nobody else will. A living worker that is just about to finds it
 * cancelled. */
void
mn_tasks_publish_collate(struct mn_tasks *t, struct mn_block *block,
                         const struct mn_death *death);

#endif
