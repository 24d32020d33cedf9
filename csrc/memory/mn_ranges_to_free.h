/* mn_ranges_to_free.h - a list of ranges of the arena that somebody will have to free.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A batch has one of what it frees at its end, a worker one of what it was granted and has not
 * sent.  Private memory, in no order, and short: looking through it is as fast as anything.
 * Knows no allocator: what is taken out of a list is whoever's who took it out.
 */
#ifndef MN_RANGES_TO_FREE_H
#define MN_RANGES_TO_FREE_H

#include <stdint.h>

struct mn_range {
    uint64_t off, bytes;
};

/* Zeroed memory is an empty list. */
struct mn_ranges {
    struct mn_range *at; /* [n], with room for more */
    uint32_t n, room;
};

/* Nothing is added for no bytes. 0 or -ENOMEM. */
int
mn_ranges_add(struct mn_ranges *r, uint64_t off, uint64_t bytes);

/* Takes a range out that lies wholly in one of the list's; what is before and behind it stays
 * there. 0; with nothing changed -EINVAL, where none of them has it, or -ENOMEM. */
int
mn_ranges_cut(struct mn_ranges *r, uint64_t off, uint64_t bytes);

/* Frees the list, not what is in it. It is empty then. */
void
mn_ranges_fini(struct mn_ranges *r);

#endif
