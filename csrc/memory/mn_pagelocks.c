/* mn_pagelocks.c - see mn_pagelocks.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory/mn_pagelocks.h"

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/mn_base.h"

/* A bit of a chunk's word: it is locked. The other bits count its users. */
#define MN_PAGELOCKED (UINT32_C(1) << 31)

/* Chunks [first, end) that a range lies in. */
struct span {
    uint64_t first, end;
};

static struct span
span_of(const struct mn_pagelocks *l, const void *at, uint64_t bytes)
{
    uint64_t off = (uint64_t)((const char *)at - l->base);
    return (struct span){off / MN_PAGELOCKS_CHUNK,
                         (off + bytes + MN_PAGELOCKS_CHUNK - 1) / MN_PAGELOCKS_CHUNK};
}

static uint64_t
bytes_of(const struct mn_pagelocks *l, uint64_t chunk)
{
    uint64_t left = l->bytes - chunk * MN_PAGELOCKS_CHUNK;
    return left < MN_PAGELOCKS_CHUNK ? left : MN_PAGELOCKS_CHUNK;
}

static int
call(struct mn_pagelocks *l, uint64_t chunk, bool lock)
{
    struct mn_pagelocks_driver *d = &l->driver;
    char *at = l->base + chunk * MN_PAGELOCKS_CHUNK;
    void *context;
    int rc = d->enter(d->context);
    if (rc == 0) {
        rc = lock ? d->lock(at, (size_t)bytes_of(l, chunk), d->flags) : d->unlock(at);
        (void)d->leave(&context);
    }
    return rc;
}

static int
lock_chunk(struct mn_pagelocks *l, uint64_t chunk)
{
    uint64_t bytes = bytes_of(l, chunk);
    if (l->locked_bytes + bytes > l->most) {
        return -ENOMEM;
    }
    int said = call(l, chunk, true);
    if (said != 0) {
        l->refused = said;
        return -ENOTSUP;
    }
    l->chunks[chunk] = MN_PAGELOCKED;
    l->locked_bytes += bytes;
    return 0;
}

/* Unlocks a chunk that has no user. Returns whether it is unlocked now. */
static bool
unlock_chunk(struct mn_pagelocks *l, uint64_t chunk)
{
    if (l->chunks[chunk] == MN_PAGELOCKED && call(l, chunk, false) == 0) {
        l->chunks[chunk] = 0;
        l->locked_bytes -= bytes_of(l, chunk);
    }
    return l->chunks[chunk] == 0;
}

static void
drop_span(struct mn_pagelocks *l, struct span s)
{
    for (uint64_t c = s.first; c < s.end; c++) {
        mn_assert((l->chunks[c] & ~MN_PAGELOCKED) != 0);
        l->chunks[c]--;
        if (l->stopped) {
            (void)unlock_chunk(l, c);
        }
    }
}

/* Adds a user to all chunks, or to none. Returns 0, or the error of lock_chunk(). */
static int
use_span(struct mn_pagelocks *l, struct span s)
{
    for (uint64_t c = s.first; c < s.end; c++) {
        int rc = l->chunks[c] == 0 ? lock_chunk(l, c) : 0;
        if (rc < 0) {
            drop_span(l, (struct span){s.first, c});
            return rc;
        }
        l->chunks[c]++;
    }
    return 0;
}

int
mn_pagelocks_use(struct mn_pagelocks *l, const void *at, uint64_t bytes)
{
    const char *from = at;
    mn_mutex_lock(&l->mutex);
    int rc = l->chunks == NULL || l->refused != 0 || l->stopped ? -ENOTSUP : 0;
    if (rc == 0 && (from < l->base || from >= l->base + l->bytes
                    || bytes > (uint64_t)(l->base + l->bytes - from) || bytes == 0)) {
        rc = -EINVAL;
    }
    if (rc == 0) {
        rc = use_span(l, span_of(l, at, bytes));
    }
    mn_mutex_unlock(&l->mutex);
    return rc;
}

void
mn_pagelocks_used(struct mn_pagelocks *l, const void *at, uint64_t bytes)
{
    mn_mutex_lock(&l->mutex);
    drop_span(l, span_of(l, at, bytes));
    mn_mutex_unlock(&l->mutex);
}

void
mn_pagelocks_stop(struct mn_pagelocks *l)
{
    mn_mutex_lock(&l->mutex);
    struct span s = span_of(l, l->base, l->chunks != NULL ? l->bytes : 0);
    for (uint64_t c = s.first; c < s.end; c++) {
        (void)unlock_chunk(l, c);
    }
    l->stopped = true;
    mn_mutex_unlock(&l->mutex);
}

int
mn_pagelocks_set(struct mn_pagelocks *l, const struct mn_pagelocks_driver *driver, uint64_t most)
{
    mn_mutex_lock(&l->mutex);
    int rc = l->chunks != NULL ? -EBUSY : 0;
    if (rc == 0) {
        uint64_t n = (l->bytes + MN_PAGELOCKS_CHUNK - 1) / MN_PAGELOCKS_CHUNK;
        l->chunks = calloc(n + 1, sizeof(*l->chunks));
        rc = l->chunks == NULL ? -ENOMEM : 0;
    }
    if (rc == 0) {
        l->driver = *driver;
        l->most = most;
    }
    mn_mutex_unlock(&l->mutex);
    return rc;
}

/* ---- the provider ------------------------------------------------------------------------ */

static int
locks_map(struct mn_provider *self, uint64_t bytes, void **base)
{
    struct mn_pagelocks *l = (struct mn_pagelocks *)self;
    int rc = l->inner->map(l->inner, bytes, base);
    if (rc == 0) {
        l->base = *base;
        l->bytes = bytes;
    }
    return rc;
}

static void
locks_unmap(struct mn_provider *self, void *base, uint64_t bytes)
{
    struct mn_pagelocks *l = (struct mn_pagelocks *)self;
    struct span s = span_of(l, base, l->chunks != NULL ? bytes : 0);
    for (uint64_t c = s.first; c < s.end; c++) {
        (void)unlock_chunk(l, c); /* no other thread can get here any more */
    }
    l->base = NULL;
    l->inner->unmap(l->inner, base, bytes);
}

/* Works chunk by chunk. A chunk in use keeps its pages for the next owner of the range. The mutex
 * is held all the time: a page that is locked and then removed would still be read. */
static void
locks_discard(struct mn_provider *self, void *at, uint64_t bytes)
{
    struct mn_pagelocks *l = (struct mn_pagelocks *)self;
    char *from = at, *end = from + bytes;
    mn_mutex_lock(&l->mutex);
    struct span s = span_of(l, at, bytes);
    if (l->locked_bytes == 0) {
        l->inner->discard(l->inner, at, bytes);
        s.end = s.first;
    }
    for (uint64_t c = s.first; c < s.end; c++) {
        char *next = l->base + (c + 1) * MN_PAGELOCKS_CHUNK;
        next = next < end ? next : end;
        if (unlock_chunk(l, c)) {
            l->inner->discard(l->inner, from, (uint64_t)(next - from));
        }
        from = next;
    }
    mn_mutex_unlock(&l->mutex);
}

int
mn_pagelocks_init(struct mn_pagelocks *l, struct mn_provider *inner)
{
    *l = (struct mn_pagelocks){.provider = {locks_map, locks_unmap, locks_discard},
                               .inner = inner};
    return mn_mutex_init(&l->mutex);
}

void
mn_pagelocks_fini(struct mn_pagelocks *l)
{
    free(l->chunks);
    mn_mutex_fini(&l->mutex);
}
