/* See mn_cache_index.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_index.h"

#include <string.h>

#include "cache/mn_cache_checksum.h"

#define PLACE_BITS 40

static struct mn_cache_record *
bucket_of(const struct mn_cache_map *map, struct mn_cache_digest digest)
{
    return map->index[digest.word[0] & (map->shape.nbuckets - 1)].record;
}

/* Reads an entry whose record says that it is of this digest, generation and place. */
static bool
confirmed(const struct mn_cache_map *map, struct mn_cache_digest digest, uint64_t generation,
          uint64_t place, struct mn_cache_found *found)
{
    const uint64_t most = map->shape.segment_bytes;
    uint64_t number = place >> PLACE_BITS;
    uint64_t off = (place & ((UINT64_C(1) << PLACE_BITS) - 1)) * MN_CACHE_UNIT;
    if (number >= map->shape.nsegments || off > most - sizeof(struct mn_cache_entry)
        || mn_a64_load_acquire(&map->segments[number].generation) != generation) { /* [K5] */
        return false;
    }
    const char *at = map->data + number * most + off;
    const struct mn_cache_entry *entry = (const struct mn_cache_entry *)at;
    struct mn_cache_head copy;
    uint64_t words[MN_CACHE_HEAD_WORDS];
    uint64_t seal = mn_a64_load_acquire(&entry->seal); /* [K9] */
    for (unsigned i = 0; i < MN_CACHE_HEAD_WORDS; i++) {
        words[i] = mn_a64_load_relaxed(&entry->head[i]);
    }
    memcpy(&copy, words, sizeof(copy));
    if (copy.digest[0] != digest.word[0] || copy.digest[1] != digest.word[1]
        || copy.generation != generation || copy.bytes > most || copy.described > copy.bytes
        || off + mn_cache_payload_off(copy.bytes) + copy.bytes > most
        || mn_cache_seal(map->shape.salt, &copy) != seal) {
        return false;
    }
    *found = (struct mn_cache_found){
        map, (uint32_t)number, generation, copy.bytes, copy.described, copy.made_ns, copy.sums,
        at + mn_cache_payload_off(copy.bytes),
    };
    return true;
}

bool
mn_cache_index_entry(const struct mn_cache_map *map, const struct mn_cache_record *record,
                     struct mn_cache_found *found)
{
    struct mn_cache_digest digest = {{mn_a64_load_acquire(&record->digest[0]),
                                      mn_a64_load_acquire(&record->digest[1])}};
    uint64_t generation = mn_a64_load_acquire(&record->generation);
    uint64_t place = mn_a64_load_acquire(&record->place);
    return generation != 0 && confirmed(map, digest, generation, place, found);
}

bool
mn_cache_index_find(const struct mn_cache_map *map, struct mn_cache_digest digest,
                    struct mn_cache_found *found)
{
    const struct mn_cache_record *bucket = bucket_of(map, digest);
    for (unsigned i = 0; i < MN_CACHE_WAYS; i++) {
        if (mn_a64_load_relaxed(&bucket[i].digest[0]) == digest.word[0]
            && mn_a64_load_relaxed(&bucket[i].digest[1]) == digest.word[1]
            && confirmed(map, digest, mn_a64_load_acquire(&bucket[i].generation),
                         mn_a64_load_acquire(&bucket[i].place), found)) {
            return true;
        }
    }
    return false;
}

/* The record to write: of the same digest, else one that leads nowhere, else the oldest. */
static struct mn_cache_record *
victim(const struct mn_cache_map *map, struct mn_cache_digest digest)
{
    struct mn_cache_record *bucket = bucket_of(map, digest), *best = bucket;
    uint64_t best_age = UINT64_MAX;
    for (unsigned i = 0; i < MN_CACHE_WAYS; i++) {
        if (mn_a64_load_relaxed(&bucket[i].digest[0]) == digest.word[0]
            && mn_a64_load_relaxed(&bucket[i].digest[1]) == digest.word[1]) {
            return &bucket[i];
        }
        uint64_t age = mn_a64_load_relaxed(&bucket[i].generation);
        uint64_t number = mn_a64_load_relaxed(&bucket[i].place) >> PLACE_BITS;
        if (age != 0
            && (number >= map->shape.nsegments
                || mn_a64_load_relaxed(&map->segments[number].generation) != age)) {
            age = 0;
        }
        if (age < best_age) {
            best_age = age;
            best = &bucket[i];
        }
    }
    return best;
}

void
mn_cache_index_insert(const struct mn_cache_map *map, struct mn_cache_digest digest,
                      uint64_t generation, uint32_t segment, uint64_t off)
{
    struct mn_cache_record *record = victim(map, digest);
    mn_a64_store_release(&record->digest[0], digest.word[0]);
    mn_a64_store_release(&record->digest[1], digest.word[1]);
    mn_a64_store_release(&record->generation, generation);
    mn_a64_store_release(&record->place,
                         (uint64_t)segment << PLACE_BITS | off / MN_CACHE_UNIT);
}

bool
mn_cache_found_still(const struct mn_cache_found *found)
{
    mn_a64 *generation = &found->map->segments[found->segment].generation;
    return mn_a64_add_acqrel(generation, 0) == found->generation; /* [K6] */
}

bool
mn_cache_found_verify(const struct mn_cache_found *found)
{
    const uint64_t salt = found->map->shape.salt;
    const uint64_t sums_bytes = mn_cache_nblocks(found->bytes) * sizeof(uint64_t);
    const char *sums = found->payload - mn_cache_padded(sums_bytes);
    if (mn_cache_checksum(salt, sums, sums_bytes) != found->sums) {
        return false;
    }
    for (uint64_t off = 0; off < found->bytes; off += MN_CACHE_BLOCK) {
        uint64_t sum, is, n = found->bytes - off;
        memcpy(&sum, sums + off / MN_CACHE_BLOCK * sizeof(sum), sizeof(sum));
        mn_cache_sum_blocks(salt + off, found->payload + off,
                            n < MN_CACHE_BLOCK ? n : MN_CACHE_BLOCK, &is);
        if (is != sum) {
            return false;
        }
    }
    return true;
}
