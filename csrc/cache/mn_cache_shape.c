/* See mn_cache_shape.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_shape.h"

#include <stddef.h>
#include <string.h>

#include "cache/mn_cache_checksum.h"

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
