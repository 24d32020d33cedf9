/* mn_checked_results.h - what workers have written, copied out and checked before anybody uses it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Workers run other people's code in C, which may write where it must not.  So nothing that a
 * worker wrote is freed, indexed or parsed by before it was copied to private memory and was
 * found to make sense, and this is the one place that does it.  A record that makes none is
 * *damage*: the worker that wrote it is killed and counts as dead, and then its task is tried again
 * by another worker or lost, as after a death: mn_quarantine.h.  A native worker, which cannot be,
 * is told to leave.
 *
 * Who owns an envelope's memory is private, too: it must lie in what its worker owes
 * (workers/mn_leases.h).
 *
 * The limit of it: what the trainer itself has written into the mapping is believed, though a
 * worker could write over it: a block's counts, its list of tasks, why a task was started.  A word
 * that makes sense and is not true is mn_claims.h's.
 *
 * All of it under the engine's mutex, but for reading what has been accepted: that is the
 * caller's who was given the batch.
 */
#ifndef MN_CHECKED_RESULTS_H
#define MN_CHECKED_RESULTS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_batch.h"

/* The head of an envelope of that length, copied, if it and all of its parts lie within. */
bool
mn_envelope_look(const void *at, uint64_t len, struct mn_envelope *out);

/* One part of it, copied; false when it is not within any more. */
bool
mn_envelope_part_look(const void *at, uint64_t len, const struct mn_envelope *head, uint64_t i,
                      struct mn_envelope_part *out);

/* Reads what is DONE of a batch. A task whose record is damaged is taken back, as a rule later: the
 * batch is busy again, or has lost it. Like mn_engine_poll else. */
enum mn_block_status
mn_batch_accept(struct mn_engine *e, struct mn_batch *b);

/* Reads what is DONE of a batch that is busy, in the same way. Also before a worker that has died
 * is replaced: its envelopes become the batch's, and its damage is not said of the next. */
void
mn_batch_accept_some(struct mn_engine *e, struct mn_batch *b);

/* The same for the memory alone, of a batch that nobody reads any more, or that was read: the
 * envelopes that are DONE become the batch's, to be freed with it, and damage is let be. */
void
mn_batch_note_envelopes(struct mn_engine *e, struct mn_batch *b);

/* The same as mn_engine_poll, and what its workers wrote was found to make sense: what is read of
 * a block that is DONE was copied then. mn_engine_next has done this. Mutex not held, as for all
 * below: the batch is the caller's. */
enum mn_block_status
mn_engine_settle(struct mn_engine *e, uint64_t block_off);

/* What was reported of the rows of a DONE block. */
const struct mn_report *
mn_engine_read_reports(struct mn_engine *e, uint64_t block_off);

/* Whether every row of it was written in place, and nothing travels beside them. */
bool
mn_engine_in_rows(struct mn_engine *e, uint64_t block_off);

#endif
