/* mn_next_delivery.h - which batch is delivered next, and how many could be.
 * SPDX-License-Identifier: Apache-2.0
 *
 * In order the head of the plan; out of order the one done first; where batches are formed
 * (mn_forming.h) the one that is.  A batch is done when its tasks have ended and what they wrote
 * was accepted, or when it is refused.  Balanced scheduling; under the engine's mutex.
 */
#ifndef MN_NEXT_DELIVERY_H
#define MN_NEXT_DELIVERY_H

#include "engine/mn_engine_state.h"

/* Batches done and not taken: in order from the head on, or (up to starved_below) all. */
int64_t
mn_next_delivery_ready(struct mn_engine *e);

/* The batch to deliver next, if there is one. Its block is 0 where it cannot be made. Where
 * batches are formed: the first unit of the one that is. */
bool
mn_next_delivery_pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off);

/* Whether there is any to deliver. */
bool
mn_next_delivery_any(struct mn_engine *e);

/* Whether the caller may take this one: it was told that it is next, and has not taken it. */
bool
mn_next_delivery_may_take(struct mn_engine *e, uint64_t sequence, uint64_t block_off);

#endif
