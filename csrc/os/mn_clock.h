/* Time, in nanoseconds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: the only place that reads a clock; policies are given its numbers.
 * The monotonic clock is one for the machine: processes may compare what they read.
 */
#ifndef MN_CLOCK_H
#define MN_CLOCK_H

#include <stdint.h>

/* Monotonic time since some point in the past; never goes back, stops in suspend. */
uint64_t
mn_now_ns(void);

/* Sleeps for about so long; a signal ends it. */
void
mn_nap_ns(int64_t ns);

/* CPU time that the calling thread has used, user and system. */
uint64_t
mn_thread_cpu_ns(void);

/* Of all threads of this process. */
uint64_t
mn_process_cpu_ns(void);

#endif /* MN_CLOCK_H */
