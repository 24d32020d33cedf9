/* mn_engine.h - the trainer's side: allocates, publishes, reaps, watches.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Actors.  The user's thread (submit, wait, retire, release; without the GIL where it may
 * block) and one engine thread (grants leases, sweeps the dead).  Both work under e->mutex,
 * so everything the trainer owns (mn_message.h) has one writer at a time.  The engine thread
 * never needs the GIL and takes no signal.
 *
 * Life of a block (one batch):
 *   submit   block from the input region, fields from the arena, tasks from the free stack;
 *            tasks go to a lane
 *   workers  claim, write rows, make each task DONE
 *   poll     derived from the task words: no counter is shared
 *   take     the caller reads reports, fields and envelopes, and says with mn_engine_keep
 *            which ranges it handed out
 *   retire   everything not handed out is free again
 *   release  a range handed out comes back
 * An abandoned block (early break) is cancelled where nobody works and retired by the engine
 * when the last worker on it is done or dead.
 *
 * Death.  The zygote reports EXITED; the engine sweeps: each task RUNNING under that worker
 * goes to the express lane with a new generation, or is LOST when its attempts are used up;
 * the unused end of the worker's lease is freed; then the entry becomes SWEPT and the zygote
 * may reap, so the pid names the dead worker until the trainer has looked.  Nothing that a
 * worker could still write is reused before its death was seen: no zombie writers.
 *
 * Memory.  limit counts every arena byte in use, also what the caller keeps.  A submit over
 * the limit is refused (-ENOMEM) and the caller waits, unless nothing else is in flight.
 * What is free and not needed goes back to the system (policy_reclaim.h): the engine thread
 * lends a range from the allocator, lets go of the mutex for the system call, and returns it.
 *
 * Fork.  A child of the trainer has a copy of this structure and must not touch it: the
 * Python floor compares process ids.
 */
#ifndef MN_ENGINE_H
#define MN_ENGINE_H

#include <stdbool.h>
#include <stdint.h>

#include "workers/mn_board.h"
#include "workers/mn_message.h"
#include "engine/mn_plan.h"
#include "engine/mn_results.h"
#include "memory/policy_reclaim.h"
#include "os/mn_thread.h"
#include "sync/mn_extent.h"

struct mn_batch;
struct mn_range;
struct mn_scheduler;

/* A worker's death, for messages. */
struct mn_death {
    uint32_t worker;
    uint32_t pid;
    int32_t status;
    int64_t row_task; /* task it was running, -1 when none */
};

struct mn_engine_config {
    uint32_t workers;       /* to begin with */
    uint32_t min_workers;   /* below max_workers: the scheduler moves between the two; 0: fixed */
    uint32_t max_workers;   /* entries of the worker table */
    /* A sample in flight for longer is a straggler; 0: learned, < 0: never. */
    int64_t straggler_ns;
    uint32_t max_retries;
    bool respawn;           /* dead workers are replaced */
    uint64_t arena_bytes;   /* 0: min(4 x RAM, 1 TB), halved until it maps */
    uint64_t memory_limit;  /* 0: half of what is available */
    uint32_t window;        /* balanced: batches in the steady window; 0: static */
    uint32_t blocks;        /* batches begun and not freed, as far as many are to be expected */
    bool in_order;
    struct mn_costs *costs; /* balanced: outlives the engine */
    uint32_t unit_rows;     /* 0: batches are planned; else samples, as many to a batch */
    bool keeps;             /* workers may keep what they have opened: neighbours are kept
                             * together where that was measured to be cheaper */
    const struct mn_scheduler_keep *keep; /* of the last iterator's scheduler, or NULL */
};

/* Why a batch cannot be made. */
enum mn_refusal_why {
    MN_REFUSED_NOT = 0,
    MN_REFUSED_TASKS = 1,   /* no descriptors, in tasks */
    MN_REFUSED_RECORDS = 2, /* no room for its indices and reports, in bytes */
    MN_REFUSED_ROWS = 3,    /* none in the arena, in bytes */
    MN_REFUSED_PRIVATE = 4, /* the system refused some bytes to the trainer */
};

