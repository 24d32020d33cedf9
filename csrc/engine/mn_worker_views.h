/* mn_worker_views.h - what each worker does now, and what waits on its own queue.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The plan decides by numbers (struct mn_worker_view in mn_plan.h); here they are read off the
 * mapping, where workers write them: whatever they are, nothing is indexed by them unchecked, and
 * nobody is given anything where the crew knows that nobody is.
 * Under the engine's mutex.
 */
#ifndef MN_WORKER_VIEWS_H
#define MN_WORKER_VIEWS_H

#include "schedule/mn_plan.h"
#include "workers/mn_crew.h"
#include "workers/mn_tasks.h"

/* A worker that has something on its own queue and runs nothing. */
struct mn_worker_rest {
    uint64_t hint;     /* of its queue, when that was seen first, */
    uint64_t since_ns; /* and when; 0: it is not so */
};

struct mn_worker_views {
    const struct mn_shm *shm;
    const struct mn_crew *crew;
    struct mn_worker_view *view; /* [workers] at the last look, and what was done since */
    struct mn_worker_rest *rest; /* [workers] */
    int64_t *sent_ns;            /* [descriptors] what tasks on workers' own queues take */
    uint64_t looked_ns;          /* when the last look was */
};

/* 0 or -ENOMEM; to be closed in any case. */
int
mn_worker_views_open(struct mn_worker_views *v, const struct mn_shm *shm,
                     const struct mn_crew *crew);

void
mn_worker_views_close(struct mn_worker_views *v);

/* Looks at all workers. */
void
mn_worker_views_look(struct mn_worker_views *v, uint64_t now_ns);

/* A task that takes so long was put on the worker's own queue. */
void
mn_worker_views_sent(struct mn_worker_views *v, uint32_t w, uint32_t task, int64_t cost_ns);

/* Moves the tasks that wait on a worker's own queue to another one. Returns how many. */
uint32_t
mn_worker_views_withdraw(struct mn_worker_views *v, struct mn_tasks *tasks, uint32_t w,
                         uint32_t queue);

/* Tasks queued that nobody has claimed: an estimate. own: also on workers' own queues. */
uint64_t
mn_worker_views_queued(const struct mn_shm *shm, bool own);

/* For how long the task of a batch has run that runs longest; -1: none does. */
int64_t
mn_worker_views_running_ns(const struct mn_shm *shm, uint64_t block_off, uint64_t now_ns);

#endif
