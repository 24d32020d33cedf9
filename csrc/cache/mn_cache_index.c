/* See mn_cache_index.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_index.h"

#include <stdlib.h>
#include <string.h>

#include "cache/mn_cache_checksum.h"
#include "cache/mn_cache_data.h"

/* of a record's place */
#define SEGMENT_SHIFT 42
#define ERA_SHIFT 24
#define ERA_MASK (((UINT64_C(1) << (SEGMENT_SHIFT - ERA_SHIFT)) - 1) << ERA_SHIFT)
MN_STATIC_ASSERT(MN_CACHE_SEGMENT_MAX / MN_CACHE_UNIT <= UINT64_C(1) << ERA_SHIFT,
                 "an offset has room");

static uint64_t
era_of(const struct mn_cache_map *map)
{
    return mn_a64_load_relaxed(&map->header->era) << ERA_SHIFT & ERA_MASK;
}

static struct mn_cache_record *
bucket_of(const struct mn_cache_map *map, struct mn_cache_digest digest)
{
    return map->index[digest.word[0] % map->shape.nbuckets].record;
}

/* Reads the head of the entry that a record with this digest leads to. */
static bool
confirmed(const struct mn_cache_map *map, struct mn_cache_record *record,
          struct mn_cache_digest digest, struct mn_cache_found *found)
{
    const uint64_t most = map->shape.segment_bytes;
    uint64_t generation = mn_a64_load_acquire(&record->generation);
    uint64_t place = mn_a64_load_acquire(&record->place);
    uint64_t number = place >> SEGMENT_SHIFT;
    uint64_t off = (place & ((UINT64_C(1) << ERA_SHIFT) - 1)) * MN_CACHE_UNIT;
    if (generation == 0 || number >= map->shape.nsegments
        || off > most - sizeof(struct mn_cache_entry)
        || mn_a64_load_acquire(&map->segments[number].generation) != generation) { /* [K5] */
        return false;
    }
    struct mn_cache_head head;
    uint64_t seal;
    if (!mn_cache_data_head(map, number * most + off, &head, &seal)
        || head.digest[0] != digest.word[0] || head.digest[1] != digest.word[1]
        || head.generation != generation || head.bytes > most || head.described > head.bytes
        || off + mn_cache_payload_off(head.bytes) + head.bytes > most
        || mn_cache_seal(map->shape.salt, &head) != seal) {
        return false;
    }
    *found = (struct mn_cache_found){
        .map = map, .segment = (uint32_t)number, .generation = generation, .bytes = head.bytes,
        .described = head.described, .made_ns = head.made_ns, .sums = head.sums,
        .payload = number * most + off + mn_cache_payload_off(head.bytes),
        .record = record, .place = place, .verified = (place & ERA_MASK) == era_of(map),
    };
    return true;
}

bool
mn_cache_index_entry(const struct mn_cache_map *map, struct mn_cache_record *record,
                     struct mn_cache_found *found)
{
    struct mn_cache_digest digest = {{mn_a64_load_acquire(&record->digest[0]),
                                      mn_a64_load_acquire(&record->digest[1])}};
    return confirmed(map, record, digest, found);
}

bool
mn_cache_index_find(const struct mn_cache_map *map, struct mn_cache_digest digest,
                    struct mn_cache_found *found)
{
    struct mn_cache_record *bucket = bucket_of(map, digest);
    for (unsigned i = 0; i < MN_CACHE_WAYS; i++) {
        if (mn_a64_load_relaxed(&bucket[i].digest[0]) == digest.word[0]
            && mn_a64_load_relaxed(&bucket[i].digest[1]) == digest.word[1]
            && confirmed(map, &bucket[i], digest, found)) {
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
        uint64_t number = mn_a64_load_relaxed(&bucket[i].place) >> SEGMENT_SHIFT;
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
                         (uint64_t)segment << SEGMENT_SHIFT | era_of(map) | off / MN_CACHE_UNIT);
}

void
mn_cache_index_mark(const struct mn_cache_found *found, bool whole)
{
    uint64_t place = found->place;
    uint64_t marked = whole ? (place & ~ERA_MASK) | era_of(found->map) : UINT64_MAX;
    (void)mn_a64_cas_acqrel(&found->record->place, &place, marked);
}

bool
mn_cache_found_still(const struct mn_cache_found *found)
{
    mn_a64 *generation = &found->map->segments[found->segment].generation;
#ifdef MN_BUG_CACHE_READ
    return mn_a64_load_relaxed(generation) != UINT64_MAX;
#endif
    return mn_a64_add_acqrel(generation, 0) == found->generation /* [K6] */
           && mn_cache_data_is_there(found->map);
}

bool
mn_cache_found_verify(const struct mn_cache_found *found)
{
    const struct mn_cache_map *map = found->map;
    const uint64_t nblocks = mn_cache_nblocks(found->bytes);
    const uint64_t sums_bytes = nblocks * sizeof(uint64_t);
    char *scratch = map->data != NULL ? NULL : malloc(MN_CACHE_BLOCK);
    uint64_t *sums = malloc(sums_bytes + 1);
    bool whole = sums != NULL && (map->data != NULL || scratch != NULL)
                 && mn_cache_data_read(map, found->payload - mn_cache_padded(sums_bytes), sums,
                                       sums_bytes) == 0
                 && mn_cache_checksum(map->shape.salt, sums, sums_bytes) == found->sums;
    for (uint64_t i = 0; whole && i < nblocks; i++) {
        uint64_t off = i * MN_CACHE_BLOCK, left = found->bytes - off;
        uint64_t n = left < MN_CACHE_BLOCK ? left : MN_CACHE_BLOCK;
        const void *block = mn_cache_data_view(map, found->payload + off, n, scratch);
        whole = block != NULL && mn_cache_checksum(map->shape.salt + off, block, n) == sums[i];
    }
    free(scratch);
    free(sums);
    return whole;
}
