/* mn_claims.h - finds tasks and workers whose word, queue and entries contradict each other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker that writes to wrong addresses may change a task's word. The word then names another
 * worker, a worker that never existed, or no worker. Such a word makes sense, but no worker would
 * ever finish the task. However, each worker writes in its own entry which task it runs, and the
 * trainer knows where it has queued each task. So these are contradictions:
 *
 *     RUNNING  and the worker's entry does not name the task
 *     QUEUED   and an entry names the task, or no queue has an entry for it any more
 *     WAITING  and an entry names the task, or all tasks that it waits for are done
 *
 * In the same way, the entry of an idle worker may be overwritten. It then names a task of another
 * worker, or no valid task. Then batches and memory would wait for that worker. It is
 * killed.
 *
 * A contradiction must last for seconds before the trainer acts. A few instructions lie between a
 * claim and the writes to the word and the entry, and a process may be held up there. A process
 * that is stopped just there for longer is taken for damaged. At that point the trainer does not
 * know which side is wrong. So it kills every worker that is named, and takes the task back when
 * they are gone (mn_quarantine.h). If no worker is named, the worker that should have claimed a
 * WAITING task may be held up just before the claim. The task is published, and that worker then
 * finds it claimed or queued.
 *
 * The limit of this: a word that turns to QUEUED again before any other worker has passed its entry
 * is claimed at once. Two workers then write the same rows until the first one ends by its own
 * assertion.
 */
#ifndef MN_CLAIMS_H
#define MN_CLAIMS_H

#include "engine/mn_engine_state.h"

/* Returns whether the task word confirms what a worker's entry says that it runs. A worker that is
 * about to claim a task writes its entry a moment before the claim. Mutex held. */
bool
mn_claims_bear_out(const struct mn_engine *e, uint32_t worker, uint64_t running);

/* Checks once a second while the caller waits for a batch. Mutex held. */
void
mn_claims_look(struct mn_engine *e, uint64_t now_ns);

#endif
