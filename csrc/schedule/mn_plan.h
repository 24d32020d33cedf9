/* mn_plan.h - batches drawn from the sampler, from then until their tasks start: what starts next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A state machine over numbers (balanced scheduling): no clock, no lock, no system call, and no
 * word of where anything lies.  Its owner tells it what there is to do (add), what is the case
 * now (struct mn_plan_facts), what it has done and seen (begun, refused, started, done, taken,
 * learned), and asks what to do next.  Nothing starts by itself.
 *
 *     add -> next_task or next_for_worker -> begun or refuse -> started -> set_done -> taken
 *
 * Which task starts next is the decision of policy_dispatch.h; whether memory allows it that of
 * policy_memory.h.  Where neighbours are kept together (policy_locality.h) each worker has a share
 * of its own, and is asked for by itself: mn_plan_shares.c.
 *
 * Few tasks are queued at a time, because what is queued is decided: about one millisecond of
 * work or a quarter of a task for each worker.
 *
 * Its files build on each other: mn_planned (what is planned), mn_plan_chunks (rows of a task),
 * mn_plan_locality (whose they are), mn_plan_cut (batches to tasks, and anew), mn_plan_learn (what
 * is planned anew for what was learned), mn_plan_starved (what idles), mn_plan_next (what
 * starts for anybody), mn_plan_first_batch (who helps with it), mn_plan_take_over (what an idle
 * worker takes over), mn_plan_shares (what starts for one worker), mn_forming (batches of what is
 * ready), mn_plan_life (from add to taken).
 */
#ifndef MN_PLAN_H
#define MN_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/mn_costs.h"
#include "schedule/policy_dispatch.h"

struct mn_forming;
struct mn_piece;
struct mn_plan; /* mn_plan_state.h, for the files of the plan alone */
struct mn_planned;

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

struct mn_plan_config {
    uint32_t workers;      /* to begin with */
    uint32_t max_workers;  /* that have a number */
    uint32_t window;       /* batches: torch's prefetch window */
    uint32_t batches;      /* that are begun and not freed, as far as many are to be expected */
    uint32_t own_tasks;    /* that a worker's own queue has room for */
    uint32_t parts;        /* of a batch that a worker collates, at most */
    bool in_order;
    bool keeps;            /* neighbours may be kept together */
    struct mn_costs *costs; /* NULL: costs are not learned */
    uint32_t ready_batch;  /* 0: what is planned is delivered. Else batches of so many samples */
    uint32_t ready_bound;  /* are formed of what is ready; none moves by more than so many */
    bool ready_mixes;      /* of several, where that is of use; else as they were planned */
};

/* What the rows of a batch take: so many fields, each rounded up to whole pages. */
struct mn_plan_rows {
    uint32_t nfields;          /* 0: not known before the batch is made */
    const uint64_t *row_bytes; /* [nfields], the caller's, alive while these are set */
    uint64_t page;
};

struct mn_plan_batch {
    uint64_t sequence; /* place in the order of delivery, counted over epochs */
    uint64_t number, epoch, position, base_seed, user_epoch;
    uint32_t nrows;
    uint32_t spares; /* indices behind those of rows */
    uint32_t seeded;
    bool whole;          /* one worker makes and collates it, */
    bool splits;         /* or, where that pays, several make it, and one collates */
    bool integers;       /* index: an int64_t of each row, by which costs are known */
    uint32_t index_kind; /* what else it may be: the caller's */
    const void *index;
    uint64_t index_bytes;
    const uint8_t *begins; /* [nrows] the dataset's word on where groups begin, or NULL */
    const float *hint;     /* [nrows] the dataset's hints of what rows cost, or NULL */
};

/* What a worker does now. */
struct mn_worker_view {
    bool usable;        /* it is there to do what it is given */
    uint64_t queued;    /* tasks that wait on its own queue */
    int64_t running_ns; /* for how long its present one has run; -1: it has none */
    int64_t left_ns;    /* what it has to do before it comes to its share, as far as known, */
    int64_t present_ns; /* and of that for its present task */
};

/* What is the case when something is decided. */
struct mn_plan_facts {
    uint64_t now_ns;
    int64_t ready;         /* batches done and not taken: in order from the head on, or all */
    uint64_t queued;       /* tasks that wait for any worker: an estimate */
    uint64_t free_tasks;   /* that could be made beside those there are */
    int64_t memory_limit;  /* bytes */
    int64_t memory_used;
    uint64_t result_bytes; /* that a batch without rows takes, on average */
    struct mn_worker_view *workers; /* [max_workers]; NULL where none has a share */
    /* For how long the task of that batch has run that runs longest; -1: none does. */
    int64_t (*running_ns)(void *arg, uint64_t block_off);
    struct mn_locality_pairs pairs; /* of batches that have begun, while mn_plan_finds */
    void *arg;
};

