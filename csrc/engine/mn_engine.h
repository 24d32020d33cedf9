/* mn_engine.h - the trainer's side: allocates, publishes, reaps, watches.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Actors.  The user's thread (submit, wait, retire, release; without the GIL where it may
 * block) and one engine thread (grants leases, sweeps the dead).  Both work under e->mutex,
 * so everything the trainer owns (mn_records.h) has one writer at a time.  The engine thread
 * never needs the GIL and takes no signal.
 *
 * Life of a block (one batch):
 *   submit   block from the input region, fields from the arena, tasks from the free stack;
 *            tasks go to a queue
 *   workers  claim, write rows, make each task DONE
 *   poll     derived from the task words: no counter is shared
 *   take     the caller reads reports, fields and envelopes, and says with mn_engine_keep
 *            which ranges it handed out
 *   retire   everything not handed out is free again
 *   release  a range handed out comes back
 * An abandoned block (early break) is cancelled where nobody works and retired by the engine
 * when the last worker on it is done or dead; what dies with its worker is not tried again.
 *
 * Death.  The zygote reports EXITED; the engine sweeps: each task RUNNING under that worker
 * goes to the express queue with a new generation, or is LOST when its attempts are used up;
 * the unused end of the worker's lease is freed; then the entry becomes SWEPT and the zygote
 * may reap, so the pid names the dead worker until the trainer has looked.  Nothing that a
 * worker could still write is reused before its death was seen: no zombie writers.
 *
 * Memory.  limit counts every arena byte in use, also what the caller keeps.  A submit over
 * the limit is refused (-ENOMEM) and the caller waits, unless nothing else is in flight.
 * What is free and not needed goes back to the system (memory/mn_arena.h).
 *
 * Fork.  A child of the trainer has a copy of this structure and must not touch it: the
 * Python floor compares process ids.
 */
#ifndef MN_ENGINE_H
#define MN_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_blocks.h"
#include "engine/mn_engine_config.h"
#include "schedule/mn_plan.h"
#include "engine/mn_checked_results.h"

/* 0 or -errno. Workers' entries start WANTED. */
int
mn_engine_open(struct mn_engine **out, const struct mn_engine_config *cfg);

/* Makes the pipe by which processes that are workers see the end of this one: os/mn_lifeline.h.
 * Once, before any of them is begun. 0 or -errno. */
int
mn_engine_open_lifeline(struct mn_engine *e);

/* Starts the engine thread once the zygote is known. */
int
mn_engine_start(struct mn_engine *e, int zygote_pidfd, int zygote_cmd);

/* Tells workers and zygote to stop; returns at once. */
void
mn_engine_stop(struct mn_engine *e);

/* Native workers end after the sample in hand, and nobody is told; returns at once. */
void
mn_engine_dismiss(struct mn_engine *e);

/* Keeps the memory, until mn_engine_unpin, also of an engine that is closed meanwhile: around
 * code of others. */
void
mn_engine_pin(struct mn_engine *e);

void
mn_engine_unpin(struct mn_engine *e);

/* Joins the thread and, once no range is out, unmaps. No worker may be alive. */
void
mn_engine_close(struct mn_engine *e);

/* Who waits in here looks again. */
void
mn_engine_kick(struct mn_engine *e);

/* ---- single workers: -EINVAL where there is no such ---------------------------------- */

/* It is not replaced when it dies. */
int
mn_engine_retire_worker(struct mn_engine *e, uint32_t worker);

/* It leaves when it has finished its task, and is not replaced. */
int
mn_engine_ask_to_leave(struct mn_engine *e, uint32_t worker, enum mn_leave how);

/* Signals its process. 0; -ESRCH: it does not live; -errno. */
int
mn_engine_kill_worker(struct mn_engine *e, uint32_t worker, int sig);

/* Signals the zygote. 0; -ESRCH: there is none that lives; -errno. */
int
mn_engine_kill_zygote(struct mn_engine *e, int sig);

/* Another zygote has taken the place of one that is gone. The caller has put its descriptors in
 * place of those that mn_engine_start() was given, under the same numbers. */
void
mn_engine_zygote_replaced(struct mn_engine *e);

/* The number of workers, within its bounds, as if that had been decided; decisions go on from
 * there. -EINVAL where it is fixed. */
int
mn_engine_move_to(struct mn_engine *e, int32_t workers);

/* ---- balanced scheduling: mn_plan.h decides ------------------------------------------ */

/* Of the batch that is planned next. The caller's thread. */
uint64_t
mn_engine_next_sequence(const struct mn_engine *e);

/* Takes a batch in and starts what should start. MN_OK; MN_FULL: later; -ENOMEM. */
int
mn_engine_plan(struct mn_engine *e, const struct mn_plan_batch *b);

/* From now on rows travel so. Batches that have started keep their form. */
void
mn_engine_set_form(struct mn_engine *e, const struct mn_form *form);

/* No more batches in this epoch. */
void
mn_engine_plan_end(struct mn_engine *e);

/* Abandons everything planned or in flight. */
void
mn_engine_plan_clear(struct mn_engine *e);

/* Waits for the next batch to deliver: the head, or out of order the one done first; with
 * no time (0) it is a look for the batch after the one that the caller gets now. MN_OK, with
 * block 0 where the batch cannot be made: mn_engine_refused says why, mn_engine_taken goes on;
 * -ETIMEDOUT, -EINTR; MN_CLOSED: a death or a lost zygote is to be looked at; MN_EMPTY:
 * workers idle behind a slow sample, or are about to, and more could be planned. */
int
mn_engine_next(struct mn_engine *e, int64_t timeout_ns, uint64_t *sequence,
               uint64_t *block_off);

/* The batch that mn_engine_next gave was read: frees it as mn_engine_retire does, or where batches
 * are formed all of which nothing is left. -EINVAL where it is not what that gave. */
int
mn_engine_taken(struct mn_engine *e, uint64_t sequence, uint64_t block_off);

/* The caller begins to wait for a batch. mn_engine_next says so by itself, unless this is said
 * before: for static scheduling, and where a batch is not the caller's yet when the engine has
 * given it: what is taken beyond the one that is waited for is prefetched (mn_plan.h), and the
 * first of that is the next.
 * Returns what the caller needs for a batch, in ns, on average; 0: not known. */
int64_t
mn_engine_span_begin(struct mn_engine *e);

/* The wait ends, with a batch or without. held: the caller has one that it was to give then, and
 * gives it the next time. */
void
mn_engine_span_end(struct mn_engine *e, bool got, bool held);

/* Both at once: the caller is given a batch that was prefetched. */
void
mn_engine_handed(struct mn_engine *e);

/* A DONE block without tasks, with room for the rows of s: for rows gathered from others. */
int
mn_engine_gather_block(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off);

/* Sleeps until block (or MN_WANT_ANY: any task) is done, something is to be looked at (a
 * death, a lost zygote), or the time is over. 0, -ETIMEDOUT, -EINTR. */
int
mn_engine_wait(struct mn_engine *e, uint64_t block_off, int64_t timeout_ns);

/* Frees a range that was kept. Any thread of the trainer. */
void
mn_engine_release(struct mn_engine *e, uint64_t off, uint64_t bytes);

/* The block is read: frees it and its fields and envelopes, but for what was kept. */
void
mn_engine_retire(struct mn_engine *e, uint64_t block_off);

#endif
