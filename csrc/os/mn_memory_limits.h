/* How much memory this process may use, in bytes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The machine's figures from /proc/meminfo, lowered by every memory limit from this process's
 * control group up to the root (versions 1 and 2). A group's use counts without its inactive file
 * cache, which the kernel drops before it refuses memory; pages of shared memory files do count.
 * Where /proc cannot be read, the kernel is asked, which knows of no group. 0 means unknown.
 */
#ifndef MN_MEMORY_LIMITS_H
#define MN_MEMORY_LIMITS_H

#include <stdint.h>
#include <sys/types.h>

/* Returns the most that this process could ever have: RAM or the lowest limit. */
uint64_t
mn_mem_total(void);

/* Returns what could be allocated now without swapping or meeting a limit. */
uint64_t
mn_mem_available(void);

/* Returns what a process would free if it ended now: pages that no other process has. 0: unknown.
 * Takes milliseconds if the process is large: call it seldom. */
uint64_t
mn_mem_private(pid_t pid);

/* Do the same with root put before every path that is read, for tests. */
uint64_t
mn_mem_total_at(const char *root);

uint64_t
mn_mem_available_at(const char *root);

/* Returns the bytes of address space that this process may still map: what RLIMIT_AS leaves.
 * UINT64_MAX without a limit. Where /proc does not say what is mapped already, half of the
 * limit. */
uint64_t
mn_mem_address_space(void);

/* Returns private zeroed pages, which go back to the system when they are freed; NULL: no
 * memory. */
void *
mn_mem_pages(uint64_t bytes);

void
mn_mem_pages_free(void *pages, uint64_t bytes);

#endif
