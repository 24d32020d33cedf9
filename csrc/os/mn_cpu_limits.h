/* How many CPUs this process may keep busy.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The smallest of the affinity mask and every CPU quota from this process's control group up to the
 * root (versions 1 and 2). A quota is rounded up: half a CPU is worth an extra worker, since
 * workers wait for storage part of their time.
 */
#ifndef MN_CPU_LIMITS_H
#define MN_CPU_LIMITS_H

#include <stdint.h>

/* Returns at least 1. Reads files: call it at the start and rarely afterwards. */
int
mn_cpu_count(void);

/* Does the same with root put before every path that is read, for tests. */
int
mn_cpu_count_at(const char *root);

/* Adds up for how long quotas have stopped the groups from this process's own up to the root, in
 * nanoseconds. Returns 0, or -ENOENT if none of them counts that. */
int
mn_cpu_throttled(uint64_t *ns);

int
mn_cpu_throttled_at(const char *root, uint64_t *ns);

#endif
