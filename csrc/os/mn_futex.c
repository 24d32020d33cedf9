/* The futex system call, shared flavour.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* The C library has no wrapper. FUTEX_WAIT's timeout is relative and monotonic. */
static long
mn_futex_call(mn_a32 *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

int
mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns)
{
    struct timespec ts;
    struct timespec *timeout = NULL;
    if (timeout_ns >= 0) {
        ts.tv_sec = (time_t)(timeout_ns / 1000000000);
        ts.tv_nsec = (long)(timeout_ns % 1000000000);
        timeout = &ts;
    }
    return mn_futex_call(word, FUTEX_WAIT, expected, timeout) == 0 ? 0 : -errno;
}

int
mn_futex_wake(mn_a32 *word, int n)
{
    long woken = mn_futex_call(word, FUTEX_WAKE, (uint32_t)n, NULL);
    return woken >= 0 ? (int)woken : -errno;
}
