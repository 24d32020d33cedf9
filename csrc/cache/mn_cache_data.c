/* See mn_cache_data.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_data.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_fault.h"
#include "cache/mn_cache_records.h"
#include "cache/mn_cache_locks.h"

#define RESERVED_AT_ONCE (UINT64_C(1) << 20) /* takes less than a millisecond */

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

int
mn_cache_data_read(const struct mn_cache_map *map, uint64_t off, void *to, uint64_t bytes)
{
    if (map->data == NULL) {
        return read_file(map, off, to, bytes);
    }
    memcpy(to, map->data + off, bytes);
    return 0;
}

const void *
mn_cache_data_view(const struct mn_cache_map *map, uint64_t off, uint64_t bytes, void *scratch)
{
    if (map->data != NULL) {
        return map->data + off;
    }
    return read_file(map, off, scratch, bytes) == 0 ? scratch : NULL;
}

bool
mn_cache_data_head(const struct mn_cache_map *map, uint64_t off, struct mn_cache_head *head,
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
    return rc != 0 ? rc : write_head(map, off, &copy, mn_cache_seal(map->shape.salt, &copy),
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
    w.error = write_head(map, off, head, mn_cache_seal_begun(map->shape.salt, head), "cache.taken");
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

int
mn_cache_data_reserve(int fd, uint64_t off, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t n = bytes < RESERVED_AT_ONCE ? bytes : RESERVED_AT_ONCE;
        if (fallocate(fd, 0, (off_t)off, (off_t)n) == 0) {
            off += n;
            bytes -= n;
        }
        else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

bool
mn_cache_data_is_there(const struct mn_cache_map *map)
{
    return map->data != NULL || mn_cache_locks_ours(map->fd, map->device, map->inode);
}
