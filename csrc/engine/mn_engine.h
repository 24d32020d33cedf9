/* mn_engine.h - the trainer's side: allocates, publishes, reaps, supervises.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Actors. The user's thread (plan, next, taken, release; next without the GIL) and
 * one engine thread (starts tasks, grants leases, sweeps dead workers, returns pages). Both work
 * under e->mutex, so everything that the trainer owns (mn_records.h) has one writer at a time. The
 * engine thread never needs the GIL and takes no signal.
 *
 * Life of a block of static scheduling (balanced: plan, next, read, taken, release; see
 * csrc/README.md, "The path of one sample"):
 *   submit   takes the block from the input region, fields from the arena, tasks from the free
 *            stack; puts the tasks on a queue
 *   workers  claim tasks, write rows, make each task DONE
 *   poll     derives the status from the task words: no counter is shared
 *   take     the caller reads reports, fields and envelopes, and calls mn_engine_retain() for each
 *            range that it hands out
 *   retire   frees everything that was not handed out
 *   release  frees a range that was handed out
 * An abandoned block (early break) is cancelled where no worker runs its tasks. The engine retires
 * it when the last worker on it is done or dead; a task whose worker dies is not retried.
 *
 * Death. csrc/README.md ("After a kill") describes the protocol. No memory that a worker could
 * still write is reused before its death was seen: no zombie writers.
 *
 * Memory. limit counts every arena byte in use, including what the caller retains. A submit over
 * the limit is refused (-ENOMEM) and the caller waits, unless nothing else is in flight. Free
 * memory that is not needed goes back to the system (memory/mn_arena.h).
 *
 * Fork. A forked child of the trainer has a copy of this structure and must not touch it: py/
 * compares process ids.
 */
#ifndef MN_ENGINE_H
#define MN_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_batches.h"
#include "schedule/mn_plan.h"

/* ---- the configuration of an engine ---- */

struct mn_shared_costs;
struct mn_autoscale_saved;

struct mn_engine_config {
    uint32_t workers;       /* at the start */
    uint32_t min_workers;   /* below max_workers: the scheduler moves between the two; 0: fixed */
    uint32_t max_workers;   /* entries of the worker table */
    /* A sample that runs for longer is a straggler; 0: learned, < 0: never. */
    int64_t straggler_ns;
    uint32_t max_retries;
    bool respawn;           /* replace dead workers */
    uint64_t arena_bytes;   /* 0: four times the memory limit; halved until it maps */
    uint64_t memory_limit;  /* 0: three quarters of the arena */
    uint32_t window;        /* balanced: steady prefetch window, in batches; 0: static */
    uint32_t blocks;        /* expected number of batches in flight; not used in ready mode */
    bool in_order;
    struct mn_shared_costs *costs; /* balanced: must outlive the engine */
    uint32_t ready_batch;   /* 0: deliver batches as planned. Else form batches of this many */
    uint32_t ready_bound;   /* ready samples; none moves by more than this many batches */
    bool ready_mixes;       /* mix samples of several planned batches where that helps */
    /* Workers may keep files open between samples: make neighbours in one worker where measurements
     * show that to be cheaper. */
    bool group_neighbours;
    const struct mn_autoscale_saved *saved_scheduler; /* the last iterator's scheduler, or NULL */
    bool processes;         /* workers may be processes, which notice the end of this one */
    const char *title;      /* by which observers show this loader; NULL: none */
};

/* Opens an engine whose worker entries start WANTED. Returns 0 or -errno. */
int
mn_engine_open(struct mn_engine **out, const struct mn_engine_config *cfg);

/* Starts the engine thread, once the zygote is known. If it has started: another zygote has
 * replaced one that ended, and its descriptors have the same numbers. Returns 0 or -errno. */
int
mn_engine_start(struct mn_engine *e, int zygote_pidfd, int zygote_cmd);

/* Asks workers and zygote to exit. Returns at once. */
void
mn_engine_stop(struct mn_engine *e);

/* Asks native workers to exit after their current sample, without any report. Returns at once. */
void
mn_engine_dismiss(struct mn_engine *e);

/* Keeps the memory alive until mn_engine_unpin(), even if the engine is closed meanwhile. Used
 * around calls of foreign code. */
void
mn_engine_pin(struct mn_engine *e);

void
mn_engine_unpin(struct mn_engine *e);

/* Joins the thread and unmaps once no range is handed out. No worker may be alive. */
void
mn_engine_close(struct mn_engine *e);

/* Wakes every thread that is blocked in mn_engine_wait() or mn_engine_next(). */
void
mn_engine_wake_waiters(struct mn_engine *e);

