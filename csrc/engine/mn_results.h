/* mn_results.h - what workers have written, copied out and checked before anybody uses it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Workers run other people's code in C, which may write where it must not.  So nothing that a
 * worker wrote is freed, indexed or parsed by before it was copied to private memory and was
 * found to make sense, and this is the one place that does it.  A record that makes none is
 * *damage*: its task is tried again by another worker or lost, as after a death, and the worker
 * that wrote it is told to leave and counts as dead.
 *
 * Who owns an envelope's memory is private, too: what a worker was granted and no accepted
 * envelope has taken is owed by it (struct mn_lease).  An envelope must lie in what its worker
 * owes, so that no record, whatever it says, frees memory of others, or twice.
 *
 * All of it under the engine's mutex, but for reading what has been accepted: that is the
 * caller's who was given the batch.
 */
#ifndef MN_RESULTS_H
#define MN_RESULTS_H

#include <stdbool.h>
#include <stdint.h>

#include "workers/mn_message.h"

struct mn_engine;
struct mn_batch;
struct mn_death;

enum mn_block_status {
    MN_BLOCK_BUSY = 0,
    MN_BLOCK_DONE = 1,
    MN_BLOCK_LOST = 2, /* done, but a task of it was lost with its worker */
};

/* What of a worker's records makes no sense. Numbers of minato/errors.py. */
enum mn_damage {
    MN_SOUND = 0,
    MN_DAMAGE_WORD = 1,     /* the state of a task */
    MN_DAMAGE_TIMES = 2,    /* when it was done, and how long it took */
    MN_DAMAGE_REPORTS = 3,  /* what it says of rows */
    MN_DAMAGE_ENVELOPE = 4, /* where its result lies */
    MN_DAMAGE_PARTS = 5,    /* what that consists of */
    MN_DAMAGE_LEASE = 6,    /* what room it has used and asks for */
};

/* Exit status in place of a worker's that was told to leave: this and the damage. */
#define MN_STATUS_DAMAGED 2000

/* A finished task's record, as it was when it was accepted, and what the trainer itself has
 * put there. */
struct mn_result {
    uint32_t row0, nrows; /* the trainer's */
    uint32_t kind;
    uint32_t flags;
    uint32_t worker;
    bool accepted;
    uint64_t env_off, env_len;
    uint64_t wall_ns, cpu_ns, done_ns;
    struct mn_envelope envelope;
};

/* The head of an envelope of that length, copied, if it and all of its parts lie within. */
bool
mn_envelope_look(const void *at, uint64_t len, struct mn_envelope *out);

/* One part of it, copied; false when it is not within any more. */
bool
mn_envelope_part_look(const void *at, uint64_t len, const struct mn_envelope *head, uint64_t i,
                      struct mn_envelope_part *out);

/* Reads what is DONE of a batch. A task whose record is damaged is taken back: the batch is
 * busy again, or has lost it. Like mn_engine_poll else. */
enum mn_block_status
mn_batch_accept(struct mn_engine *e, struct mn_batch *b);

/* The same of those of its tasks that are DONE, for the memory alone. */
void
mn_batch_accept_envelopes(struct mn_engine *e, struct mn_batch *b);

/* Tells a worker to leave, for what it wrote. */
void
mn_worker_damaged(struct mn_engine *e, uint32_t worker, enum mn_damage what);

/* Takes the range out of what the worker owes. 0; -EINVAL: it does not owe that; -ENOMEM. */
int
mn_lease_take(struct mn_engine *e, uint32_t worker, uint64_t off, uint64_t bytes);

/* The worker was granted the range. 0 or -ENOMEM. */
int
mn_lease_give(struct mn_engine *e, uint32_t worker, uint64_t off, uint64_t bytes);

/* What it says of its lease: where its used part ends, and how much it wants. */
bool
mn_lease_sound(const struct mn_engine *e, uint32_t worker, uint64_t used_end, uint64_t want);

/* Frees what is left of its lease behind used_end. */
void
mn_lease_end(struct mn_engine *e, uint32_t worker, uint64_t used_end);

/* Frees all that it owes. It is dead, or nobody lives. */
void
mn_lease_forget(struct mn_engine *e, uint32_t worker);

#endif
