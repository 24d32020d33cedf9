/* See mn_cache_log.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_log.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/statfs.h>

#include "base/mn_error.h"
#include "base/mn_fault.h"
#include "cache/mn_cache_data.h"
#include "cache/mn_cache_locks.h"
#include "cache/mn_cache_records.h"
#include "os/mn_limits.h"
#include "os/mn_memfd.h"
#include "os/mn_thread.h"

#define SECOND_NS UINT64_C(1000000000)
#define LOG_WAIT_NS (INT64_C(2) * 1000000000)
#define NO_ROOM_NS (SECOND_NS / 5)    /* between two tries to find room */
#define RESERVE_SHARE 16              /* of a file system: left to other users of it, */
#define RESERVE_MAX (UINT64_C(1) << 30) /* but not more of a disk */
#define UNUSED_FINDS 4 /* times the entries; after that many finds an entry never found is unused */
#define GROWTH (UINT64_C(16) << 20) /* bytes by which a segment gets its pages, or more */
#define TRIES 8

static mn_a64 *
own_reservation(const struct mn_cache_log *log)
{
    return &log->file->map.slots[log->file->slot].reservation;
}

bool
mn_cache_log_is_full(int rc)
{
    return rc == -ENOSPC || rc == -ENOMEM || rc == -EDQUOT || rc == -EFBIG;
}

/* Whether a client that lives has a place in the segment. */
static bool
is_reserved(const struct mn_cache_file *file, uint64_t segment)
{
#ifdef MN_BUG_CACHE_LOG
    return false;
#endif
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        if (mn_a64_load_seqcst(&file->map.slots[i].reservation) == segment + 1 /* [K4] */
            && mn_cache_slot_lives(file, i)) {
            return true;
        }
    }
    return false;
}

/* Whether the clients of two slots may be of one job. */
static bool
agree(const struct mn_cache_slot *a, const struct mn_cache_slot *b)
{
    return mn_a64_load_relaxed(&a->job) == mn_a64_load_relaxed(&b->job)
           && (mn_a64_load_relaxed(&a->tree) == mn_a64_load_relaxed(&b->tree)
               || mn_a64_load_relaxed(&a->rank) != mn_a64_load_relaxed(&b->rank));
}

uint64_t
mn_cache_log_jobs(const struct mn_cache_file *file)
{
    const struct mn_cache_slot *slots = file->map.slots;
    uint32_t of[MN_CACHE_SLOTS], jobs = 0; /* a client joins the first job that agrees with it */
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        of[i] = MN_CACHE_SLOTS;
        if (mn_a64_load_relaxed(&slots[i].job) == 0 || !mn_cache_slot_lives(file, i)) {
            continue;
        }
        of[i] = 0;
        for (uint32_t k = 0; k < i; k++) {
            if (of[k] == of[i] && !agree(&slots[k], &slots[i])) {
                of[i]++;
                k = UINT32_MAX; /* from the begin, for the next job */
            }
        }
        jobs = of[i] >= jobs ? of[i] + 1 : jobs;
    }
    return jobs;
}

/* Whether a client of another job is attached. */
static bool
is_shared(const struct mn_cache_file *file)
{
    const struct mn_cache_slot *slots = file->map.slots;
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        if (mn_a64_load_relaxed(&slots[i].job) != 0 && !agree(&slots[i], &slots[file->slot])
            && mn_cache_slot_lives(file, i)) {
            return true;
        }
    }
    return false;
}

/* What living clients may still take for other things. */
static uint64_t
promised(const struct mn_cache_file *file)
{
    uint64_t sum = 0;
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        uint64_t bytes = mn_a64_load_relaxed(&file->map.slots[i].promised);
        if (bytes != 0 && mn_cache_slot_lives(file, i)) {
            sum += bytes;
        }
    }
    return sum;
}

