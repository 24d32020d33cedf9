/* mn_engine_internal.h - shared by the engine's own files only.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_INTERNAL_H
#define MN_ENGINE_INTERNAL_H

#include "engine/mn_engine.h"

struct mn_range {
    uint64_t off, bytes;
};

/* A block in flight as the trainer knows it; private memory. */
struct mn_batch {
    struct mn_batch *next, *prev;
    uint64_t block_off;
    uint64_t sequence;    /* of delivery, counted over epochs; UINT64_MAX: outside of it */
    bool abandoned;
    bool detached;        /* the caller knows that it is done */
    bool learned;         /* its costs are in the model */
    bool accepted;        /* what workers wrote was read: it is done, or lost */
    uint32_t nranges, room;
    struct mn_range *ranges; /* of the arena, to be freed when the block is retired */
    struct mn_report reports[]; /* [rows], of tasks that were accepted */
};

/* Frees what was allocated. Where the system refuses the few bytes to note it down, the range
 * stays allocated, and counted, for as long as the engine lives. */
void
mn_range_free(struct mn_extents *x, uint64_t off, uint64_t bytes);

struct mn_batch *
mn_batch_find(struct mn_engine *e, uint64_t block_off);

/* Adds a range to what the batch frees. 0 or -ENOMEM. */
int
mn_batch_own(struct mn_batch *b, uint64_t off, uint64_t bytes);

/* Gives the pages of all free ranges of the arena back to the system. Mutex held, and released
 * now and then. */
void
mn_engine_punch_free(struct mn_engine *e);

/* The next step of what policy_reclaim.h has to say. The engine's thread only. Mutex held, and
 * released meanwhile. Whether it should be called again at once. */
bool
mn_engine_reclaim(struct mn_engine *e, uint64_t now_ns);

/* Frees block, tasks and ranges. Mutex held, all tasks out of workers' hands. */
void
mn_batch_drop(struct mn_engine *e, struct mn_batch *b);

/* The two ends of a batch, see mn_engine_retire and mn_engine_abandon. Mutex held. */
void
mn_batch_retire(struct mn_engine *e, uint64_t block_off);

void
mn_batch_abandon(struct mn_engine *e, uint64_t block_off);

/* Makes a block with fields and PLANNED tasks, cut at row0[0..ntasks]; behind PART tasks one
 * more to collate them. 0, or e->refusal and -EAGAIN without descriptors or while room is
 * lent, else -ENOMEM. */
int
mn_batch_make(struct mn_engine *e, const struct mn_submit *s, const uint32_t *row0,
              uint32_t ntasks, uint64_t *block_off);

/* Waits until nothing of the arena is lent: for what has no other to try again for it. Mutex
 * held, and released meanwhile. Whether it had to wait. */
bool
mn_engine_no_lent(struct mn_engine *e);

/* Whether what the trainer waits for (mn_ctl.wanted) is done. Mutex held for MN_WANT_ANY. */
bool
mn_engine_has_done(struct mn_engine *e, uint64_t wanted);

/* Puts a task that was taken from a lane on another one, for others to claim. */
void
mn_task_put(struct mn_engine *e, uint32_t task, uint32_t lane);

/* Wakes up to n sleeping workers. */
void
mn_engine_ring_workers(struct mn_engine *e, uint32_t n);

bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b);

/* A task that its worker will not finish: somebody else tries, or it is lost with that death.
 * word: what it was, with its generation and attempt. */
void
mn_task_take_back(struct mn_engine *e, uint32_t task, uint64_t word,
                  const struct mn_death *death);

/* Memory came back: wakes the engine if a worker waits for some. Mutex held. */
void
mn_engine_room(struct mn_engine *e);

void
mn_engine_poke_zygote(struct mn_engine *e);

/* Grants leases, sweeps the dead, drops abandoned blocks. Mutex held. True if anything
 * was done. */
bool
mn_engine_step(struct mn_engine *e);

#endif
