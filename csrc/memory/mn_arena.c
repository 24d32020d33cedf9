/* mn_arena.c - see mn_arena.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "memory/mn_arena.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_memfd.h"

/* ---- lists of ranges that must be freed later ---- */

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

/* ---- which ranges are free: first fit at the lowest address ----
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
 */

struct mn_extent {
    uint64_t off;
    uint64_t len;
    uint64_t max; /* largest len in this subtree */
    struct mn_extent *left;  /* or the next spare node */
    struct mn_extent *right;
    uint32_t rank; /* random; a parent's is never below its children's */
};

struct mn_extents {
    struct mn_extent *root;
    struct mn_extent *spare;
    uint64_t spares;
    uint64_t promised;
    uint64_t lends;    /* ranges lent: each has a spare node, which no free may use */
    uint64_t base_off;
    uint64_t bytes;
    uint64_t free_bytes;
    uint64_t lent_bytes; /* while there are any, an allocation may fail that would succeed later */
    uint64_t warm_bytes; /* free, and may have pages */
    uint64_t warm_end;   /* nothing is warm from this offset on */
    uint64_t allocs;     /* so far */
    uint8_t *freed_at; /* [granules]: turn of the last free; 0: in use or not warm */
    uint32_t granule;
    uint32_t seed;
    uint8_t turn; /* 1 to 255 */
};

/* Granules that one search for warm ones looks at: some ten microseconds. */
#define MN_EXTENT_LOOK 16384u

/* Spare nodes beyond the promises that are not returned to malloc: enough for the ranges of a few
 * batches, a few kilobytes. */
#define MN_EXTENT_SLACK 64

/* ---- nodes ---- */

/* Marsaglia's xorshift32. The shape of the tree needs no better randomness, and a fixed
 * seed makes a failing trace repeat. */
static uint32_t
mn_extent_rank(struct mn_extents *e)
{
    uint32_t x = e->seed;
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    return e->seed = x;
}

static void
mn_extent_retire(struct mn_extents *e, struct mn_extent *node)
{
    node->left = e->spare;
    e->spare = node;
    e->spares++;
}

/* Returns spare nodes to malloc, down to `wanted` and those for lent ranges. */
static void
mn_extent_trim(struct mn_extents *e, uint64_t wanted)
{
    while (e->spares > wanted + e->lends) {
        struct mn_extent *node = e->spare;
        e->spare = node->left;
        e->spares--;
        free(node);
    }
}

/* Ensures `wanted` spare nodes in addition to those for lent ranges. Returns 0 or -ENOMEM. */
static int
mn_extent_stock(struct mn_extents *e, uint64_t wanted)
{
    while (e->spares < wanted + e->lends) {
        struct mn_extent *node = malloc(sizeof(*node));
        if (node == NULL) {
            return -ENOMEM;
        }
        mn_extent_retire(e, node);
    }
    return 0;
}

static struct mn_extent *
mn_extent_take(struct mn_extents *e, uint64_t off, uint64_t len)
{
    struct mn_extent *node = e->spare;
    e->spare = node->left;
    e->spares--;
    *node = (struct mn_extent){.off = off, .len = len, .max = len};
    node->rank = mn_extent_rank(e);
    return node;
}

/* ---- treap: every function returns the subtree's new root ---- */

static uint64_t
mn_extent_max(const struct mn_extent *node)
{
    return node != NULL ? node->max : 0;
}

static struct mn_extent *
mn_extent_pull(struct mn_extent *node)
{
    uint64_t max = node->len;
    uint64_t left = mn_extent_max(node->left);
    uint64_t right = mn_extent_max(node->right);
    max = left > max ? left : max;
    node->max = right > max ? right : max;
    return node;
}

/* Merges two subtrees. All offsets in left lie below those in right. */
static struct mn_extent *
mn_extent_merge(struct mn_extent *left, struct mn_extent *right)
{
    if (left == NULL || right == NULL) {
        return left != NULL ? left : right;
    }
    if (left->rank >= right->rank) {
        left->right = mn_extent_merge(left->right, right);
        return mn_extent_pull(left);
    }
    right->left = mn_extent_merge(left, right->left);
    return mn_extent_pull(right);
}

