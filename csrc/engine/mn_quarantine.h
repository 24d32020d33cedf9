/* mn_quarantine.h - tasks whose records are damaged, until nobody can write their rows any more.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A damaged word does not say who runs the task, and a worker that has damaged it may go on with
 * it.  But each worker says in its own entry what it runs, and does so before its claim ([A1] in
 * mn_records.h).  So whoever is named, by an entry or by the record, is ended, and the task is
 * taken back only when no entry names it and all who were ended are gone: until then one of them
 * may write its rows.  An entry that names what cannot be a task may stand for any.
 *
 * Meanwhile the task is RUNNING to whoever asks (mn_tasks_word), whatever its record says: its
 * batch is busy, next() sleeps, and an abandoned batch is kept.  A process is killed, so that takes
 * as long as a death is noticed; a thread is told to leave, and is gone behind its sample.
 *
 * Mutex held.
 */
#ifndef MN_QUARANTINE_H
#define MN_QUARANTINE_H

#include "engine/mn_engine_state.h"

/* Takes a task back as soon as that is safe, which may be now. word: what it says, as
 * mn_tasks_word has it. Nothing is done where that said that nobody has the task, and somebody has
 * just claimed it. */
void
mn_quarantine_task(struct mn_engine *e, uint32_t task, uint64_t word, enum mn_damage damage);

/* The same for a task that one who has died was running, and that another's entry names. That one
 * is not ended: it may have been about to claim the task as the other did, and says no more of it
 * as soon as it finds that out. One that goes on saying so is ended by mn_claims.h. */
void
mn_quarantine_of_the_dead(struct mn_engine *e, uint32_t task, uint64_t word,
                          const struct mn_death *death);

/* Takes back those that nobody can write any more. After each sweep, which is when that becomes so.
 * Whether there were any. */
bool
mn_quarantine_look(struct mn_engine *e);

#endif
