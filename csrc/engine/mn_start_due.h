/* mn_start_due.h - starts what the plan says should start now: makes blocks, queues tasks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The run queues are kept short, because a queued task can no longer be reordered. A worker that
 * takes a queue below its low water mark notifies the engine, which dispatches again
 * (mn_ctl.low_water). The user's thread dispatches too, whenever it plans, waits or takes a batch.
 *
 * A batch is refused if it can never be made. It is also refused if the caller waits for it while
 * no memory that it needs can come back. It is delivered in its place as an error, and the other
 * batches go on. Balanced scheduling only; all functions need the engine's mutex.
 */
#ifndef MN_START_DUE_H
#define MN_START_DUE_H

#include "engine/mn_engine_state.h"

/* Starts what is due. Returns how many tasks went to the run queues; moving a share from one
 * worker's queue to another's counts as one. */
uint32_t
mn_start_due(struct mn_engine *e);

/* Returns whether the program should plan more now, because workers idle behind a straggler or are
 * about to. Returns true only once for the same plan. */
bool
mn_start_due_starving(struct mn_engine *e);

#endif
