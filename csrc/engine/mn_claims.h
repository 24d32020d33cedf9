/* mn_claims.h - tasks in flight, and workers, of which word, queue and entries do not agree.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker that writes where it must not may have a task's word say that another worker runs it,
 * one that lives or one that was never there, or that nobody does.  Such a word makes sense, and
 * nobody would ever finish the task.  But each worker says in its own entry what it runs, and the
 * trainer knows where it has queued what:
 *
 *     RUNNING  and the worker's entry does not say so
 *     QUEUED   and an entry says that it runs, or none of a queue stands for it any more
 *     WAITING  and an entry says that it runs, or all that it waits for is done
 *
 * In the same way a worker that is idle may have its entry say that it runs what is none of its
 * tasks, or no task: then batches are kept for it, and room waits for it.  It is killed.
 *
 * A disagreement is doubted only after seconds: between a claim and what the word and the entry
 * say of it lie a few instructions, where a process may be held up: one that is stopped just there,
 * and for longer, is taken for damaged.  Who lies is not known then.
 * So all who are named are killed, and the task is taken back when they are gone (mn_quarantine.h).
 * Where nobody is named, whoever should have claimed a WAITING task may be held up before that: it
 * is published, and that one finds it so.
 *
 * The limit of it: a word that says QUEUED again before any other worker has passed its entry is
 * claimed at once, and two write the same rows until the first ends by its own assertion.
 */
#ifndef MN_CLAIMS_H
#define MN_CLAIMS_H

#include "engine/mn_engine_state.h"

/* Whether a worker's entry that says so of what it runs is true by the task's word, too. One that
 * is about to claim a task says so a moment before that is. Mutex held. */
bool
mn_claims_bear_out(const struct mn_engine *e, uint32_t worker, uint64_t running);

/* Looks once a second while the caller waits. Mutex held. */
void
mn_claims_look(struct mn_engine *e, uint64_t now_ns);

#endif
