/* mn_quarantine.h - holds damaged tasks back until no worker can write their rows any more.
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
#ifndef MN_QUARANTINE_H
#define MN_QUARANTINE_H

#include "engine/mn_engine_state.h"

/* Takes a task back as soon as that is safe, which may be now. word: the result of mn_tasks_word().
 * Does nothing if word said that no worker has the task and a worker has just claimed it. */
void
mn_quarantine_task(struct mn_engine *e, uint32_t task, uint64_t word, enum mn_damage damage);

/* Does the same for a task that a dead worker was running and that another worker's entry names.
 * That worker is not ended. It may have been about to claim the task like the dead one, and clears
 * its entry as soon as its claim fails. If its entry goes on naming the task, mn_claims.h ends
 * it. */
void
mn_quarantine_of_the_dead(struct mn_engine *e, uint32_t task, uint64_t word,
                          const struct mn_death *death);

/* Takes back the tasks whose rows no worker can write any more. Call after each sweep, because only
 * a sweep changes that. Returns whether there were any. */
bool
mn_quarantine_look(struct mn_engine *e);

#endif
