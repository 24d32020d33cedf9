/* mn_checked_results.h - copies out and checks what workers have written, before any use.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Workers run foreign C code, which may write to wrong addresses. So the trainer first copies
 * every value that a worker wrote to private memory and checks it. Only then does it free, index
 * or parse by that value. This is the one place that does so. A record that fails the checks is
 * *damage*.  The worker that wrote it is killed. Its task counts as RUNNING until that worker is
 * dead, and is then retried or lost. A thread cannot be killed; it is asked to exit.
 *
 * The ownership of envelope memory is private, too: an envelope must lie in memory that its worker
 * was granted and still owes (workers/mn_arena_leases.h).
 *
 * The limit of this: the trainer trusts what it has itself written into the mapping, although a
 * worker could overwrite it. Examples are a block's counts, its list of tasks, why a task was
 * started. It also believes a record that makes sense and is not true.
 *
 * All functions need the engine's mutex, except those that read accepted results: these belong to
 * the caller that was given the batch.
 */
#ifndef MN_CHECKED_RESULTS_H
#define MN_CHECKED_RESULTS_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_batch.h"

/* Copies the head of an envelope of len bytes. Returns whether the head and all of its parts lie
 * within. */
bool
mn_envelope_look(const void *at, uint64_t len, struct mn_envelope *out);

/* Copies part i of the envelope. Returns false if it no longer lies within. */
bool
mn_envelope_part_look(const void *at, uint64_t len, const struct mn_envelope *head, uint64_t i,
                      struct mn_envelope_part *out);

/* Reads the DONE tasks of a batch. A task with a damaged record is RUNNING again, and the batch is
 * busy. Otherwise returns what mn_engine_poll() returns. */
enum mn_block_status
mn_batch_accept(struct mn_engine *e, struct mn_batch *b);

/* Reads the DONE tasks of a busy batch in the same way. Also called before a dead worker is
 * replaced: its envelopes become the batch's, and its damage is not blamed on its successor. */
void
mn_batch_accept_some(struct mn_engine *e, struct mn_batch *b);

/* Does the same for memory alone, for a batch that was read or will not be read. Its DONE envelopes
 * become the batch's and are freed with it. Damage is ignored. */
void
mn_batch_note_envelopes(struct mn_engine *e, struct mn_batch *b);

/* Like mn_engine_poll(), but the results are also checked: what is read of a DONE block was copied
 * then. mn_engine_next() has done this already. Called without the mutex, like all functions below:
 * the batch belongs to the caller. */
enum mn_block_status
mn_engine_settle(struct mn_engine *e, uint64_t block_off);

/* Returns the reports on the rows of a DONE block. */
const struct mn_report *
mn_engine_read_reports(struct mn_engine *e, uint64_t block_off);

/* Returns whether every row of the block was written in place and no envelope travels with them. */
bool
mn_engine_in_rows(struct mn_engine *e, uint64_t block_off);

#endif