/* Splits into offsets below off and offsets from off on. */
static void
mn_extent_split(struct mn_extent *node, uint64_t off, struct mn_extent **below,
                struct mn_extent **from)
{
    if (node == NULL) {
        *below = *from = NULL;
        return;
    }
    if (node->off < off) {
        mn_extent_split(node->right, off, &node->right, from);
        *below = mn_extent_pull(node);
        return;
    }
    mn_extent_split(node->left, off, below, &node->left);
    *from = mn_extent_pull(node);
}

static struct mn_extent *
mn_extent_insert(struct mn_extent *root, struct mn_extent *node)
{
    if (root == NULL || node->rank > root->rank) {
        mn_extent_split(root, node->off, &node->left, &node->right);
        return mn_extent_pull(node);
    }
    if (node->off < root->off) {
        root->left = mn_extent_insert(root->left, node);
    }
    else {
        root->right = mn_extent_insert(root->right, node);
    }
    return mn_extent_pull(root);
}

static struct mn_extent *
mn_extent_erase(struct mn_extent *root, const struct mn_extent *node)
{
    if (root == node) {
        return mn_extent_merge(root->left, root->right);
    }
    if (node->off < root->off) {
        root->left = mn_extent_erase(root->left, node);
    }
    else {
        root->right = mn_extent_erase(root->right, node);
    }
    return mn_extent_pull(root);
}

/* Moves and resizes a node. It stays between its neighbours, so only the largest lengths above it
 * change. */
static void
mn_extent_resize(struct mn_extent *root, struct mn_extent *node, uint64_t off, uint64_t len)
{
    if (root == node) {
        node->off = off;
        node->len = len;
    }
    else {
        mn_extent_resize(node->off < root->off ? root->left : root->right, node, off, len);
    }
    (void)mn_extent_pull(root);
}

/* Finds the last free range that begins at or before off, and the first that begins after. */
static void
mn_extent_around(const struct mn_extents *e, uint64_t off, struct mn_extent **before,
                 struct mn_extent **after)
{
    struct mn_extent *node = e->root;
    *before = *after = NULL;
    while (node != NULL) {
        if (node->off <= off) {
            *before = node;
            node = node->right;
        }
        else {
            *after = node;
            node = node->left;
        }
    }
}

/* ---- what is warm ---- */

static uint64_t
mn_extent_granule(const struct mn_extents *e, uint64_t off)
{
    return (off - e->base_off) / e->granule;
}

static void
mn_extent_warm(struct mn_extents *e, uint64_t off, uint64_t len)
{
    memset(e->freed_at + mn_extent_granule(e, off), e->turn, (size_t)(len / e->granule));
    e->warm_bytes += len;
    e->warm_end = off + len > e->warm_end ? off + len : e->warm_end;
}

static void
mn_extent_unwarm(struct mn_extents *e, uint64_t off, uint64_t len)
{
    uint8_t *at = e->freed_at + mn_extent_granule(e, off);
    uint64_t n = len / e->granule, warm = 0;
    for (uint64_t i = 0; i < n; i++) {
        warm += at[i] != 0;
    }
    if (warm != 0) { /* do not touch the bytes of memory that was never in use */
        memset(at, 0, (size_t)n);
        e->warm_bytes -= warm * e->granule;
        e->warm_end = e->warm_bytes != 0 ? e->warm_end : e->base_off;
    }
}

static bool
mn_extent_is_cold(const struct mn_extents *e, uint64_t granule, uint32_t turns)
{
    uint32_t at = e->freed_at[granule];
    return at != 0 && (e->turn >= at ? e->turn - at : e->turn + 255u - at) >= turns;
}

/* ---- the allocator ---- */

/* Maps a zero byte for each granule. There may be 2^25. A mapping gets its pages only when they are
 * written. calloc() might have to clear all of it, because its memory may have been used before. */
