/* mn_batch.h - batches in flight: which there are, and how far their tasks are.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Whether a batch is done is read off its task words (mn_records.h): no counter is shared.
 * Mutex held, but where it says otherwise.
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
    MN_BLOCK_LOST = 2, /* done, but a task of it was lost with its worker */
};

/* Lets go of the mutex, then wakes whom it concerns. Whoever calls has a hold on the engine that
 * lasts until this returns. */
void
mn_engine_unlock(struct mn_engine *e);

struct mn_batch *
mn_batch_find(struct mn_engine *e, uint64_t block_off);

void
mn_batch_link(struct mn_engine *e, struct mn_batch *b);

void
mn_batch_unlink(struct mn_engine *e, struct mn_batch *b);

/* Whether no worker has a task of it, or can get one. A word that makes no sense tells nothing of
 * that, but workers' entries do ([A1] in mn_records.h). */
bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b);

/* Without the mutex, too, by whoever's block it is. */
enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off);

/* When the last task of a DONE block finished. */
uint64_t
mn_engine_done_ns(struct mn_engine *e, uint64_t block_off);

#endif
