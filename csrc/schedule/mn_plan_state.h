/* mn_plan_state.h - what the plan knows, and what its files have of each other; for them alone.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_PLAN_STATE_H
#define MN_PLAN_STATE_H

#include "base/mn_atomic.h"
#include "base/mn_attr.h"
#include "schedule/mn_planned.h"

/* Tasks of one batch at most, so that the head always finds descriptors. */
#define MN_PLAN_BATCH_TASKS 1024u

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

/* What batches take, of time and of memory: by this they are cut, and the dispatcher's window
 * follows. */
struct mn_plan_pace {
    uint32_t active;     /* workers that should be there, standby ones not counted */
    int64_t consumer_ns; /* what the consumer takes for a batch, running mean; 0: unknown */
    struct mn_plan_rows rows_of; /* of a batch that begins now */
    uint64_t batch_bytes; /* of the largest batch so far */
    uint32_t cut_rows;   /* of the batch planned last, */
    uint32_t cut_tasks;  /* and into how many tasks it was cut; 0: nothing was planned */
    bool split;          /* what the tasks of whole batches are cut by now */
};

/* What stood in the way, when something was to start or to be planned. */
struct mn_plan_stall {
    bool held;           /* the last dispatch ended at the memory limit */
    bool full;           /* there was no room for what was to be planned last */
    uint64_t starved_ns; /* since when a worker idles behind the head; 0: none does */
    uint64_t told;       /* next when the program was last asked to plan more */
};

/* Whether neighbours are kept together, and by what that is known (policy_locality.h). */
struct mn_plan_together {
    bool may;             /* they may be at all: they are, or could be, cheaper */
    bool wanted;          /* they should be, by what is known */
    bool by_piece;        /* they are: mn_plan_locality.c */
    bool parted;          /* they are not any more, and nobody has asked yet */
    bool declared;        /* the dataset says where groups begin */
    uint64_t finding;     /* 1 + sequence of a first batch of which it is being found out whether
                           * others should help with it; 0: none */
    uint32_t stance;      /* what the pieces were cut by: a change of it is news */
};

/* What one worker alone is to do next, as long as nobody has to help. */
struct mn_share {
    struct mn_piece *first, *last;
    uint64_t chain;   /* of what it was given last */
    int64_t cost_ns;  /* of what is in it */
    uint32_t tasks;   /* in it */
    uint64_t idle_ns; /* since when its worker has nothing to start; 0: it has */
    bool usable;      /* its worker was there at the last look */
};

/* Whose the pieces are, while neighbours are kept together. */
struct mn_plan_shares {
    struct mn_share *of;   /* [max_workers] */
    int64_t cost_ns;       /* in all of them */
    uint64_t tasks;        /* in all of them */
    uint64_t piece_tasks;  /* in all pieces, the dispatcher's too */
    struct mn_chain chain; /* that the sample planned last belongs to */
    uint64_t chains;       /* that were begun: numbers are not used again */
    uint64_t helped;       /* times a worker took over part of another's share */
};

struct mn_plan {
    struct mn_plan_config cfg;
    struct mn_dispatch dispatch;
    void *memory;                /* the dispatcher's */
    struct mn_planned **batches; /* ring by sequence, [room] */
    uint32_t room;               /* a power of two */
    struct mn_plan_order order;
    uint64_t horizon;            /* no batch from this sequence on may start */
    uint64_t rows;               /* planned so far: the order among equals */
    uint64_t refused;            /* planned ones that cannot be made */
    uint64_t unmade;             /* begun ones that nobody has seen done */
    /* Batches that were taken in their order and are the caller's only later: they count as if
     * nobody had taken them. Written by the caller's thread; the engine's looks at it, and may
     * see what it was. */
    mn_a64 prefetched;
    uint64_t starts[6];          /* by enum mn_dispatch_why, for stats */
    struct mn_costs_view known;  /* of costs, when something was planned or learned last */
    struct mn_plan_pace pace;
    struct mn_plan_stall stall;
    struct mn_plan_together together;
    struct mn_plan_shares shares;
    struct mn_forming *forming;  /* NULL: what is planned is what is delivered */
};

/* The dispatcher's tag of a task, or of a piece: its batch, and the number that it has in that.
 * Of either a batch has MN_PLAN_BATCH_TASKS at most. */
MN_STATIC_ASSERT(MN_PLAN_BATCH_TASKS < 1u << 24, "the number is a tag's lowest 24 bits");

static inline uint64_t
mn_plan_tag(const struct mn_planned *q, uint32_t number)
{
    return q->sequence << 24 | number;
}

static inline struct mn_planned *
mn_plan_tagged(const struct mn_plan *p, uint64_t tag, uint32_t *number)
{
    *number = (uint32_t)(tag & 0xffffff);
    return mn_plan_at(p, tag >> 24);
}

/* Looks up what is known of costs now, and what follows for neighbours. */
void
mn_plan_look(struct mn_plan *p);

/* Cuts a batch that has not started into tasks and hands them on, with room left for one task
 * of each of `others`. cost: room for its rows'. 0 or -ENOMEM. */
int
mn_plan_cut(struct mn_plan *p, struct mn_planned *q, int64_t *cost, uint64_t others);

/* Whether there is room for as many tasks as the batch may be cut into, and for others. */
bool
mn_plan_room(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others);

/* How many tasks the batch may be cut into, with room left for one of each of `others`. */
uint64_t
mn_plan_tasks_most(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others);

/* Cuts a batch into that many tasks at most, whatever its samples cost. */
void
mn_plan_cut_evenly(struct mn_planned *q, uint64_t most);

/* Cuts anew what is stale and has not started. */
void
mn_plan_recut(struct mn_plan *p);

