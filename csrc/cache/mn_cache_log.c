/* See mn_cache_log.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_log.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statfs.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_limits.h"
#include "os/mn_memfd.h"
#include "os/mn_thread.h"

/* ---- an entry: read and written ---- */

/* Returns the checksum of an entry's head. It is never 0, because fresh pages hold 0. */
static uint64_t
seal_of(uint64_t salt, const struct mn_cache_head *head)
{
    uint64_t seal = mn_cache_checksum(salt, head, sizeof(*head));
    return seal != 0 ? seal : 1;
}

/* The same for an entry whose data is not written yet: covers all but the checksum of checksums. */
static uint64_t
begun_seal_of(uint64_t salt, const struct mn_cache_head *head)
{
    struct mn_cache_head begun = *head;
    begun.sums = 0;
    return seal_of(salt, &begun) ^ 2;
}

/* Moves bytes between memory and the data of a file. 0 or -errno. */
static int
transfer(const struct mn_cache_map *map, uint64_t off, char *at, uint64_t bytes, bool writes)
{
    while (bytes > 0) {
        off_t place = (off_t)(map->shape.data_off + off);
        ssize_t n = writes ? pwrite(map->fd, at, bytes, place) : pread(map->fd, at, bytes, place);
        if (n <= 0) {
            if (n < 0 && errno == EINTR) {
                continue;
            }
            return n < 0 ? -errno : -EIO;
        }
        at += n;
        off += (uint64_t)n;
        bytes -= (uint64_t)n;
    }
    return 0;
}

static int
read_file(const struct mn_cache_map *map, uint64_t off, void *to, uint64_t bytes)
{
    return transfer(map, off, to, bytes, false);
}

static int
write_file(const struct mn_cache_map *map, uint64_t off, const void *from, uint64_t bytes)
{
    return transfer(map, off, (char *)(uintptr_t)from, bytes, true);
}

/* Copies bytes out. 0 or -errno. */
static int
data_read(const struct mn_cache_map *map, uint64_t off, void *to, uint64_t bytes)
{
    if (map->data == NULL) {
        return read_file(map, off, to, bytes);
    }
    memcpy(to, map->data + off, bytes);
    return 0;
}

/* Where these bytes can be looked at: in the mapping, or in `scratch`, to which they are read.
 * NULL: they cannot be read. */
static const void *
data_view(const struct mn_cache_map *map, uint64_t off, uint64_t bytes, void *scratch)
{
    if (map->data != NULL) {
        return map->data + off;
    }
    return read_file(map, off, scratch, bytes) == 0 ? scratch : NULL;
}

/* What an entry says of itself; false: it cannot be read. */
static bool
data_head(const struct mn_cache_map *map, uint64_t off, struct mn_cache_head *head,
                   uint64_t *seal)
{
    uint64_t words[MN_CACHE_HEAD_WORDS + 1];
    if (map->data == NULL) {
        if (read_file(map, off, words, sizeof(words)) != 0) {
            return false;
        }
        *seal = words[MN_CACHE_HEAD_WORDS];
    }
    else {
        const struct mn_cache_entry *entry = (const struct mn_cache_entry *)(map->data + off);
        *seal = mn_a64_load_acquire(&entry->seal); /* [K9] */
        for (unsigned i = 0; i < MN_CACHE_HEAD_WORDS; i++) {
            words[i] = mn_a64_load_relaxed(&entry->head[i]);
        }
    }
    memcpy(head, words, sizeof(*head));
    return true;
}

/* A payload on its way, a block after the other. */
struct writer {
    const struct mn_cache_map *map;
    uint64_t payload; /* where it begins in the data */
    uint64_t nblocks; /* written so far */
    uint64_t filled;  /* bytes of the current block */
    char *block;      /* where pieces of several parts become one */
    uint64_t *sums;
    int error; /* of a system call, from which on nothing is written */
};

static void
write_block(struct writer *w, const void *block, uint64_t bytes)
{
    uint64_t off = w->nblocks * MN_CACHE_BLOCK;
    w->sums[w->nblocks++] = mn_cache_checksum(w->map->shape.salt + off, block, bytes);
    if (w->error == 0) {
        w->error = write_file(w->map, w->payload + off, block, bytes);
    }
}

/* data NULL: zeros. A whole block goes to the file from where it is. */
static void
push(struct writer *w, const void *data, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes;) {
        uint64_t left = bytes - done, room = MN_CACHE_BLOCK - w->filled;
        uint64_t n = left < room ? left : room;
        if (data != NULL && n == MN_CACHE_BLOCK) {
            write_block(w, (const char *)data + done, n);
            done += n;
            continue;
        }
        if (data != NULL) {
            memcpy(w->block + w->filled, (const char *)data + done, n);
        }
        else {
            memset(w->block + w->filled, 0, n);
        }
        w->filled += n;
        done += n;
        if (w->filled == MN_CACHE_BLOCK) {
            write_block(w, w->block, w->filled);
            w->filled = 0;
        }
    }
}

