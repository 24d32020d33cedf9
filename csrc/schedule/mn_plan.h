/* mn_plan.h - batches from drawing until they are taken: decides what starts next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A state machine over numbers (balanced scheduling): no clock, no lock, no system call, and no
 * knowledge of memory addresses. Its owner tells it what to do (add), the present state (struct
 * mn_plan_facts), and what was done and seen (begun, refused, started, done, taken, learned). Then
 * it asks what to do next. The plan starts nothing by itself.
 *
 *     add -> next_task or next_for_worker -> begun or refuse -> started -> done -> taken
 *
 * policy_dispatch.h decides which task starts next, mn_plan_window_and_memory.c whether memory
 * allows it. Where neighbours are kept together, or that is not known (policy_locality.h), each
 * worker has a share of its own, and the plan is asked for each worker separately:
 * mn_plan_worker_shares.c says whether a task without an owner comes before the worker's own
 * (comes_first). All functions need the owner's mutex, unless they say otherwise.
 *
 * Few tasks are queued at a time, because a queued task can no longer be reordered. The number
 * is about one millisecond of work or a quarter of a task for each worker.
 *
 * The plan's files build on each other. mn_plan_state.c: planned batches.
 * mn_plan_window_and_memory.c: whether the window and memory allow a start. mn_plan_start.c: what
 * starts next. mn_plan_worker_shares.c: which worker makes what where neighbours are kept together,
 * and what an idle one takes over. mn_plan.c, above all: from add to taken; how batches are cut
 * into tasks, and cut again after learning.
 */
#ifndef MN_PLAN_H
#define MN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/mn_costs.h"
#include "schedule/policy_dispatch.h"

struct mn_piece;
struct mn_plan; /* mn_plan_state.h; private to the plan's files */

/* Most tasks of one batch, so that the head always finds descriptors. */
#define MN_PLAN_BATCH_TASKS 1024u

/* Why a batch cannot be made. */
enum mn_refusal_why {
    MN_REFUSED_NOT = 0,
    MN_REFUSED_TASKS = 1,   /* no descriptors; need and all count tasks */
    MN_REFUSED_RECORDS = 2, /* no memory for its indices and reports; in bytes */
    MN_REFUSED_ROWS = 3,    /* no memory for its rows in the arena; in bytes */
    MN_REFUSED_PRIVATE = 4, /* the system refused private memory to the trainer; in bytes */
};

struct mn_refusal {
    enum mn_refusal_why why;
    uint64_t need;
    uint64_t all; /* how much exists, in use or not */
};

struct mn_plan_config {
    uint32_t workers;      /* at the start */
    uint32_t max_workers;  /* number of worker entries */
    uint32_t window;       /* torch's prefetch window, in batches */
    uint32_t batches;      /* expected number of batches in flight */
    uint32_t own_tasks;    /* capacity of a worker's own queue */
    uint32_t parts;        /* most parts of a batch that a worker collates */
    bool in_order;
    bool group_neighbours; /* neighbours may be kept together */
    struct mn_costs *costs; /* NULL: costs are not learned */
    bool forms;            /* batches are formed of ready rows: mn_plan_set_span() says of which.
                            * Planned batches are taken as soon as they have ended */
    size_t batch_bytes;    /* of the owner's struct that begins with a struct mn_planned; 0: that
                            * alone. mn_plan_add() makes it, filled with zeros */
};

/* The memory that the rows of a batch take at most: nfields fields, each rounded up to whole
 * pages. */
struct mn_plan_rows {
    uint32_t nfields;          /* 0: not known before the batch is made */
    const uint64_t *row_bytes; /* [nfields]; owned by the caller, valid while these are set */
    uint64_t page;
};

struct mn_plan_batch {
    uint64_t sequence; /* position in the order of planning, over the plan's epochs */
    uint64_t number;   /* in its epoch; a resumed epoch leaves out what was delivered */
    uint64_t epoch;    /* for seeds; also tells the next epoch's batches from this one's */
    uint64_t position; /* of its first sample in the sampler's order of the epoch */
    uint64_t base_seed, user_epoch;
    uint32_t nrows;
    uint32_t spares; /* spare indices that follow those of the rows */
    uint32_t seeded;
    bool whole;          /* a worker collates it: it has no rows */
    bool splits;         /* several workers may make its samples; then one collates */
    bool integers;       /* index has an int64_t for each row, by which costs are known */
    uint32_t index_kind; /* enum mn_index_kind; only for the caller */
    const void *index;
    uint64_t index_bytes;
    const uint8_t *begins; /* [nrows]; the dataset says where groups begin; or NULL */
    const float *hint;     /* [nrows] the dataset's hints of what rows cost, or NULL */
};

