/* .npy files: parsing the header and reading parts of the body.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Format versions 1.0, 2.0 and 3.0 as numpy.lib.format describes them. Accepted are
 * little-endian arrays of the dtypes of minato/ops.h, C order, four axes (channel, depth,
 * height, width), none of them empty, whose bytes make up exactly the rest of the file.
 * Everything else is an error that names the file and says what was found.
 *
 * Where a file can be mapped it is (mn_map.h), and reading it is pointing into the mapping;
 * all that looks at the bytes stands between mn_npy_begin and mn_npy_end. Elsewhere reads are
 * pread calls into the caller's buffer. Either way a file that shrinks while it is read is an
 * error and not a signal. With `direct` the page cache is bypassed (O_DIRECT); a file system
 * that cannot do that is an error, not a silent change.
 */
#ifndef MN_NPY_H
#define MN_NPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "minato/ops.h"
#include "ops/mn_fail.h"
#include "ops/mn_map.h"

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

struct mn_npy_file {
    const char *path; /* borrowed, for messages */
    int fd;           /* -1: not open, or no more needed because it is mapped */
    struct mn_map *map; /* NULL: not mapped; else this file's own until it is closed */
    bool direct;
    bool newly_mapped; /* by this very opening */
    struct mn_npy_identity identity;
    struct mn_npy npy;
};

/* Memory that reads go to and grow: aligned to MN_NPY_BLOCK. */
struct mn_npy_buffer {
    unsigned char *bytes;
    size_t size;
};

/* What was taken from files. */
struct mn_npy_count {
    uint64_t bytes;   /* copied, or looked at */
    uint64_t touched; /* of the blocks of MN_NPY_BLOCK bytes that these lie in */
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

/* Opens the file, or finds it mapped, and fills in all but npy. Maps NULL: never map. A file
 * that was opened is read by calls until mn_npy_header_known: its header, so that no fault need
 * wait for it. */
int
mn_npy_open(struct mn_npy_file *file, struct mn_maps *maps, const char *path, bool direct,
            struct mn_text *text);

/* The header is known: what is mapped needs no descriptor any more. */
void
mn_npy_header_known(struct mn_npy_file *file);

/* Opens a mapped file, to read it by calls as well; *again is only for the next function,
 * mn_npy_read and mn_npy_close. Leaves its fd at -1 if there is another file now. */
void
mn_npy_open_again(struct mn_npy_file *again, const struct mn_npy_file *file);

/* Whether this byte can be read without waiting for the disk; true where nobody knows. */
bool
mn_npy_is_cached(const struct mn_npy_file *again, uint64_t off);

/* Around all that looks at bytes which mn_npy_read gave, or at the mapping itself: from here
 * on they may turn out to be gone. */
void
mn_npy_begin(const struct mn_npy_file *file);

/* Returns rc, or the error that the bytes since mn_npy_begin were not the file's. */
int
mn_npy_end(const struct mn_npy_file *file, int rc, struct mn_text *text);

/* Reads and parses the header of an open file, before mn_npy_header_known. */
int
mn_npy_read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer,
                   struct mn_text *text);

/* Reads `length` bytes from `off`; *bytes points into the mapping, else into the buffer, and
 * stays valid until its next use. *count grows. */
int
mn_npy_read(const struct mn_npy_file *file, struct mn_npy_buffer *buffer, uint64_t off,
            size_t length, const unsigned char **bytes, struct mn_npy_count *count,
            struct mn_text *text);

/* These bytes will be read soon: the page cache may fetch them now. Waits for nothing. */
void
mn_npy_ahead(const struct mn_npy_file *file, uint64_t off, uint64_t length);

/* Adds `n` pieces of `length` bytes each, `stride` apart, the first (in the file) at `off`. */
void
mn_npy_count(struct mn_npy_count *count, uint64_t off, uint64_t length, uint64_t stride,
             uint64_t n);

/* Makes the buffer hold at least `size` bytes; what it held is lost. */
int
mn_npy_buffer_grow(struct mn_npy_buffer *buffer, size_t size, struct mn_text *text);

void
mn_npy_buffer_fini(struct mn_npy_buffer *buffer);

/* What was mapped goes (back) to `maps`. */
void
mn_npy_close(struct mn_npy_file *file, struct mn_maps *maps);

#endif /* MN_NPY_H */
