/* Opening .npy files and reading parts of them.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* O_DIRECT */
#endif

#include "ops/mn_npy.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/mn_attr.h"

MN_STATIC_ASSERT(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                 "voxels are used as they lie in the file, which is little-endian");

/* Makes the buffer hold at least size bytes; its contents are lost. */
static int
buffer_grow(struct mn_npy_buffer *buffer, size_t size, struct mn_text *text)
{
    if (size <= buffer->size) {
        return 0;
    }
    size_t rounded = (size + MN_NPY_BLOCK - 1) / MN_NPY_BLOCK * MN_NPY_BLOCK;
    void *bytes = NULL;
    if (rounded < size || posix_memalign(&bytes, MN_NPY_BLOCK, rounded) != 0) {
        return mn_fail_memory(text, size);
    }
    free(buffer->bytes);
    buffer->bytes = bytes;
    buffer->size = rounded;
    return 0;
}

void
mn_npy_buffer_fini(struct mn_npy_buffer *buffer)
{
    free(buffer->bytes);
    *buffer = (struct mn_npy_buffer){0};
}

static int
fail_errno(struct mn_text *text, const char *path, const char *doing)
{
    int code = errno;
    char reason[128];
#if defined(__GLIBC__)
    const char *words = strerror_r(code, reason, sizeof(reason));
#else
    strerror_r(code, reason, sizeof(reason));
    const char *words = reason;
#endif
    return mn_fail(text, code, "%s: %s: %s", path, doing, words);
}

static int
fail_direct(struct mn_text *text, const char *path)
{
    return mn_fail(text, EINVAL,
                   "%s: its file system cannot bypass the page cache; use direct=False",
                   path);
}

static struct mn_npy_identity
identity_of(const struct stat *st)
{
    return (struct mn_npy_identity){
        .device = (uint64_t)st->st_dev,
        .inode = (uint64_t)st->st_ino,
        .size = (uint64_t)st->st_size,
        .mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec,
    };
}

static int
identify(struct mn_npy_file *file, struct mn_text *text)
{
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return fail_errno(text, file->path, "fstat");
    }
    if (!S_ISREG(st.st_mode)) {
        return mn_fail(text, EINVAL, "%s: is not a regular file", file->path);
    }
    file->identity = identity_of(&st);
    return 0;
}

/* Takes a mapping of the file's current state out of the table, if it is there. A mapping of an
 * earlier state is dropped. */
static bool
find_mapped(struct mn_npy_file *file, struct mn_maps *maps)
{
    struct stat st;
    struct mn_map *map = mn_maps_take(maps, file->path);
    if (map == NULL) {
        return false;
    }
    if (stat(file->path, &st) == 0) {
        file->identity = identity_of(&st);
        if (mn_same_identity(&map->identity, &file->identity)) {
            file->map = map;
            return true;
        }
    }
    mn_map_close(maps, map);
    return false;
}

static void
close_fd(struct mn_npy_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        file->fd = -1;
    }
}

