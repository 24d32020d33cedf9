/* mn_engine_state.h - the engine's parts and how they fit together; private to engine/.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine composes parts that do not know each other. They are the arena (memory/mn_arena.h),
 * tasks, leases and the crew of workers (workers/), the plan (schedule/) and the caller's waits
 * (mn_waits.h). Other folders ask through mn_engine_snapshot.h. The engine's files build on each
 * other, and include downwards only:
 *
 *     mn_engine_next  the caller's thread: plans, waits for its next batch, takes it
 *     mn_engine       opening, the thread, closing; requests to single workers
 *     mn_engine_snapshot   answers to questions about the engine
 *     mn_engine_step    deaths, leases, starts, abandoned batches
 *     mn_autoscale    the number of workers
 *     mn_start_due    what each worker does; starts what the plan says: blocks, run queues
 *     mn_delivery_ready, mn_delivery   which batch is delivered next
 *     mn_batches      batches in flight: made, checked, learned from, and freed
 *
 * Lock. One, mutex, which next() takes. It guards everything below except the marked fields, and
 * the parts that have no lock of their own. mn_engine_unlock() unlocks it and then makes the
 * wake-ups that were noted meanwhile. No system call is made while the mutex is held, except those
 * of malloc. A model of costs has its own lock, which may be taken while this one is held.
 */
#ifndef MN_ENGINE_STATE_H
#define MN_ENGINE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_batches.h"
#include "engine/mn_delivery.h"
#include "engine/mn_engine.h"
#include "engine/mn_engine_snapshot.h"
#include "os/mn_proc.h"
#include "memory/mn_arena.h"
#include "memory/mn_pagelocks.h"
#include "os/mn_thread.h"
#include "workers/mn_crew.h"
#include "workers/mn_records.h"
#include "workers/mn_tasks_and_retries.h"

struct mn_autoscale;

/* A batch as the trainer knows it, from the plan to its delivery; in private memory. Of static
 * scheduling, or rows that the trainer gathers: only while it has a block, and the plan's part is
 * its sequence, block, state and batch. */
struct mn_batch {
    struct mn_planned planned; /* first: the plan makes it */
    struct mn_batch *next, *prev; /* in flight: while it has a block */
    bool learned;            /* its costs are in the model, its envelopes in their mean */
    struct mn_ranges ranges; /* of the arena; freed with the block */
    struct mn_report *reports; /* [rows], from accepted tasks */
    /* Ready mode: */
    int64_t first;     /* place of its row 0 */
    uint32_t left;     /* rows not taken yet */
    uint32_t unmarked; /* rows not known to be ready */
};

static inline struct mn_batch *
mn_batch_of(struct mn_planned *q)
{
    return (struct mn_batch *)q;
}

/* The batches that have a block, oldest first. */
struct mn_flight {
    struct mn_batch *first, *last;
    uint32_t n;
    struct mn_batch **by_task; /* [ntasks]; NULL: of no batch in flight */
    uint64_t submitted;        /* static: number of batches so far, which is their order */
    uint32_t serial;           /* of the block that was made last */
    uint64_t mean_envelope_bytes; /* mean memory that a batch's results take outside of its rows */
};

/* A worker that has tasks on its own queue but runs none. */
struct mn_worker_rest {
    uint64_t hint;     /* the queue's hint when this was first seen */
    uint64_t since_ns; /* when this was first seen; 0: not so */
};

/* What each worker does now, and what waits on its own queue: mn_start_due.c. */
struct mn_worker_views {
    struct mn_worker_view *view; /* [workers] at the last look, updated with what was done since */
    struct mn_worker_rest *rest; /* [workers] */
    int64_t *sent_ns;            /* [descriptors] expected time of tasks on workers' own queues */
    uint64_t looked_ns;          /* time of the last look */
};

struct mn_engine {
    struct mn_shm shm;       /* the mapping, as the parts see it */
    struct mn_memory_file file; /* where the mapping comes from */
    struct mn_lifeline lifeline; /* shows zygote and workers that the trainer is gone */
    int lifeline_end;            /* what they inherit of it; -1: there is none */
    struct mn_pagelocks locks;  /* ranges that a device may read; closed before the file */
    struct mn_mutex mutex;
    struct mn_thread thread; /* the engine thread; not running before mn_engine_start */
    struct mn_engine_config cfg;
    struct mn_arena arena;
    struct mn_tasks tasks;
    struct mn_arena_leases leases;
    struct mn_crew crew;
    struct mn_watch watch;   /* of the crew's processes; engine thread only */
    uint32_t active;         /* workers that should exist, standby workers not counted */
    struct mn_autoscale *autoscale; /* NULL: the number of workers is fixed */
    struct mn_plan *plan;    /* balanced scheduling; NULL: static */
    struct mn_form form;     /* form of the batches that start now */
    struct mn_worker_views views;
    const struct mn_delivery *delivery; /* which batch is next; NULL: static */
    void *delivery_state;               /* its own */
    uint64_t stuck_ns;       /* since when memory is too short for the plan's head; 0: it is not */
    struct mn_flight flight;
    struct mn_refusal refusal; /* of the last batch that could not be made */
    struct mn_waits waits;   /* only the caller's thread writes it */
    uint64_t held;           /* waits during which the memory limit held tasks back */
    uint64_t refs;           /* ranges handed out, pins, and one while the engine is open */
    uint64_t idle_ns;        /* since when a lease waits only for idle workers; 0: it does not */
    bool closing;
};

/* ---- what the engine's files call of each other; with the mutex held -------------------- */

/* ---- mn_engine_step.c ---- */

/* Sweeps dead workers, grants leases, drops abandoned blocks, starts what is due. Returns whether
 * anything was done. */
bool
mn_engine_step(struct mn_engine *e);

/* Returns whether what the trainer waits for (mn_ctl.wanted) is done. Needs the mutex for
 * MN_WANT_ANY. */
bool
mn_engine_has_done(struct mn_engine *e, uint64_t wanted);

/* ---- mn_start_due.c ---- */

/* Returns 0 or -ENOMEM; close it in either case. */
int
mn_worker_views_open(struct mn_engine *e);

void
mn_worker_views_close(struct mn_engine *e);

/* Returns the number of queued and unclaimed tasks: an estimate. own: includes the workers' own
 * queues. */
uint64_t
mn_worker_views_queued(const struct mn_engine *e, bool own);

/* Starts what is due. Returns how many tasks went to the run queues; moving a share from one
 * worker's queue to another's counts as one. */
uint32_t
mn_start_due(struct mn_engine *e);

/* Returns whether the program should plan more now, because workers idle behind a straggler or are
 * about to. Returns true only once for the same plan. */
bool
mn_start_due_starving(struct mn_engine *e);

#endif
