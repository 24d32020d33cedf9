/* mn_ready_rows.h - which rows of planned batches are ready, and the batches formed of them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Where batches are formed of whatever is ready first (mn_forming.h): reads off the tasks of units
 * which rows are, and ends units.  Under the engine's mutex.
 */
#ifndef MN_READY_ROWS_H
#define MN_READY_ROWS_H

#include "engine/mn_engine_state.h"

/* Forms the next batch if it can be, and else notes whether one could be mixed. Whether there
 * is one. */
bool
mn_ready_rows_form(struct mn_engine *e);

/* Whether there is a batch, or one could be mixed and mn_ready_rows_form does not know it yet:
 * there is something to look at. */
bool
mn_ready_rows_any(struct mn_engine *e);

/* Batches that could be formed of what is ready, and of what nobody has looked at yet. */
int64_t
mn_ready_rows_batches(struct mn_engine *e);

/* How long from now on a batch that could be mixed is not, if nothing happens; INT64_MAX. */
int64_t
mn_ready_rows_nap(const struct mn_engine *e);

/* The batch that is formed was read: units of which nothing is left are retired. */
void
mn_ready_rows_taken(struct mn_engine *e);

/* Drops the blocks of units that have left the plan; the plan is about to be cleared. */
void
mn_ready_rows_drop(struct mn_engine *e);

#endif