static int
open_path(const char *path, int more_flags)
{
    int fd;
    /* O_NONBLOCK: a FIFO in place of the file must not hang the worker. */
    do {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | more_flags);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

int
mn_npy_open(struct mn_npy_file *file, struct mn_maps *maps, const char *path, bool direct,
            struct mn_text *text)
{
    *file = (struct mn_npy_file){.path = path, .fd = -1, .direct = direct};
    if (maps != NULL && !direct && find_mapped(file, maps)) {
        return 0;
    }
    file->fd = open_path(path, direct ? O_DIRECT : 0);
    if (file->fd < 0) {
        return direct && errno == EINVAL ? fail_direct(text, path)
                                         : fail_errno(text, path, "cannot be opened");
    }
    int rc = identify(file, text);
    if (rc == 0 && maps != NULL && !direct) {
        file->map = mn_map_open(maps, file->fd, path, &file->identity);
        file->newly_mapped = file->map != NULL;
    }
    if (rc < 0) {
        close_fd(file);
    }
    return rc;
}

void
mn_npy_header_known(struct mn_npy_file *file)
{
    if (file->map != NULL) {
        close_fd(file);
    }
}

void
mn_npy_close(struct mn_npy_file *file, struct mn_maps *maps)
{
    close_fd(file);
    if (file->map != NULL) {
        mn_maps_put(maps, file->map);
        file->map = NULL;
    }
}

void
mn_npy_open_again(struct mn_npy_file *again, const struct mn_npy_file *file)
{
    struct stat st;
    *again = (struct mn_npy_file){.path = file->path, .fd = open_path(file->path, 0)};
    if (again->fd >= 0) {
        struct mn_npy_identity now = {0};
        if (fstat(again->fd, &st) == 0) {
            now = identity_of(&st);
        }
        if (!mn_same_identity(&now, &file->map->identity)) {
            mn_npy_close(again, NULL);
        }
    }
}

bool
mn_npy_is_cached(const struct mn_npy_file *again, uint64_t off)
{
    char byte;
    struct iovec to = {&byte, 1};
    return again->fd < 0 || preadv2(again->fd, &to, 1, (off_t)off, RWF_NOWAIT) >= 0
           || errno != EAGAIN;
}

void
mn_npy_begin(const struct mn_npy_file *file)
{
    if (file->map != NULL) {
        mn_guard_enter(&file->map->guard);
    }
}

/* A page of which the file has lost a part reads as zeros there, without a signal, so the size is
 * checked as well. A file that has replaced it meanwhile says nothing about this one. */
int
mn_npy_end(const struct mn_npy_file *file, int rc, struct mn_text *text)
{
    struct stat st;
    struct mn_map *map = file->map;
    if (map == NULL) {
        return rc;
    }
    bool whole = mn_guard_leave(&map->guard);
    bool same = stat(file->path, &st) == 0 && (uint64_t)st.st_dev == map->identity.device
                && (uint64_t)st.st_ino == map->identity.inode;
    bool shorter = same && (uint64_t)st.st_size < map->identity.size;
    if (whole && !shorter) {
        return rc;
    }
    map->lost = true;
    if (same && !shorter) {
        errno = EIO;
        return fail_errno(text, file->path, "read");
    }
    return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
}

void
mn_npy_count(struct mn_npy_count *count, uint64_t off, uint64_t length, uint64_t stride,
             uint64_t n)
{
    bool adjoin = n > 0 && stride < length + MN_NPY_BLOCK; /* no whole block between two pieces */
    count->bytes += length * n;
    if (adjoin) {
        length += (n - 1) * stride;
        n = 1;
    }
    for (uint64_t i = 0; i < n; i++, off += stride) {
        uint64_t first = off / MN_NPY_BLOCK, last = (off + length - 1) / MN_NPY_BLOCK;
        count->touched += (last + 1 - first) * MN_NPY_BLOCK;
    }
}

/* Reads up to `length` bytes, fewer only at the file's end. Returns their number. */
static int64_t
read_fully(const struct mn_npy_file *file, unsigned char *to, size_t length, uint64_t off,
           struct mn_text *text)
{
    size_t done = 0;
    while (done < length) {
        ssize_t n = pread(file->fd, to + done, length - done, (off_t)(off + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return file->direct && errno == EINVAL ? fail_direct(text, file->path)
                                                   : fail_errno(text, file->path, "read");
        }
        if (n == 0) {
            break;
        }
        done += (size_t)n;
        if (file->direct && done % MN_NPY_BLOCK != 0) {
            break; /* only the file's last block is read in part */
        }
    }
    return (int64_t)done;
}

int
mn_npy_read(const struct mn_npy_file *file, struct mn_npy_buffer *buffer, uint64_t off,
            size_t length, const unsigned char **bytes, struct mn_npy_count *count,
            struct mn_text *text)
{
    if (file->fd < 0 && file->map != NULL) {
        if (off > file->map->guard.size || length > file->map->guard.size - off) {
            return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
        }
        mn_npy_count(count, off, length, 0, 1);
        *bytes = file->map->guard.bytes + off;
        return 0;
    }
    size_t before = file->direct ? (size_t)(off % MN_NPY_BLOCK) : 0;
    size_t span = before + length;
    if (file->direct) {
        span = (span + MN_NPY_BLOCK - 1) / MN_NPY_BLOCK * MN_NPY_BLOCK;
    }
    int rc = buffer_grow(buffer, span, text);
    if (rc < 0) {
        return rc;
    }
    int64_t got = read_fully(file, buffer->bytes, span, off - before, text);
    if (got < 0) {
        return (int)got;
    }
    if (got > 0) {
        mn_npy_count(count, off - before, (uint64_t)got, 0, 1);
    }
    if ((uint64_t)got < before + length) {
        return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
    }
    *bytes = buffer->bytes + before;
    return 0;
}

void
mn_npy_ahead(const struct mn_npy_file *file, uint64_t off, uint64_t length)
{
    if (file->map != NULL) {
        mn_map_ahead(file->map, off, length);
    } else {
        (void)posix_fadvise(file->fd, (off_t)off, (off_t)length, POSIX_FADV_WILLNEED);
    }
}

static int
read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer, struct mn_text *text)
{
    uint64_t need = 512;
    struct mn_npy_count ignored = {0};
    /* The first read gives the length of the header, and the second has all of it. The third is for
     * a file that was rewritten between the two. */
    for (int attempt = 0; attempt < 3; attempt++) {
        uint64_t length = need < file->identity.size ? need : file->identity.size;
        const unsigned char *head = NULL;
        int rc = mn_npy_read(file, buffer, 0, (size_t)length, &head, &ignored, text);
        if (rc < 0) {
            return rc;
        }
        rc = mn_npy_parse(&file->npy, head, (size_t)length, file->identity.size, file->path,
                          &need, text);
        if (rc <= 0) {
            return rc;
        }
    }
    return mn_fail(text, EINVAL, "%s: malformed .npy header", file->path);
}

int
mn_npy_read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer,
                   struct mn_text *text)
{
    mn_npy_begin(file); /* for a file that was found mapped and whose header was not cached */
    return mn_npy_end(file, read_header(file, buffer, text), text);
}
