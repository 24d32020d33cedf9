/* mn_worker.h - the worker's side: claim a task, get memory, publish. One thread per worker.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker owns only the task that it has RUNNING and its lease (mn_records.h). It waits on its own
 * event, never longer than the given time, so that its caller can check whether the trainer still
 * lives.
 */
#ifndef MN_WORKER_H
#define MN_WORKER_H

#include <stdbool.h>

#include "os/mn_proc.h"
#include "workers/mn_records.h"

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

/* Claims a task. Returns MN_OK, MN_EMPTY after timeout_ns without one, or MN_CLOSED on stop. */
int
mn_worker_claim(struct mn_worker_side *w, int64_t timeout_ns, uint32_t *task);

/* Returns whether the loader is closed: then no task is claimed any more. */
static inline bool
mn_worker_stopped(const struct mn_worker_side *w)
{
    return mn_a32_load_seqcst(&w->shm.ctl->stop) != 0;
}

/* Gets memory for an envelope, page aligned, and waits for it if necessary: mn_worker_lease.c.
 * Returns 0, -ENOMEM (refused), or MN_CLOSED (the loader was stopped or dismissed meanwhile, or its
 * process is gone). */
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
