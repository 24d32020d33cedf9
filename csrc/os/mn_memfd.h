/* A sparse, nameless, shared memory file, and operations on ranges of it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: the memory that trainer and workers share. Its size is address space only; a page costs
 * memory from its first touch until it is punched.
 * Actors: one process creates it; that process and its forks map, populate and mark; only the owner
 * of the allocator punches.
 * A crash leaves nothing: the file is gone with its last descriptor and mapping.
 *
 *   mn_memfd_create      close(fd)
 *   mn_memfd_map         mn_memfd_unmap
 *   mn_memfd_populate    mn_memfd_punch_mapped     (page in, page out)
 *
 * All functions return 0 or a negative errno unless they say otherwise. Ranges are widened to whole
 * pages, except for punching.
 */
#ifndef MN_MEMFD_H
#define MN_MEMFD_H

#include <stdint.h>

/* Returns a descriptor (close-on-exec) of a sparse file of that size; -EINVAL for 0. */
int
mn_memfd_create(const char *name, uint64_t bytes);

/* The same for a file without bytes, which can be sealed. */
int
mn_memfd_create_empty(const char *name);

/* Maps [0, bytes) shared, readable and writable, without reserving memory or swap. */
int
mn_memfd_map(int fd, uint64_t bytes, void **out);

int
mn_memfd_unmap(void *addr, uint64_t bytes);

/* Returns the pages that lie wholly in the range to the system; they then read as zero. Works
 * through the mapping, because the descriptor may be closed by now. */
int
mn_memfd_punch_mapped(void *addr, uint64_t len);

/* Makes the range writable without further faults. Its content stays, even content that another
 * process writes meanwhile. -ENOMEM or -EFAULT if memory is short. */
int
mn_memfd_populate(void *addr, uint64_t len);

/* Keeps the range out of core dumps, which would make the sparse file solid. */
int
mn_memfd_dontdump(void *addr, uint64_t len);

/* Hides the range from children of this process. */
int
mn_memfd_dontfork(void *addr, uint64_t len);

#endif
