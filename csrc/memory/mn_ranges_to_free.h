/* mn_ranges_to_free.h - a list of ranges of the arena that must be freed later.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A batch has a list of what it frees at its end. A worker has a list of what it was granted and
 * has not sent. Lists are private memory, unordered, and short, so a linear search is fast enough.
 * A list knows no allocator: a range that is taken out belongs to the caller.
 */
#ifndef MN_RANGES_TO_FREE_H
#define MN_RANGES_TO_FREE_H

#include <stdint.h>

struct mn_range {
    uint64_t off, bytes;
};

/* Zeroed memory is an empty list. */
struct mn_ranges {
    struct mn_range *at; /* [n], with space for more */
    uint32_t n, capacity;
};

/* Adds a range; does nothing for 0 bytes. Returns 0 or -ENOMEM. */
int
mn_ranges_add(struct mn_ranges *r, uint64_t off, uint64_t bytes);

/* Takes out a range that lies wholly in one of the list's ranges; the parts before and behind it
 * stay. Returns 0. With nothing changed: -EINVAL if no range contains it, or -ENOMEM. */
int
mn_ranges_cut(struct mn_ranges *r, uint64_t off, uint64_t bytes);

/* Frees the list, but not the ranges in it. It is empty then. */
void
mn_ranges_fini(struct mn_ranges *r);

#endif
