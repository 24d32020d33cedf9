/* mn_blocks.h - a batch's block in the mapping: made with its rows and tasks, and ended.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A batch ends once: retired when it was read, abandoned when nobody wants it.  Either way its
 * records, tasks and ranges are free, but for what was kept.  An abandoned one that somebody
 * still works on is dropped when he is through (mn_supervise.h).
 */
#ifndef MN_BLOCKS_H
#define MN_BLOCKS_H

#include "engine/mn_batch.h"

/* How the rows of a batch travel, decided when it starts. */
struct mn_form {
    uint32_t kind;   /* enum mn_task_kind */
    uint32_t layout; /* offset of the posted layout, 0 without */
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields], the caller's, alive while the form is set */
};

struct mn_submit {
    uint64_t sequence; /* place in the order of delivery, counted over epochs */
    uint64_t number, epoch, position, base_seed, user_epoch;
    uint32_t nrows;
    uint32_t spares; /* indices behind those of rows */
    uint32_t kind;
    uint32_t queue; /* mn_engine_submit: of one worker */
    uint32_t layout;
    uint32_t seeded;
    uint32_t apart;
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields] */
    uint32_t index_kind;
    const void *index;
    uint64_t index_bytes;
};

/* ---- mutex held --------------------------------------------------------------------- */

/* Makes a block with fields and PLANNED tasks, cut at row0[0..ntasks]; behind PART tasks one
 * more to collate them. 0, or e->refusal and -EAGAIN without descriptors or while room is
 * lent, else -ENOMEM. */
int
mn_batch_make(struct mn_engine *e, const struct mn_submit *s, const uint32_t *row0,
              uint32_t ntasks, uint64_t *block_off);

/* Frees block, tasks and ranges. All tasks are out of workers' hands. */
void
mn_batch_drop(struct mn_engine *e, struct mn_batch *b);

/* Nobody wants it: what nobody works on is cancelled, and what dies with its worker stays so. */
void
mn_batch_abandon(struct mn_engine *e, uint64_t block_off);

/* What its results take outside of rows, for the budget of those to come. */
void
mn_batch_learn_envelopes(struct mn_engine *e, uint64_t block_off);

/* ---- mutex not held ----------------------------------------------------------------- */

/* Static scheduling: publishes a batch as one task, on the queue of its worker. A BATCH
 * without room for its rows now has no layout: then it travels in an envelope. 0 and the block;
 * -ENOMEM; -EAGAIN: no descriptors now, or the queue is full. */
int
mn_engine_submit(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off);

/* Puts bytes where every worker can read them for as long as the engine lives: the record
 * at *off is a uint64_t length, then the bytes. 0 or -ENOMEM. */
int
mn_engine_post(struct mn_engine *e, const void *bytes, uint64_t n, uint64_t *off);

/* [off, off + bytes) of the DONE block is the caller's from now on: it comes back with
 * mn_engine_release, not with the block. 0; -ENOMEM, or -EINVAL where the block has no such
 * memory, or the engine was closed (then it is not the caller's). */
int
mn_engine_keep(struct mn_engine *e, uint64_t block_off, uint64_t off, uint64_t bytes);

#endif