/* A task to start. */
struct mn_plan_start {
    struct mn_planned *batch;
    uint32_t task;
    enum mn_dispatch_why why;
    bool in_order;          /* the first there is */
    uint32_t node;          /* in the dispatcher; of next_task */
    struct mn_piece *piece; /* it is of; of next_for_worker */
    uint32_t helps;         /* MN_PLAN_MOVE: the worker whose queue is to be taken over */
};

enum mn_plan_step {
    MN_PLAN_NOTHING = 0, /* for now */
    MN_PLAN_START = 1,
    MN_PLAN_MOVE = 2,    /* no task, but all that wait on another worker's queue */
};

/* A dispatch to workers that have shares, while it goes on. */
struct mn_plan_round {
    struct mn_plan_facts facts;
    struct mn_dispatch_view view;
    uint64_t depth; /* tasks that should wait on a busy worker's own queue */
    bool idle; /* the worker that is looked at has nothing at all, */
    bool soon; /* and once it has idled for longer it may start something past the window */
    bool held; /* memory does not allow what it would start */
};

/* ---- life: mn_plan_life.c ------------------------------------------------------------- */

/* Whoever calls has the lock of the costs, here and where it says so below. 0 or -ENOMEM. */
int
mn_plan_open(struct mn_plan **out, const struct mn_plan_config *cfg);

void
mn_plan_close(struct mn_plan *p);

/* Takes a batch in; its sequence must be the next. MN_OK, MN_FULL, -ENOMEM, -EINVAL. Starts
 * nothing. With the lock of the costs. */
int
mn_plan_add(struct mn_plan *p, const struct mn_plan_batch *b);

/* No more batches in this epoch. */
void
mn_plan_end(struct mn_plan *p);

/* The caller has used a batch for so long. */
void
mn_plan_used(struct mn_plan *p, int64_t used_ns);

/* The batch was taken by the consumer. */
void
mn_plan_taken(struct mn_plan *p, uint64_t sequence);

/* So many more are prefetched, or are not any more; false and nothing done for fewer than none,
 * and out of order, where a batch that is taken is not the first. The caller's thread only. */
bool
mn_plan_prefetched(struct mn_plan *p, int more);

/* Forgets everything that has not started; the sequence goes on. */
void
mn_plan_clear(struct mn_plan *p);

/* Whether what is known has changed, and with it whether neighbours are kept together, or how. */
bool
mn_plan_unsettled(const struct mn_plan *p);

/* How many workers should be there from now on, standby ones not counted. */
void
mn_plan_set_active(struct mn_plan *p, uint32_t workers);

/* What the rows of batches that begin from now on take. */
void
mn_plan_set_rows(struct mn_plan *p, const struct mn_plan_rows *rows);

/* Begins or ends to keep neighbours together, or cuts the pieces anew. To be called before
 * anything is started, where mn_plan_unsettled says so; with the lock of the costs. */
void
mn_plan_settle(struct mn_plan *p);

/* ---- what starts next: mn_plan_next.c, mn_plan_shares.c --------------------------------- */

/* Once after neighbours were kept together, and are not any more: what waits on workers' queues
 * is anybody's then. */
bool
mn_plan_parts(struct mn_plan *p);

/* A dispatch begins. To be called before next_task is asked. */
void
mn_plan_dispatch_begins(struct mn_plan *p);

/* How many tasks should be queued for anybody. */
uint64_t
mn_plan_depth(const struct mn_plan *p);

/* The task to start next, for any worker; or where that finds no room the first in order. True
 * if there is one. */
bool
mn_plan_next_task(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_start *out);

bool
mn_plan_next_in_order(struct mn_plan *p, const struct mn_plan_facts *f,
                      struct mn_plan_start *out);

/* The same while neighbours are kept together (by_piece): all workers are looked at, first those
 * that idle. What is told of workers is brought up to date as tasks start. */
void
mn_plan_round_begin(struct mn_plan *p, const struct mn_plan_facts *f, struct mn_plan_round *r);

/* Whether the worker should be asked for. first: only if it idles. */
bool
mn_plan_worker_wants(const struct mn_plan_round *r, uint32_t w, bool first);

enum mn_plan_step
mn_plan_next_for_worker(struct mn_plan *p, struct mn_plan_round *r, uint32_t w,
                        struct mn_plan_start *out);

/* The task of next_task is queued. */
void
mn_plan_started(struct mn_plan *p, const struct mn_plan_start *s);

/* The task of next_for_worker is queued for it. Returns what it is expected to take. */
int64_t
mn_plan_started_for(struct mn_plan *p, const struct mn_plan_start *s, uint32_t w);

/* ---- what was done and seen: mn_planned.c, mn_plan_life.c --------------------------------- */

/* Its block is about to be made: what it takes may be what the next ones do. */
void
mn_plan_tries(struct mn_plan *p, const struct mn_planned *q);

