/* mn_batch.h - the batches in flight, and the state of their tasks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Whether a batch is done is derived from its task words (mn_records.h): no counter is shared. All
 * functions need the mutex unless they say otherwise.
 */
#ifndef MN_BATCH_H
#define MN_BATCH_H

#include <stdbool.h>
#include <stdint.h>

#include "workers/mn_records.h"

struct mn_engine;
struct mn_batch;

enum mn_block_status {
    MN_BLOCK_BUSY = 0,
    MN_BLOCK_DONE = 1,
    MN_BLOCK_LOST = 2, /* done, but one of its tasks was lost with its worker */
};

/* Unlocks the mutex, then makes the wake-ups that were noted under it. The caller must hold a
 * reference on the engine until this returns. */
void
mn_engine_unlock(struct mn_engine *e);

/* Returns the batch in flight that has this block; NULL if none has. */
struct mn_batch *
mn_batch_find(struct mn_engine *e, uint64_t block_off);

/* Adds the batch to the end of the list of batches in flight. */
void
mn_batch_link(struct mn_engine *e, struct mn_batch *b);

/* Removes the batch from the list of batches in flight. */
void
mn_batch_unlink(struct mn_engine *e, struct mn_batch *b);

/* Returns whether no worker runs a task of the batch or can claim one. */
bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b);

/* Returns the status of a block. The owner of the block may also call this without the mutex. */
enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off);

/* Returns when the last task of a DONE block finished. */
uint64_t
mn_engine_done_ns(struct mn_engine *e, uint64_t block_off);

#endif
