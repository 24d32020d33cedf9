/* mn_learn_costs.h - teaches the cost model from the records of finished batches.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Needs the engine's mutex; takes the lock of the costs.
 */
#ifndef MN_LEARN_COSTS_H
#define MN_LEARN_COSTS_H

#include "engine/mn_engine_state.h"

/* Teaches the cost model what the rows of a finished batch cost. Does so once per batch. */
void
mn_learn_costs(struct mn_engine *e, struct mn_batch *batch);

/* Does the same for all batches that are done and not delivered, and learns the memory of their
 * envelopes. While one sample holds up the very first batches, there is nothing else to learn
 * from. */
void
mn_learn_costs_waiting(struct mn_engine *e);

#endif
