/* mn_process_watch.h - workers' processes as the trainer sees them by itself.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The zygote reports deaths, and workers say in their entries who they are.  Neither is enough:
 * a zygote that is stopped or hangs reports nothing, and a worker that writes where it must not
 * may have its entry say anything, also that it is dead.  So the crew notes for itself which
 * process has which entry (struct mn_member), looks now and then whether it lives, takes back a
 * worker's tasks only when it does not, and kills it by what was noted.
 *
 * Each look is by a descriptor of the process (os/mn_proc.h), opened for it and closed, so that
 * descriptors do not grow with workers.  All of this is without the lock that guards the crew
 * (guard), which is taken for what others read.  One thread, and it is the one that sweeps.  It is
 * told the time.  Native workers have no process of their own, and are not looked at.
 */
#ifndef MN_PROCESS_WATCH_H
#define MN_PROCESS_WATCH_H

#include "os/mn_thread.h"
#include "workers/mn_crew.h"

struct mn_watch {
    struct mn_crew *crew;
    struct mn_mutex *guard;
    uint64_t looked_ns;   /* when all were looked at last */
    /* Looks in a row without another process that the executor has started. */
    uint32_t unanswered;    /* at which it owed an answer */
    uint32_t starts_nobody; /* at which somebody was to be started */
    uint32_t starts_seen;   /* processes that it had started by then */
    uint32_t hung; /* zygotes in a row that were ended because they hung */
};

void
mn_watch_init(struct mn_watch *w, struct mn_crew *crew, struct mn_mutex *guard);

/* Looks which processes live, and whether their executor answers. Before each round of sweeps;
 * guard not held. */
void
mn_watch_look(struct mn_watch *w, uint64_t now_ns);

#endif