static void
push_part(struct writer *w, const struct mn_cache_part *part)
{
    push(w, part->data, part->bytes);
    push(w, NULL, mn_cache_padded(part->bytes) - part->bytes);
}

/* Writes a head and its seal, which is the last word; step: for tests. 0 or -errno. */
static int
write_head(const struct mn_cache_map *map, uint64_t off, const struct mn_cache_head *head,
           uint64_t seal, const char *step)
{
    uint64_t words[MN_CACHE_HEAD_WORDS + 1];
    memcpy(words, head, sizeof(*head));
    words[MN_CACHE_HEAD_WORDS] = seal;
    (void)step;
    if (map->data == NULL) {
        MN_FAULT(step);
        return write_file(map, off, words, sizeof(words));
    }
    struct mn_cache_entry *entry = (struct mn_cache_entry *)(map->data + off);
    for (unsigned i = 0; i < MN_CACHE_HEAD_WORDS; i++) {
        mn_a64_store_relaxed(&entry->head[i], words[i]);
    }
    MN_FAULT(step);
    mn_a64_store_release(&entry->seal, seal); /* [K8], [K10] */
    return 0;
}

/* After the payload. */
static int
end_entry(const struct writer *w, uint64_t off, const struct mn_cache_head *head)
{
    const struct mn_cache_map *map = w->map;
    struct mn_cache_head copy = *head;
    uint64_t sums_bytes = w->nblocks * sizeof(*w->sums);
    copy.sums = mn_cache_checksum(map->shape.salt, w->sums, sums_bytes);
    int rc = write_file(map, off + sizeof(struct mn_cache_entry), w->sums, sums_bytes);
    return rc != 0 ? rc : write_head(map, off, &copy, seal_of(map->shape.salt, &copy),
                                     "cache.written");
}

int
mn_cache_data_write(const struct mn_cache_map *map, uint64_t off, const struct mn_cache_head *head,
                    const struct mn_cache_part *description, const struct mn_cache_part *parts,
                    uint64_t nparts)
{
    void *buffer = malloc(MN_CACHE_BLOCK + mn_cache_nblocks(head->bytes) * sizeof(uint64_t));
    if (buffer == NULL) {
        return -ENOMEM;
    }
    struct writer w = {.map = map, .payload = off + mn_cache_payload_off(head->bytes),
                       .block = buffer};
    w.sums = (uint64_t *)(w.block + MN_CACHE_BLOCK);
    if (map->data != NULL) {
        mn_a64_store_relaxed(&((struct mn_cache_entry *)(map->data + off))->seal, 0); /* no seal */
    }
    w.error = write_head(map, off, head, begun_seal_of(map->shape.salt, head), "cache.taken");
    push_part(&w, description);
    for (uint64_t i = 0; i < nparts; i++) {
        push_part(&w, &parts[i]);
        MN_FAULT("cache.part");
    }
    if (w.filled > 0) {
        write_block(&w, w.block, w.filled);
    }
    int rc = w.error != 0 ? w.error : end_entry(&w, off, head);
    free(buffer);
    return rc;
}

bool
mn_cache_data_is_there(const struct mn_cache_map *map)
{
    return map->data != NULL || mn_cache_locks_ours(map->fd, map->device, map->inode);
}

/* ---- finding an entry ---- */

/* of a record's place */
#define SEGMENT_SHIFT 42
#define ERA_SHIFT 24
#define ERA_MASK (((UINT64_C(1) << (SEGMENT_SHIFT - ERA_SHIFT)) - 1) << ERA_SHIFT)
MN_STATIC_ASSERT(MN_CACHE_SEGMENT_MAX / MN_CACHE_UNIT <= UINT64_C(1) << ERA_SHIFT,
                 "an offset has room");

static uint64_t
era_of(const struct mn_cache_map *map)
{
    return mn_a64_load_relaxed(&map->header->era) << ERA_SHIFT & ERA_MASK;
}

static struct mn_cache_record *
bucket_of(const struct mn_cache_map *map, struct mn_cache_digest digest)
{
    return map->index[digest.word[0] % map->shape.nbuckets].record;
}