/* Neighbouring samples that belong together (policy_locality.h), up to the last planned one. */
struct mn_chain {
    uint64_t number;
    int64_t length; /* samples so far; 0: a new one begins */
    int64_t owner;  /* worker that it was given to; -1: none yet */
};

#define MN_SENT_ANY UINT16_MAX /* for any worker */

enum mn_batch_state {
    MN_BATCH_PLANNED = 0,
    MN_BATCH_QUEUED = 1,    /* it has a block, and tasks of it may be queued */
    MN_BATCH_DONE = 2,      /* its block was seen done or lost, or it is refused */
    MN_BATCH_TAKEN = 3,     /* it has left the plan: delivered, or (ready mode) to be formed */
    MN_BATCH_ABANDONED = 4, /* it will not be delivered */
};

/* A batch, from mn_plan_add() until the last of its holders lets it go: the plan until it is taken
 * or cleared, and the owner while it has a block or needs it for another reason. Only under the
 * owner's mutex. */
struct mn_planned {
    uint64_t sequence;
    uint64_t block_off; /* the owner's name for its block; 0: it has none */
    uint64_t rows;      /* planned before it */
    uint32_t holders;
    enum mn_batch_state state;
    uint32_t ntasks;
    bool stale;         /* its cut is based on outdated costs */
    struct mn_chain chain;   /* as it was before the batch's first row */
    struct mn_piece *pieces; /* space for [ntasks], while neighbours are kept together */
    uint32_t npieces;
    int64_t *cost_ns;        /* [ntasks] expected durations; stored behind the pieces */
    int64_t *opens_ns;       /* [ntasks] the part for groups that begin there; behind cost_ns */
    uint16_t *sent;          /* [ntasks] queued now or earlier: 1 + the worker, or MN_SENT_ANY; 0:
                              * not */
    uint8_t *border;         /* [nrows] a piece begins here */
    uint64_t first_chain;    /* of its first row; 0: it was not cut for pieces */
    uint64_t later_chain;    /* the first of the chains that begin after that row */
    int32_t maker;           /* 1 + the worker that was given a task of it last; 0: none */
    struct mn_refusal refusal; /* why it cannot be made */
    struct mn_plan_batch batch; /* its arrays lie behind the struct */
    uint32_t *row0;             /* [ntasks + 1]; the same */
};

/* Lets a batch go. The last holder frees it. */
void
mn_planned_let_go(struct mn_planned *q);

/* The present activity of a worker. */
struct mn_worker_view {
    bool usable;        /* it exists and can run tasks */
    uint64_t queued;    /* tasks that wait on its own queue */
    int64_t running_ns; /* for how long its current task has run; -1: it has none */
    int64_t left_ns;    /* known work before it gets to its share */
    int64_t present_ns; /* the part of that for its current task */
};

/* The present state, as an input for decisions. */
struct mn_plan_facts {
    uint64_t now_ns;
    int64_t ready;         /* batches done and not taken: in order from the head on, else all */
    uint64_t queued;       /* tasks that wait for any worker: an estimate */
    uint64_t free_tasks;   /* descriptors that are free */
    int64_t memory_limit;  /* bytes */
    int64_t memory_used;
    int64_t memory_kept;   /* of it, retained by the program; 0 while it waits for a batch */
    uint64_t result_bytes; /* mean memory of a batch without rows */
    bool formed;           /* a batch has left the plan before it was taken (ready mode) */
    struct mn_worker_view *workers; /* [max_workers]; NULL if no worker has a share */
    /* Returns for how long the batch's longest running task has run; -1: none is running. */
    int64_t (*running_ns)(void *arg, uint64_t block_off);
    void *arg;
};

/* A task to start. */
struct mn_plan_start {
    struct mn_planned *batch;
    uint32_t task;
    enum mn_dispatch_why why;
    bool in_order;          /* mn_plan_next_in_order() has found it */
    uint32_t node;          /* in the dispatcher; from next_task */
    struct mn_piece *piece; /* the piece that it belongs to; from next_for_worker */
    uint32_t helps;         /* MN_PLAN_MOVE: the worker whose queue is taken over */
};