static int
mn_extent_map_turns(struct mn_extents *e)
{
    void *at = mmap(NULL, (size_t)(e->bytes / e->granule), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    e->freed_at = at != MAP_FAILED ? at : NULL;
    return at != MAP_FAILED ? 0 : -ENOMEM;
}

static void
mn_extent_unmap_turns(struct mn_extents *e)
{
    if (e->freed_at != NULL) {
        munmap(e->freed_at, (size_t)(e->bytes / e->granule));
    }
}

/* Opens an allocator: all of [base_off, base_off + bytes) is free, and none of it is warm. granule
 * is a power of two of which both are multiples. Returns 0, -EINVAL, -ENOMEM. */
static int
mn_extents_open(struct mn_extents **out, uint64_t base_off, uint64_t bytes,
                uint32_t granule)
{
    bool power = granule != 0 && (granule & (granule - 1)) == 0;
    if (!power || bytes == 0 || base_off % granule != 0 || bytes % granule != 0
        || base_off > (UINT64_MAX >> 1) || bytes > (UINT64_MAX >> 1) - base_off) {
        return -EINVAL;
    }
    struct mn_extents *e = calloc(1, sizeof(*e));
    if (e == NULL) {
        return -ENOMEM;
    }
    e->base_off = base_off;
    e->bytes = bytes;
    e->free_bytes = bytes;
    e->granule = granule;
    e->seed = 2463534242u; /* Marsaglia's own; any seed but zero will do */
    e->turn = 1;
    e->warm_end = base_off;
    if (mn_extent_map_turns(e) != 0 || mn_extent_stock(e, 1) != 0) {
        mn_extent_unmap_turns(e);
        free(e);
        return -ENOMEM;
    }
    e->root = mn_extent_take(e, base_off, bytes);
    *out = e;
    return 0;
}

static void
mn_extent_drop(struct mn_extent *node)
{
    while (node != NULL) { /* recursion on one side only: at most as deep as the tree */
        struct mn_extent *right = node->right;
        mn_extent_drop(node->left);
        free(node);
        node = right;
    }
}

/* Forgets everything; NULL is allowed. */
static void
mn_extents_close(struct mn_extents *e)
{
    if (e == NULL) {
        return;
    }
    mn_extent_drop(e->root);
    e->lends = 0;
    mn_extent_trim(e, 0);
    mn_extent_unmap_turns(e);
    free(e);
}

static uint64_t
mn_extents_round(const struct mn_extents *e, uint64_t bytes)
{
    uint64_t mask = (uint64_t)e->granule - 1;
    return (bytes + mask) & ~mask;
}

/* Takes bytes, rounded up to granules, at the lowest offset where they fit. Returns 0; -ENOMEM if
 * no free range is long enough or malloc failed; -EINVAL for 0 bytes. */
static int
mn_extents_alloc(struct mn_extents *e, uint64_t bytes, uint64_t *off)
{
    if (bytes == 0) {
        return -EINVAL;
    }
    if (bytes > e->bytes) { /* also keeps the rounding from wrapping */
        return -ENOMEM;
    }
    uint64_t len = mn_extents_round(e, bytes);
    if (len > mn_extent_max(e->root) || mn_extent_stock(e, e->promised + 1) != 0) {
        return -ENOMEM;
    }
    struct mn_extent *node = e->root;
    for (;;) {
        if (mn_extent_max(node->left) >= len) {
            node = node->left;
        }
        else if (node->len >= len) {
            break;
        }
        else {
            node = node->right;
        }
    }
    *off = node->off;
    e->promised++;
    e->allocs++;
    e->free_bytes -= len;
    if (node->len == len) {
        e->root = mn_extent_erase(e->root, node);
        mn_extent_retire(e, node);
    }
    else {
        mn_extent_resize(e->root, node, node->off + len, node->len - len);
    }
    mn_extent_unwarm(e, *off, len);
    return 0;
}

/* Promises n more frees that cannot fail. Returns 0 or -ENOMEM. */
static int
mn_extents_reserve(struct mn_extents *e, uint32_t n)
{
    if (mn_extent_stock(e, e->promised + n) != 0) {
        return -ENOMEM;
    }
    e->promised += n;
    return 0;
}

/* Enters [off, off + len) as free, between its neighbours before and after. */
static void
mn_extents_put(struct mn_extents *e, uint64_t off, uint64_t len, struct mn_extent *before,
               struct mn_extent *after)
{
    bool joins_before = before != NULL && before->off + before->len == off;
    bool joins_after = after != NULL && off + len == after->off;
    if (joins_before && joins_after) {
        uint64_t whole = before->len + len + after->len;
        e->root = mn_extent_erase(e->root, after);
        mn_extent_retire(e, after);
        mn_extent_resize(e->root, before, before->off, whole);
    }
    else if (joins_before) {
        mn_extent_resize(e->root, before, before->off, before->len + len);
    }
    else if (joins_after) {
        mn_extent_resize(e->root, after, off, after->len + len);
    }
    else {
        e->root = mn_extent_insert(e->root, mn_extent_take(e, off, len));
    }
}

/* Frees any part of what is allocated; off is a multiple of the granule, bytes is rounded up.
 * Returns 0; -EINVAL if any of it is free already or out of range; -ENOMEM as described above. */
static int
mn_extents_free(struct mn_extents *e, uint64_t off, uint64_t bytes)
{
    struct mn_extent *before, *after;
    uint64_t end = e->base_off + e->bytes;
    if (bytes == 0 || off < e->base_off || off >= end || off % e->granule != 0
        || bytes > end - off) {
        return -EINVAL;
    }
    uint64_t len = mn_extents_round(e, bytes);
    mn_extent_around(e, off, &before, &after);
    if ((before != NULL && before->off + before->len > off)
        || (after != NULL && after->off < off + len)) {
        return -EINVAL;
    }
    if (mn_extent_stock(e, 1) != 0) { /* fails only past all promises */
        return -ENOMEM;
    }
    mn_extents_put(e, off, len, before, after);
    mn_extent_warm(e, off, len);
    e->free_bytes += len;
    e->promised -= e->promised > 0 ? 1 : 0;
    /* Each free returns at least one granule. So promises beyond the number of granules in use are
     * left over from ranges that were freed in fewer pieces than announced. */
    uint64_t most = (e->bytes - e->free_bytes) / e->granule;
    e->promised = e->promised < most ? e->promised : most;
    mn_assert(e->spares >= e->promised + e->lends);
    mn_extent_trim(e, e->promised + MN_EXTENT_SLACK);
    return 0;
}

/* Returns the bytes allocated, in whole granules. */
static uint64_t
mn_extents_used(const struct mn_extents *e)
{
    return e->bytes - e->free_bytes - e->lent_bytes;
}

/* Finds the first free bytes at or after from_off, up to the end of their range. Returns MN_OK, or
 * MN_EMPTY if there are none. To continue, ask from *off + *len. */
static int
mn_extents_next_free(const struct mn_extents *e, uint64_t from_off, uint64_t *off,
                     uint64_t *len)
{
    struct mn_extent *before, *after;
    mn_extent_around(e, from_off, &before, &after);
    if (before != NULL && before->off + before->len > from_off) {
        *off = from_off;
        *len = before->off + before->len - from_off;
        return MN_OK;
    }
    if (after == NULL) {
        return MN_EMPTY;
    }
    *off = after->off;
    *len = after->len;
    return MN_OK;
}

/* ---- lending ---- */

/* Ends a turn. */
static void
mn_extents_turn(struct mn_extents *e)
{
    e->turn = (uint8_t)(e->turn % 255u + 1);
}

/* Finds the first warm range at or after *from (base_off, or where the last call ended), up to most
 * bytes of it. The range was freed at least `turns` turns ago. turns < 255; most is in whole
 * granules. Returns MN_OK; MN_FULL: this search was long enough, ask again; MN_EMPTY: there is no
 * more. */
static int
mn_extents_cold(const struct mn_extents *e, uint32_t turns, uint64_t most, uint64_t *from,
                uint64_t *off, uint64_t *len)
{
    uint64_t look = MN_EXTENT_LOOK, start, free_len;
    while (mn_extents_next_free(e, *from, &start, &free_len) == MN_OK && start < e->warm_end) {
        uint64_t end = start + free_len < e->warm_end ? start + free_len : e->warm_end;
        uint64_t at = mn_extent_granule(e, start), stop = mn_extent_granule(e, end);
        while (at < stop && look != 0 && !mn_extent_is_cold(e, at, turns)) {
            at++;
            look--;
        }
        *from = e->base_off + at * e->granule;
        if (look == 0) {
            return MN_FULL;
        }
        look--; /* a search in the tree has a cost, too */
        if (at < stop) {
            *off = *from;
            *len = 0;
            while (at < stop && *len < most && mn_extent_is_cold(e, at, turns)) {
                *len += e->granule;
                at++;
            }
            *from = *off + *len;
            return MN_OK;
        }
    }
    return MN_EMPTY;
}

/* Lends free granules. Returns 0; -EINVAL if any of them is not free; -ENOMEM. */
static int
mn_extents_lend(struct mn_extents *e, uint64_t off, uint64_t len)
{
    struct mn_extent *node, *after;
    mn_extent_around(e, off, &node, &after);
    if (node == NULL || len == 0 || off % e->granule != 0 || len % e->granule != 0
        || len > node->len || off - node->off > node->len - len) {
        return -EINVAL;
    }
    if (mn_extent_stock(e, e->promised + 2) != 0) { /* to return it, and for a second part */
        return -ENOMEM;
    }
    uint64_t below = off - node->off, above = node->len - len - below;
    if (below != 0) {
        mn_extent_resize(e->root, node, node->off, below);
        if (above != 0) {
            e->root = mn_extent_insert(e->root, mn_extent_take(e, off + len, above));
        }
    }
    else if (above != 0) {
        mn_extent_resize(e->root, node, off + len, above);
    }
    else {
        e->root = mn_extent_erase(e->root, node);
        mn_extent_retire(e, node);
    }
    e->lends++;
    e->free_bytes -= len;
    e->lent_bytes += len;
    mn_extent_unwarm(e, off, len);
    return 0;
}

/* Returns what one call has lent: it is free again, without pages. Cannot fail. */
static void
mn_extents_return(struct mn_extents *e, uint64_t off, uint64_t len)
{
    mn_assert(e->lends > 0);
    e->lends--; /* its node becomes a promise, which the free uses up */
    e->promised++;
    int rc = mn_extents_free(e, off, len);
    mn_assert(rc == 0);
    (void)rc;
    e->lent_bytes -= len;
    mn_extent_unwarm(e, off, len);
}

/* ---- which free memory goes back to the system, and when ---- */

/* Returns whether a turn is over; then a pass may begin. allocs: allocations so far. */
static bool
mn_trim_turn(struct mn_trim *r, uint64_t now_ns, uint64_t allocs)
{
    if (r->turned_ns == 0) {
        r->turned_ns = now_ns;
        r->allocs = allocs;
    }
    uint64_t lasts = allocs != r->allocs ? MN_TRIM_TURN_NS : MN_TRIM_PAUSE_NS;
    if (now_ns - r->turned_ns < lasts) {
        return false;
    }
    r->turned_ns = now_ns;
    r->allocs = allocs;
    r->turns++;
    return true;
}

/* Begins a pass if there may be something for it to find. */
static void
mn_trim_begin(struct mn_arena *a)
{
    struct mn_trim *r = &a->trim;
    uint64_t used = mn_extents_used(a->rows), warm = a->rows->warm_bytes;
    uint64_t busy = used > a->kept_bytes ? used - a->kept_bytes : 0;
    r->age = MN_TRIM_COLD;
    r->spare = busy / 4 > MN_TRIM_SPARE ? busy / 4 : MN_TRIM_SPARE;
    if (r->turns >= MN_TRIM_COLD * MN_TRIM_LONG) {
        r->turns = 0;
        r->age = MN_TRIM_COLD * MN_TRIM_LONG;
        r->spare = 0;
    }
    if (used > a->limit || warm > a->limit - used) {
        uint64_t below = used < a->limit ? a->limit - used : 0;
        r->age = MN_TRIM_COLD / 2;
        r->spare = r->spare < below ? r->spare : below;
    }
    if (warm <= r->spare) {
        r->age = 0;
    }
    a->trim_from = a->rows_off;
}

/* The pass has found len bytes that are old enough. Returns how many of them, from the start,
 * stay. */
static uint64_t
mn_trim_keep(struct mn_trim *r, uint64_t len)
{
    uint64_t keep = len < r->spare ? len : r->spare;
    r->spare -= keep;
    return keep;
}

/* ---- memory from a sparse file without a name ---- */

static int
file_map(struct mn_provider *self, uint64_t bytes, void **base)
{
    struct mn_memory_file *file = (struct mn_memory_file *)self;
    int fd = mn_memfd_create("minato", bytes);
    if (fd < 0) {
        return fd;
    }
    int rc = mn_memfd_map(fd, bytes, base);
    if (rc < 0) {
        close(fd);
        return rc;
    }
    file->fd = fd;
    return 0;
}

static void
file_unmap(struct mn_provider *self, void *base, uint64_t bytes)
{
    (void)self;
    mn_memfd_unmap(base, bytes);
}

/* Works through the mapping, so the descriptor may be closed already. */
static void
file_discard(struct mn_provider *self, void *at, uint64_t bytes)
{
    (void)self;
    (void)mn_memfd_punch_mapped(at, bytes);
}

void
mn_memory_file_init(struct mn_memory_file *file)
{
    *file = (struct mn_memory_file){{file_map, file_unmap, file_discard}, -1};
}

void
mn_memory_file_close(struct mn_memory_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
    }
    file->fd = -1;
}

