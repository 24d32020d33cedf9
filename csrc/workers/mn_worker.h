/* mn_worker.h - the worker's side: claim, find room, publish. One thread a worker.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker owns nothing but the task it has RUNNING and its lease (mn_records.h).
 * It waits on its own event, never longer than the given time, so that its caller can look
 * whether the trainer still lives.
 */
#ifndef MN_WORKER_H
#define MN_WORKER_H

#include "os/mn_lifeline.h"
#include "workers/mn_records.h"

/* Who sleeps for want of work looks this often whether the trainer still lives. So long at most a
 * notification is late whose notifier is held up off its core: mn_event.h. */
#define MN_WORKER_IDLE_NS (INT64_C(1000) * 1000 * 1000)

struct mn_worker_side {
    struct mn_shm shm;
    uint32_t number;
    struct mn_worker *me;
    const struct mn_lifeline_end *trainer; /* NULL: a thread of the trainer */
    struct mn_task held; /* of the task in hand what the trainer wrote, as it was when it was
                          * claimed: what writes over the record leads nobody astray */
    uint64_t lease_off, lease_end, used_end;
    bool begun;         /* it has finished a task */
    uint64_t epoch;     /* of the last sample that it made, */
    uint64_t position;  /* and the place after it in the sampler's order */
};

/* 0, or -EPROTO when the mapping was made by another version of this code. */
int
mn_worker_attach(struct mn_worker_side *w, const struct mn_shm *shm, uint32_t number);

/* Claims a task without waiting. MN_OK, MN_EMPTY, MN_CLOSED on stop. */
int
mn_worker_try(struct mn_worker_side *w, uint32_t *task);

/* Claims a task. MN_OK, MN_EMPTY after timeout_ns without one, MN_CLOSED on stop. */
int
mn_worker_claim(struct mn_worker_side *w, int64_t timeout_ns, uint32_t *task);

/* Whether the loader is closed, and nothing is claimed any more. */
static inline bool
mn_worker_stopped(const struct mn_worker_side *w)
{
    return mn_a32_load_seqcst(&w->shm.ctl->stop) != 0;
}

/* Room for an envelope, page aligned; waits for it: mn_worker_room.c. 0, -ENOMEM (refused),
 * MN_CLOSED (the loader was stopped or dismissed meanwhile, or its process is gone). */
int
mn_worker_room(struct mn_worker_side *w, uint64_t bytes, uint64_t *off);

#define MN_NO_TASK UINT32_MAX

/* RUNNING -> DONE, and tells the trainer if it waits for this. Returns the collate task of
 * the block when that was its last part: RUNNING in this worker's hands. Else MN_NO_TASK. */
uint32_t
mn_worker_done(struct mn_worker_side *w, uint32_t task);

#endif
