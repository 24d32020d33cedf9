/* Time, in nanoseconds.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The only place that reads a clock; policies are given its numbers. The machine has one monotonic
 * clock: processes may compare what they read.
 */
#ifndef MN_CLOCK_H
#define MN_CLOCK_H

#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* Returns monotonic time since some point in the past. It never goes back and stops in suspend. */
uint64_t
mn_now_ns(void);

/* Returns ts, set to ns, as system calls take their time-outs; NULL if ns < 0: no time-out. */
static inline struct timespec *
mn_timeout_of(struct timespec *ts, int64_t ns)
{
    if (ns < 0) {
        return NULL;
    }
    *ts = (struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return ts;
}

/* Sleeps for about ns; a signal ends the sleep. */
void
mn_nap_ns(int64_t ns);

/* Returns the CPU time that the calling thread has used, user and system. */
uint64_t
mn_thread_cpu_ns(void);

/* Returns the CPU time of all threads of this process. */
uint64_t
mn_process_cpu_ns(void);

#endif