/* Bytes per step: about a millisecond, after which the caller can do other things again. */
#define TRIM_STEP (UINT64_C(4) << 20)

/* ---- the arena ---- */

int
mn_arena_map(struct mn_arena *a, struct mn_provider *provider, uint64_t bytes)
{
    void *base;
    int rc = provider->map(provider, bytes, &base);
    if (rc == 0) {
        a->provider = provider;
        a->base = base;
        a->total_bytes = bytes;
    }
    return rc;
}

int
mn_arena_open(struct mn_arena *a, struct mn_mutex *guard, struct mn_range records,
              struct mn_range rows)
{
    a->guard = guard;
    a->rows_off = rows.off;
    int rc = mn_extents_open(&a->records, records.off, records.bytes, MN_ARENA_RECORD);
    if (rc == 0) {
        rc = mn_extents_open(&a->rows, rows.off, rows.bytes, (uint32_t)MN_ARENA_PAGE);
    }
    return rc;
}

void
mn_arena_close(struct mn_arena *a)
{
    mn_extents_close(a->records);
    mn_extents_close(a->rows);
    if (a->base != NULL) {
        a->provider->unmap(a->provider, a->base, a->total_bytes);
    }
    *a = (struct mn_arena){0};
}

/* ---- what is used ------------------------------------------------------------------- */