/* Reads the head of the entry that a record with this digest leads to. */
static bool
confirmed(const struct mn_cache_map *map, struct mn_cache_record *record,
          struct mn_cache_digest digest, struct mn_cache_found *found)
{
    const uint64_t most = map->shape.segment_bytes;
    uint64_t generation = mn_a64_load_acquire(&record->generation);
    uint64_t place = mn_a64_load_acquire(&record->place);
    uint64_t number = place >> SEGMENT_SHIFT;
    uint64_t off = (place & ((UINT64_C(1) << ERA_SHIFT) - 1)) * MN_CACHE_UNIT;
    if (generation == 0 || number >= map->shape.nsegments
        || off > most - sizeof(struct mn_cache_entry)
        || mn_a64_load_acquire(&map->segments[number].generation) != generation) { /* [K5] */
        return false;
    }
    struct mn_cache_head head;
    uint64_t seal;
    if (!data_head(map, number * most + off, &head, &seal)
        || head.digest[0] != digest.word[0] || head.digest[1] != digest.word[1]
        || head.generation != generation || head.bytes > most || head.described > head.bytes
        || off + mn_cache_payload_off(head.bytes) + head.bytes > most
        || seal_of(map->shape.salt, &head) != seal) {
        return false;
    }
    *found = (struct mn_cache_found){
        .map = map, .segment = (uint32_t)number, .generation = generation, .bytes = head.bytes,
        .described = head.described, .made_ns = head.made_ns, .sums = head.sums,
        .payload = number * most + off + mn_cache_payload_off(head.bytes),
        .record = record, .place = place, .verified = (place & ERA_MASK) == era_of(map),
    };
    return true;
}

bool
mn_cache_index_entry(const struct mn_cache_map *map, struct mn_cache_record *record,
                     struct mn_cache_found *found)
{
    struct mn_cache_digest digest = {{mn_a64_load_acquire(&record->digest[0]),
                                      mn_a64_load_acquire(&record->digest[1])}};
    return confirmed(map, record, digest, found);
}

bool
mn_cache_index_find(const struct mn_cache_map *map, struct mn_cache_digest digest,
                    struct mn_cache_found *found)
{
    struct mn_cache_record *bucket = bucket_of(map, digest);
    for (unsigned i = 0; i < MN_CACHE_WAYS; i++) {
        if (mn_a64_load_relaxed(&bucket[i].digest[0]) == digest.word[0]
            && mn_a64_load_relaxed(&bucket[i].digest[1]) == digest.word[1]
            && confirmed(map, &bucket[i], digest, found)) {
            return true;
        }
    }
    return false;
}

/* The record to write: of the same digest, else one that leads nowhere, else the oldest. */
static struct mn_cache_record *
victim(const struct mn_cache_map *map, struct mn_cache_digest digest)
{
    struct mn_cache_record *bucket = bucket_of(map, digest), *best = bucket;
    uint64_t best_age = UINT64_MAX;
    for (unsigned i = 0; i < MN_CACHE_WAYS; i++) {
        if (mn_a64_load_relaxed(&bucket[i].digest[0]) == digest.word[0]
            && mn_a64_load_relaxed(&bucket[i].digest[1]) == digest.word[1]) {
            return &bucket[i];
        }
        uint64_t age = mn_a64_load_relaxed(&bucket[i].generation);
        uint64_t number = mn_a64_load_relaxed(&bucket[i].place) >> SEGMENT_SHIFT;
        if (age != 0
            && (number >= map->shape.nsegments
                || mn_a64_load_relaxed(&map->segments[number].generation) != age)) {
            age = 0;
        }
        if (age < best_age) {
            best_age = age;
            best = &bucket[i];
        }
    }
    return best;
}

void
mn_cache_index_insert(const struct mn_cache_map *map, struct mn_cache_digest digest,
                      uint64_t generation, uint32_t segment, uint64_t off)
{
    struct mn_cache_record *record = victim(map, digest);
    mn_a64_store_release(&record->digest[0], digest.word[0]);
    mn_a64_store_release(&record->digest[1], digest.word[1]);
    mn_a64_store_release(&record->generation, generation);
    mn_a64_store_release(&record->place,
                         (uint64_t)segment << SEGMENT_SHIFT | era_of(map) | off / MN_CACHE_UNIT);
}

void
mn_cache_index_mark(const struct mn_cache_found *found, bool whole)
{
    uint64_t place = found->place;
    uint64_t marked = whole ? (place & ~ERA_MASK) | era_of(found->map) : UINT64_MAX;
    (void)mn_a64_cas_acqrel(&found->record->place, &place, marked);
}

bool
mn_cache_found_still(const struct mn_cache_found *found)
{
    mn_a64 *generation = &found->map->segments[found->segment].generation;
#ifdef MN_BUG_CACHE_READ
    return mn_a64_load_relaxed(generation) != UINT64_MAX;
#endif
    return mn_a64_add_acqrel(generation, 0) == found->generation /* [K6] */
           && mn_cache_data_is_there(found->map);
}

