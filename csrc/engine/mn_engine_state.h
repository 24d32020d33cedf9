/* mn_engine_state.h - the engine's parts and how they lie together; for its own files alone.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine composes parts that do not know each other: the arena (memory/mn_arena.h), tasks,
 * leases and the crew of workers (workers/), the plan (schedule/) and the caller's waits
 * (mn_waits.h).  What others ask of it is answered by mn_engine_snapshot.h.  Its files build on
 * each other, and include downwards only:
 *
 *     mn_engine_wait  the caller's wait
 *     mn_engine       opening, the thread, closing
 *     mn_engine_plan  what the caller tells the plan
 *     mn_engine_workers    what the program asks of single workers
 *     mn_engine_snapshot   what the engine tells
 *     mn_supervise    deaths, leases, abandoned batches
 *     mn_claims       whose words and workers do not agree
 *     mn_autoscale    how many workers there should be
 *     mn_start_due    what the plan says should start: blocks, run queues
 *     mn_next_delivery   which batch is delivered next
 *     mn_ready_rows   batches formed of what is ready
 *     mn_learn_costs  what batches have cost
 *     mn_worker_views what each worker does
 *     mn_blocks       batches made and ended
 *     mn_checked_results   what workers wrote, copied out and checked
 *     mn_quarantine   damaged tasks, until nobody writes their rows
 *     mn_batch        batches in flight
 *
 * Lock.  One, mutex, which next() takes.  It guards everything below but what is marked, and the
 * parts that have no lock of their own.  It is let go of by mn_engine_unlock, which makes the
 * wake-ups that were noted meanwhile: no system call is made while it is held, but for what
 * malloc does.  A model of costs has a lock of its own, which may be taken with this one held.
 */
#ifndef MN_ENGINE_STATE_H
#define MN_ENGINE_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/mn_blocks.h"
#include "engine/mn_engine_config.h"
#include "os/mn_lifeline.h"
#include "schedule/mn_plan.h"
#include "engine/mn_waits.h"
#include "engine/mn_worker_views.h"
#include "memory/mn_arena.h"
#include "memory/mn_pagelocks.h"
#include "os/mn_thread.h"
#include "workers/mn_crew.h"
#include "workers/mn_leases.h"
#include "workers/mn_records.h"
#include "workers/mn_tasks.h"
#include "workers/mn_process_watch.h"

struct mn_autoscale;

/* A block in flight as the trainer knows it; private memory. */
struct mn_batch {
    struct mn_batch *next, *prev;
    uint64_t block_off;
    uint64_t sequence;    /* of delivery, counted over epochs; UINT64_MAX: outside of it */
    bool abandoned;
    bool detached;        /* the caller knows that it is done */
    bool learned;         /* its costs are in the model */
    bool accepted;        /* what workers wrote was read: it is done, or lost */
    struct mn_ranges ranges; /* of the arena, to be freed when the block is retired */
    struct mn_report reports[]; /* [rows], of tasks that were accepted */
};

/* The batches that have a block, oldest first. */
struct mn_flight {
    struct mn_batch *first, *last;
    uint32_t n;
    struct mn_batch **by_task; /* [ntasks], NULL: of none in flight */
    uint64_t submitted;        /* static: batches so far, their order */
    uint32_t serial;           /* of the block made last */
    uint64_t mean_envelope_bytes; /* what the results of one take outside of rows */
};

struct mn_found {
    uint64_t sequence;
    uint64_t done_ns;
};

/* Out of order: the batches that were found done, by when, and how many of them are taken. */
struct mn_done {
    struct mn_found *found; /* [mn_plan_batches_most] */
    uint32_t n, at;
};

/* Tasks and workers that do not agree: mn_claims.h. */
struct mn_claims {
    uint64_t looked_ns;
    struct mn_doubt {
        uint64_t says;  /* a task's word; what a worker's entry says that it runs */
        uint32_t at;    /* which task, or worker */
        uint32_t looks; /* at which this was found so, in a row */
    } task, entry;
};

struct mn_engine {
    struct mn_shm shm;       /* the mapping, as the parts see it */
    struct mn_memory_file file; /* where it comes from */
    struct mn_lifeline lifeline; /* by which zygote and workers see that the trainer is gone */
    int lifeline_end;            /* what they inherit of it; -1: there is none */
    struct mn_pagelocks locks;  /* what of it a device may read; goes before the file */
    struct mn_mutex mutex;
    struct mn_thread thread; /* the engine's; not running before mn_engine_start */
    struct mn_engine_config cfg;
    struct mn_arena arena;
    struct mn_tasks tasks;
    struct mn_leases leases;
    struct mn_zygote zygote; /* the executor of the crew */
    struct mn_crew crew;
    struct mn_watch watch;   /* of its processes; the engine's thread only */
    uint32_t active;         /* workers that should be there, standby ones not counted */
    struct mn_autoscale *autoscale; /* NULL: the number of workers is fixed */
    struct mn_plan *plan;    /* balanced scheduling; NULL: static */
    struct mn_form form;     /* of what starts now */
    struct mn_worker_views views;
    struct mn_done done;
    uint64_t stuck_ns;       /* since when there is no room for the plan's head; 0: there is */
    struct mn_flight flight;
    struct mn_refusal refusal; /* of the last batch that could not be made */
    struct mn_waits waits;   /* the caller's thread only */
    uint64_t held;           /* waits while the memory limit held tasks back */
    uint64_t delivered;      /* batches */
    uint64_t refs;           /* ranges handed out, pins, and one while it is open */
    uint64_t mended_ns;      /* when the queues were looked at last for damage */
    uint64_t idle_ns;        /* since when room waits for nothing but idle workers; 0: not */
    struct mn_claims claims;
    bool closing;
};

/* The workers' table has changed. Mutex held. */
static inline void
mn_engine_wake_zygote(struct mn_engine *e)
{
    e->crew.wakes.look = true;
}

#endif
