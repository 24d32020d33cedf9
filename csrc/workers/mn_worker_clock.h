/* mn_worker_clock.h - what a task has cost its worker, by both clocks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owned by the worker's thread, as its entry's counters are.
 */
#ifndef MN_WORKER_CLOCK_H
#define MN_WORKER_CLOCK_H

#include "workers/mn_worker.h"

struct mn_worker_clock {
    uint64_t begin_ns;     /* of the task in hand */
    uint64_t lap_ns;       /* when the last of its rows was done that was timed, or it began */
    uint64_t cpu_begin_ns; /* CPU time of this thread then; 0: not looked at, because the
                            * tasks are so cheap. */
};

/* The thread has waited, or just begun: what that has cost is not the next task's. */
void
mn_worker_waited(struct mn_worker_clock *clock);

/* The claimed task's time begins. */
void
mn_worker_begin(struct mn_worker_side *w, struct mn_worker_clock *clock);

/* How long it is since the task began, or since this was asked last: what a row has taken. */
uint64_t
mn_worker_lap(struct mn_worker_clock *clock);

/* And ends: into the task and the entry's counters. Before mn_worker_done. */
void
mn_worker_account(struct mn_worker_side *w, struct mn_worker_clock *clock, uint32_t task);

#endif
