/* mn_ready_rows.h - which rows of planned batches are ready, and the batches formed of them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * For ready mode (mn_forming.h): reads from the tasks of each unit which of its rows are ready, and
 * ends units. All functions need the engine's mutex.
 */
#ifndef MN_READY_ROWS_H
#define MN_READY_ROWS_H

#include "engine/mn_engine_state.h"

/* Forms the next batch if that is possible, else notes whether one could be mixed. Returns whether
 * there is a batch. */
bool
mn_ready_rows_form(struct mn_engine *e);

/* Returns whether mn_ready_rows_form() should be called: there is a batch, or one could be mixed
 * that it does not know of yet. */
bool
mn_ready_rows_any(struct mn_engine *e);

/* Returns how many batches could be formed of the ready rows, including those not looked at yet. */
int64_t
mn_ready_rows_batches(struct mn_engine *e);

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

#endif