struct mn_refusal {
    enum mn_refusal_why why;
    uint64_t need;
    uint64_t all; /* that there are, in use or not */
};

struct mn_engine {
    struct mn_shm shm;
    int fd;
    uint64_t total_bytes;
    struct mn_mutex mutex;
    struct mn_thread thread;
    bool thread_running;
    struct mn_engine_config cfg;
    struct mn_extents *input;
    struct mn_extents *arena;
    uint32_t *free_tasks;
    uint32_t nfree;
    uint32_t *gens;
    struct mn_death *lost;     /* [ntasks], of tasks that are LOST */
    struct mn_result *results; /* [ntasks] */
    struct mn_batch **by_task; /* [ntasks], NULL: of none in flight */
    struct mn_lane_head *heads;
    struct mn_lease {
        uint64_t off, len;      /* the present one; len 0: none */
        struct mn_range *owed;  /* what it was granted of this or earlier ones, unless an */
        uint32_t nowed, room;   /* accepted envelope has taken it; in no order */
        uint32_t damage;        /* enum mn_damage: it is to leave for that */
        uint32_t barren; /* deaths in a row without a finished task */
        uint64_t tasks;  /* finished in this place before the present worker came */
    } *leases;
    struct mn_batch *batches; /* in flight, oldest first */
    struct mn_batch *last;
    uint32_t inflight;
    uint64_t submitted; /* static: batches so far, their order */
    struct mn_refusal refusal; /* of the last batch that could not be made */
    uint64_t limit;
    uint64_t lease_bytes;
    uint64_t kept_bytes;    /* handed out to the caller */
    uint64_t refs;          /* ranges handed out + 1 while open; under mutex */
    uint32_t active;        /* workers that should be there, standby ones not counted */
    struct mn_scheduler *scheduler; /* NULL: the number of workers is fixed */
    struct mn_plan *plan;   /* balanced scheduling; NULL: static */
    uint64_t mean_envelope_bytes;
    uint64_t wait_ns, waits, wait_max_ns; /* the caller in next() */
    uint64_t used_ns;       /* the caller between two calls of next() */
    uint64_t wait_first_ns; /* the first wait */
    uint64_t held;          /* waits while the memory limit held tasks back */
    uint64_t asked_ns;      /* begin of the last wait, */
    uint64_t counted_ns;    /* of its last part, */
    uint64_t given_ns;      /* and its end; 0: it gave nothing, or the epoch is over */
    bool asking;            /* the last call gave nothing: its wait may go on */
    bool spanned;           /* the caller says when a wait begins and ends, */
    bool served;            /* and what it waits for was taken */
    uint64_t delivered;
    uint64_t retries;
    uint32_t ndeaths;       /* unexpected ones */
    struct mn_death death;  /* the last */
    int zygote_pidfd;
    int zygote_cmd;         /* write end: one byte = look at the workers' table */
    struct mn_reclaim reclaim; /* what goes back to the system */
    uint64_t reclaim_from;     /* arena offset where its present pass has come to */
    uint64_t reclaimed_bytes;  /* given back so far */
    bool zygote_lost;
    bool closing;
    bool room_waits; /* a worker waits for room: memory that comes back is told */
    uint64_t idle_ns; /* since when it waits for nothing but idle workers; 0: it does not */
};

/* 0 or -errno. Workers' entries start WANTED. */
int
mn_engine_open(struct mn_engine **out, const struct mn_engine_config *cfg);

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

/* ---- static scheduling: the caller says which worker -------------------------------- */

struct mn_submit {
    uint64_t sequence; /* place in the order of delivery, counted over epochs */
    uint64_t number, epoch, position, base_seed, user_epoch;
    uint32_t nrows;
    uint32_t kind;
    uint32_t lane;
    uint32_t layout;
    uint32_t seeded;
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields] */
    uint32_t index_kind;
    const void *index;
    uint64_t index_bytes;
};

