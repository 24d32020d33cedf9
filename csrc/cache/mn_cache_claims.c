/* See mn_cache_claims.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_claims.h"

#include <errno.h>
#include <limits.h>
#include <stdbool.h>

#include "base/mn_error.h"
#include "base/mn_fault.h"
#include "os/mn_thread.h"

/* of a word: tag of the key, slot + 1, incarnation */
#define TAG_SHIFT 32
#define SLOT_SHIFT 21
#define INCARNATIONS ((UINT64_C(1) << SLOT_SHIFT) - 1)
MN_STATIC_ASSERT(MN_CACHE_SLOTS < 1u << (TAG_SHIFT - SLOT_SHIFT), "slot + 1 has room");

static bool
owner_lives(const struct mn_cache_file *file, uint64_t word)
{
    uint64_t slot = ((word & UINT32_MAX) >> SLOT_SHIFT) - 1;
    return slot < MN_CACHE_SLOTS
           && (mn_a64_load_acquire(&file->map.slots[slot].incarnation) & INCARNATIONS)
                  == (word & INCARNATIONS)
           && mn_cache_slot_lives(file, (uint32_t)slot);
}

static struct mn_cache_claim *
place_of(const struct mn_cache_file *file, struct mn_cache_digest digest)
{
    return &file->map.claims[digest.word[1] % MN_CACHE_CLAIMS];
}

int
mn_cache_claims_take(const struct mn_cache_file *file, struct mn_cache_digest digest,
                     struct mn_cache_claimed *out)
{
    struct mn_cache_claim *claim = place_of(file, digest);
    uint64_t word = digest.word[0] >> TAG_SHIFT << TAG_SHIFT
                    | (uint64_t)(file->slot + 1) << SLOT_SHIFT
                    | (file->incarnation & INCARNATIONS);
    out->claim = claim;
    out->turn = mn_a32_load_seqcst(&claim->turn);
    uint64_t seen = 0;
    while (!mn_a64_cas_seqcst(&claim->word, &seen, word)) {
        if (seen != 0 && owner_lives(file, seen)) {
            if (seen >> TAG_SHIFT != word >> TAG_SHIFT) {
                return MN_FULL;
            }
            out->word = seen;
            return -EBUSY;
        }
    }
    MN_FAULT("cache.claimed");
    out->word = word;
    return 0;
}

int
mn_cache_claims_wait(const struct mn_cache_claimed *seen)
{
    if (mn_a64_load_seqcst(&seen->claim->word) != seen->word) {
        return 0;
    }
    int rc = mn_futex_wait(&seen->claim->turn, seen->turn, MN_CACHE_POLL_NS);
    return rc == -EINTR ? rc : 0;
}

void
mn_cache_claims_release(const struct mn_cache_file *file, struct mn_cache_digest digest,
                        uint64_t word)
{
    struct mn_cache_claim *claim = place_of(file, digest);
    if (mn_a64_cas_seqcst(&claim->word, &word, 0)) {
        (void)mn_a32_add_seqcst(&claim->turn, 1);
        (void)mn_futex_wake(&claim->turn, INT_MAX);
    }
}
