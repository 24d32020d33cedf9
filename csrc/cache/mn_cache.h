/* A client of a cache file: what a process asks and stores.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Values by digest, shared by all processes of a user that open the same file, in memory or on a
 *   disk. The parts are mn_cache_file (the file, and which clients live) and mn_cache_log (entries:
 *   room for them, what is new, finding and reading). Their headers explain why each part is
 *   correct.
 *
 * Actors: any thread of the process. Finding and copying take no lock. Attaching, storing and
 *   closing take the client's mutex. Storing holds it while it copies. So a client writes one entry
 *   at a time, and its slot needs one reservation.
 *
 * Forks: a child has neither the mapping nor the descriptor (see mn_cache_file.h). The fork waits
 *   until no thread attaches or stores. A child that uses its copy of the client attaches anew,
 *   with a slot of its own; one that does not costs nothing.
 *
 * Lost descriptors: where the program has closed them all, the next store finds out, and attaches
 *   anew. The old mapping stays until the client is closed, because other threads may read it.
 *
 * All functions return 0, MN_FULL, MN_EMPTY, a refusal (mn_cache_file.h) or a negative errno.
 *
 * Single flight: one thread makes a value, and others that want it wait for it
 *   A miss claims its key before the value is made. A claim only saves work. Without one, or with
 *   two, values are still right: every waiter gives up after a while and makes the value itself.
 *   A claim is one word in a table that the key's digest points into. It holds a tag of the key,
 *   and the slot and incarnation of the client. 0 is free. A client takes it by exchange from 0, or
 *   from the word of an owner that does not live any more. The owner gives it back by exchange from
 *   exactly its own word. So a client that dies in its maker leaves a word that the next one takes
 *   over. Two keys at one place: the second is made without a claim.
 *   Waiting is on the place's futex for at most MN_CACHE_POLL_NS, after which the waiter looks
 *   whether the owner lives. The owner adds to the futex word after it has freed the place. So a
 *   waiter that read the futex word before it saw the claim misses no wake-up.
 */
#ifndef MN_CACHE_H
#define MN_CACHE_H

#include <stdbool.h>
#include <stdint.h>

#include "cache/mn_cache_file.h"
#include "cache/mn_cache_log.h"

#define MN_CACHE_TOO_LARGE 48 /* an entry that no segment holds; a result besides the refusals */
#define MN_CACHE_POLL_NS (INT64_C(50) * 1000000)

struct mn_cache_claimed {
    struct mn_cache_claim *claim;
    uint64_t word; /* the own one, or, after -EBUSY, the owner's */
    uint32_t turn; /* of the futex, before the word was read */
};

struct mn_cache;

struct mn_cache_value {
    const struct mn_cache_part *description, *parts;
    uint64_t nparts;
    uint64_t made_ns; /* what it cost to make */
    bool evicts;      /* the oldest segment may be recycled for it, if jobs share the file */
};

struct mn_cache_sums {
    uint64_t hits, hit_bytes, saved_ns, misses, made_ns, stored, stored_bytes, refused;
    uint64_t bytes, used_bytes, entries, recycled, returned, clients, jobs, entry_bytes_max;
    uint64_t damaged, segments;
    enum mn_cache_name name;
    char label[MN_CACHE_LABEL_BYTES]; /* of the file (mn_cache_place) */
};

/* A client that is not attached yet. Folder and name are copied. reserve: bytes of memory to leave
 * to others. -ENOMEM. */
int
mn_cache_open(const struct mn_cache_place *place, uint64_t reserve, struct mn_cache **out);

/* Leaves the file, also as its last client, and frees the client. Call it only while no other
 * thread uses this client. */
void
mn_cache_close(struct mn_cache *cache);

/* Opens the file unless this process has it open. The other calls do the same by themselves. */
int
mn_cache_attach(struct mn_cache *cache);

/* Leaves the file; the next call attaches again. A fork that never attached removes what
 * its killed parent has left. Call it only while no other thread uses this client. */
void
mn_cache_detach(struct mn_cache *cache);

/* Whether its calls may wait for a disk. */
bool
mn_cache_is_on_disk(const struct mn_cache *cache);

/* Bytes of memory that this process may take for other things: the cache leaves them alone. */
void
mn_cache_promise(struct mn_cache *cache, uint64_t bytes);

/* MN_EMPTY: there is none, or it is damaged. count: whether it counts as a hit or a miss. */
int
mn_cache_find(struct mn_cache *cache, struct mn_cache_digest digest, bool count,
              struct mn_cache_found *found);

/* Whether an entry is there and its checksums are right. A damaged one is counted and not found any
 * more. */
bool
mn_cache_check(struct mn_cache *cache, const struct mn_cache_found *found);

/* Stores a value: its description, and its parts, each padded to MN_CACHE_UNIT. 0, MN_FULL,
 * MN_CACHE_TOO_LARGE, or why there is no cache. */
int
mn_cache_store(struct mn_cache *cache, struct mn_cache_digest digest,
               const struct mn_cache_value *value);

/* 0: claimed. MN_FULL: no client can claim it now. -EBUSY: another thread makes the value; wait on
 * `out`, if at all, and try again. */
int
mn_cache_claim_key(struct mn_cache *cache, struct mn_cache_digest digest,
                   struct mn_cache_claimed *out);

/* After -EBUSY: waits until the claim may be free, at most MN_CACHE_POLL_NS. 0 or -EINTR. */
int
mn_cache_wait_for_key(const struct mn_cache_claimed *seen);

/* Gives a claim back by its word. Does nothing if the client has left that file since. */
void
mn_cache_release_key(struct mn_cache *cache, struct mn_cache_digest digest, uint64_t word);

/* Says what a value of a function, given by some number, cost to make. */
void
mn_cache_learn_cost(struct mn_cache *cache, uint64_t function, uint64_t made_ns);

/* How long to wait for another maker: four times what values of the function cost, at least a
 * second. 0 if the last values found no room, so that waiting is in vain. */
int64_t
mn_cache_patience_ns(struct mn_cache *cache, uint64_t function);

/* At most `most` entries that any client has stored since the cursor moved: mn_cache_log.h. */
int
mn_cache_inserted(struct mn_cache *cache, struct mn_cache_cursor *cursor,
                  struct mn_cache_stored *out, uint64_t most, uint64_t *n);

int
mn_cache_sum(struct mn_cache *cache, struct mn_cache_sums *sums);

/* Checks every entry that the index leads to. */
int
mn_cache_verify(struct mn_cache *cache, uint64_t *checked, uint64_t *damaged);

#endif /* MN_CACHE_H */
