/* mn_engine_snapshot.h - what the engine tells whoever does not know its parts.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Answers are copies of one instant, taken under the mutex, but for what it says belongs to the
 * caller's thread. The mapping is shared with workers: what is read there is described, with who
 * may write it, in workers/mn_records.h.  Any thread of the trainer, with the mutex not held.
 */
#ifndef MN_ENGINE_SNAPSHOT_H
#define MN_ENGINE_SNAPSHOT_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/mn_plan.h"
#include "engine/mn_autoscale.h"
#include "engine/mn_waits.h"
#include "workers/mn_records.h"
#include "workers/mn_tasks.h"

struct mn_engine;
struct mn_pagelocks;
struct mn_run;

/* The mapping; as long as the engine lives. */
const struct mn_shm *
mn_engine_shm(const struct mn_engine *e);

/* Its bytes, by the trainer's own record. */
uint64_t
mn_engine_mapped(const struct mn_engine *e);

/* Its descriptor; -1 since mn_engine_start. */
int
mn_engine_fd(const struct mn_engine *e);

/* The descriptor by which other processes see the end of this one; -1 without one, and since
 * mn_engine_start. */
int
mn_engine_lifeline_end(const struct mn_engine *e);

/* Whether batches are planned: it was opened with a window. */
bool
mn_engine_is_balanced(const struct mn_engine *e);

/* Whether somebody has begun to close it. */
bool
mn_engine_is_stopped(const struct mn_engine *e);

/* ---- memory -------------------------------------------------------------------------- */

struct mn_memory_snapshot {
    uint64_t used;           /* bytes of the arena, what the program keeps included */
    uint64_t kept;           /* by the program */
    uint64_t warm;           /* free, and may hold pages */
    uint64_t reclaimed;      /* given back to the system so far */
    uint64_t limit;          /* the ceiling of used */
    uint64_t envelope_bytes; /* that a batch takes outside of rows, running mean */
    uint32_t in_flight;      /* batches */
};

struct mn_memory_snapshot
mn_engine_memory(struct mn_engine *e);

/* Whether the program may keep so many bytes more: at the ceiling it gets copies, because half of
 * the limit is left for batches that are made; and over it, or what has passed it as the head would
 * still be there when the next head does. */
bool
mn_engine_may_keep(struct mn_engine *e, uint64_t bytes);

/* What of the mapping a device may read; as long as the engine lives. It has a mutex of its own. */
struct mn_pagelocks *
mn_engine_pagelocks(struct mn_engine *e);

/* ---- workers ------------------------------------------------------------------------- */

struct mn_health {
    bool zygote_lost;
    bool zygote_hung;
    uint32_t deaths; /* unexpected ones so far */
    /* the longest row of them up to now in one place without a finished task */
    uint32_t crash_loop;
    uint32_t live;   /* workers that may still finish something */
    uint64_t retries;
    struct mn_death last;
};

struct mn_health
mn_engine_health(struct mn_engine *e);

/* What the number of workers is decided on; low and high are its bounds. */
struct mn_autoscale_log {
    uint32_t active;
    uint32_t low, high;
    uint64_t stragglers;
    struct mn_autoscale_keep keep;
    uint32_t n;
    struct mn_decision last[MN_AUTOSCALE_LOG]; /* [n], oldest first */
};

/* False where the number of workers is fixed. */
bool
mn_engine_autoscale(struct mn_engine *e, struct mn_autoscale_log *out);

/* ---- batches ------------------------------------------------------------------------- */

/* Whether the block that was made there with that number is still of a batch in flight. */
bool
mn_engine_has_block(struct mn_engine *e, uint64_t block_off, uint32_t serial);

/* What was read of the i-th task of a block that is done; NULL behind the last one. The caller
 * was given the batch. */
const struct mn_result *
mn_engine_result(const struct mn_engine *e, uint64_t block_off, uint32_t i);

struct mn_loss {
    struct mn_death death; /* of the last worker that tried */
    uint32_t row0, nrows;
};

/* Whether the i-th task of the block, of which there are that many, was lost with its worker. */
bool
mn_engine_loss(const struct mn_engine *e, uint64_t block_off, uint32_t i, struct mn_loss *out);

/* Balanced scheduling only. */
struct mn_progress {
    uint64_t delivered; /* batches, as all four */
    uint64_t planned;   /* and not begun */
    uint64_t ready;     /* complete, and not delivered */
    uint64_t helped;    /* times a worker took over part of another's share */
    uint64_t starts[6]; /* tasks, by enum mn_dispatch_why */
    int64_t consumer_ns; /* that the caller needs for a batch, running mean; 0: not known */
    bool together;      /* neighbours are kept together */
};

struct mn_progress
mn_engine_progress(struct mn_engine *e);

/* The caller's waits, and batches that the memory limit held tasks back for. */
struct mn_waits
mn_engine_waits(struct mn_engine *e, uint64_t *held);

/* A statistic that other processes read: how many samples failed so far and were left out or
 * replaced.
 * The caller's thread. */
void
mn_engine_note_failed(struct mn_engine *e, uint64_t samples);

/* Why a batch that next() gave without a block cannot be made. */
struct mn_refusal
mn_engine_refused(struct mn_engine *e, uint64_t sequence);

/* ---- batches that are formed (mn_forming.h) --------------------------------------------- */

bool
mn_engine_forms(const struct mn_engine *e);

/* Of which rows the batch is that next() gave; the caller's, until it is taken. */
uint32_t
mn_engine_formed(const struct mn_engine *e, const struct mn_run **runs);

/* How far samples moved from where the sampler had them, in batches: the most, and the sum. */
void
mn_engine_displaced(struct mn_engine *e, int64_t *most, int64_t *sum);

#endif