/* Whether memory and file system have room for this much more. */
static bool
has_room(const struct mn_cache_log *log, uint64_t bytes)
{
    struct statfs system;
    if (fstatfs(log->file->fd, &system) == 0 && system.f_blocks > 0) {
        uint64_t block = (uint64_t)system.f_bsize;
        uint64_t left = (uint64_t)system.f_blocks * block / RESERVE_SHARE;
        if (log->file->map.data == NULL && left > RESERVE_MAX) {
            left = RESERVE_MAX;
        }
        if ((uint64_t)system.f_bavail * block < bytes + left) {
            return false;
        }
    }
    if (log->file->map.data == NULL) {
        return true; /* the page cache, which gives way */
    }
    uint64_t available = mn_mem_available("");
    return available == 0 || available >= bytes + log->reserve + promised(log->file);
}

/* Sees to it that the first `bytes` of a segment have their pages. Under the log lock. 0, MN_FULL
 * or -errno. */
static int
give_pages(const struct mn_cache_log *log, uint64_t number, uint64_t bytes)
{
    const struct mn_cache_map *map = &log->file->map;
    struct mn_cache_segment *segment = &map->segments[number];
    uint64_t has = mn_a64_load_relaxed(&segment->pages), most = map->shape.segment_bytes;
    if (has >= bytes) {
        return 0;
    }
    uint64_t wants = (bytes + GROWTH - 1) / GROWTH * GROWTH;
    wants = wants < most ? wants : most;
    if (!has_room(log, wants - has)) {
        return MN_FULL;
    }
    int rc = mn_cache_data_reserve(log->file->fd, map->shape.data_off + number * most + has,
                                   wants - has);
    if (rc != 0) {
        return mn_cache_log_is_full(rc) ? MN_FULL : rc;
    }
    MN_FAULT("cache.pages");
    mn_a64_store_release(&segment->pages, wants);
    return 0;
}

/* Takes a segment's entries away. False: a client has it reserved; it stays empty then. */
static bool
empty(const struct mn_cache_file *file, uint64_t number)
{
    (void)mn_a64_xchg_seqcst(&file->map.segments[number].generation, 0); /* [K3] */
    MN_FAULT("cache.emptied");
    return !is_reserved(file, number);
}

/* An empty segment that no client has reserved, with pages for an entry of `bytes` if there is one.
 * -1: none. */
static int64_t
find_empty(const struct mn_cache_file *file, uint64_t bytes)
{
    int64_t found = -1;
    for (uint64_t i = 0; i < file->map.shape.nsegments; i++) {
        const struct mn_cache_segment *segment = &file->map.segments[i];
        if (mn_a64_load_relaxed(&segment->generation) != 0 || is_reserved(file, i)) {
            continue;
        }
        if (mn_a64_load_relaxed(&segment->pages) >= bytes) {
            return (int64_t)i;
        }
        found = found < 0 ? (int64_t)i : found;
    }
    return found;
}

/* Whether the session has asked for so much that it would have found what it uses. */
static bool
has_been_through(const struct mn_cache_map *map)
{
    uint64_t finds = 0, entries = 0;
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        finds += mn_a64_load_relaxed(&map->slots[i].hits)
                 + mn_a64_load_relaxed(&map->slots[i].misses);
    }
    for (uint64_t i = 0; i < map->shape.nsegments; i++) {
        entries += mn_a64_load_relaxed(&map->segments[i].entries);
    }
    return finds - mn_a64_load_relaxed(&map->header->session_finds) >= UNUSED_FINDS * entries;
}

/* The oldest segment that has entries, that no client has reserved, and that has pages for an entry
 * of `bytes`, emptied. -1: none. unused: only one in which this session has found and stored
 * nothing. */
static int64_t
empty_oldest(const struct mn_cache_file *file, uint64_t bytes, bool unused)
{
    uint64_t session = mn_a64_load_relaxed(&file->map.header->session);
    for (int tries = 0; tries < TRIES; tries++) {
        uint64_t oldest = UINT64_MAX;
        int64_t found = -1;
        for (uint64_t i = 0; i < file->map.shape.nsegments; i++) {
            const struct mn_cache_segment *segment = &file->map.segments[i];
            uint64_t generation = mn_a64_load_relaxed(&segment->generation);
            bool used = mn_a64_load_relaxed(&segment->used) == session;
            if (generation != 0 && generation < oldest && !(unused && used)
                && mn_a64_load_relaxed(&segment->pages) >= bytes
                && !is_reserved(file, i)) {
                oldest = generation;
                found = (int64_t)i;
            }
        }
        if (found < 0 || empty(file, (uint64_t)found)) {
            return found;
        }
    }
    return -1;
}