/* ---- single workers ------------------------------------------------------------------ */

/* Asks the worker to exit after its current task. It is not replaced. Does nothing for a number
 * without an entry. */
void
mn_engine_ask_to_exit(struct mn_engine *e, uint32_t worker, enum mn_exit_request how);

/* If the worker still makes this row of the batch with this number, that took too long: once it is
 * killed, it is replaced, and its task is lost. end: kills it. Returns whether it makes the row. */
bool
mn_engine_end_late(struct mn_engine *e, uint32_t worker, uint64_t number, uint64_t row, bool end);

/* Signals the worker's process. retire: it is not replaced when it ends. Returns 0; -ESRCH: it has
 * ended; -EINVAL for a number without an entry; -errno. */
int
mn_engine_kill_worker(struct mn_engine *e, uint32_t worker, int sig, bool retire);

/* Sets the number of workers, within its bounds, as if the policy had decided so. Later decisions
 * start from there. Returns -EINVAL if the number is fixed. */
int
mn_engine_move_to(struct mn_engine *e, int32_t workers);

/* ---- balanced scheduling: mn_plan.h decides ------------------------------------------ */

/* Returns the sequence of the batch that will be planned next. Caller's thread only. */
uint64_t
mn_engine_next_sequence(const struct mn_engine *e);

/* Plans a batch and starts what is due. Returns MN_OK; MN_FULL: try later; -ENOMEM. */
int
mn_engine_plan(struct mn_engine *e, const struct mn_plan_batch *b);

/* Sets how rows travel from now on. Batches that have started keep their form. */
void
mn_engine_set_form(struct mn_engine *e, const struct mn_form *form);

/* Declares that this epoch has no more batches. */
void
mn_engine_plan_end(struct mn_engine *e);

/* Abandons everything that is planned or in flight. */
void
mn_engine_plan_clear(struct mn_engine *e);

/* How a wait for the next batch has ended, if not with -EINTR. */
enum mn_next {
    MN_NEXT_BATCH = 0,
    MN_NEXT_TIMEOUT = 1,
    MN_NEXT_HEALTH = 2, /* a worker died or the zygote is lost: look at mn_engine_health() */
    MN_NEXT_PLAN = 3,   /* workers idle behind a straggler, or soon will: plan more */
};

/* Waits for the next batch to deliver: the head, or out of order the batch that was done first. A
 * timeout of 0 only looks for the batch after the one that the caller receives now. If the block of
 * a batch is 0, it cannot be made: mn_engine_refused() says why, and mn_engine_taken() skips it.
 * Returns an enum mn_next, or -EINTR. */
int
mn_engine_next(struct mn_engine *e, int64_t timeout_ns, uint64_t *sequence,
               uint64_t *block_off);

/* Frees the batch that mn_engine_next() gave, after the caller has read it. In ready mode, frees
 * every planned batch whose last row this delivery used. pinned: does what mn_engine_unpin() does,
 * too; the engine must be open. Returns -EINVAL if mn_engine_next() did not give this batch. */
int
mn_engine_taken(struct mn_engine *e, uint64_t sequence, uint64_t block_off, bool pinned);

/* Starts timing the caller's wait. mn_engine_next() does this itself; call it only for static
 * scheduling, or when several batches are taken at once. Batches taken beyond the awaited one are
 * prefetched (mn_plan.h), and the next one to deliver is the first of those. Returns how long the
 * caller needs for a batch on average, in ns; 0: unknown. */
int64_t
mn_engine_span_begin(struct mn_engine *e);

/* Ends the wait. got: with a batch. held: the caller already has the batch that it would have given
 * now, and will give it the next time. If no wait has begun, it begins and ends now: the caller is
 * given a prefetched batch. */
void
mn_engine_span_end(struct mn_engine *e, bool got, bool held);

/* Sleeps until the block is done (MN_WANT_ANY: until any task is done) or the timeout is over. A
 * death or a lost zygote, which the caller must look at, also ends the sleep. Returns 0,
 * -ETIMEDOUT, -EINTR. */
int
mn_engine_wait(struct mn_engine *e, uint64_t block_off, int64_t timeout_ns);

/* Frees a range that the caller retained. Any thread of the trainer. */
void
mn_engine_release(struct mn_engine *e, uint64_t off, uint64_t bytes);

/* Frees a block that was read, with its fields and envelopes, except the ranges that the caller
 * retains. */
void
mn_engine_retire(struct mn_engine *e, uint64_t block_off);

#endif
