/* mn_blocks.h - a batch's block in the mapping: makes it with its rows and tasks, and frees it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A batch ends exactly once: it is retired after the caller has read it, or abandoned when it will
 * not be delivered. Both free its records, tasks and ranges, except the ranges that the caller
 * retains. If a worker still runs a task of an abandoned batch, the engine drops the batch when
 * that task ends (mn_engine_step.c).
 */
#ifndef MN_BLOCKS_H
#define MN_BLOCKS_H

#include "engine/mn_batch.h"

/* How the rows of a batch travel; decided when the batch starts. */
struct mn_form {
    uint32_t kind;   /* enum mn_task_kind */
    uint32_t layout; /* offset of the posted layout; 0: none */
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields]; owned by the caller, valid while the form is set */
};

struct mn_submit {
    uint64_t sequence; /* position in the order of delivery, over all epochs */
    uint64_t number, epoch, position, base_seed, user_epoch;
    uint32_t nrows;
    uint32_t spares; /* spare indices that follow those of the rows */
    uint32_t kind;
    uint32_t queue; /* mn_engine_submit: the queue of one worker */
    uint32_t layout;
    uint32_t seeded; /* this and apart: as in struct mn_block */
    uint32_t apart;
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields] */
    uint32_t index_kind;
    const void *index;
    uint64_t index_bytes;
};

/* ---- mutex held --------------------------------------------------------------------- */

/* Makes a block with fields and PLANNED tasks, cut at row0[0..ntasks]; PART tasks are followed by
 * one more task that collates them. Returns 0. On failure sets e->refusal and returns -EAGAIN if no
 * descriptors are free or memory is lent, else -ENOMEM. */
int
mn_batch_make(struct mn_engine *e, const struct mn_submit *s, const uint32_t *row0,
              uint32_t ntasks, uint64_t *block_off);

/* Frees the block, its tasks and its ranges. No worker may run any of its tasks. */
void
mn_batch_drop(struct mn_engine *e, struct mn_batch *b);

/* Gives up a batch that will not be delivered. Tasks that no worker runs are cancelled; a task
 * whose worker dies is not retried. */
void
mn_batch_abandon(struct mn_engine *e, uint64_t block_off);

/* Adds the memory that the batch used outside of its rows to the running mean, which sets the
 * budget of later batches. Does so once per batch. */
void
mn_batch_learn_envelopes(struct mn_engine *e, struct mn_batch *b);

/* ---- mutex not held ----------------------------------------------------------------- */

/* Static scheduling: publishes a batch as one task on its worker's own queue. If there is no memory
 * for the rows of a BATCH now, it gets no layout and travels in an envelope. Returns 0 and the
 * block; -ENOMEM; -EAGAIN if no descriptors are free or the queue is full. */
int
mn_engine_submit(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off);

/* Copies bytes to where every worker can read them for as long as the engine lives. The record at
 * *off is a uint64_t length followed by the bytes. Returns 0 or -ENOMEM. */
int
mn_engine_post(struct mn_engine *e, const void *bytes, uint64_t n, uint64_t *off);

/* Makes the caller the owner of [off, off + bytes) of a DONE block: the range is freed by
 * mn_engine_release(), not with the block. Returns 0; -ENOMEM; -EINVAL if the block has no such
 * memory or the engine was closed. After an error the caller does not own the range. */
int
mn_engine_retain(struct mn_engine *e, uint64_t block_off, uint64_t off, uint64_t bytes);

#endif
