/* mn_next_delivery.h - which batch is delivered next, and how many could be.
 * SPDX-License-Identifier: Apache-2.0
 *
 * In order: the head of the plan. Out of order: the batch that was done first. In ready mode
 * (mn_forming.h): the formed batch. A batch is done when its tasks have ended and their results
 * were accepted, or when it is refused. Balanced scheduling only; all functions need the engine's
 * mutex.
 */
#ifndef MN_NEXT_DELIVERY_H
#define MN_NEXT_DELIVERY_H

#include "engine/mn_engine_state.h"

/* Returns the number of batches that are done and not taken. In order it counts from the head on,
 * out of order all (up to starved_below). */
int64_t
mn_next_delivery_ready(struct mn_engine *e);

/* Finds the batch to deliver next. *block_off is 0 if that batch cannot be made. In ready mode: the
 * first unit of the formed batch. Returns false if there is none. */
bool
mn_next_delivery_pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off);

/* Returns whether there is a batch to deliver. */
bool
mn_next_delivery_any(struct mn_engine *e);

/* Returns whether the caller may take this batch: it was given as the next one, and was not taken
 * yet. */
bool
mn_next_delivery_may_take(struct mn_engine *e, uint64_t sequence, uint64_t block_off);

#endif
