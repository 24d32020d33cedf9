/* Which ranges of an arena are free: first fit at the lowest address.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Hands out ranges of [base_off, base_off + bytes) of an arena that it never touches.
 *   Lowest address first: memory that was in use a moment ago is warm. The cold upper end stays in
 *   one piece that can be returned to the system.
 *
 * Actors and owners
 *   One thread at a time; only the trainer's engine. Everything lives in private memory,
 *   so a worker killed at any instruction cannot damage it, and no memory order is needed.
 *   A child made by fork has a dead copy that it must not use to free.
 *
 * Data
 *   A treap of the free ranges by offset; each node also holds the largest length
 *   below it. That makes first fit, free and every query O(log n) in the number of free
 *   ranges. Allocations are not recorded: the owner of a range knows its length.
 *
 * Invariants
 *   Free ranges are disjoint, not empty, never adjacent (coalesced), whole granules.
 *   used == bytes - sum of the lengths of free ranges.
 *   spare nodes >= promised frees, see below.
 *
 * When malloc fails
 *   An allocation needs no node, but the free that ends it may. So alloc sets a node aside
 *   (a promise), and fails with -ENOMEM when it cannot, with nothing changed. Each free
 *   uses up one promise. A range that will be freed in n pieces needs n - 1 more promises:
 *   mn_extents_reserve. A free past all promises asks malloc, and may return -ENOMEM with
 *   nothing changed and the range still allocated; it can be tried again later. A lent range
 *   has its own node set aside, which no free uses.
 *
 * Free memory that was in use once may still have pages: it is warm. Each granule has a byte with
 * the turn at which it was last freed; 0: it is in use or has no page. The caller defines turns in
 * terms of time. Returning pages to the system takes a system call, for which no lock should be
 * held. So a warm range is lent, which makes it neither free nor used, and is returned without
 * pages. Free memory that is not warm was never in use, or was lent since.
 *
 * Wrap: offsets are 64 bits and open refuses a range whose end passes 2^63. Turns are counted in a
 * byte: memory that was freed 255 turns ago looks as if it was freed just now, and is found later.
 *
 *   mn_extents_open     mn_extents_close
 *   mn_extents_alloc    mn_extents_free, at once or in pieces
 *   mn_extents_lend     mn_extents_return
 */
#ifndef MN_FREE_EXTENTS_H
#define MN_FREE_EXTENTS_H

#include <stdint.h>

struct mn_extents;

/* Opens an allocator: all of [base_off, base_off + bytes) is free, and none of it is warm. granule
 * is a power of two of which both are multiples. Returns 0, -EINVAL, -ENOMEM. */
int
mn_extents_open(struct mn_extents **out, uint64_t base_off, uint64_t bytes,
                uint32_t granule);

/* Forgets everything; NULL is allowed. */
void
mn_extents_close(struct mn_extents *e);

/* Takes bytes, rounded up to granules, at the lowest offset where they fit. Returns 0; -ENOMEM if
 * no free range is long enough or malloc failed; -EINVAL for 0 bytes. */
int
mn_extents_alloc(struct mn_extents *e, uint64_t bytes, uint64_t *off);

/* Promises n more frees that cannot fail. Returns 0 or -ENOMEM. */
int
mn_extents_reserve(struct mn_extents *e, uint32_t n);

/* Frees any part of what is allocated; off is a multiple of the granule, bytes is rounded up.
 * Returns 0; -EINVAL if any of it is free already or out of range; -ENOMEM as described above. */
int
mn_extents_free(struct mn_extents *e, uint64_t off, uint64_t bytes);

/* Returns the bytes allocated, in whole granules. */
uint64_t
mn_extents_used(const struct mn_extents *e);

/* Returns the bytes lent. While there are any, an allocation may fail that would succeed later. */
uint64_t
mn_extents_lent(const struct mn_extents *e);

/* Returns the free bytes that may have pages. */
uint64_t
mn_extents_warm(const struct mn_extents *e);

/* Returns the number of allocations so far. */
uint64_t
mn_extents_allocs(const struct mn_extents *e);

/* Finds the first free bytes at or after from_off, up to the end of their range. Returns MN_OK, or
 * MN_EMPTY if there are none. To continue, ask from *off + *len. */
int
mn_extents_next_free(const struct mn_extents *e, uint64_t from_off, uint64_t *off,
                     uint64_t *len);

/* Ends a turn. */
void
mn_extents_turn(struct mn_extents *e);

/* Finds the first warm range at or after *from (base_off, or where the last call ended), up to most
 * bytes of it. The range was freed at least `turns` turns ago. turns < 255; most is in whole
 * granules. Returns MN_OK; MN_FULL: this search was long enough, ask again; MN_EMPTY: there is no
 * more. */
int
mn_extents_cold(const struct mn_extents *e, uint32_t turns, uint64_t most, uint64_t *from,
                uint64_t *off, uint64_t *len);

/* Lends free granules. Returns 0; -EINVAL if any of them is not free; -ENOMEM. */
int
mn_extents_lend(struct mn_extents *e, uint64_t off, uint64_t len);

/* Returns what one call has lent: it is free again, without pages. Cannot fail. */
void
mn_extents_return(struct mn_extents *e, uint64_t off, uint64_t len);

#endif