/* Publishes a batch as one task. 0 and the block; -ENOMEM; -EAGAIN: no descriptors now,
 * or the lane is full. */
int
mn_engine_submit(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off);

/* ---- balanced scheduling: mn_plan.h decides ------------------------------------------ */

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

struct mn_refusal
mn_engine_refused(struct mn_engine *e, uint64_t sequence);

/* The batch that mn_engine_next gave was read: frees it as mn_engine_retire does. */
void
mn_engine_taken(struct mn_engine *e, uint64_t sequence, uint64_t block_off);

/* The batch is read but its block stays out until it is retired: the next becomes the head. */
void
mn_engine_detach(struct mn_engine *e, uint64_t sequence);

/* The caller begins to wait for a batch, and ends: with one or without. mn_engine_next does
 * it by itself, unless a wait is begun by mn_engine_span_begin: for static scheduling, and
 * where a batch is not the caller's yet when the engine has given it: what is taken beyond the
 * one that is waited for is in hand (mn_plan.h), and the first of that is the next. */
void
mn_engine_asked(struct mn_engine *e);

void
mn_engine_given(struct mn_engine *e, bool got);

void
mn_engine_span_begin(struct mn_engine *e);

void
mn_engine_span_end(struct mn_engine *e, bool got);

/* Both at once: the caller is given a batch that it had in hand. */
void
mn_engine_handed(struct mn_engine *e);

/* No batch from this sequence on may start yet (UINT64_MAX >> 1: no limit). */
void
mn_engine_set_horizon(struct mn_engine *e, uint64_t sequence);

/* A DONE block without tasks, with room for the rows of s: for rows gathered from others. */
int
mn_engine_gather_block(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off);

/* Puts bytes where every worker can read them for as long as the engine lives: the record
 * at *off is a uint64_t length, then the bytes. 0 or -ENOMEM. */
int
mn_engine_post(struct mn_engine *e, const void *bytes, uint64_t n, uint64_t *off);

enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off);

/* The same, and what its workers wrote was found to make sense: what is read of a block that is
 * DONE was copied then. mn_engine_next has done this. */
enum mn_block_status
mn_engine_settle(struct mn_engine *e, uint64_t block_off);

/* What was reported of the rows of a DONE block. */
const struct mn_report *
mn_engine_read_reports(struct mn_engine *e, uint64_t block_off);

/* Whether every row of it was written in place, and nothing travels beside them. */
bool
mn_engine_in_rows(struct mn_engine *e, uint64_t block_off);

/* When the last task of a DONE block finished. */
uint64_t
mn_engine_done_ns(struct mn_engine *e, uint64_t block_off);

/* Sleeps until block (or MN_WANT_ANY: any task) is done, something is to be looked at (a
 * death, a lost zygote), or the time is over. 0, -ETIMEDOUT, -EINTR. */
int
mn_engine_wait(struct mn_engine *e, uint64_t block_off, int64_t timeout_ns);

/* [off, off + bytes) of the DONE block is the caller's from now on: it comes back with
 * mn_engine_release, not with the block. 0; -ENOMEM, or -EINVAL where the block has no such
 * memory, or the engine was closed (then it is not the caller's). */
int
mn_engine_keep(struct mn_engine *e, uint64_t block_off, uint64_t off, uint64_t bytes);

/* Frees a range that was kept. Any thread of the trainer. */
void
mn_engine_release(struct mn_engine *e, uint64_t off, uint64_t bytes);

/* The block is read: frees it and its fields and envelopes, but for what was kept. */
void
mn_engine_retire(struct mn_engine *e, uint64_t block_off);

/* The block is not wanted any more, finished or not. */
void
mn_engine_abandon(struct mn_engine *e, uint64_t block_off);

/* Rounds a range up to what the arena manages. */
static inline uint64_t
mn_page_round(uint64_t bytes)
{
    return (bytes + MN_PAGE - 1) & ~(uint64_t)(MN_PAGE - 1);
}

/* Workers that may still finish something. */
uint32_t
mn_engine_live(struct mn_engine *e);

#endif
