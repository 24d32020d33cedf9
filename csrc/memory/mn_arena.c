/* mn_arena.c - see mn_arena.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory/mn_arena.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
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
mn_trim_begin(struct mn_trim *r, const struct mn_trim_view *v)
{
    uint64_t busy = v->used > v->kept ? v->used - v->kept : 0;
    r->age = MN_TRIM_COLD;
    r->spare = busy / 4 > MN_TRIM_SPARE ? busy / 4 : MN_TRIM_SPARE;
    if (r->turns >= MN_TRIM_COLD * MN_TRIM_LONG) {
        r->turns = 0;
        r->age = MN_TRIM_COLD * MN_TRIM_LONG;
        r->spare = 0;
    }
    if (v->used > v->limit || v->warm > v->limit - v->used) {
        uint64_t below = v->used < v->limit ? v->limit - v->used : 0;
        r->age = MN_TRIM_COLD / 2;
        r->spare = r->spare < below ? r->spare : below;
    }
    if (v->warm <= r->spare) {
        r->age = 0;
    }
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
    return rc == -ENOMEM && mn_extents_lent(a->rows) != 0 ? -EAGAIN : rc;
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
    return mn_extents_warm(a->rows);
}

uint64_t
mn_arena_lent(const struct mn_arena *a)
{
    return mn_extents_lent(a->rows);
}

bool
mn_arena_exceeds(const struct mn_arena *a, uint64_t bytes)
{
    uint64_t used = mn_extents_used(a->rows);
    return used > a->limit || bytes > a->limit - used;
}

void
mn_arena_wait_for_room(struct mn_arena *a, bool waits)
{
    a->room_waits = waits;
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
    while (mn_extents_lent(a->rows) != 0) {
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
    if (mn_trim_turn(r, now_ns, mn_extents_allocs(a->rows))) {
        mn_extents_turn(a->rows);
        if (r->age == 0) {
            struct mn_trim_view view = {mn_extents_used(a->rows), a->kept_bytes,
                                           mn_extents_warm(a->rows), a->limit};
            mn_trim_begin(r, &view);
            a->trim_from = a->rows_off;
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
