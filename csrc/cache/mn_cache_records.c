/* The shape of a cache file, and its checksums.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_records.h"

#include <stddef.h>
#include <string.h>

#define A UINT64_C(0x9e3779b97f4a7c15)
#define B UINT64_C(0xc2b2ae3d27d4eb4f)
#define LANES 4

static inline uint64_t
rotated(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

/* One multiplication, as they take most of the time. Another word always makes another lane. */
static inline uint64_t
mixed(uint64_t lane, uint64_t word)
{
    return rotated((lane ^ word) * A, 31);
}

static inline uint64_t
finished(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint64_t
mn_cache_checksum(uint64_t salt, const void *data, uint64_t bytes)
{
    const unsigned char *at = data;
    uint64_t lanes[LANES] = {salt + A + B, salt + B, salt, salt - A};
    uint64_t words[LANES], left = bytes;
    for (; left >= sizeof(words); left -= sizeof(words), at += sizeof(words)) {
        memcpy(words, at, sizeof(words));
        for (int i = 0; i < LANES; i++) {
            lanes[i] = mixed(lanes[i], words[i]);
        }
    }
    uint64_t sum = bytes;
    for (int i = 0; i < LANES; i++) {
        sum = mixed(sum, lanes[i]);
    }
    for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), at += sizeof(uint64_t)) {
        memcpy(words, at, sizeof(uint64_t));
        sum = mixed(sum, words[0]);
    }
    for (; left > 0; left--, at++) {
        sum = mixed(sum, *at + UINT64_C(256));
    }
    return finished(sum);
}

uint64_t
mn_cache_seal(uint64_t salt, const struct mn_cache_head *head)
{
    uint64_t seal = mn_cache_checksum(salt, head, sizeof(*head));
    return seal != 0 ? seal : 1;
}

uint64_t
mn_cache_seal_begun(uint64_t salt, const struct mn_cache_head *head)
{
    struct mn_cache_head begun = *head;
    begun.sums = 0;
    return mn_cache_seal(salt, &begun) ^ 2;
}

#define RECORD_BYTES 2048 /* of data for each record of the index: it takes a 64th as much */

static uint64_t
pages(uint64_t bytes)
{
    return (bytes + MN_CACHE_PAGE - 1) / MN_CACHE_PAGE * MN_CACHE_PAGE;
}

/* From segments and buckets to all offsets. */
static void
lay_out(struct mn_cache_shape *shape)
{
    shape->magic = MN_CACHE_MAGIC;
    shape->layout = MN_CACHE_LAYOUT;
    shape->slots_off = pages(sizeof(struct mn_cache_header));
    shape->claims_off = shape->slots_off + pages(MN_CACHE_SLOTS * sizeof(struct mn_cache_slot));
    shape->segments_off
        = shape->claims_off + pages(MN_CACHE_CLAIMS * sizeof(struct mn_cache_claim));
    shape->index_off
        = shape->segments_off + pages(shape->nsegments * sizeof(struct mn_cache_segment));
    shape->data_off = shape->index_off + pages(shape->nbuckets * sizeof(struct mn_cache_bucket));
    shape->bytes = shape->data_off + shape->nsegments * shape->segment_bytes;
    shape->checksum
        = mn_cache_checksum(0, shape, offsetof(struct mn_cache_shape, checksum));
}

bool
mn_cache_shape_of(uint64_t bytes, uint64_t salt, struct mn_cache_shape *shape)
{
    if (bytes < MN_CACHE_BYTES_MIN || bytes > UINT64_C(1) << 46) {
        return false;
    }
    uint64_t n = (bytes + MN_CACHE_SEGMENT_MAX - 1) / MN_CACHE_SEGMENT_MAX;
    n = n > MN_CACHE_SEGMENTS ? n : MN_CACHE_SEGMENTS;
    uint64_t segment = bytes / n / MN_CACHE_PAGE * MN_CACHE_PAGE;
    *shape = (struct mn_cache_shape){
        .salt = salt, .nsegments = bytes / segment, .segment_bytes = segment,
        .nbuckets = bytes / (MN_CACHE_WAYS * RECORD_BYTES),
    };
    lay_out(shape);
    return true;
}

bool
mn_cache_shape_makes_sense(const struct mn_cache_shape *shape, uint64_t length)
{
    struct mn_cache_shape again = *shape;
    if (shape->segment_bytes == 0 || shape->segment_bytes > MN_CACHE_SEGMENT_MAX
        || shape->segment_bytes % MN_CACHE_PAGE != 0 || shape->nsegments == 0
        || shape->nsegments > UINT64_C(1) << 22 || shape->nbuckets == 0
        || shape->nbuckets > UINT64_C(1) << 40) {
        return false;
    }
    lay_out(&again);
    return memcmp(&again, shape, sizeof(again)) == 0 && length == shape->bytes;
}