int
mn_arena_alloc(struct mn_arena *a, uint64_t bytes, uint64_t *off)
{
    int rc = mn_extents_alloc(a->rows, bytes, off);
    /* Lent memory comes back in a moment, and may be what is missing. */
    return rc == -ENOMEM && a->rows->lent_bytes != 0 ? -EAGAIN : rc;
}

static void
free_range(struct mn_extents *x, uint64_t off, uint64_t bytes)
{
    int rc = mn_extents_free(x, off, bytes);
    mn_assert(rc == 0 || rc == -ENOMEM);
    (void)rc;
}

static void
room_comes(struct mn_arena *a)
{
    a->room_came |= a->room_waits;
    a->room_waits = false;
}

void
mn_arena_free(struct mn_arena *a, uint64_t off, uint64_t bytes)
{
    free_range(a->rows, off, bytes);
    room_comes(a);
}

void
mn_arena_free_ranges(struct mn_arena *a, struct mn_ranges *r)
{
    for (uint32_t i = 0; i < r->n; i++) {
        mn_arena_free(a, r->at[i].off, r->at[i].bytes);
    }
    r->n = 0;
}

int
mn_arena_record(struct mn_arena *a, uint64_t bytes, uint64_t *off)
{
    return mn_extents_alloc(a->records, bytes, off);
}

