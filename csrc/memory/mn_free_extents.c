/* A treap of free ranges, by offset, with the largest length below each node.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "memory/mn_free_extents.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"

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
    uint64_t lent_bytes;
    uint64_t warm_bytes;
    uint64_t warm_end; /* nothing is warm from this offset on */
    uint64_t allocs;
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

int
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

void
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

int
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

int
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

int
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

uint64_t
mn_extents_used(const struct mn_extents *e)
{
    return e->bytes - e->free_bytes - e->lent_bytes;
}

uint64_t
mn_extents_lent(const struct mn_extents *e)
{
    return e->lent_bytes;
}

uint64_t
mn_extents_warm(const struct mn_extents *e)
{
    return e->warm_bytes;
}

uint64_t
mn_extents_allocs(const struct mn_extents *e)
{
    return e->allocs;
}

int
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

void
mn_extents_turn(struct mn_extents *e)
{
    e->turn = (uint8_t)(e->turn % 255u + 1);
}

int
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

int
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

void
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
