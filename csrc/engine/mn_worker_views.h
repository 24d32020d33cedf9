/* mn_worker_views.h - what each worker does now, and what waits on its own queue.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The plan decides by numbers (struct mn_worker_view in mn_plan.h); this file reads them from the
 * mapping, where workers write them. No value read there is used as an index unchecked. No task is
 * given to an entry that has no worker according to the crew. All functions need the engine's
 * mutex.
 */
#ifndef MN_WORKER_VIEWS_H
#define MN_WORKER_VIEWS_H

#include "schedule/mn_plan.h"
#include "workers/mn_crew.h"
#include "workers/mn_tasks_and_retries.h"

/* A worker that has tasks on its own queue but runs none. */
struct mn_worker_rest {
    uint64_t hint;     /* the queue's hint when this was first seen */
    uint64_t since_ns; /* when this was first seen; 0: not so */
};

struct mn_worker_views {
    const struct mn_shm *shm;
    const struct mn_crew *crew;
    struct mn_worker_view *view; /* [workers] at the last look, updated with what was done since */
    struct mn_worker_rest *rest; /* [workers] */
    int64_t *sent_ns;            /* [descriptors] expected time of tasks on workers' own queues */
    uint64_t looked_ns;          /* time of the last look */
};

/* Returns 0 or -ENOMEM; close it in either case. */
int
mn_worker_views_open(struct mn_worker_views *v, const struct mn_shm *shm,
                     const struct mn_crew *crew);

void
mn_worker_views_close(struct mn_worker_views *v);

/* Reads the state of all workers. */
void
mn_worker_views_look(struct mn_worker_views *v, uint64_t now_ns);

/* Records that a task expected to take cost_ns was put on the worker's own queue. */
void
mn_worker_views_sent(struct mn_worker_views *v, uint32_t w, uint32_t task, int64_t cost_ns);

/* Moves the tasks that wait on a worker's own queue to another queue. Returns their number. */
uint32_t
mn_worker_views_withdraw(struct mn_worker_views *v, struct mn_tasks *tasks, uint32_t w,
                         uint32_t queue);

/* Returns the number of queued and unclaimed tasks: an estimate. own: includes the workers' own
 * queues. */
uint64_t
mn_worker_views_queued(const struct mn_shm *shm, bool own);

/* Returns for how long the batch's longest running task has run; -1: none is running. */
int64_t
mn_worker_views_running_ns(const struct mn_shm *shm, uint64_t block_off, uint64_t now_ns);

#endif