/* Gives an empty segment its generation, and makes it the current one. */
static void
begin(const struct mn_cache_file *file, uint64_t number)
{
    const struct mn_cache_map *map = &file->map;
    struct mn_cache_segment *segment = &map->segments[number];
    uint64_t generation = mn_a64_add_acqrel(&map->header->generation, 1) + 1;
    mn_a64_store_relaxed(&segment->entries, 0);
    mn_a64_store_relaxed(&segment->used, mn_a64_load_relaxed(&map->header->session));
    mn_a64_store_relaxed(&segment->fill, 0);
    mn_a64_store_seqcst(&segment->generation, generation); /* [K7] */
    MN_FAULT("cache.begun");
    mn_a64_store_seqcst(&map->header->current, number + 1); /* [K12] */
}

/* Makes another segment current, for an entry of `bytes`. */
static int
next_segment(struct mn_cache_log *log, uint64_t bytes)
{
    const struct mn_cache_file *file = log->file;
    int64_t number = find_empty(file, bytes);
    int rc = number < 0 ? MN_FULL : give_pages(log, (uint64_t)number, bytes);
    bool full = rc == MN_FULL && !log->keeps, shared = full && is_shared(file);
    if (shared || (full && file->map.data == NULL && has_been_through(&file->map))) {
        number = empty_oldest(file, bytes, !shared);
        if (number >= 0) {
            (void)mn_a64_add_relaxed(&file->map.header->recycled, 1);
            rc = 0;
        }
    }
    if (rc == 0) {
        begin(file, (uint64_t)number);
    }
    return rc;
}

/* Whether a segment could get the pages that an entry needs behind its last one. */
static bool
grows(struct mn_cache_log *log, uint64_t number, uint64_t bytes)
{
    const struct mn_cache_map *map = &log->file->map;
    uint64_t fill = mn_a64_load_acquire(&map->segments[number].fill);
    return fill + bytes <= map->shape.segment_bytes && give_pages(log, number, fill + bytes) == 0;
}

/* Makes room for an entry for which the current segment has none: in it, or in another one. `full`
 * and its generation are what the caller has seen. */
static int
advance(struct mn_cache_log *log, uint64_t full, uint64_t generation, uint64_t bytes)
{
    const struct mn_cache_map *map = &log->file->map;
    if (log->no_room_ns != 0 && mn_now_ns() - log->no_room_ns < NO_ROOM_NS) {
        return MN_FULL;
    }
    bool stuck = mn_a64_load_relaxed(&map->header->stuck) != 0;
    int rc = mn_cache_lock_wait(log->file->fd, MN_CACHE_LOG_BYTE, stuck ? 0 : LOG_WAIT_NS);
    if (rc == 0 ? stuck : rc == -ETIMEDOUT) { /* its holder is stopped, say, or goes on */
        mn_a64_store_relaxed(&map->header->stuck, rc != 0);
    }
    if (rc == 0) {
        bool same = mn_a64_load_acquire(&map->header->current) == full;
        if (same && full != 0 && generation != 0) {
            same = mn_a64_load_acquire(&map->segments[full - 1].generation) == generation;
        }
        if (same && !(generation != 0 && grows(log, full - 1, bytes))) {
            rc = next_segment(log, bytes);
        }
        mn_cache_unlock(log->file->fd, MN_CACHE_LOG_BYTE);
    }
    rc = rc == -ETIMEDOUT ? MN_FULL : rc;
    log->no_room_ns = rc == MN_FULL ? mn_now_ns() : 0;
    return rc;
}

/* Takes the next bytes of a segment; false: it has not that many left that have their pages. A
 * caller with a reservation knows that pages only become more. */
