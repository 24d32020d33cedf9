/* mn_engine_parts.h - what the engine's files call of each other; each file says how it works.
 * SPDX-License-Identifier: Apache-2.0
 *
 * All functions need the engine's mutex.
 */
#ifndef MN_ENGINE_PARTS_H
#define MN_ENGINE_PARTS_H

#include "engine/mn_engine_state.h"

/* ---- mn_engine_step.c ---- */

/* Sweeps dead workers, grants leases, drops abandoned blocks, starts what is due. Returns whether
 * anything was done. */
bool
mn_engine_step(struct mn_engine *e);

/* Returns whether what the trainer waits for (mn_ctl.wanted) is done. Needs the mutex for
 * MN_WANT_ANY. */
bool
mn_engine_has_done(struct mn_engine *e, uint64_t wanted);

/* ---- mn_start_due.c ---- */

/* Returns 0 or -ENOMEM; close it in either case. */
int
mn_worker_views_open(struct mn_engine *e);

void
mn_worker_views_close(struct mn_engine *e);

/* Returns the number of queued and unclaimed tasks: an estimate. own: includes the workers' own
 * queues. */
uint64_t
mn_worker_views_queued(const struct mn_engine *e, bool own);

/* Starts what is due. Returns how many tasks went to the run queues; moving a share from one
 * worker's queue to another's counts as one. */
uint32_t
mn_start_due(struct mn_engine *e);

/* Returns whether the program should plan more now, because workers idle behind a straggler or are
 * about to. Returns true only once for the same plan. */
bool
mn_start_due_starving(struct mn_engine *e);

/* ---- mn_next_delivery.c ---- */

/* Returns for how long from now a mixed batch must still wait if nothing happens; INT64_MAX: there
 * is none to wait for. */
int64_t
mn_ready_rows_nap(const struct mn_engine *e);

/* The formed batch was read: retires the units whose rows are all delivered. */
void
mn_ready_rows_taken(struct mn_engine *e);

/* Drops the blocks of units that have left the plan. Call just before the plan is cleared. */
void
mn_ready_rows_drop(struct mn_engine *e);

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

/* Teaches the cost model what the rows of a finished batch cost. Does so once per batch. */
void
mn_learn_costs(struct mn_engine *e, struct mn_batch *batch);

/* Does the same for all batches that are done and not delivered, and learns the memory of their
 * envelopes. While one sample holds up the very first batches, there is nothing else to learn
 * from. */
void
mn_learn_costs_waiting(struct mn_engine *e);

#endif
