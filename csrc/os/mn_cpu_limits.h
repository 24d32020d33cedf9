/* How many CPUs this process may keep busy.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The smaller of the affinity mask and of every CPU quota from this process's control
 * group up to the root (versions 1 and 2). A quota is rounded up: half a CPU more is worth
 * a worker, since workers wait for storage part of their time.
 */
#ifndef MN_CPU_LIMITS_H
#define MN_CPU_LIMITS_H

/* At least 1. Reads files: ask at start and rarely after. */
int
mn_cpu_count(void);

/* The same with root put before every path that is read, for tests. */
int
mn_cpu_count_at(const char *root);

#endif /* MN_CPU_LIMITS_H */
