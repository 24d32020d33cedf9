/* mn_plan.h - batches drawn from the sampler, from then until their tasks are queued.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Part of the engine (balanced scheduling); called under its mutex.  A planned batch is
 * private memory: its block, and with it the room for its rows, is made when the first of
 * its tasks starts.  Which task starts next is the decision of policy_dispatch.h; whether
 * memory allows it that of policy_memory.h.
 *
 * The run queues are kept short, because what is in them is decided: about one millisecond of work
 * or a quarter of a task for each worker.  A worker that takes the run queues under its low water
 * mark notifies the engine, which dispatches again (mn_ctl.low_water).  The user's thread dispatches too,
 * whenever it plans, waits or takes a batch.
 */
#ifndef MN_PLAN_H
#define MN_PLAN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mn_atomic.h"
#include "engine/mn_costs.h"
#include "schedule/policy_dispatch.h"

struct mn_engine;
struct mn_batch;
struct mn_refusal;

/* How the rows of a batch travel, decided when it starts. */
struct mn_form {
    uint32_t kind;   /* enum mn_task_kind */
    uint32_t layout; /* offset of the posted layout, 0 without */
    uint32_t nfields;
    const uint64_t *row_bytes; /* [nfields], the caller's, alive while the form is set */
};

struct mn_plan_batch {
    uint64_t sequence; /* place in the order of delivery, counted over epochs */
    uint64_t number, epoch, position, base_seed, user_epoch;
    uint32_t nrows;
    uint32_t spares; /* indices behind those of rows (struct mn_block) */
    uint32_t seeded;
    bool whole;          /* one BATCH task, */
    bool splits;         /* or, where that pays, PART tasks and one that collates them */
    uint32_t index_kind; /* enum mn_index_kind */
    const void *index;
    uint64_t index_bytes;
    const uint8_t *begins; /* [nrows] the dataset's word on where groups begin, or NULL */
};

struct mn_planned;
struct mn_engine_config;
struct mn_piece;
struct mn_forming;

/* The chain that the sample planned last belongs to (policy_locality.h). */
struct mn_chain {
    uint64_t number;
    int64_t length; /* samples so far; 0: a new one begins */
    int64_t owner;  /* worker that it was given to, -1: to nobody yet */
};

/* What one worker alone is to do next, as long as nobody has to help. */
struct mn_share {
    struct mn_piece *first, *last;
    uint64_t chain;  /* of what it was given last */
    int64_t cost_ns; /* of what is in it */
    uint32_t tasks;  /* in it */
    uint64_t hint;   /* of its worker's own queue, when it was seen to wait there for nobody, */
    uint64_t idle_ns; /* and since when; 0: it does not */
};

struct mn_found {
    uint64_t sequence;
    uint64_t done_ns;
};

struct mn_plan {
    struct mn_dispatch dispatch;
    void *memory;
    struct mn_planned **batches; /* ring by sequence, [room] */
    uint32_t room;               /* a power of two */
    uint32_t nfound, found_at;   /* out of order: done ones, as found, and how many are taken */
    struct mn_found *found;      /* [room] */
    struct mn_costs *costs;      /* NULL: costs are not learned */
    struct mn_form form;
    uint64_t head;               /* sequence of the next batch to deliver */
    uint64_t next;               /* sequence of the next batch to plan */
    uint64_t begun;              /* nothing from this sequence on has started */
    uint64_t refused;            /* planned ones that cannot be made */
    uint64_t unmade;             /* begun ones that nobody has seen done */
    uint64_t stuck_ns;           /* since when there is no room for the head; 0: there is */
    uint64_t rows;               /* planned so far: the order among equals */
    uint64_t horizon;            /* no batch from this sequence on may start */
    /* Batches that were taken in their order and are the caller's only later: they count as if
     * nobody had taken them. Written by the caller's thread; the engine's looks at it, and may
     * see what it was. */
    mn_a64 prefetched;
    int64_t consumer_ns;         /* what it takes for one, running mean */
    uint64_t batch_bytes;        /* of the largest batch so far */
    uint32_t cut_rows;           /* of the batch planned last, and into how many tasks */
    uint32_t cut_tasks;
    uint32_t window;             /* batches: torch's prefetch window */
    bool in_order;
    bool held;                   /* the last dispatch ended at the memory limit */
    bool full;                   /* there was no room for what was to be planned last */
    bool split;                  /* what the tasks of whole batches are cut by now */
    uint64_t starved_ns;         /* since when a worker idles behind the head; 0: not */
    uint64_t told;               /* next when the program was last asked to plan more */
    uint64_t starts[6];          /* by enum mn_dispatch_why, for stats */
    bool keeps;                  /* neighbours may be kept together at all, */
    bool wanted;                 /* should be by what is known, */
    bool by_piece;               /* and are: mn_plan_pieces.c */
    bool again;                  /* these workers have made an epoch: samples have homes */
    uint64_t first_epoch;        /* theirs */
    uint64_t finding;            /* 1 + sequence of a first batch of which it is being found out
                                  * whether others should help with it; 0: none */
    bool declared;               /* the dataset says where groups begin */
    struct mn_forming *forming;  /* NULL: what is planned is what is delivered */
    uint32_t stance;             /* what the pieces were cut by: a change of it is news */
    struct mn_costs_view known;  /* of costs, when something was planned or learned last */
    struct mn_share *shares;     /* [workers], while by_piece */
    uint32_t nshares;
    struct mn_chain chain;
    uint64_t chains;             /* that were begun: numbers are not used again */
    int64_t shared_ns;           /* in all shares */
    uint64_t shared_tasks;
    uint64_t piece_tasks;        /* in all pieces, the dispatcher's too */
    int64_t *sent_ns;            /* [descriptors] what tasks on workers' own queues take */
    uint32_t nsent;
    uint32_t moved;              /* tasks that were put elsewhere since the last dispatch */
    uint64_t helped;             /* times a worker took over part of another's share */
};