enum mn_plan_step {
    MN_PLAN_NOTHING = 0, /* for now */
    MN_PLAN_START = 1,
    MN_PLAN_MOVE = 2,    /* no task; move all that wait on another worker's queue */
};

/* One dispatch to workers that have shares. */
struct mn_plan_round {
    struct mn_plan_facts facts;
    struct mn_dispatch_view view;
    uint64_t depth; /* tasks that should wait on a busy worker's own queue */
    bool idle; /* the current worker has nothing to do */
    bool soon; /* the worker could start a task beyond the window if it had been idle for longer */
    bool held; /* the memory limit does not allow the task that the worker would start */
};

/* ---- life: mn_plan.c ------------------------------------------------------------------ */

/* The caller must hold the lock of the costs, here and where noted below. Returns 0 or -ENOMEM. */
int
mn_plan_open(struct mn_plan **out, const struct mn_plan_config *cfg);

void
mn_plan_close(struct mn_plan *p);

/* Adds a batch, whose sequence must be the next. Returns MN_OK, MN_FULL, -ENOMEM or -EINVAL. Starts
 * nothing. Needs the lock of the costs. */
int
mn_plan_add(struct mn_plan *p, const struct mn_plan_batch *b);

/* Declares that this epoch has no more batches. */
void
mn_plan_end(struct mn_plan *p);

/* Learns that the caller has used a batch for used_ns. */
void
mn_plan_used(struct mn_plan *p, int64_t used_ns);

/* Removes a batch that the caller has taken. */
void
mn_plan_taken(struct mn_plan *p, uint64_t sequence);

/* Changes the number of prefetched batches by more (+1 or -1). Returns false and does nothing if
 * the number would become negative, and with out-of-order delivery, where a taken batch is not the
 * first. Caller's thread only. */
bool
mn_plan_prefetched(struct mn_plan *p, int more);

/* Forgets all batches; the engine has abandoned those that have a block. Sequences continue. */
void
mn_plan_clear(struct mn_plan *p);

/* Returns whether new knowledge may change whether or how neighbours are kept together. */
bool
mn_plan_unsettled(const struct mn_plan *p);

/* Sets how many workers should exist from now on, standby workers not counted. */
void
mn_plan_set_active(struct mn_plan *p, uint32_t workers);

/* Where batches are formed: sets the first batch that would be in the next formed one if all rows
 * were ready, and from which one on no batch may start. */
void
mn_plan_set_span(struct mn_plan *p, uint64_t first, uint64_t end);

/* Sets the memory that rows take in batches that start from now on. */
void
mn_plan_set_rows(struct mn_plan *p, const struct mn_plan_rows *rows);

/* Starts or stops keeping neighbours together, or cuts the pieces again. Call it before anything is
 * started if mn_plan_unsettled() is true. Needs the lock of the costs. */
void
mn_plan_settle(struct mn_plan *p);

/* Returns true once after neighbours have stopped being kept together: then tasks that wait on
 * workers' own queues may go to any worker. */
bool
mn_plan_shares_ended(struct mn_plan *p);

/* ---- what starts next: mn_plan_start.c, mn_plan_worker_shares.c ----------------------- */

/* Begins a dispatch: call it before mn_plan_next_task(). Returns how many tasks should be queued
 * for any worker. */
uint64_t
mn_plan_dispatch_begins(struct mn_plan *p);

/* Finds the task to start next, for any worker; mn_plan_next_in_order() finds the first in order,
 * for when memory refuses the other or a queue is full. Returns whether there is one. */
bool
mn_plan_next_task(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_start *out);

bool
mn_plan_next_in_order(struct mn_plan *p, const struct mn_plan_facts *f,
                      struct mn_plan_start *out);

/* Begins a dispatch while neighbours are kept together (by_piece): all workers are considered, idle
 * ones first. The facts about workers are updated as tasks start. */
void
mn_plan_round_begin(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_round *r);

/* Returns whether to ask for a task for this worker. first: only if it is idle. */
bool
mn_plan_worker_wants(const struct mn_plan_round *r, uint32_t w, bool first);

enum mn_plan_step
mn_plan_next_for_worker(struct mn_plan *p, struct mn_plan_round *r, uint32_t w,
                        struct mn_plan_start *out);

/* Records that the task from mn_plan_next_task() is queued. */
void
mn_plan_started(struct mn_plan *p, const struct mn_plan_start *s);

/* Records that the task from mn_plan_next_for_worker() is queued for worker w. Returns its expected
 * duration. */
