/* Reads the monotonic clock and the thread's CPU clock.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_clock.h"

#include <time.h>

#include "base/mn_assert.h"

static uint64_t
mn_clock_read(clockid_t clock)
{
    struct timespec ts;
    int rc = clock_gettime(clock, &ts);
    mn_assert(rc == 0); /* both clocks exist wherever futexes do */
    (void)rc;
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t
mn_now_ns(void)
{
    return mn_clock_read(CLOCK_MONOTONIC);
}

void
mn_nap_ns(int64_t ns)
{
    struct timespec ts = {(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    (void)nanosleep(&ts, NULL);
}

uint64_t
mn_thread_cpu_ns(void)
{
    return mn_clock_read(CLOCK_THREAD_CPUTIME_ID);
}

uint64_t
mn_process_cpu_ns(void)
{
    return mn_clock_read(CLOCK_PROCESS_CPUTIME_ID);
}