void
mn_arena_free_record(struct mn_arena *a, uint64_t off, uint64_t bytes)
{
    free_range(a->records, off, bytes);
    room_comes(a);
}

int
mn_arena_retain(struct mn_arena *a, struct mn_ranges *of, uint64_t off, uint64_t bytes)
{
    /* Freeing in parts needs one of the allocator's nodes for each part. */
    int rc = mn_extents_reserve(a->rows, 2);
    if (rc == 0) {
        rc = mn_ranges_cut(of, off, bytes);
    }
    if (rc == 0) {
        a->kept_bytes += bytes;
    }
    return rc;
}

void
mn_arena_release(struct mn_arena *a, uint64_t off, uint64_t bytes)
{
    a->kept_bytes -= bytes;
    mn_arena_free(a, off, bytes);
}

uint64_t
mn_arena_used(const struct mn_arena *a)
{
    return mn_extents_used(a->rows);
}

uint64_t
mn_arena_warm(const struct mn_arena *a)
{
    return a->rows->warm_bytes;
}

uint64_t
mn_arena_lent(const struct mn_arena *a)
{
    return a->rows->lent_bytes;
}

bool
mn_arena_exceeds(const struct mn_arena *a, uint64_t bytes)
{
    uint64_t used = mn_extents_used(a->rows);
    return used > a->limit || bytes > a->limit - used;
}

