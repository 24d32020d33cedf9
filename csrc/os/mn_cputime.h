/* How busy CPUs and processes have been.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Cumulative times; callers take differences. Facts read from /proc, a few microseconds a
 * call: ask some times a second, not per sample.
 */
#ifndef MN_CPUTIME_H
#define MN_CPUTIME_H

#include <stdint.h>
#include <sys/types.h>

/* Ticks since boot that the CPUs this process may run on were not idle, and ticks in all. 0 or
 * -errno. */
int
mn_cputime_machine(uint64_t *busy, uint64_t *total);

/* Nanoseconds on a CPU of the process's first thread. 0 or -errno. */
int
mn_cputime_process(pid_t pid, uint64_t *ns);

/* Nanoseconds that it was ready to run and had no CPU. 0 or -errno. */
int
mn_cputime_queued(pid_t pid, uint64_t *ns);

#endif /* MN_CPUTIME_H */