int64_t
mn_plan_started_for(struct mn_plan *p, const struct mn_plan_start *s, uint32_t w);

/* ---- what was done and seen: mn_plan_state.c, mn_plan.c ------------------------------ */

/* Records that a batch's block is about to be made. Its size is an estimate for the next ones. */
void
mn_plan_tries(struct mn_plan *p, const struct mn_planned *q);

/* Records the block of a batch that has just started. */
void
mn_plan_begun(struct mn_plan *p, struct mn_planned *q, uint64_t block_off);

/* Records that the batch cannot be made: it is delivered as an error, and its tasks are no longer
 * planned. */
void
mn_plan_refuse(struct mn_plan *p, struct mn_planned *q, const struct mn_refusal *why);

/* Records that the batch is done. */
void
mn_plan_done(struct mn_plan *p, struct mn_planned *q);

/* ---- what is learned: mn_plan.c; with the lock of the costs ---------------------------- */

/* Returns whether these samples turn out slow while the next epoch already has them planned by a
 * guess. Call it before they are learned. wall_ns[i * step]: of row i. */
bool
mn_plan_is_news(struct mn_plan *p, uint64_t epoch, const int64_t *index, const uint64_t *wall_ns,
                size_t step, uint32_t rows);

/* They are learned: cuts again what was planned with less knowledge. */
void
mn_plan_learned(struct mn_plan *p, bool news);

/* ---- idle workers: mn_plan_start.c --------------------------------------------------- */

/* Returns when the engine must look again if nothing happens: at most nap_ns from now. */
int64_t
mn_plan_nap(const struct mn_plan *p, uint64_t now_ns, int64_t nap_ns);

/* Returns for how many nanoseconds the planned work that has not started keeps the workers busy,
 * beyond a reserve. Returns 1 while costs are unknown, INT64_MAX when no more batches are
 * planned. */
int64_t
mn_plan_lasts(const struct mn_plan *p);

/* Returns whether workers are idle or about to be, and little planned work is left to start. Only
 * then call mn_plan_starving(). */
bool
mn_plan_idles(const struct mn_plan *p, uint64_t queued);

/* Returns whether the program should plan more now, because workers are idle behind a straggler.
 * Returns true only once for the same plan. */
bool
mn_plan_starving(struct mn_plan *p, const struct mn_plan_facts *f);

/* ---- the plan's state --------------------------------------------------------------------- */

/* Sequences, in ascending order. */
struct mn_plan_order {
    uint64_t head;    /* of the next batch to deliver */
    uint64_t begun;   /* no batch from this one on has started */
    uint64_t next;    /* of the next batch to plan; the planning thread reads it without the lock */
};

/* What others may read of the plan; only its files write it. */
struct mn_plan_view {
    struct mn_plan_order order;
    struct mn_costs_view known;  /* costs, when something was last planned or learned */
    bool by_piece;       /* neighbours are kept together, or that is not known: ask for each
                          * worker separately */
    bool held;           /* the memory limit ended the last dispatch */
    bool unreleased;     /* a batch waits until the program releases the one that it had before */
    uint32_t capacity;   /* in batches; never grows */
    uint64_t batch_bytes; /* of the largest batch so far */
    int64_t consumer_ns; /* the caller's time for a batch, running mean; 0: unknown */
    uint64_t starts[6];  /* tasks started, by enum mn_dispatch_why */
    uint64_t helped;     /* times that a worker took over part of another worker's share */
};

const struct mn_plan_view *
mn_plan_view(const struct mn_plan *p);

/* The size of the window now. Work beyond it may start while fewer than starved_below batches are
 * done. */
struct mn_plan_window {
    int64_t batches;
    int64_t starved_below;
    uint64_t prefetched; /* taken from the engine, not given to the program yet */
};

struct mn_plan_window
mn_plan_window(const struct mn_plan *p);

/* Returns a planned batch; NULL if it is not planned or was taken. */
struct mn_planned *
mn_plan_at(const struct mn_plan *p, uint64_t sequence);

/* Returns whether the batch to deliver next is the first of an epoch that was not resumed. */
bool
mn_plan_begins(const struct mn_plan *p);

/* Returns the batch's block; 0: it has not started. */
uint64_t
mn_plan_block(const struct mn_plan *p, uint64_t sequence);

/* Returns the number of tasks that have not started. */
uint64_t
mn_plan_waiting(const struct mn_plan *p);

#endif