bool
mn_arena_room_came(struct mn_arena *a)
{
    bool came = a->room_came;
    a->room_came = false;
    return came;
}

/* ---- what goes back to the system ----------------------------------------------------- */

void
mn_arena_discard(struct mn_arena *a, uint64_t off, uint64_t bytes)
{
    a->provider->discard(a->provider, a->base + off, bytes);
}

/* Removes the pages of a free range. Guard held, but released during the system call. */
static void
discard_free(struct mn_arena *a, uint64_t off, uint64_t len)
{
    if (mn_extents_lend(a->rows, off, len) < 0) {
        return; /* no memory for a node: the range stays as it is */
    }
    mn_mutex_unlock(a->guard);
    mn_arena_discard(a, off, len);
    mn_mutex_lock(a->guard);
    mn_extents_return(a->rows, off, len);
    a->trimmed_bytes += len;
    room_comes(a); /* an allocation may have failed while it was lent */
}

void
mn_arena_discard_free(struct mn_arena *a)
{
    uint64_t from = a->rows_off, off, len;
    int rc;
    do {
        rc = mn_extents_cold(a->rows, 0, TRIM_STEP, &from, &off, &len);
        if (rc == MN_OK) {
            discard_free(a, off, len);
        }
    } while (rc != MN_EMPTY);
}

bool
mn_arena_no_lent(struct mn_arena *a)
{
    bool waited = false;
    while (a->rows->lent_bytes != 0) {
        mn_mutex_unlock(a->guard);
        (void)sched_yield();
        mn_mutex_lock(a->guard);
        waited = true;
    }
    return waited;
}

bool
mn_arena_trim(struct mn_arena *a, uint64_t now_ns)
{
    struct mn_trim *r = &a->trim;
    uint64_t off, len;
    if (mn_trim_turn(r, now_ns, a->rows->allocs)) {
        mn_extents_turn(a->rows);
        if (r->age == 0) {
            mn_trim_begin(a);
        }
    }
    if (r->age == 0) {
        return false;
    }
    int rc = mn_extents_cold(a->rows, r->age, TRIM_STEP, &a->trim_from, &off, &len);
    if (rc == MN_EMPTY) {
        r->age = 0;
    }
    if (rc == MN_OK) {
        uint64_t keep = mn_page_round(mn_trim_keep(r, len));
        if (keep < len) {
            discard_free(a, off + keep, len - keep);
        }
    }
    return rc != MN_EMPTY;
}
