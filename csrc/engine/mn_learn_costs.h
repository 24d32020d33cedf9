/* mn_learn_costs.h - what finished batches have cost, read off their records and taught.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Under the engine's mutex; takes the lock of the costs.
 */
#ifndef MN_LEARN_COSTS_H
#define MN_LEARN_COSTS_H

#include "engine/mn_engine_state.h"

/* Teaches the cost model what a finished batch's rows have cost, once. */
void
mn_learn_costs(struct mn_engine *e, struct mn_batch *batch);

/* The same of all that are done and not delivered yet: while one sample holds up the first
 * batches of all, that is all there is to know. */
void
mn_learn_costs_waiting(struct mn_engine *e);

#endif
