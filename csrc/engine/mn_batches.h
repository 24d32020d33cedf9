/* mn_batches.h - batches in flight: made, their results checked, and ended.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Whether a batch is done is derived from its task words (mn_records.h): no counter is shared.
 * A batch ends exactly once: it is retired after the caller has read it, or abandoned when it will
 * not be delivered. Both free its records, tasks and ranges, except the ranges that the caller
 * retains. If a worker still runs a task of an abandoned batch, the engine drops the batch when
 * that task ends (mn_engine_step.c).
 *
 * Workers run foreign C code, which may write to wrong addresses. So the trainer first copies
 * every value that a worker wrote to private memory and checks it. Only then does it free, index
 * or parse by that value. This is the one place that does so. A record that fails the checks is
 * *damage*.  The worker that wrote it is killed. Its task counts as RUNNING until that worker is
 * dead, and is then retried or lost. A thread cannot be killed; it is asked to exit.
 *
 * The ownership of envelope memory is private, too: an envelope must lie in memory that its worker
 * was granted and still owes (workers/mn_tasks_and_retries.h).
 *
 * The limit of this: the trainer trusts what it has itself written into the mapping, although a
 * worker could overwrite it. Examples are a block's counts, its list of tasks, why a task was
 * started. It also believes a record that makes sense and is not true.
 */
#ifndef MN_BATCHES_H
#define MN_BATCHES_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/mn_plan.h"
#include "workers/mn_records.h"

struct mn_engine;
struct mn_batch;

/* How the rows of a batch travel; decided when the batch starts. */
struct mn_form {
    uint32_t kind;   /* enum mn_task_kind */
    uint32_t layout; /* offset of the posted layout; 0: none */
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields]; owned by the caller, valid while the form is set */
};

/* ---- mutex held, unless a function says otherwise ------------------------------------- */

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

/* Returns whether no worker runs a task of the batch or can claim one. */
bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b);

/* Returns the status of a block. The owner of the block may also call this without the mutex. */
enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off);

/* Returns when the last task of a DONE block finished. */
uint64_t
mn_engine_done_ns(struct mn_engine *e, uint64_t block_off);

/* Makes the batch's block, with fields and PLANNED tasks, cut at row0[0..ntasks]; PART tasks are
 * followed by one more task that collates them. Then the batch is in flight and held once more.
 * Returns 0. On failure sets e->refusal and returns -EAGAIN if no descriptors are free, else
 * -ENOMEM. */
int
mn_batch_make(struct mn_engine *e, struct mn_batch *b, const struct mn_form *form,
              const uint32_t *row0, uint32_t ntasks);

/* Frees the block, its tasks and its ranges, and lets the batch go. No worker may run any of its
 * tasks. */
void
mn_batch_drop(struct mn_engine *e, struct mn_batch *b);

/* Gives up a batch that has a block and will not be delivered. Tasks that no worker runs are
 * cancelled; a task whose worker dies is not retried. */
void
mn_batch_abandon(struct mn_engine *e, struct mn_batch *b);

/* Learns from an accepted batch what its rows have cost, and how much memory it used outside of
 * them. Does so once per batch. */
void
mn_batch_learn(struct mn_engine *e, struct mn_batch *b);

/* Does the same for all batches that are done and not delivered. While one sample holds up the very
 * first batches, there is nothing else to learn from. */
void
mn_batches_learn_waiting(struct mn_engine *e);

/* The batch was read: learns from it, and drops it. */
void
mn_batch_retire(struct mn_engine *e, struct mn_batch *b);

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

/* ---- mutex not held ----------------------------------------------------------------- */

/* Static scheduling: publishes a batch as one task on a worker's own queue; its sequence is not
 * used. If there is no memory for the rows of a BATCH now, it gets no layout and travels in an
 * envelope. Returns 0 and the block; -ENOMEM; -EAGAIN if no descriptors are free or the queue is
 * full. */
int
mn_engine_submit(struct mn_engine *e, const struct mn_plan_batch *batch,
                 const struct mn_form *form, uint32_t queue, uint64_t *block_off);

/* Makes a DONE block without tasks, with memory for nrows rows of this form: for rows gathered from
 * other batches. Returns 0 or -errno. */
int
mn_engine_gather_block(struct mn_engine *e, uint32_t nrows, const struct mn_form *form,
                       uint64_t *block_off);

/* Copies bytes to where every worker can read them for as long as the engine lives. The record at
 * *off is a uint64_t length followed by the bytes. Returns 0 or -ENOMEM. */
int
mn_engine_post(struct mn_engine *e, const void *bytes, uint64_t n, uint64_t *off);

/* Makes the caller the owner of [off, off + bytes) of a DONE block: the range is freed by
 * mn_engine_release(), not with the block. Returns 0; -ENOMEM; -EINVAL if the block has no such
 * memory or the engine was closed. After an error the caller does not own the range. */
int
mn_engine_retain(struct mn_engine *e, uint64_t block_off, uint64_t off, uint64_t bytes);

/* Like mn_engine_poll(), but the results are also checked: what is read of a DONE block was copied
 * then. mn_engine_next() has done this already. Called without the mutex, like all functions below:
 * the batch belongs to the caller. */
enum mn_block_status
mn_engine_settle(struct mn_engine *e, uint64_t block_off);

/* Returns the reports on the rows of a DONE block. */
const struct mn_report *
mn_engine_read_reports(struct mn_engine *e, uint64_t block_off);

#endif
