/* Mappings of files that are kept between samples.
 * SPDX-License-Identifier: Apache-2.0
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
 *   calls. A crop that had to wait asks for all its remaining planes at once (mn_view.c). A scan
 *   reads by calls from the first voxels that are not in memory (mn_pipeline_sample.c). Measured on
 *   the same files, dropped from the cache each time. A crop took 60 to 69 ms, against 70 to 76 by
 *   calls alone. Scan and crop took 55 against 62, and a scan was as fast as by calls.
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
 *   mn_map_open returns NULL, and the caller reads the file instead, in three cases. The table is
 *   full, the system refuses the mapping, or the file system may not be on this machine. (A network
 *   file system may notice another machine's change only at open, and can raise SIGBUS when its
 *   server is gone.)
 */
#ifndef MN_MAP_H
#define MN_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/mn_atomic.h"

/* ---- Reading mapped files that may shrink meanwhile ----
 *
 * Purpose
 *   A mapped page may be missing: its file has shrunk, or the disk cannot deliver it. Reading the
 *   page raises SIGBUS in the thread, which ends the program. Between mn_guard_enter and
 *   mn_guard_leave it does not: the mapping reads as zeros from then on, and mn_guard_leave
 *   says that they must not be used.
 *
 * How
 *   The handler checks whether the fault lies in the range that its own thread has entered (a
 *   thread-local pointer). If so it puts zero pages in place of the whole range, notes it, and
 *   lets the instruction run again. It never jumps out of the reading code, so nothing is left
 *   half done. The range must belong to this thread alone: it is replaced.
 *
 *   Each mn_guard_enter checks that our handler is installed and installs it if it is not. So
 *   code that installs another one later (faulthandler.enable, another library) disables ours
 *   only until the next section. The previous handler is remembered. A SIGBUS that is not
 *   ours puts it back and comes again. A fault by running the instruction again, and a signal that
 *   was sent by sending it again. If that leads back here, the other code has our handler as its
 *   predecessor; then the default action is taken. The handler stays installed after
 *   mn_guard_leave, where it has no range and so only does that.
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
    bool blocked; /* whether SIGBUS was blocked before mn_guard_enter */
};

/* Begins a section in which the calling thread reads the range. Sections do not nest. */
void
mn_guard_enter(struct mn_guard *guard);

/* Ends the section. Returns false if the thread may have read something else than the file. */
bool
mn_guard_leave(struct mn_guard *guard);

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

struct mn_maps {
    struct mn_map_slot slots[MN_MAPS];
    mn_a64 clock;
    mn_a64 bytes;  /* of all mappings, in the table or not */
    mn_a64 misfits; /* files that found no room */
    uint64_t most_bytes;
};

/* Returns the FNV-1a hash of a path. */
uint64_t
mn_path_hash(const char *path);

/* Returns whether both identify the same state of a file. */
bool
mn_same_identity(const struct mn_npy_identity *a, const struct mn_npy_identity *b);

/* Makes an empty table. most_bytes: bound of all mappings. */
void
mn_maps_init(struct mn_maps *maps, uint64_t most_bytes);

/* Unmaps all mappings in the table; no thread may use it any more. */
void
mn_maps_fini(struct mn_maps *maps);

/* Takes a mapping of this path, which the caller then owns; NULL if there is none. Its identity may
 * be out of date. */
struct mn_map *
mn_maps_take(struct mn_maps *maps, const char *path);

/* Returns the mapping to the table, which may unmap it at once. */
void
mn_maps_put(struct mn_maps *maps, struct mn_map *map);

/* Maps an open file that has this identity. The caller owns the mapping, and must put or close it.
 * NULL: read the file by calls. */
struct mn_map *
mn_map_open(struct mn_maps *maps, int fd, const char *path,
            const struct mn_npy_identity *identity);

/* Unmaps a mapping; NULL is allowed. */
void
mn_map_close(struct mn_maps *maps, struct mn_map *map);

/* Starts to read these bytes from the disk, unless they are in the page cache. */
void
mn_map_ahead(const struct mn_map *map, uint64_t off, uint64_t length);

/* Returns whether this thread had to wait for the disk at a page of any mapping since the last call
 * with this counter. */
bool
mn_map_waited(uint64_t *counter);

#endif
