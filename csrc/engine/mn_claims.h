/* mn_claims.h - tasks in flight whose word and whose worker do not agree.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker that writes where it must not may have a task's word say that another worker runs it,
 * one that lives or one that was never there, or that nobody does.  Such a word makes sense, and
 * nobody would ever finish the task.  But each worker says in its own entry what it runs.
 *
 * A disagreement is doubted only after seconds: between a claim and what the word and the entry
 * say of it lie a few instructions, where a process may be held up.  Who lies is not known then.
 * So all who are named are killed, and the task is taken back when they are gone (mn_quarantine.h).
 */
#ifndef MN_CLAIMS_H
#define MN_CLAIMS_H

#include "engine/mn_engine_state.h"

/* Looks once a second while the caller waits. Mutex held. */
void
mn_claims_look(struct mn_engine *e, uint64_t now_ns);

#endif
