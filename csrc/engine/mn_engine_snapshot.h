/* mn_engine_snapshot.h - what the engine reports to code that does not know its parts.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Answers are copies of one instant, taken under the mutex, unless a function belongs to the
 * caller's thread. The mapping is shared with workers: workers/mn_records.h describes what is read
 * there and who may write it. Any thread of the trainer may call these functions, without the
 * mutex.
 */
#ifndef MN_ENGINE_SNAPSHOT_H
#define MN_ENGINE_SNAPSHOT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_batches.h"
#include "schedule/mn_plan.h"
#include "engine/mn_autoscale.h"
#include "engine/mn_waits.h"
#include "workers/mn_records.h"
#include "workers/mn_tasks_and_retries.h"

struct mn_engine;
struct mn_pagelocks;

/* Returns the mapping; valid for as long as the engine lives. */
const struct mn_shm *
mn_engine_shm(const struct mn_engine *e);

/* Returns the size of the mapping in bytes, from the trainer's own record. */
uint64_t
mn_engine_mapped(const struct mn_engine *e);

/* Returns the descriptor of the mapping; -1 after mn_engine_start(). */
int
mn_engine_fd(const struct mn_engine *e);

/* Returns the descriptor by which other processes notice the end of this one; -1 if there is none,
 * and after mn_engine_start(). */
int
mn_engine_lifeline_end(const struct mn_engine *e);

/* Returns whether scheduling is balanced: the engine was opened with a prefetch window. */
bool
mn_engine_is_balanced(const struct mn_engine *e);

/* Returns whether closing has begun. */
bool
mn_engine_is_stopped(const struct mn_engine *e);

/* ---- memory -------------------------------------------------------------------------- */

struct mn_memory_snapshot {
    uint64_t used;           /* bytes of the arena, including what the program retains */
    uint64_t kept;           /* retained by the program */
    uint64_t warm;           /* free, but may still have pages */
    uint64_t reclaimed;      /* returned to the system so far */
    uint64_t limit;          /* upper bound of used */
    uint64_t envelope_bytes; /* that a batch takes outside of its rows; running mean */
    uint32_t in_flight;      /* batches */
};

/* Returns the use of the arena. */
struct mn_memory_snapshot
mn_engine_memory(struct mn_engine *e);

/* Returns whether the program may retain this many more bytes; if not, it gets copies. It may
 * retain at most half of the limit, because the rest is left for batches that are being made. It
 * may retain nothing while use exceeds the limit. Otherwise a head that passed the limit would
 * still be in memory when the next head passes it. */
bool
mn_engine_may_retain(struct mn_engine *e, uint64_t bytes);

/* Returns the parts of the mapping that a device may read; valid for as long as the engine lives.
 * They have their own mutex. */
struct mn_pagelocks *
mn_engine_pagelocks(struct mn_engine *e);

/* ---- workers ------------------------------------------------------------------------- */

struct mn_health {
    bool zygote_lost;
    bool zygote_hung;
    uint32_t deaths; /* unexpected deaths so far */
    /* the longest series of deaths in one entry without a finished task, now */
    uint32_t crash_loop;
    uint32_t live;   /* workers that may still finish a task */
    uint64_t retries;
    struct mn_death last;
};

/* Returns what is known about the zygote and about deaths of workers. */
struct mn_health
mn_engine_health(struct mn_engine *e);

/* The inputs and results of decisions on the number of workers; low and high are its bounds. */
struct mn_autoscale_log {
    uint32_t active;
    uint32_t low, high;
    uint64_t stragglers;
    struct mn_autoscale_saved saved;
    uint32_t n;
    struct mn_decision last[MN_AUTOSCALE_LOG]; /* [n], oldest first */
};

/* Returns false if the number of workers is fixed. */
bool
mn_engine_autoscale(struct mn_engine *e, struct mn_autoscale_log *out);

/* ---- batches ------------------------------------------------------------------------- */

/* Returns whether the block made at this offset with this serial number still belongs to a batch in
 * flight. */
bool
mn_engine_has_block(struct mn_engine *e, uint64_t block_off, uint32_t serial);

/* How a block in flight may be read now. */
struct mn_reading {
    enum mn_block_status status;
    bool in_rows; /* every row was written in place, and no envelope travels with them */
    bool copy;    /* the program may not retain its rows */
};

/* Looks at a block that was made with this serial number, for a caller who wants to make a batch of
 * its rows, of row_bytes each. Returns false if its batch is not in flight any more. Otherwise it
 * has also called mn_engine_pin(). */
bool
mn_engine_read(struct mn_engine *e, uint64_t block_off, uint32_t serial, uint64_t row_bytes,
               struct mn_reading *out);

/* Returns the accepted result of the i-th task of a DONE block; NULL after the last task. Only for
 * the caller that was given the batch. */
const struct mn_result *
mn_engine_result(const struct mn_engine *e, uint64_t block_off, uint32_t i);

struct mn_loss {
    struct mn_death death; /* of the last worker that tried it */
    uint32_t row0, nrows;
};

/* Returns whether the i-th task of the block was lost with its worker. The block must have that
 * task. */
bool
mn_engine_loss(const struct mn_engine *e, uint64_t block_off, uint32_t i, struct mn_loss *out);

struct mn_progress {
    struct mn_waits waits; /* the caller's */
    uint64_t held;      /* how often the memory limit held tasks back; the rest is 0 for static
                         * scheduling */
    uint64_t planned;   /* batches that have not started */
    uint64_t ready;     /* batches that are complete, and not delivered */
    uint64_t helped;    /* times that a worker took over part of another worker's share */
    uint64_t starts[6]; /* tasks started, by enum mn_dispatch_why */
    bool together;      /* neighbours are made by one worker, or it is not known whether to */
    int64_t displaced_max, displaced_sum; /* how far samples moved from their positions in the
                                           * sampler's order, in batches */
};

/* Returns the progress of deliveries and the plan's statistics. */
struct mn_progress
mn_engine_progress(struct mn_engine *e);

/* Publishes a statistic that other processes read: how many samples failed so far and were left out
 * or replaced. Caller's thread only. */
void
mn_engine_note_failed(struct mn_engine *e, uint64_t samples);

/* Returns why a batch that mn_engine_next() gave without a block cannot be made. */
struct mn_refusal
mn_engine_refused(struct mn_engine *e, uint64_t sequence);

#endif
