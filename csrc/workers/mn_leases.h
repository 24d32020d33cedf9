/* mn_leases.h - what room in the arena each worker has, for results that do not fit in rows.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns, in private memory, what each worker was granted and no accepted envelope has taken: it
 * owes that.  An envelope must lie in what its worker owes, so that no record, whatever it says,
 * frees memory of others, or twice.  When a worker is dead, all that it owes is free.
 *
 * A worker asks by lease_state WANT [L1] and sleeps on its room event; the answer is stored here
 * [L3], and whoever owns this notifies that event after he has let go of his lock.
 *
 * Lock.  None of its own: under the lock that guards the arena.  No system call.
 */
#ifndef MN_LEASES_H
#define MN_LEASES_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/mn_arena.h"
#include "workers/mn_records.h"

struct mn_lease {
    uint64_t off, len;     /* the present one; len 0: none */
    struct mn_ranges owed; /* of this and earlier ones, what no accepted envelope has taken */
};

struct mn_leases {
    struct mn_shm shm;
    struct mn_arena *arena;
    struct mn_lease *at;  /* [nworkers] */
    uint64_t grain;       /* bytes of a lease, if its worker does not want more */
};

/* 0 or -ENOMEM. The arena has its limit by now, and outlives this. */
int
mn_leases_open(struct mn_leases *l, const struct mn_shm *shm, struct mn_arena *arena);

/* What was granted is the arena's matter. */
void
mn_leases_close(struct mn_leases *l);

/* Whether the worker waits for an answer. */
bool
mn_leases_wanted(const struct mn_leases *l, uint32_t worker);

/* What it says of its lease: where its used part ends, and how much it wants. */
bool
mn_leases_sound(const struct mn_leases *l, uint32_t worker, uint64_t used_end, uint64_t want);

/* Frees what is left of its lease behind used_end. */
void
mn_leases_end(struct mn_leases *l, uint32_t worker, uint64_t used_end);

/* Grants so much, or refuses where that is not to be had. The worker has no lease. */
void
mn_leases_grant(struct mn_leases *l, uint32_t worker, uint64_t len);

void
mn_leases_refuse(struct mn_leases *l, uint32_t worker);

/* Takes the range out of what the worker owes. 0; -EINVAL: it does not owe that; -ENOMEM. */
int
mn_leases_take(struct mn_leases *l, uint32_t worker, uint64_t off, uint64_t bytes);

/* Frees all that it owes. It is dead, or nobody lives. */
void
mn_leases_forget(struct mn_leases *l, uint32_t worker);

#endif
