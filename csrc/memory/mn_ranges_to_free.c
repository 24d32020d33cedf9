/* mn_ranges_to_free.c - see mn_ranges_to_free.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory/mn_ranges_to_free.h"

#include <errno.h>
#include <stdlib.h>

int
mn_ranges_add(struct mn_ranges *r, uint64_t off, uint64_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    if (r->n == r->capacity) {
        uint32_t capacity = r->capacity != 0 ? 2 * r->capacity : 4;
        struct mn_range *more = realloc(r->at, capacity * sizeof(*more));
        if (more == NULL) {
            return -ENOMEM;
        }
        r->at = more;
        r->capacity = capacity;
    }
    r->at[r->n++] = (struct mn_range){off, bytes};
    return 0;
}

int
mn_ranges_cut(struct mn_ranges *r, uint64_t off, uint64_t bytes)
{
    for (uint32_t i = 0; i < r->n; i++) {
        struct mn_range x = r->at[i];
        if (off < x.off || off - x.off > x.bytes || bytes > x.bytes - (off - x.off)) {
            continue;
        }
        uint64_t before = off - x.off, after = x.bytes - before - bytes;
        if (after != 0 && before != 0 && mn_ranges_add(r, off + bytes, after) < 0) {
            return -ENOMEM;
        }
        r->at[i] = before != 0 ? (struct mn_range){x.off, before}
                               : (struct mn_range){off + bytes, after};
        if (r->at[i].bytes == 0) {
            r->at[i] = r->at[--r->n];
        }
        return 0;
    }
    return -EINVAL;
}

void
mn_ranges_fini(struct mn_ranges *r)
{
    free(r->at);
    *r = (struct mn_ranges){0};
}
