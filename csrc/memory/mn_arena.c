/* mn_arena.c - see mn_arena.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory/mn_arena.h"

#include <errno.h>
#include <sched.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"

/* Bytes per step: about a millisecond, after which the caller can do other things again. */
#define TRIM_STEP (UINT64_C(4) << 20)

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
