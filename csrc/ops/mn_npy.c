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
#include <unistd.h>

#include "base/mn_attr.h"

MN_STATIC_ASSERT(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                 "voxels are used as they lie in the file, which is little-endian");

int
mn_npy_buffer_grow(struct mn_npy_buffer *buffer, size_t size, struct mn_text *text)
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

static int
identify(struct mn_npy_file *file, struct mn_text *text)
{
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return fail_errno(text, file->path, "fstat");
    }
    if (!S_ISREG(st.st_mode)) {
        return mn_fail(text, EINVAL, "%s: is no regular file", file->path);
    }
    file->identity = (struct mn_npy_identity){
        .device = (uint64_t)st.st_dev,
        .inode = (uint64_t)st.st_ino,
        .size = (uint64_t)st.st_size,
        .mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec,
    };
    return 0;
}

int
mn_npy_open(struct mn_npy_file *file, const char *path, bool direct, struct mn_text *text)
{
    *file = (struct mn_npy_file){.path = path, .fd = -1, .direct = direct};
    /* O_NONBLOCK: a FIFO in place of the file must not hang the worker. */
    int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    do {
        file->fd = open(path, flags | (direct ? O_DIRECT : 0));
    } while (file->fd < 0 && errno == EINTR);
    if (file->fd < 0) {
        return direct && errno == EINVAL ? fail_direct(text, path)
                                         : fail_errno(text, path, "cannot be opened");
    }
    int rc = identify(file, text);
    if (rc < 0) {
        mn_npy_close(file);
    }
    return rc;
}

void
mn_npy_close(struct mn_npy_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        file->fd = -1;
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
            size_t length, const unsigned char **bytes, uint64_t *read_bytes,
            struct mn_text *text)
{
    size_t before = file->direct ? (size_t)(off % MN_NPY_BLOCK) : 0;
    size_t span = before + length;
    if (file->direct) {
        span = (span + MN_NPY_BLOCK - 1) / MN_NPY_BLOCK * MN_NPY_BLOCK;
    }
    int rc = mn_npy_buffer_grow(buffer, span, text);
    if (rc < 0) {
        return rc;
    }
    int64_t got = read_fully(file, buffer->bytes, span, off - before, text);
    if (got < 0) {
        return (int)got;
    }
    *read_bytes += (uint64_t)got;
    if ((uint64_t)got < before + length) {
        return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
    }
    *bytes = buffer->bytes + before;
    return 0;
}

int
mn_npy_read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer,
                   struct mn_text *text)
{
    uint64_t need = 512, ignored = 0;
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
