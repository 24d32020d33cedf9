/* .npy files: parsing the header and reading parts of the body.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Format versions 1.0, 2.0 and 3.0 as numpy.lib.format describes them. Accepted are little-endian
 * arrays of the dtypes of minato/ops.h, C order, with four axes (channel, depth, height, width),
 * none of them empty. Their bytes must make up exactly the rest of the file. Any other file is an
 * error that names the file and says what was found.
 *
 * A file is mapped if possible, and reading it is pointing into the mapping. All code
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

#include "base/mn_atomic.h"
#include "minato/ops.h"
#include "ops/mn_fail.h"

/* ---- Mappings of files that are kept between samples ----
 *
 * Why mapped, and why kept
 *   A crop needs short rows far apart: of a plane's band of rows about a third to a half. Read
 *   by calls, either the band is copied twice (pread, then the rows out of it), or each row is
 *   a call. Measured on six real cases, patch 128^3, 10.5 MB, one core, page cache warm. Bands by
 *   pread took 1.8 ms and 21 to 28 MB. Files mapped and unmapped each time took 1.3 ms, files kept
 *   mapped 0.9 ms. Copying within memory takes about the same again. Prefetching rows and stores
 *   past the cache changed nothing. A label's scan for boxes is spared a copy, too.
 *
 * Files that are not in the page cache
 *   A fault reads a piece around it, waits, and leaves small pages behind. So headers are read by
 *   calls. A crop that had to wait asks for all its remaining planes at once
 *   (mn_pipeline_sample.c). A scan reads by calls from the first voxels that are not in memory
 *   (mn_pipeline_sample.c). Measured on the same files, dropped from the cache each time. A crop
 *   took 60 to 69 ms, against 70 to 76 by calls alone. Scan and crop took 55 against 62, and a scan
 *   was as fast as by calls.
 *
 * Ownership
 *   A mapping has one owner at a time: the table, or the work of one sample. The work takes it out
 *   by exchange and puts it back by compare-and-swap. Two threads that want one file at once have a
 *   mapping each, and the table keeps both. So there is no count of users, no mapping vanishes
 *   under a reader, and only one thread sees the zeros of a guard. There is also no lock
 *   for a fork to copy while it is held. Mappings that other threads had out at a fork stay mapped
 *   in the child, unused.
 *
 * Bounds
 *   MN_MAPS mappings, and as many bytes as the machine has memory (more cannot be in the page
 *   cache). Files beyond that are read by calls. An epoch asks for each file once. So a mapping
 *   that takes the place of another would itself be gone when it is asked for again. Measured on
 *   crops of 16^3 and 32^3 from 3000 files of 40^3. Mapping and unmapping all the time cost 1.3 to
 *   1.7 times as much as calls. While all files fit, mappings cost half. Only one in MN_MAPS_TURN
 *   files replaces the mapping that was put back longest ago. So mappings of unused files are
 *   dropped in the end. No descriptor stays open. The pages are page cache: the kernel takes them
 *   back when it needs memory. A process's resident and proportional set sizes nevertheless count
 *   those it has mapped. Page tables are its own: at most 1/512 of the bytes. The space of a
 *   deleted file is free again when its mapping is dropped.
 *
 * Changed files
 *   Each use compares the file's identity, found by the path, with that of the mapping.
 *
 * Where there is no mapping
 *   map_open returns NULL, and the caller reads the file instead, in three cases. The table is
 *   full, the system refuses the mapping, or the file system may not be on this machine. (A network
 *   file system may notice another machine's change only at open, and can raise SIGBUS when its
 *   server is gone.)
 */

/* ---- Reading mapped files that may shrink meanwhile ----
 *
 * Purpose
 *   A mapped page may be missing: its file has shrunk, or the disk cannot deliver it. Reading the
 *   page raises SIGBUS in the thread, which ends the program. Between guard_enter and
 *   guard_leave it does not: the mapping reads as zeros from then on, and guard_leave
 *   says that they must not be used.
 *
 * How
 *   The handler checks whether the fault lies in the range that its own thread has entered (a
 *   thread-local pointer). If so it puts zero pages in place of the whole range, notes it, and
 *   lets the instruction run again. It never jumps out of the reading code, so nothing is left
 *   half done. The range must belong to this thread alone: it is replaced.
 *
 *   Each guard_enter checks that our handler is installed and installs it if it is not. So
 *   code that installs another one later (faulthandler.enable, another library) disables ours
 *   only until the next section. The previous handler is remembered. A SIGBUS that is not
 *   ours puts it back and comes again. A fault by running the instruction again, and a signal that
 *   was sent by sending it again. If that leads back here, the other code has our handler as its
 *   predecessor; then the default action is taken. The handler stays installed after
 *   guard_leave, where it has no range and so only does that.
 *
 *   The kernel ends the program if a fault's signal is blocked, as it is in native workers, so
 *   SIGBUS is unblocked within the section.
 *
 * Processes
 *   A fork inherits the handler with all that it needs; its one thread is in no section. An
 *   exec resets it.
 */

struct mn_guard {
    unsigned char *bytes; /* page aligned */
    size_t size;
    mn_a32 lost;  /* zeros have replaced the mapping */
    bool blocked; /* whether SIGBUS was blocked before guard_enter */
};

/* A 64th of the mappings that Linux gives a process (vm.max_map_count, 65530): other pipelines and
 * other code need mappings, too. Twice the 420 files of KiTS19. */
#define MN_MAPS 1024
/* Slots where a path's mapping may be. There are few enough to look at each, many enough that a
 * mapping finds one in a table that is half full. */
#define MN_MAPS_WAYS 16
#define MN_MAPS_TURN 64

/* The identity of a state of a file: a changed file differs in one of these. */
struct mn_npy_identity {
    uint64_t device, inode, size;
    int64_t mtime_ns;
};

struct mn_map {
    struct mn_npy_identity identity;
    uint64_t hash; /* of the path */
    bool lost;     /* reads as zeros, or gone: do not keep it */
    struct mn_guard guard; /* the mapping itself */
    char path[];
};

struct mn_map_slot {
    mn_a64 map; /* struct mn_map *, or 0 */
    mn_a64 hash, stamp; /* hints: may belong to an earlier mapping until the slot's next use */
};

/* Zeroed memory with most_bytes set is an empty table. */
struct mn_maps {
    struct mn_map_slot slots[MN_MAPS];
    mn_a64 clock;
    mn_a64 bytes;  /* of all mappings, in the table or not */
    mn_a64 misfits; /* files that found no room */
    uint64_t most_bytes; /* bound of all mappings */
};

/* Returns the FNV-1a hash of a path. */
uint64_t
mn_path_hash(const char *path);

/* Returns whether both identify the same state of a file. */
bool
mn_same_identity(const struct mn_npy_identity *a, const struct mn_npy_identity *b);

/* Unmaps all mappings in the table; no thread may use it any more. */
void
mn_maps_fini(struct mn_maps *maps);

/* Returns whether this thread had to wait for the disk at a page of any mapping since the last call
 * with this counter. */
bool
mn_map_waited(uint64_t *counter);

/* ---- Files ---- */

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

/* Memory for reads, which grows; aligned to MN_NPY_BLOCK. The owner frees `bytes`. */
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

/* Returns "<f4" and so on, as headers of files say it. */
const char *
mn_dtype_code(int dtype);

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

/* Closes the file. Its mapping goes (back) to `maps`. */
void
mn_npy_close(struct mn_npy_file *file, struct mn_maps *maps);

#endif
