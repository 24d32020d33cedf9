/* How busy CPUs and processes have been.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Cumulative times; callers take differences. Read from /proc, a few microseconds per call: call
 * them some times a second, not per sample.
 */
#ifndef MN_CPUTIME_H
#define MN_CPUTIME_H

#include <stdint.h>
#include <sys/types.h>

/* Reads the ticks since boot in which the CPUs that this process may run on were not idle, and all
 * ticks. Returns 0 or -errno. */
int
mn_cputime_machine(uint64_t *busy, uint64_t *total);

/* Reads the nanoseconds that the process's first thread spent on a CPU. Returns 0 or -errno. */
int
mn_cputime_process(pid_t pid, uint64_t *ns);

/* Reads the nanoseconds that it was ready to run but had no CPU. Returns 0 or -errno. */
int
mn_cputime_queued(pid_t pid, uint64_t *ns);

#endif
