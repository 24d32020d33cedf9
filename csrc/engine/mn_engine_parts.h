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

/* Returns NULL if memory is short. */
struct mn_forming *
mn_forming_open(uint32_t batch, uint32_t bound, bool mixes);

void
mn_forming_close(struct mn_forming *f);

/* Makes space for one more unit. Returns 0 or -ENOMEM. */
int
mn_forming_room(struct mn_forming *f);

/* Adds the batch that the plan added last. mn_forming_room() must have made space for it. */
void
mn_forming_add(struct mn_engine *e, uint64_t sequence, uint32_t nrows);

/* Declares that no more batches are planned in this epoch. */
void
mn_forming_end(struct mn_engine *e);

/* Drops the blocks of units that have left the plan, and forgets all units. Call it just before the
 * plan is cleared. */
void
mn_forming_clear(struct mn_engine *e);

/* Returns for how long from now a mixed batch must still wait if nothing happens; INT64_MAX: there
 * is none to wait for. */
int64_t
mn_forming_nap(const struct mn_engine *e);

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

/* Frees the batch, which the caller has read. In ready mode, frees every unit whose last row this
 * delivery used. Returns -EINVAL if it was not given as the next one, or was taken. */
int
mn_next_delivery_take(struct mn_engine *e, uint64_t sequence, uint64_t block_off);

#endif