static bool
take_bytes(struct mn_cache_segment *segment, uint64_t most, uint64_t bytes, uint64_t *off)
{
    uint64_t fill = mn_a64_load_acquire(&segment->fill);
    uint64_t pages = mn_a64_load_acquire(&segment->pages);
    most = pages < most ? pages : most;
    do {
        if (bytes > most || fill > most - bytes) {
            return false;
        }
    } while (!mn_a64_cas_acqrel(&segment->fill, &fill, fill + bytes));
    *off = fill;
    return true;
}

int
mn_cache_log_reserve(struct mn_cache_log *log, uint64_t bytes, struct mn_cache_reserved *out)
{
    const struct mn_cache_map *map = &log->file->map;
    for (;;) {
        uint64_t current = mn_a64_load_acquire(&map->header->current), generation = 0;
        if (current != 0 && current <= map->shape.nsegments) {
            struct mn_cache_segment *segment = &map->segments[current - 1];
            generation = mn_a64_load_acquire(&segment->generation);
            mn_a64_store_seqcst(own_reservation(log), current); /* [K1] */
            MN_FAULT("cache.reserved");
            if (generation != 0
                && mn_a64_load_seqcst(&segment->generation) == generation /* [K2] */
                && mn_a64_load_seqcst(&map->header->current) == current   /* [K13] */
                && take_bytes(segment, map->shape.segment_bytes, bytes, &out->off)) {
                out->segment = (uint32_t)(current - 1);
                out->generation = generation;
                return 0;
            }
            mn_cache_log_done(log);
        }
        int rc = advance(log, current, generation, bytes);
        if (rc != 0) {
            return rc;
        }
    }
}

void
mn_cache_log_done(struct mn_cache_log *log)
{
    mn_a64_store_release(own_reservation(log), 0);
}

/* Whether others have taken of the memory that is left to them. */
static bool
is_short(const struct mn_cache_log *log)
{
    uint64_t available = mn_mem_available("");
    return available != 0 && available < log->reserve;
}

void
mn_cache_log_relieve(struct mn_cache_log *log)
{
    const struct mn_cache_file *file = log->file;
    const struct mn_cache_map *map = &file->map;
    if (!is_short(log) || mn_cache_lock_try(file->fd, MN_CACHE_LOG_BYTE) != 0) {
        return;
    }
    do {
        int64_t number = find_empty(file, 1);
        if (number < 0 || mn_a64_load_relaxed(&map->segments[number].pages) == 0) {
            number = empty_oldest(file, 1, false);
        }
        if (number < 0) {
            break;
        }
        uint64_t off = (uint64_t)number * map->shape.segment_bytes;
        mn_a64_store_relaxed(&map->segments[number].pages, 0);
        (void)mn_memfd_punch_mapped(map->data + off, map->shape.segment_bytes);
        (void)mn_a64_add_relaxed(&map->header->returned, 1);
        log->no_room_ns = mn_now_ns();
    } while (is_short(log));
    mn_cache_unlock(file->fd, MN_CACHE_LOG_BYTE);
}

enum place { NO_ENTRY, BEGUN, WHOLE };

/* What is at a place in the cursor's segment. head: of an entry. */
static enum place
look(const struct mn_cache_map *map, const struct mn_cache_cursor *c, uint64_t off,
     struct mn_cache_head *head)
{
    const uint64_t most = map->shape.segment_bytes;
    if (off > most - sizeof(struct mn_cache_entry)) {
        return NO_ENTRY;
    }
    uint64_t seal;
    if (!mn_cache_data_head(map, c->segment * most + off, head, &seal) /* [K11] */
        || head->generation != c->generation || head->bytes > most
        || off + mn_cache_payload_off(head->bytes) + head->bytes > most) {
        return NO_ENTRY;
    }
    if (seal == mn_cache_seal(map->shape.salt, head)) {
        return WHOLE;
    }
    return seal == mn_cache_seal_begun(map->shape.salt, head) ? BEGUN : NO_ENTRY;
}

static bool
is_here(const struct mn_cache_map *map, const struct mn_cache_cursor *c)
{
    return c->generation != 0
           && mn_a64_load_acquire(&map->segments[c->segment].generation) == c->generation;
}