bool
mn_cache_found_verify(const struct mn_cache_found *found)
{
    const struct mn_cache_map *map = found->map;
    const uint64_t nblocks = mn_cache_nblocks(found->bytes);
    const uint64_t sums_bytes = nblocks * sizeof(uint64_t);
    char *scratch = map->data != NULL ? NULL : malloc(MN_CACHE_BLOCK);
    uint64_t *sums = malloc(sums_bytes + 1);
    bool whole = sums != NULL && (map->data != NULL || scratch != NULL)
                 && data_read(map, found->payload - mn_cache_padded(sums_bytes), sums,
                                       sums_bytes) == 0
                 && mn_cache_checksum(map->shape.salt, sums, sums_bytes) == found->sums;
    for (uint64_t i = 0; whole && i < nblocks; i++) {
        uint64_t off = i * MN_CACHE_BLOCK, left = found->bytes - off;
        uint64_t n = left < MN_CACHE_BLOCK ? left : MN_CACHE_BLOCK;
        const void *block = data_view(map, found->payload + off, n, scratch);
        whole = block != NULL && mn_cache_checksum(map->shape.salt + off, block, n) == sums[i];
    }
    free(scratch);
    free(sums);
    return whole;
}

#define SPAN (UINT64_C(256) << 10) /* read at once from a disk, of which runs are copied */

int
mn_cache_copy(const struct mn_cache_found *found, uint64_t off, void *to, uint64_t bytes)
{
    if (off > found->bytes || bytes > found->bytes - off) {
        return -EINVAL;
    }
    return data_read(found->map, found->payload + off, to, bytes);
}

/* Copies n runs of bytes, a stride apart. scratch, for a disk: SPAN bytes, into which neighbouring
 * runs are read at once; NULL: each is copied by itself. */
static int
copy_runs(const struct mn_cache_found *found, uint64_t off, uint64_t run, uint64_t stride,
          uint64_t n, char *to, char *scratch)
{
    uint64_t most = scratch == NULL || run > SPAN / 2 ? 1 : (SPAN - run) / stride + 1, k;
    for (uint64_t done = 0; done < n; done += k) {
        k = n - done < most ? n - done : most;
        uint64_t at = off + done * stride, span = (k - 1) * stride + run;
        int rc = mn_cache_copy(found, at, k == 1 ? to + done * run : scratch, span);
        if (rc != 0) {
            return rc;
        }
        for (uint64_t i = 0; k > 1 && i < k; i++) {
            memcpy(to + (done + i) * run, scratch + i * stride, run);
        }
    }
    return 0;
}

int
mn_cache_copy_box(const struct mn_cache_found *found, uint64_t off,
                  const struct mn_cache_box *box, void *to)
{
    uint64_t run = box->itemsize, stride = box->itemsize, runs = 1;
    int inner = box->ndim; /* dimensions from here on are copied whole, in one run */
    while (inner > 0 && box->count[inner - 1] == box->shape[inner - 1]) {
        inner--;
        run *= box->shape[inner];
        stride *= box->shape[inner];
    }
    if (inner > 0) { /* and of the next one a range */
        inner--;
        off += box->start[inner] * stride;
        run *= box->count[inner];
        stride *= box->shape[inner];
    }
    uint64_t rows = 1, row = stride; /* runs that are neighbours, and from one to the next */
    if (inner > 0) {
        inner--;
        off += box->start[inner] * stride;
        rows = box->count[inner];
        stride *= box->shape[inner];
    }
    for (int d = inner - 1; d >= 0; d--) {
        runs *= box->count[d];
    }
    char *scratch = found->map->data == NULL ? malloc(SPAN) : NULL;
    int rc = 0;
    for (uint64_t r = 0; r < runs && rc == 0; r++) {
        uint64_t left = r, at = off, step = stride;
        for (int d = inner - 1; d >= 0; d--) {
            at += (box->start[d] + left % box->count[d]) * step;
            left /= box->count[d];
            step *= box->shape[d];
        }
        rc = copy_runs(found, at, run, row, rows, (char *)to + r * rows * run, scratch);
    }
    free(scratch);
    return rc;
}

/* ---- places for entries, and room ---- */

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
    int rc = mn_cache_reserve(log->file->fd, map->shape.data_off + number * most + has,
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

/* ---- cursors ---- */

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
    if (!data_head(map, c->segment * most + off, head, &seal) /* [K11] */
        || head->generation != c->generation || head->bytes > most
        || off + mn_cache_payload_off(head->bytes) + head->bytes > most) {
        return NO_ENTRY;
    }
    if (seal == seal_of(map->shape.salt, head)) {
        return WHOLE;
    }
    return seal == begun_seal_of(map->shape.salt, head) ? BEGUN : NO_ENTRY;
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
