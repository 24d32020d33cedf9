/* mn_engine_workers.c - requests of the program to single workers. See mn_engine.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>

#include "engine/mn_engine.h"
#include "engine/mn_engine_state.h"
#include "engine/mn_autoscale.h"
#include "os/mn_proc.h"

int
mn_engine_retire_worker(struct mn_engine *e, uint32_t worker)
{
    if (worker >= e->shm.ctl->nworkers) {
        return -EINVAL;
    }
    mn_mutex_lock(&e->mutex);
    mn_crew_retire(&e->crew, worker);
    mn_mutex_unlock(&e->mutex);
    return 0;
}

int
mn_engine_ask_to_exit(struct mn_engine *e, uint32_t worker, enum mn_exit_request how)
{
    int rc = mn_engine_retire_worker(e, worker);
    if (rc == 0) {
        mn_mutex_lock(&e->mutex);
        mn_crew_ask_to_exit(&e->crew, worker, how);
        mn_mutex_unlock(&e->mutex);
        mn_event_notify(&mn_worker_at(&e->shm, worker)->event);
    }
    return rc;
}

int
mn_engine_kill_worker(struct mn_engine *e, uint32_t worker, int sig)
{
    if (worker >= e->shm.ctl->nworkers) {
        return -EINVAL;
    }
    mn_mutex_lock(&e->mutex);
    uint32_t pid = mn_crew_pid(&e->crew, worker);
    mn_mutex_unlock(&e->mutex);
    return mn_proc_kill((pid_t)pid, sig);
}

int
mn_engine_kill_zygote(struct mn_engine *e, int sig)
{
    return mn_proc_kill((pid_t)mn_a32_load_acquire(&e->shm.ctl->zygote), sig);
}

void
mn_engine_zygote_replaced(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    mn_crew_replace_executor(&e->crew);
    mn_engine_unlock(e);
}

int
mn_engine_move_to(struct mn_engine *e, int32_t workers)
{
    if (e->autoscale == NULL) {
        return -EINVAL;
    }
    mn_mutex_lock(&e->mutex);
    mn_autoscale_move(e, workers);
    mn_engine_unlock(e);
    return 0;
}
