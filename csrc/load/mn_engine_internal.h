/* mn_engine_internal.h - shared by the engine's own files only.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_INTERNAL_H
#define MN_ENGINE_INTERNAL_H

#include "load/mn_engine.h"

struct mn_range {
    uint64_t off, bytes;
};

/* A block in flight as the trainer knows it; private memory. */
struct mn_batch {
    struct mn_batch *next, *prev;
    uint64_t block_off;
    bool abandoned;
    bool detached;        /* the caller knows that it is done */
    bool learned;         /* its costs are in the model */
    bool envelopes_owned; /* the tasks' envelopes are among the ranges */
    uint32_t nranges, room;
    struct mn_range *ranges; /* of the arena, to be freed when the block is retired */
};

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

/* Makes a block with fields and PLANNED tasks, cut at row0[0..ntasks]; behind PART tasks one
 * more to collate them. 0, -ENOMEM over the
 * limit while something is in flight, -EAGAIN without descriptors or while room is lent. */
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

/* Wakes up to n sleeping workers. */
void
mn_engine_ring_workers(struct mn_engine *e, uint32_t n);

bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b);

/* Remembers how far a finished task has used its worker's present lease. */
void
mn_lease_note(struct mn_engine *e, uint32_t worker, const struct mn_task *t);

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
