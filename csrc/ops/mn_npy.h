/* .npy files: parsing the header and reading parts of the body.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Format versions 1.0, 2.0 and 3.0 as numpy.lib.format describes them. Accepted are little-endian
 * arrays of the dtypes of minato/ops.h, C order, with four axes (channel, depth, height, width),
 * none of them empty. Their bytes must make up exactly the rest of the file. Any other file is an
 * error that names the file and says what was found.
 *
 * A file is mapped if possible (mn_map.h), and reading it is pointing into the mapping. All code
 * that looks at the bytes stands between mn_npy_begin and mn_npy_end. Otherwise reads are pread
 * calls into the caller's buffer. Either way a file that shrinks while it is read is an error and
 * not a signal. With `direct` the page cache is bypassed (O_DIRECT); a file system that cannot do
 * that is an error, not a silent change.
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
    int fd;           /* -1: not open, or no longer needed because it is mapped */
    struct mn_map *map; /* NULL: not mapped; else owned by this file until it is closed */
    bool direct;
    bool newly_mapped; /* by this opening */
    struct mn_npy_identity identity;
    struct mn_npy npy;
};

/* Memory for reads, which grows; aligned to MN_NPY_BLOCK. */
struct mn_npy_buffer {
    unsigned char *bytes;
    size_t size;
};

/* Counts of what was read from files. */
struct mn_npy_count {
    uint64_t bytes;   /* copied, or looked at */
    uint64_t touched; /* bytes of all blocks of MN_NPY_BLOCK bytes that they lie in */
};

/* Returns the bytes of one voxel of a dtype, 0 for an unknown one. */
size_t
mn_dtype_size(int dtype);

/* Returns "float32" and so on, "no dtype" for an unknown one. */
const char *
mn_dtype_name(int dtype);

/* Parses the first `length` bytes of a file of file_size bytes. A pure function. Returns 0; 1 if
 * more than `length` bytes are needed, their number then in *need; or -EINVAL. `path` is only for
 * texts. */
int
mn_npy_parse(struct mn_npy *npy, const unsigned char *head, size_t length,
             uint64_t file_size, const char *path, uint64_t *need, struct mn_text *text);

/* Opens the file, or finds it mapped, and fills in all but npy. maps NULL: never map. A file that
 * was opened is read by calls until mn_npy_header_known(), so that no fault need wait for its
 * header. */
int
mn_npy_open(struct mn_npy_file *file, struct mn_maps *maps, const char *path, bool direct,
            struct mn_text *text);

/* The header is known: a mapped file needs no descriptor any more. */
void
mn_npy_header_known(struct mn_npy_file *file);

/* Opens a mapped file again, to read it by calls as well. *again is only for the next function,
 * mn_npy_read and mn_npy_close. Its fd stays -1 if the path has another file now. */
void
mn_npy_open_again(struct mn_npy_file *again, const struct mn_npy_file *file);

/* Returns whether this byte can be read without waiting for the disk; true if that is unknown. */
bool
mn_npy_is_cached(const struct mn_npy_file *again, uint64_t off);

/* Begins a section that looks at bytes from mn_npy_read, or at the mapping itself: from here on
 * they may turn out to be gone. */
void
mn_npy_begin(const struct mn_npy_file *file);

/* Ends the section. Returns rc, or the error that the bytes were not the file's. */
int
mn_npy_end(const struct mn_npy_file *file, int rc, struct mn_text *text);

/* Reads and parses the header of an open file, before mn_npy_header_known. */
int
mn_npy_read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer,
                   struct mn_text *text);

/* Reads `length` bytes from `off`; *bytes points into the mapping, else into the buffer, and stays
 * valid until its next use. Adds to *count. */
int
mn_npy_read(const struct mn_npy_file *file, struct mn_npy_buffer *buffer, uint64_t off,
            size_t length, const unsigned char **bytes, struct mn_npy_count *count,
            struct mn_text *text);

/* Tells the page cache that these bytes will be read soon. Does not wait. */
void
mn_npy_ahead(const struct mn_npy_file *file, uint64_t off, uint64_t length);

/* Adds `n` pieces of `length` bytes each, `stride` apart, the first (in the file) at `off`. */
void
mn_npy_count(struct mn_npy_count *count, uint64_t off, uint64_t length, uint64_t stride,
             uint64_t n);

void
mn_npy_buffer_fini(struct mn_npy_buffer *buffer);

/* Closes the file. Its mapping goes (back) to `maps`. */
void
mn_npy_close(struct mn_npy_file *file, struct mn_maps *maps);

#endif
