/* mn_ask_workers.c - requests of the program to single workers. See mn_engine.h.
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

bool
mn_engine_end_late(struct mn_engine *e, uint32_t worker, uint64_t number, uint64_t row)
{
    if (worker >= e->shm.ctl->nworkers) {
        return false;
    }
    mn_mutex_lock(&e->mutex);
    const struct mn_worker *k = mn_worker_at(&e->shm, worker);
    uint32_t task;
    uint64_t since_ns;
    bool late = mn_worker_at_work(k, e->shm.ctl->ntasks, &task, &since_ns)
                && e->flight.by_task[task] != NULL && mn_a64_load_relaxed(&k->row) == row
                && mn_block_at(&e->shm, e->flight.by_task[task]->block_off)->number == number;
    uint64_t word = late ? mn_tasks_word(&e->tasks, task) : 0;
    late = late && mn_word_status(word) == MN_TASK_RUNNING && mn_word_worker(word) == worker;
    if (late) {
        mn_crew_late(&e->crew, worker, word);
    }
    mn_engine_unlock(e);
    return late;
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
