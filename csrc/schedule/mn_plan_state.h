/* mn_plan_state.h - the state of the plan and what its files share; private to them.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_PLAN_STATE_H
#define MN_PLAN_STATE_H

#include "base/mn_atomic.h"
#include "base/mn_base.h"
#include "schedule/mn_plan.h"

#define MN_PLAN_BATCHES 4096u /* at least */
#define MN_PLAN_BATCHES_MOST (1u << 20)
#define MN_PLAN_TASKS 16384u
/* A batch larger than this is large. */
#define MN_PLAN_LARGE_BYTES (UINT64_C(1) << 20)

/* Time savings below this are not worth the memory of another batch. A worker idles for this long
 * before anything beyond the window is started. A large batch's sample must be slow by more than
 * this to count as slow. A busy machine takes a core away for up to some ten milliseconds, and
 * fresh pages for a large batch cost about as much. */
static inline int64_t
mn_plan_patience_ns(uint64_t batch_bytes)
{
    return (batch_bytes > MN_PLAN_LARGE_BYTES ? 20 : 5) * INT64_C(1000000);
}

/* The time and memory that batches take: batches are cut by this, and the dispatcher's window
 * follows it. */
struct mn_plan_pace {
    uint32_t active;     /* workers that should exist, standby workers not counted */
    struct mn_plan_rows rows_of; /* of a batch that starts now */
    uint64_t steady;     /* batches that may lie finished in memory; see may_lie() */
    uint32_t cut_rows;   /* of the batch planned last */
    uint32_t cut_tasks;  /* its number of tasks; 0: no batch was planned */
    bool split;          /* tasks of whole batches are cut for splitting now */
    unsigned revision;   /* struct mn_costs_view, by which planned batches are cut */
};

/* Obstacles found when something was to be started or planned. */
struct mn_plan_stall {
    bool full;           /* the last batch to be planned found no space */
    uint64_t starved_ns; /* since when a worker idles behind the head; 0: none does */
    uint64_t told;       /* order.next when the program was last asked to plan more */
};

/* Whether neighbours are kept together, and for what reason (policy_locality.h). */
struct mn_plan_together {
    bool may;             /* allowed: that is, or could be, cheaper */
    bool wanted;          /* by what is known, they should be */
    bool parted;          /* they no longer are, and the engine has not asked since */
    bool declared;        /* the dataset says where groups begin */
    uint32_t stance;      /* what the pieces were cut by: a change of it is news */
};

/* The pieces that one worker is to make next, unless other workers must help. */
struct mn_share {
    struct mn_piece *first, *last;
    uint64_t chain;   /* of the piece that its worker started or adopted last */
    int64_t cost_ns;  /* of its pieces */
    uint32_t tasks;   /* number of tasks in it */
    uint64_t idle_ns; /* since when its worker has nothing to start; 0: it has */
    bool usable;      /* its worker existed at the last look */
};

/* The owners of the pieces, while neighbours are kept together. */
struct mn_plan_shares {
    struct mn_share *of;   /* [max_workers] */
    int64_t cost_ns;       /* of all shares */
    uint64_t tasks;        /* of all shares */
    uint64_t piece_tasks;  /* of all pieces, including the dispatcher's */
    struct mn_chain chain; /* of the sample planned last */
    uint64_t chains;       /* chains so far: numbers are never reused */
};

struct mn_plan {
    struct mn_plan_view view;
    struct mn_plan_config cfg;
    struct mn_dispatch dispatch;
    void *memory;                /* the dispatcher's */
    struct mn_planned **batches; /* ring by sequence, [view.capacity], which is a power of two */
    uint64_t formed_first;       /* where batches are formed: see mn_plan_set_span() */
    uint64_t horizon;            /* no batch from this sequence on may start */
    uint64_t rows;               /* planned so far: the order among equals */
    uint64_t refused;            /* planned batches that cannot be made */
    uint64_t unmade;             /* started batches not seen done yet */
    /* Batches that were taken in order but go to the caller only later: they count as not taken.
     * Written by the caller's thread; the engine thread reads it and may see an old value. */
    mn_a64 prefetched;
    struct mn_plan_pace pace;
    struct mn_plan_stall stall;
    struct mn_plan_together together;
    struct mn_plan_shares shares;
};

