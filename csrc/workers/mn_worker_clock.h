/* mn_worker_clock.h - what a task has cost its worker, by both clocks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owned by the worker's thread, like its entry's counters.
 */
#ifndef MN_WORKER_CLOCK_H
#define MN_WORKER_CLOCK_H

#include "workers/mn_worker.h"

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

#endif
