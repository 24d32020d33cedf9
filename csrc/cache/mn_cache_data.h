/* The data of a cache file: how its bytes are read and written.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   The only difference between the two kinds of cache. In memory the data is mapped, and is read
 *   through the mapping. On a disk it is read by pread. So a block that cannot be read is an error
 *   of a call, and never a signal. What the kernel has of the file in its page cache is what other
 *   processes see, at once.
 *   Both are written by pwrite, because the kernel need not clear a page that it fills whole, and
 *   takes no fault for it: a MB in memory takes 0.42 ms of CPU in place of 0.72. Heads and seals in
 *   memory are stored through the mapping, because readers rely on the order of these stores.
 *
 * All offsets are from the begin of the data. Callers stay within the segment that they mean.
 */
#ifndef MN_CACHE_DATA_H
#define MN_CACHE_DATA_H

#include <stdbool.h>
#include <stdint.h>

#include "cache/mn_cache_records.h"

struct mn_cache_part {
    const void *data;
    uint64_t bytes;
};

/* Copies bytes out. 0 or -errno. */
int
mn_cache_data_read(const struct mn_cache_map *map, uint64_t off, void *to, uint64_t bytes);

/* Where these bytes can be looked at: in the mapping, or in `scratch`, to which they are read.
 * NULL: they cannot be read. */
const void *
mn_cache_data_view(const struct mn_cache_map *map, uint64_t off, uint64_t bytes, void *scratch);

/* What an entry says of itself; false: it cannot be read. */
bool
mn_cache_data_head(const struct mn_cache_map *map, uint64_t off, struct mn_cache_head *head,
                   uint64_t *seal);

/* Writes an entry: description and parts, each padded to a unit, their checksums, the head with
 * `sums` set, and its seal last of all. 0 or -errno; the seal is not written then. */
int
mn_cache_data_write(const struct mn_cache_map *map, uint64_t off, const struct mn_cache_head *head,
                    const struct mn_cache_part *description, const struct mn_cache_part *parts,
                    uint64_t nparts);

/* Gives a range of the file, from the begin of the file, its pages or blocks. 0 or -errno.
 *
 * It asks for little at a time. The kernel gives all of a call's pages back if a signal interrupts
 * the call, so a program with a timer of some milliseconds would never get many at once. */
int
mn_cache_data_reserve(int fd, uint64_t off, uint64_t bytes);

/* Whether what was read before came from this file: a program that closes every descriptor may have
 * given the number to another one since. */
bool
mn_cache_data_is_there(const struct mn_cache_map *map);

#endif /* MN_CACHE_DATA_H */