#define MN_PLAN_BATCHES 4096u /* at least */
#define MN_PLAN_BATCHES_MOST (1u << 20)
#define MN_PLAN_TASKS 16384u
/* A batch of more is large. */
#define MN_PLAN_LARGE_BYTES (UINT64_C(1) << 20)

/* Less than this is not worth the memory of another batch: a worker idles for so long before
 * anything past the window is started, and a large batch's sample is slow by more. A busy
 * machine takes a core away for up to some ten milliseconds, and fresh pages for a large
 * batch cost about as much. */
static inline int64_t
mn_plan_patience_ns(uint64_t batch_bytes)
{
    return (batch_bytes > MN_PLAN_LARGE_BYTES ? 20 : 5) * INT64_C(1000000);
}

int
mn_plan_open(struct mn_plan **out, const struct mn_engine_config *cfg, uint32_t ntasks);

void
mn_plan_close(struct mn_plan *p);

/* Takes a batch in; its sequence must be the next. MN_OK, MN_FULL, -ENOMEM. Does not dispatch. */
int
mn_plan_add(struct mn_engine *e, const struct mn_plan_batch *b);

/* Starts what should start now. Returns how many tasks went to the run queues. */
uint32_t
mn_plan_start_due(struct mn_engine *e);

/* When the engine has to look again if nothing happens: never later than in nap_ns. */
int64_t
mn_plan_nap(const struct mn_plan *p, int64_t nap_ns);

/* Tasks queued that nobody has claimed: an estimate. */
uint64_t
mn_plan_queued(const struct mn_engine *e);

/* Whether work past the window may start. It takes memory that torch's loader would not: a
 * slow sample has to hold up the rest, or a worker to idle for a while first. Shorter stalls
 * are the machine's, and there is always another. ready: batches, as mn_plan_ready says;
 * queued: tasks that wait in the run queues. */
bool
mn_plan_starved(struct mn_engine *e, int64_t ready, uint64_t queued);

/* Nanoseconds for which what is planned and has not started keeps the workers busy, beyond a
 * reserve; 1 while costs are unknown, INT64_MAX when no more is planned. */
int64_t
mn_plan_lasts(const struct mn_plan *p, uint32_t workers);

/* Whether the program should plan more now, because workers idle behind a slow sample or are
 * about to. Says so once for what is planned. */
bool
mn_plan_starving(struct mn_engine *e);

/* The batch that the program has next, or would have if what is planned came in order. */
int64_t
mn_plan_first(const struct mn_plan *p);

/* Batches complete and not taken: in order from the head on, or (up to starved_below) all. */
int64_t
mn_plan_ready(struct mn_engine *e);

/* The batch to deliver next, if it is done: the head, or out of order the one done first. Its
 * block is 0 where it cannot be made. Where batches are formed (mn_forming.h): the first unit
 * of the one that is. */
bool
mn_plan_pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off);

/* Why a planned batch cannot be made. Mutex not held. */
struct mn_refusal
mn_engine_refused(struct mn_engine *e, uint64_t sequence);

/* Whether there is any to deliver. */
bool
mn_plan_any_done(struct mn_engine *e);

/* Whether the batch to deliver next is the first of an epoch. */
bool
mn_plan_begins(const struct mn_plan *p);

/* Offset of the batch's block, 0 when it has not started. */
uint64_t
mn_plan_block(const struct mn_plan *p, uint64_t sequence);

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

/* Teaches the cost model what a finished batch's rows have cost, once. */
void
mn_plan_learn(struct mn_engine *e, struct mn_batch *batch);

#endif
