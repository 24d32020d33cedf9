/* mn_quarantine.c - holds damaged tasks back until no worker can write their rows any more.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A damaged word does not say which worker runs the task, and the worker that damaged it may
 * continue. But each worker writes in its own entry what it runs, and does so before its claim
 * ([A1] in mn_records.h). So the engine ends every worker that an entry or the record names. It
 * takes the task back only when no entry names the task and all ended workers are gone. Until then,
 * one of them may still write the rows. An entry with an impossible task number may stand for any
 * task.
 *
 * Meanwhile mn_tasks_word() reports the task as RUNNING, whatever its record says: its batch is
 * busy, next() sleeps, and an abandoned batch stays. A process is killed, so this lasts until its
 * death is noticed. A thread is asked to exit, and is gone after its current sample.
 *
 * All functions need the mutex.
 */
#include "engine/mn_engine_parts.h"

static void
end_worker(struct mn_engine *e, uint32_t task, uint32_t worker)
{
    struct mn_death *death = &e->tasks.lost[task];
    uint32_t state = mn_a32_load_acquire(&mn_worker_at(&e->shm, worker)->state);
    if (state == MN_WORKER_STARTING || state == MN_WORKER_READY) {
        mn_crew_damaged(&e->crew, worker, (enum mn_damage)(death->status - MN_STATUS_DAMAGED));
        death->worker = worker;
        death->pid = mn_crew_pid(&e->crew, worker);
    }
}

/* Ends all workers that may run the task, if it is known to be damaged, including workers whose
 * entries have named it only since. Returns whether no worker can write its rows any more. */
static bool
is_let_go(struct mn_engine *e, uint32_t task)
{
    bool gone = true, damaged = e->tasks.results[task].damaged;
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        uint64_t running = mn_a64_load_acquire(&mn_worker_at(&e->shm, w)->running); /* [A2], [A4] */
        if (running == (uint64_t)task + 1 || running > e->shm.ctl->ntasks) {
            if (damaged) {
                end_worker(e, task, w);
            }
            gone = false;
        }
        gone = gone && !mn_crew_is_damaged(&e->crew, w);
    }
    return gone;
}

static bool
take_back(struct mn_engine *e, uint32_t task)
{
    if (!is_let_go(e, task)) {
        return false;
    }
    struct mn_death death = e->tasks.lost[task];
    mn_tasks_take_back(&e->tasks, task, &death);
    e->crew.wakes.all_sleepers = true; /* also the caller, if the task is lost */
    return true;
}

void
mn_quarantine_task(struct mn_engine *e, uint32_t task, uint64_t word, enum mn_damage damage)
{
    enum mn_task_status st = mn_word_status(word);
    bool named = st != MN_TASK_QUEUED && st != MN_TASK_WAITING
                 && mn_word_worker(word) < e->shm.ctl->nworkers;
    if (!mn_tasks_quarantine(&e->tasks, task, word)) {
        return;
    }
    e->tasks.results[task].damaged = true;
    e->tasks.lost[task] = (struct mn_death){UINT32_MAX, 0, MN_STATUS_DAMAGED + (int32_t)damage,
                                                MN_NO_ROW};
    if (named) {
        end_worker(e, task, mn_word_worker(word));
    }
    (void)take_back(e, task);
}

void
mn_quarantine_of_the_dead(struct mn_engine *e, uint32_t task, uint64_t word,
                          const struct mn_death *death)
{
    if (mn_tasks_quarantine(&e->tasks, task, word)) {
        e->tasks.results[task].damaged = false;
        e->tasks.lost[task] = *death;
        (void)take_back(e, task);
    }
}

bool
mn_quarantine_look(struct mn_engine *e)
{
    bool any = false;
    for (uint32_t i = 0; e->tasks.nquarantined != 0 && i < e->shm.ctl->ntasks; i++) {
        any |= mn_tasks_is_quarantined(&e->tasks, i) && take_back(e, i);
    }
    return any;
}
