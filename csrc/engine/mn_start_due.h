/* mn_start_due.h - starts what the plan says should start now: blocks made, tasks queued.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The run queues are kept short, because what is in them is decided.  A worker that takes them
 * under their low water mark notifies the engine, which dispatches again (mn_ctl.low_water).  The
 * user's thread dispatches too, whenever it plans, waits or takes a batch.
 *
 * A batch that can never be made, or that everybody waits for while nothing that would make room
 * for it can come back, is refused: it is delivered in its place as an error, and the others go
 * on.  Balanced scheduling; under the engine's mutex.
 */
#ifndef MN_START_DUE_H
#define MN_START_DUE_H

#include "engine/mn_engine_state.h"

/* Starts what should start now. Returns how many tasks went to the run queues, a move
 * from one worker's to another's counted as one. */
uint32_t
mn_start_due(struct mn_engine *e);

/* Whether the program should plan more now, because workers idle behind a slow sample or are
 * about to. Says so once for what is planned. */
bool
mn_start_due_starving(struct mn_engine *e);

#endif
