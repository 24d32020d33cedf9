/* Finds the files of the control groups that this process is in.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Shared by mn_cpu_limits.c and mn_memory_limits.c. A limit set on any group from the process's own
 * up to the root holds. So all of them are visited, in version 2 and in version 1. In a container
 * the path in /proc/self/cgroup may be the host's and not exist below the mount. The walk upwards
 * then ends at the mount point itself, which is the container's group.
 */
#ifndef MN_CGROUP_H
#define MN_CGROUP_H

#include <stdint.h>

#define MN_CGROUP_PATH_MAX 4096

/* Calls visit with the directory of every group of that version 1 controller ("cpu", "memory") and
 * of version 2, own group first. version is 1 or 2; root is put before each path. Directories that
 * do not exist are visited, too. */
void
mn_cgroup_each(const char *root, const char *controller,
               void (*visit)(void *arg, int version, const char *dir), void *arg);

/* Reads dir/file whole, at most size - 1 bytes, as a string. Returns 0 or -errno. */
int
mn_cgroup_read(const char *dir, const char *file, char *text, uint64_t size);

/* Reads the number that dir/file begins with; UINT64_MAX for "max". Returns 0, -errno, -EPROTO. */
int
mn_cgroup_number(const char *dir, const char *file, uint64_t *value);

/* Finds the line "key number" in a text of such lines. Returns 0 or -ENOENT. */
int
mn_cgroup_keyed(const char *text, const char *key, uint64_t *value);

#endif
