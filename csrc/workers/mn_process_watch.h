/* mn_process_watch.h - the trainer's own observation of workers' processes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The zygote reports deaths, and workers write in their entries who they are. Neither is enough. A
 * zygote that is stopped or hangs reports nothing. A worker's stray writes may make its entry say
 * anything, even that it is dead. So the crew records which process has which entry (struct
 * mn_member). It checks now and then whether the process lives, takes back a worker's tasks only
 * when it does not, and kills it by that record.
 *
 * Each look uses a descriptor of the process (os/mn_proc.h), opened for it and closed again, so
 * that descriptors do not grow with workers. All of this runs without the lock that guards the
 * crew (guard), which is taken for fields that other threads read. Only one thread may call this:
 * the one that sweeps. It passes the time. Native workers have no process of their own, and are
 * not watched.
 */
#ifndef MN_PROCESS_WATCH_H
#define MN_PROCESS_WATCH_H

#include "os/mn_thread.h"
#include "workers/mn_crew.h"

struct mn_watch {
    struct mn_crew *crew;
    struct mn_mutex *guard;
    uint64_t looked_ns;   /* time of the last look at all workers */
    /* Numbers of looks in a row without a new process of the executor: */
    uint32_t unanswered;          /* at which it owed an answer */
    uint32_t looks_without_start; /* at which a worker was to be started */
    uint32_t starts_seen;         /* processes that it had started at that time */
    uint32_t hung; /* zygotes in a row that were ended because they hung */
};

void
mn_watch_init(struct mn_watch *w, struct mn_crew *crew, struct mn_mutex *guard);

/* Checks which processes live, and whether their executor answers. Call it before each round of
 * sweeps, without guard. */
void
mn_watch_look(struct mn_watch *w, uint64_t now_ns);

#endif
