/* mn_arena_leases.h - the arena memory of each worker for results that do not fit in rows.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns, in private memory, what each worker was granted and no accepted envelope has taken: the
 * worker owes that. An envelope must lie in memory that its worker owes. So no record, whatever
 * it contains, frees memory of others, or frees memory twice. When a worker is dead, all that it
 * owes is freed.
 *
 * A worker asks by lease_state WANT [L1] and sleeps on its lease event. The answer is stored here
 * [L3], and the owner of this struct notifies that event after it has released its lock.
 *
 * Lock. None of its own: all functions need the lock that guards the arena. No system call.
 */
#ifndef MN_ARENA_LEASES_H
#define MN_ARENA_LEASES_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/mn_arena.h"
#include "workers/mn_records.h"

struct mn_arena_lease {
    uint64_t off, len;     /* the present lease; len 0: none */
    struct mn_ranges owed; /* what no accepted envelope has taken of this and earlier leases */
};

struct mn_arena_leases {
    struct mn_shm shm;
    struct mn_arena *arena;
    struct mn_arena_lease *at; /* [nworkers] */
    uint64_t grain;            /* bytes of a lease, unless its worker wants more */
};

/* Returns 0 or -ENOMEM. The arena must have its limit by now, and must outlive this. */
int
mn_arena_leases_open(struct mn_arena_leases *l, const struct mn_shm *shm, struct mn_arena *arena);

/* Frees the records. Granted memory is the arena's. */
void
mn_arena_leases_close(struct mn_arena_leases *l);

/* Returns whether the worker waits for an answer. */
bool
mn_arena_leases_wanted(const struct mn_arena_leases *l, uint32_t worker);

/* Returns whether a worker's statements about its lease make sense: the end of its used part, and
 * how much it wants. */
bool
mn_arena_leases_sound(const struct mn_arena_leases *l, uint32_t worker, uint64_t used_end,
                      uint64_t want);

/* Frees the rest of its lease, behind used_end. */
void
mn_arena_leases_end(struct mn_arena_leases *l, uint32_t worker, uint64_t used_end);

/* Grants len bytes, or refuses them if the arena does not have them. The worker must have no
 * lease. */
void
mn_arena_leases_grant(struct mn_arena_leases *l, uint32_t worker, uint64_t len);

/* Refuses a request: it can never be granted. */
void
mn_arena_leases_refuse(struct mn_arena_leases *l, uint32_t worker);

/* Removes the range from what the worker owes. Returns 0; -EINVAL: it does not owe that;
 * -ENOMEM. */
int
mn_arena_leases_take(struct mn_arena_leases *l, uint32_t worker, uint64_t off, uint64_t bytes);

/* Frees all that the worker owes. The worker must be dead. */
void
mn_arena_leases_forget(struct mn_arena_leases *l, uint32_t worker);

#endif
