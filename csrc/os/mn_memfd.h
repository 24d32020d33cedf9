/* One sparse, nameless, shared memory file and what can be done to ranges of it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: the memory that trainer and workers share. Its size is address space only; a
 * page costs memory once it is touched and stops costing it once it is punched.
 * Actors: one process creates; it and its forks map, populate and mark; only the owner of
 * the allocator punches.
 * A crash leaves nothing: the file goes with its last descriptor and mapping.
 *
 *   mn_memfd_create      close(fd)
 *   mn_memfd_map         mn_memfd_unmap
 *   mn_memfd_create_empty, mn_memfd_map_empty: likewise
 *   mn_memfd_populate    mn_memfd_punch_mapped     (page in, page out)
 *
 * All functions return 0 or a negative errno unless they say otherwise. Ranges are widened to
 * whole pages but for punching.
 */
#ifndef MN_MEMFD_H
#define MN_MEMFD_H

#include <stdbool.h>
#include <stdint.h>

/* Returns a descriptor (close-on-exec) of a sparse file of that size; -EINVAL for 0. */
int
mn_memfd_create(const char *name, uint64_t bytes);

/* A descriptor of a file without bytes: a mark that goes from process to process with its
 * mapping. */
int
mn_memfd_create_empty(const char *name);

/* A page that nobody may touch. */
int
mn_memfd_map_empty(int fd, void **out);

/* Of such a file: whether any process has it mapped. Not to be mapped again once none has: it is
 * sealed then, and later mappings are not told of. */
bool
mn_memfd_is_mapped(int fd);

/* Maps [0, bytes) shared, readable and writable, without reserving memory or swap. */
int
mn_memfd_map(int fd, uint64_t bytes, void **out);

int
mn_memfd_unmap(void *addr, uint64_t bytes);

/* Gives the pages that lie wholly in the range back to the system; they read as zero. Through
 * the mapping, because the descriptor may be closed by now. */
int
mn_memfd_punch_mapped(void *addr, uint64_t len);

/* Makes the range writable without further faults. Content stays, even content that
 * another process writes meanwhile. -ENOMEM or -EFAULT when memory is short. */
int
mn_memfd_populate(void *addr, uint64_t len);

/* Keeps the range out of core dumps, which would make the sparse file solid. */
int
mn_memfd_dontdump(void *addr, uint64_t len);

/* Keeps the range out of children of this process. */
int
mn_memfd_dontfork(void *addr, uint64_t len);

#endif /* MN_MEMFD_H */
