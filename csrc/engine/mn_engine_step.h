/* mn_engine_step.h - one step of the engine thread: deaths, leases, abandoned batches, starts.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Composes the crew, tasks and leases (workers/), which do not know batches. Mutex held.
 */
#ifndef MN_ENGINE_STEP_H
#define MN_ENGINE_STEP_H

#include "engine/mn_engine_state.h"

/* Sweeps dead workers, grants leases, drops abandoned blocks, starts what is due. Returns whether
 * anything was done. */
bool
mn_engine_step(struct mn_engine *e);

/* Returns whether what the trainer waits for (mn_ctl.wanted) is done. Needs the mutex for
 * MN_WANT_ANY. */
bool
mn_engine_has_done(struct mn_engine *e, uint64_t wanted);

#endif