/* Whether memory allows a task of the batch to start. */
bool
mn_plan_memory_allows(const struct mn_plan *p, const struct mn_plan_facts *f,
                      const struct mn_planned *q);

/* Whether work past the window may start, in a round: a worker idles, and has for long enough. */
bool
mn_plan_may_ahead(struct mn_plan *p, struct mn_plan_round *r);

/* Whether a piece may start now; says in the round what holds it back. */
bool
mn_plan_piece_may_start(struct mn_plan *p, struct mn_plan_round *r, const struct mn_piece *x);

int64_t
mn_plan_sum(const int64_t *v, uint32_t n);

/* How many of the first n rows make a task. */
uint32_t
mn_plan_chunk(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost,
              uint32_t n, bool parts, int64_t limit);

/* The most rows that a task of a stretch of n may have. */
int64_t
mn_plan_chunk_limit(const struct mn_plan *p, const struct mn_plan_batch *b,
                    const int64_t *cost, uint32_t n);

/* What a task that costs so much counts as slow by. */
int64_t
mn_plan_worth(const struct mn_plan *p, int64_t cost_ns, int64_t bytes);

/* ---- mn_plan_locality.c: neighbours kept together --------------------------------------- */

/* A piece is a run of tasks of one batch that one worker is meant to make: of one chain, and
 * where that is known to be cheaper of one home. */
struct mn_piece {
    struct mn_piece *next; /* in its worker's share */
    struct mn_planned *batch;
    uint64_t chain;
    uint32_t t0, t1;  /* its tasks that are not queued yet */
    uint32_t node;    /* in the dispatcher, or MN_NO_NODE: in a share, or empty */
    int32_t home;     /* worker that made it last, -1 unknown */
    int64_t cost_ns;
    int64_t opens_ns; /* of that, what is paid for groups that begin in it */
};

#define MN_NO_NODE UINT32_MAX

/* Cuts a batch that has not started into tasks and pieces. 0 or -ENOMEM. cost: predicted, of
 * each row; others: batches for which room for a task is left. */
int
mn_pieces_cut(struct mn_plan *p, struct mn_planned *q, const int64_t *cost, bool parts,
              uint64_t others);

/* Gives what has not started of a batch to the dispatcher, or to the worker whose it is. 0 or
 * -ENOMEM. */
int
mn_pieces_insert(struct mn_plan *p, struct mn_planned *q, const int64_t *cost);

/* No shares any more. */
void
mn_pieces_reset(struct mn_plan *p);

/* What decides how early a piece starts: what its samples cost. What is paid for its group others
 * pay for theirs, and early starts of them all would only open groups in more workers. */
static inline int64_t
mn_piece_samples_ns(const struct mn_piece *x)
{
    return x->cost_ns - x->opens_ns;
}

/* Whether its samples are known to be slow, not only many: they may have to start before what
 * comes first. Slow ones have a piece of their own. */
bool
mn_piece_slow(const struct mn_plan *p, const struct mn_piece *x);

/* Takes what is left of a batch out of the dispatcher's and the workers' hands. */
void
mn_pieces_forget(struct mn_plan *p, struct mn_planned *q);

static inline uint32_t
mn_piece_tasks(const struct mn_piece *x)
{
    return x->t1 - x->t0;
}

/* Puts a piece into a worker's share, in the order of delivery. */
void
mn_share_give(struct mn_plan *p, uint32_t w, struct mn_piece *x);

void
mn_share_take(struct mn_plan *p, uint32_t w, struct mn_piece *x);

/* Cuts a piece of a worker's share in two before a task; the second is returned, in no share. */
struct mn_piece *
mn_share_split(struct mn_plan *p, uint32_t w, struct mn_piece *x, uint32_t at);

/* The same, where it is known which piece it is behind; NULL: none. */
void
mn_share_take_behind(struct mn_plan *p, uint32_t w, struct mn_piece *behind, struct mn_piece *x);

/* Gives a piece that is in no share to the dispatcher. */
void
mn_piece_offer(struct mn_plan *p, struct mn_piece *x);

/* What a worker that has died, or was asked to leave, has before it is anybody's again. */
void
mn_share_disown(struct mn_plan *p, uint32_t w);

/* Whether neighbours are known to belong together: then no slow sample is a reason to part them. */
static inline bool
mn_plan_together(const struct mn_plan *p)
{
    return p->together.declared || p->known.near == MN_CONTRAST_YES;
}

/* For so long opening a group may take while nobody knows. */
#define MN_PLAN_UNKNOWN_NS (INT64_C(200) * 1000 * 1000)

/* What a task of a share takes, as far as known. */
static inline int64_t
mn_plan_share_task_ns(const struct mn_plan *p)
{
    return p->shares.tasks != 0 ? p->shares.cost_ns / (int64_t)p->shares.tasks : p->known.median_ns;
}

/* ---- mn_plan_take_over.c: what a worker with nothing to do takes over -------------------- */

/* Gives the helper, which idles, half of another's share, where that pays. Whether it has. */
bool
mn_plan_find_help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper);

/* The worker behind whose present task, which goes on and on, tasks wait on its queue. Or where
 * there is none, how many workers there are. */
uint32_t
mn_plan_find_stuck(const struct mn_plan *p, const struct mn_plan_round *r, uint32_t helper);

/* ---- mn_plan_first_batch.c --------------------------------------------------------------- */

/* Finds out whether the first batch is a group (policy_locality.h), and has all help with it where
 * it is none. True as long as nothing is known of it. */
bool
mn_plan_find_first(struct mn_plan *p, const struct mn_locality_pairs *pairs);

#endif