/* The dispatcher's tag of a task or a piece: its batch, and its number in that batch. A batch has
 * at most MN_PLAN_BATCH_TASKS of either. */
MN_STATIC_ASSERT(MN_PLAN_BATCH_TASKS < 1u << 24, "the number is a tag's lowest 24 bits");

static inline uint64_t
mn_plan_tag(const struct mn_planned *q, uint32_t number)
{
    return q->sequence << 24 | number;
}

/* Returns the batch of a tag, and the number in it. */
struct mn_planned *
mn_plan_tagged(const struct mn_plan *p, uint64_t tag, uint32_t *number);

/* Returns the ring slot that holds or would hold the batch. */
struct mn_planned **
mn_plan_place(const struct mn_plan *p, uint64_t sequence);

/* Returns the memory that the rows of a batch take at most. */
uint64_t
mn_plan_rows_bytes(const struct mn_plan *p, uint32_t nrows);

/* Returns the indices by which the costs of the batch's rows are known, or NULL. */
static inline const int64_t *
mn_planned_index(const struct mn_plan_batch *b)
{
    return b->integers ? b->index : NULL;
}

/* Returns the predicted time between two batches like this one. */
int64_t
mn_plan_period(const struct mn_plan *p, const struct mn_plan_batch *b);

/* Returns the cost that counts when a task of cost_ns is judged to be slow. */
int64_t
mn_plan_worth(const struct mn_plan *p, int64_t cost_ns, int64_t bytes);

/* ---- mn_plan_window_and_memory.c ------------------------------------------------------------- */

/* Returns whether work beyond the prefetch window may start. Such work takes memory that torch's
 * loader would not take. So a straggler must hold up the rest, or a worker must have been idle for
 * a while. Shorter stalls are noise of the machine and never end. Notes since when workers are
 * idle, if that was not noted yet. */
bool
mn_plan_starved(struct mn_plan *p, const struct mn_plan_facts *f);

/* Returns the batch that the program gets next, or would get if batches came in the planned
 * order. */
int64_t
mn_plan_first_wanted(const struct mn_plan *p);

/* Returns whether memory allows a task of the batch to start. held: set if the limit refuses it. */
bool
mn_plan_memory_allows(struct mn_plan *p, const struct mn_plan_facts *f,
                      const struct mn_planned *q, enum mn_dispatch_why why, bool *held);

/* ---- neighbours kept together: mn_plan_worker_shares.c -------------------------------------- */

/* A piece is a run of tasks of one batch that one worker is meant to make. They belong to one chain
 * and, where that is known to be cheaper, to one home. */
struct mn_piece {
    struct mn_piece *next; /* in its worker's share */
    struct mn_planned *batch;
    uint64_t chain;
    uint32_t t0, t1;  /* its tasks that are not queued yet */
    uint32_t node;    /* in the dispatcher; NO_NODE: in a share, or empty */
    int32_t home;     /* worker that made it last; -1: unknown */
    int64_t cost_ns;
    int64_t opens_ns; /* the part of that for opening groups that begin in it */
};

/* What begins at a row: struct mn_planned, border. */
enum { CHAIN = 1, PIECE = 2, OPENING = 4 };

/* Gives what has not started of a batch to the dispatcher, or to the worker that owns it. Needs the
 * lock of the costs. Returns 0 or -ENOMEM. */
int
mn_pieces_insert(struct mn_plan *p, struct mn_planned *q, const int64_t *cost);

/* Removes all shares. */
void
mn_pieces_reset(struct mn_plan *p);

/* Removes what is left of a batch from the dispatcher and from all shares. */
void
mn_pieces_forget(struct mn_plan *p, struct mn_planned *q);

#endif
