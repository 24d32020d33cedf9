/* mn_executor.c - tells worker processes and native threads to start and exit. See mn_crew.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <signal.h>
#include <sys/types.h>
#include <unistd.h>

#include "os/mn_proc.h"
#include "workers/mn_crew.h"

static void
zygote_check_table(struct mn_executor *self)
{
    struct mn_zygote *z = (struct mn_zygote *)self;
    if (z->cmd >= 0) {
        ssize_t n = write(z->cmd, "!", 1);
        (void)n; /* full: it was told already; closed: its death is noticed elsewhere */
        return;
    }
    for (uint32_t w = 0; w < z->shm.ctl->nworkers; w++) { /* threads: each serves itself */
        mn_event_notify(&mn_worker_at(&z->shm, w)->event);
    }
}

/* The zygote outlives its standby, if that is killed. */
static bool
zygote_gone(struct mn_executor *self)
{
    const struct mn_zygote *z = (const struct mn_zygote *)self;
    return z->pidfd >= 0 && mn_proc_wait_pidfd(z->pidfd, 0) == 0
           && mn_proc_alive((pid_t)mn_a32_load_acquire(&z->shm.ctl->zygote)) != 1;
}

static void
zygote_end(struct mn_executor *self, bool all)
{
    const struct mn_zygote *z = (const struct mn_zygote *)self;
    if (all) {
        (void)mn_proc_kill_pidfd(z->pidfd, SIGKILL); /* first: the standby must not fork another */
    }
    if (mn_proc_kill((pid_t)mn_a32_load_acquire(&z->shm.ctl->zygote), SIGKILL) != 0) {
        (void)mn_proc_kill_pidfd(z->pidfd, SIGKILL);
    }
}

void
mn_zygote_init(struct mn_zygote *z, const struct mn_shm *shm, int pidfd, int cmd)
{
    struct mn_executor executor = {zygote_check_table, zygote_gone, zygote_end, pidfd >= 0};
    *z = (struct mn_zygote){executor, *shm, pidfd, cmd};
}
