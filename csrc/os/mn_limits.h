/* How many CPUs and how much memory this process may use: machine, affinity, control groups.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A limit set on any control group from the process's own up to the root holds. So all of them are
 * visited, in version 2 and in version 1. In a container the path in /proc/self/cgroup may be the
 * host's and not exist below the mount. The walk upwards then ends at the mount point itself, which
 * is the container's group.
 *
 * root: put before every path that is read; "", but for tests.
 */
#ifndef MN_LIMITS_H
#define MN_LIMITS_H

#include <stdint.h>
#include <sys/types.h>

/* ---- How many CPUs this process may keep busy ----
 *
 * The smallest of the affinity mask and every CPU quota from this process's control group up to the
 * root (versions 1 and 2). A quota is rounded up: half a CPU is worth an extra worker, since
 * workers wait for storage part of their time.
 */

/* Returns at least 1. Reads files: call it at the start and rarely afterwards. */
int
mn_cpu_count(const char *root);

/* Adds up for how long quotas have stopped the groups from this process's own up to the root, in
 * nanoseconds. Returns 0, or -ENOENT if none of them counts that. */
int
mn_cpu_throttled(const char *root, uint64_t *ns);

/* ---- How much memory this process may use, in bytes ----
 *
 * The machine's figures from /proc/meminfo, lowered by every memory limit from this process's
 * control group up to the root (versions 1 and 2). A group's use counts without its inactive file
 * cache, which the kernel drops before it refuses memory; pages of shared memory files do count.
 * Where /proc cannot be read, the kernel is asked, which knows of no group. 0 means unknown.
 */

/* Returns the most that this process could ever have: RAM or the lowest limit. */
uint64_t
mn_mem_total(const char *root);

/* Returns what could be allocated now without swapping or meeting a limit. */
uint64_t
mn_mem_available(const char *root);

/* Returns what a process would free if it ended now: pages that no other process has. 0: unknown.
 * Takes milliseconds if the process is large: call it seldom. */
uint64_t
mn_mem_private(pid_t pid);

/* Returns the bytes of address space that this process may still map: what RLIMIT_AS leaves.
 * UINT64_MAX without a limit. Where /proc does not say what is mapped already, half of the
 * limit. */
uint64_t
mn_mem_address_space(void);

#endif