/* The lowest generation above one, and its segment. UINT64_MAX: there is none. */
static uint64_t
lowest_above(const struct mn_cache_map *map, uint64_t generation, uint64_t *segment)
{
    uint64_t lowest = UINT64_MAX;
    for (uint64_t i = 0; i < map->shape.nsegments; i++) {
        uint64_t here = mn_a64_load_acquire(&map->segments[i].generation);
        if (here > generation && here < lowest) {
            lowest = here;
            *segment = i;
        }
    }
    return lowest;
}

/* Goes to the oldest segment behind the cursor's. False: there is none.
 *
 * A scan may miss a segment that is made meanwhile, and meet one that is made after that. The
 * second scan finds the missed one. */
static bool
go_on(const struct mn_cache_map *map, struct mn_cache_cursor *c)
{
    uint64_t segment = 0, next = lowest_above(map, c->generation, &segment);
    if (next == UINT64_MAX) {
        return false;
    }
    next = lowest_above(map, c->generation, &segment);
    if (next == UINT64_MAX) {
        return false; /* recycled meanwhile: the next call looks again */
    }
    c->generation = next;
    c->oldest = next < c->oldest ? next : c->oldest; /* it was made after the call had begun */
    c->segment = segment;
    c->off = c->npending = 0;
    return true;
}

/* Notes an entry that is being written. */
static void
note(struct mn_cache_cursor *c, uint64_t off)
{
    if (c->npending == MN_CACHE_PENDING) {
        c->npending--;
        memmove(c->pending, c->pending + 1, c->npending * sizeof(*c->pending));
    }
    c->pending[c->npending++] = off;
}

/* Reports noted entries that are whole by now. */
static uint64_t
settle(const struct mn_cache_map *map, struct mn_cache_cursor *c, struct mn_cache_stored *out,
       uint64_t most)
{
    struct mn_cache_head head;
    uint64_t n = 0, left = 0;
    for (uint64_t i = 0; i < c->npending; i++) {
        if (n < most && look(map, c, c->pending[i], &head) == WHOLE) {
            out[n++] = (struct mn_cache_stored){head.digest[0], head.generation};
        }
        else {
            c->pending[left++] = c->pending[i];
        }
    }
    c->npending = left;
    return n;
}

/* Whether the log has left the cursor's segment, and there is nothing to wait for in it. A later
 * segment shows that the cursor's one has been the current one before. */
static bool
is_over(const struct mn_cache_file *file, const struct mn_cache_cursor *c)
{
    uint64_t segment;
    return lowest_above(&file->map, c->generation, &segment) != UINT64_MAX
           && mn_a64_load_seqcst(&file->map.header->current) != c->segment + 1 /* [K14] */
           && !is_reserved(file, c->segment);
}

uint64_t
mn_cache_cursor_next(const struct mn_cache_file *file, struct mn_cache_cursor *c,
                     struct mn_cache_stored *out, uint64_t most)
{
    const struct mn_cache_map *map = &file->map;
    struct mn_cache_head head;
    uint64_t n = 0, segment;
    if (c->salt != map->shape.salt || c->segment >= map->shape.nsegments
        || c->npending > MN_CACHE_PENDING) {
        *c = (struct mn_cache_cursor){.salt = map->shape.salt};
    }
    c->oldest = lowest_above(map, 0, &segment);
    for (;;) {
        if (!is_here(map, c)) {
            if (!go_on(map, c)) {
                return n;
            }
            continue;
        }
        bool over = is_over(file, c); /* before the places are looked at */
        uint64_t fill = mn_a64_load_acquire(&map->segments[c->segment].fill);
        n += settle(map, c, out + n, most - n);
        while (n < most && c->off < fill) {
            enum place place = look(map, c, c->off, &head);
            if (place == NO_ENTRY) {
                break;
            }
            if (place == BEGUN) {
                note(c, c->off);
            }
            else {
                out[n++] = (struct mn_cache_stored){head.digest[0], head.generation};
            }
            c->off += mn_cache_payload_off(head.bytes) + head.bytes;
        }
        if (n == most || !over || !go_on(map, c)) {
            return n;
        }
    }
}
