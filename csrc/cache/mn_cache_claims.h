/* Single flight: one thread makes a value, and others that want it wait for it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A miss claims its key before the value is made. A claim only saves work. Without one, or with
 *   two, values are still right: every waiter gives up after a while and makes the value itself.
 *
 * A claim is one word in a table that the key's digest points into. It holds a tag of the key, and
 * the slot and incarnation of the client. 0 is free. A client takes it by exchange from 0, or from
 * the word of an owner that does not live any more. The owner gives it back by exchange from
 * exactly its own word. So a client that dies in its maker leaves a word that the next one takes
 * over. Two keys at one place: the second is made without a claim.
 *
 * Waiting: on the place's futex for at most MN_CACHE_POLL_NS, after which the waiter looks whether
 * the owner lives. The owner adds to the futex word after it has freed the place. So a waiter that
 * read the futex word before it saw the claim misses no wake-up.
 */
#ifndef MN_CACHE_CLAIMS_H
#define MN_CACHE_CLAIMS_H

#include <stdint.h>

#include "cache/mn_cache_file.h"

#define MN_CACHE_POLL_NS (INT64_C(50) * 1000000)

struct mn_cache_claimed {
    struct mn_cache_claim *claim;
    uint64_t word; /* the own one, or, after -EBUSY, the owner's */
    uint32_t turn; /* of the futex, before the word was read */
};

/* 0: claimed. MN_FULL: the place is another key's; go on without. -EBUSY: somebody makes it. */
int
mn_cache_claims_take(const struct mn_cache_file *file, struct mn_cache_digest digest,
                     struct mn_cache_claimed *out);

/* After -EBUSY: waits until the place may be free, at most MN_CACHE_POLL_NS. 0 or -EINTR. */
int
mn_cache_claims_wait(const struct mn_cache_claimed *seen);

/* Gives back what `take` has claimed under that word. */
void
mn_cache_claims_release(const struct mn_cache_file *file, struct mn_cache_digest digest,
                        uint64_t word);

#endif /* MN_CACHE_CLAIMS_H */
