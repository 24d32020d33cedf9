/* Copying out of an entry that was found.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Copies are checked afterwards, by mn_cache_found_still(): an entry may be recycled at any time.
 */
#ifndef MN_CACHE_COPY_H
#define MN_CACHE_COPY_H

#include <stdint.h>

#include "cache/mn_cache_index.h"

/* Part of an array in C order that lies in an entry's payload. All in items. */
struct mn_cache_box {
    int ndim;
    uint64_t itemsize;
    const uint64_t *shape, *start, *count;
};

/* Copies bytes of the payload from `off` on; no check but of the bounds (-EINVAL). Another error:
 * they cannot be read. */
int
mn_cache_copy(const struct mn_cache_found *found, uint64_t off, void *to, uint64_t bytes);

/* Copies a box out of an array at `off`, to C order. */
int
mn_cache_copy_box(const struct mn_cache_found *found, uint64_t off,
                  const struct mn_cache_box *box, void *to);

#endif /* MN_CACHE_COPY_H */