/* A batch that has not begun has a block now. */
void
mn_plan_begun(struct mn_plan *p, struct mn_planned *q, uint64_t block_off);

/* It cannot be made, and is an error in its place: its tasks are planned no more. */
void
mn_plan_refuse(struct mn_plan *p, struct mn_planned *q, const struct mn_refusal *why);

/* Its block was seen done, or lost: both are final. */
void
mn_plan_set_done(struct mn_plan *p, struct mn_planned *q);

/* ---- what is learned: mn_plan_learn.c; with the lock of the costs ------------------------ */

/* Whether these samples turn out slow and are planned already for the next epoch, by a guess:
 * before they are learned. wall_ns[i * step]: of row i. */
bool
mn_plan_is_news(struct mn_plan *p, uint64_t epoch, const int64_t *index, const uint64_t *wall_ns,
                size_t step, uint32_t rows);

/* They are learned: cuts anew what is planned by less. */
void
mn_plan_learned(struct mn_plan *p, bool news);

/* ---- what idles: mn_plan_starved.c -------------------------------------------------------- */

/* When the engine has to look again if nothing happens: never later than in nap_ns. */
int64_t
mn_plan_nap(const struct mn_plan *p, uint64_t now_ns, int64_t nap_ns);

/* Whether work past the window may start. It takes memory that torch's loader would not: a
 * slow sample has to hold up the rest, or a worker to idle for a while first. Shorter stalls
 * are the machine's, and there is always another. */
bool
mn_plan_starved(struct mn_plan *p, const struct mn_plan_facts *f);

/* Nanoseconds for which what is planned and has not started keeps the workers busy, beyond a
 * reserve; 1 while costs are unknown, INT64_MAX when no more is planned. */
int64_t
mn_plan_lasts(const struct mn_plan *p);

/* Whether workers idle, or are about to: then it is to be asked whether they are starving. */
bool
mn_plan_idles(const struct mn_plan *p, uint64_t queued);

/* Whether the program should plan more now, because workers idle behind a slow sample. Says so
 * once for what is planned. */
bool
mn_plan_starving(struct mn_plan *p, const struct mn_plan_facts *f);

/* ---- what there is ------------------------------------------------------------------------ */

/* Sequences, in this order. */
struct mn_plan_order {
    uint64_t head;    /* of the next batch to deliver */
    uint64_t begun;   /* nothing from this one on has started */
    uint64_t next;    /* of the next batch to plan */
};

struct mn_plan_order
mn_plan_order(const struct mn_plan *p);

/* The sequence of the next batch to plan. Only planning changes it: who plans may read it
 * without the lock that guards the rest of the order. */
uint64_t
mn_plan_next_sequence(const struct mn_plan *p);

/* The part that forms batches of what is ready; NULL: what is planned is what is delivered. */
struct mn_forming *
mn_plan_forming(const struct mn_plan *p);

/* What was known of costs when something was planned or learned last. */
const struct mn_costs_view *
mn_plan_known(const struct mn_plan *p);

/* Whether neighbours are kept together by now: each worker is asked for then. */
bool
mn_plan_by_piece(const struct mn_plan *p);

/* Whether it is being found out if others should help with a first batch. */
bool
mn_plan_finds(const struct mn_plan *p);

/* Batches in the window by now, and how many done ones are so few that work past it may start. */
struct mn_plan_window {
    int64_t batches;
    int64_t starved_below;
    uint64_t prefetched; /* by the program, taken from the engine */
};

struct mn_plan_window
mn_plan_window(const struct mn_plan *p);

/* Bytes of the largest batch so far. */
uint64_t
mn_plan_batch_bytes(const struct mn_plan *p);

/* Batches that there is room for, which never grows. */
uint32_t
mn_plan_batches_most(const struct mn_plan *p);

/* What the consumer takes for a batch, running mean; 0: unknown. The caller's thread needs no lock
 * for it. */
int64_t
mn_plan_consumer_ns(const struct mn_plan *p);

/* Whether the last dispatch ended at the memory limit. */
bool
mn_plan_held(const struct mn_plan *p);

/* For stats. */
struct mn_plan_counts {
    uint64_t starts[6]; /* of tasks, by enum mn_dispatch_why */
    uint64_t helped;    /* times a worker took over part of another's share */
};

struct mn_plan_counts
mn_plan_counts(const struct mn_plan *p);

/* NULL when it is not planned, or was taken. */
struct mn_planned *
mn_plan_at(const struct mn_plan *p, uint64_t sequence);

/* Whether the batch to deliver next is the first of an epoch. */
bool
mn_plan_begins(const struct mn_plan *p);

/* The batch's block, 0 when it has not started. */
uint64_t
mn_plan_block(const struct mn_plan *p, uint64_t sequence);

/* Tasks that have not started. */
uint64_t
mn_plan_waiting(const struct mn_plan *p);

#endif
