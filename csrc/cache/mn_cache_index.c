/* See mn_cache_index.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_index.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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

#define SPAN (UINT64_C(256) << 10) /* read at once from a disk, of which runs are copied */

int
mn_cache_copy(const struct mn_cache_found *found, uint64_t off, void *to, uint64_t bytes)
{
    if (off > found->bytes || bytes > found->bytes - off) {
        return -EINVAL;
    }
    return mn_cache_data_read(found->map, found->payload + off, to, bytes);
}

/* Copies n runs of bytes, a stride apart. scratch, for a disk: SPAN bytes, into which neighbouring
 * runs are read at once; NULL: each is copied by itself. */
static int
copy_runs(const struct mn_cache_found *found, uint64_t off, uint64_t run, uint64_t stride,
          uint64_t n, char *to, char *scratch)
{
    uint64_t most = scratch == NULL || run > SPAN / 2 ? 1 : (SPAN - run) / stride + 1, k;
    for (uint64_t done = 0; done < n; done += k) {
        k = n - done < most ? n - done : most;
        uint64_t at = off + done * stride, span = (k - 1) * stride + run;
        int rc = mn_cache_copy(found, at, k == 1 ? to + done * run : scratch, span);
        if (rc != 0) {
            return rc;
        }
        for (uint64_t i = 0; k > 1 && i < k; i++) {
            memcpy(to + (done + i) * run, scratch + i * stride, run);
        }
    }
    return 0;
}

int
mn_cache_copy_box(const struct mn_cache_found *found, uint64_t off,
                  const struct mn_cache_box *box, void *to)
{
    uint64_t run = box->itemsize, stride = box->itemsize, runs = 1;
    int inner = box->ndim; /* dimensions from here on are copied whole, in one run */
    while (inner > 0 && box->count[inner - 1] == box->shape[inner - 1]) {
        inner--;
        run *= box->shape[inner];
        stride *= box->shape[inner];
    }
    if (inner > 0) { /* and of the next one a range */
        inner--;
        off += box->start[inner] * stride;
        run *= box->count[inner];
        stride *= box->shape[inner];
    }
    uint64_t rows = 1, row = stride; /* runs that are neighbours, and from one to the next */
    if (inner > 0) {
        inner--;
        off += box->start[inner] * stride;
        rows = box->count[inner];
        stride *= box->shape[inner];
    }
    for (int d = inner - 1; d >= 0; d--) {
        runs *= box->count[d];
    }
    char *scratch = found->map->data == NULL ? malloc(SPAN) : NULL;
    int rc = 0;
    for (uint64_t r = 0; r < runs && rc == 0; r++) {
        uint64_t left = r, at = off, step = stride;
        for (int d = inner - 1; d >= 0; d--) {
            at += (box->start[d] + left % box->count[d]) * step;
            left /= box->count[d];
            step *= box->shape[d];
        }
        rc = copy_runs(found, at, run, row, rows, (char *)to + r * rows * run, scratch);
    }
    free(scratch);
    return rc;
}
