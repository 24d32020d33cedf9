/* .npy files: parsing the header and reading parts of the body.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Format versions 1.0, 2.0 and 3.0 as numpy.lib.format describes them. Accepted are
 * little-endian arrays of the dtypes of minato/ops.h, C order, four axes (channel, depth,
 * height, width), none of them empty, whose bytes make up exactly the rest of the file.
 * Everything else is an error that names the file and says what was found.
 *
 * Reads are pread calls into the caller's buffer: nothing is mapped, so a file that
 * shrinks while it is read is an error and not a signal. With `direct` the page cache is
 * bypassed (O_DIRECT); a file system that cannot do that is an error, not a silent change.
 */
#ifndef MN_NPY_H
#define MN_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "minato/ops.h"
#include "ops/mn_fail.h"

/* Longest header read; NumPy's own are 128 bytes. */
#define MN_NPY_HEADER_MAX 65536
/* Offsets and lengths of direct reads are multiples of this: no block device needs more. */
#define MN_NPY_BLOCK 4096

struct mn_npy {
    int dtype; /* enum mn_dtype */
    int64_t shape[MN_VOLUME_DIMS];
    uint64_t data_off;   /* of the first voxel in the file */
    uint64_t data_bytes; /* of all voxels */
};

/* What names a state of a file: a changed file differs in one of these. */
struct mn_npy_identity {
    uint64_t device, inode, size;
    int64_t mtime_ns;
};

struct mn_npy_file {
    const char *path; /* borrowed, for messages */
    int fd;           /* -1: not open */
    bool direct;
    struct mn_npy_identity identity;
    struct mn_npy npy;
};

/* Memory that reads go to and grow: aligned to MN_NPY_BLOCK. */
struct mn_npy_buffer {
    unsigned char *bytes;
    size_t size;
};

/* Bytes of one voxel of a dtype, 0 for an unknown one. */
size_t
mn_dtype_size(int dtype);

/* "float32" and so on, "no dtype" for an unknown one. */
const char *
mn_dtype_name(int dtype);

/* Parses the first `length` bytes of a file of file_size bytes. A pure function.
 * Returns 0; 1 if more than `length` bytes are needed, their number then in *need;
 * or -EINVAL. `path` is only named in texts. */
int
mn_npy_parse(struct mn_npy *npy, const unsigned char *head, size_t length,
             uint64_t file_size, const char *path, uint64_t *need, struct mn_text *text);

/* Opens the file and fills in fd and identity; not npy. */
int
mn_npy_open(struct mn_npy_file *file, const char *path, bool direct, struct mn_text *text);

/* Reads and parses the header of an open file. */
int
mn_npy_read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer,
                   struct mn_text *text);

/* Reads `length` bytes from `off`; *bytes points into the buffer and stays valid until its
 * next use. *read_bytes grows by what was read from the file. */
int
mn_npy_read(const struct mn_npy_file *file, struct mn_npy_buffer *buffer, uint64_t off,
            size_t length, const unsigned char **bytes, uint64_t *read_bytes,
            struct mn_text *text);

/* Makes the buffer hold at least `size` bytes; what it held is lost. */
int
mn_npy_buffer_grow(struct mn_npy_buffer *buffer, size_t size, struct mn_text *text);

void
mn_npy_buffer_fini(struct mn_npy_buffer *buffer);

void
mn_npy_close(struct mn_npy_file *file);

#endif /* MN_NPY_H */
