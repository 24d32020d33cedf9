/* mn_worker.h - the worker's side: claim a task, get memory, publish. One thread per worker.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker owns only the task that it has RUNNING and its lease (mn_records.h). It waits on its own
 * event, never longer than the given time, so that its caller can check whether the trainer still
 * lives.
 */
#ifndef MN_WORKER_H
#define MN_WORKER_H

#include "os/mn_lifeline.h"
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

#endif
