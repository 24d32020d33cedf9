/* Time, threads without signals, and private locks, on pthreads.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE

#include "os/mn_thread.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/mn_base.h"

/* ---- Time ---- */

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

/* ---- The futex system call, shared flavour ---- */

/* The C library has no wrapper. FUTEX_WAIT's timeout is relative and monotonic. */
static long
mn_futex_call(mn_a32 *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

/* Returns ts, set to ns, as system calls take their time-outs; NULL if ns < 0: no time-out. */
static struct timespec *
timeout_of(struct timespec *ts, int64_t ns)
{
    if (ns < 0) {
        return NULL;
    }
    *ts = (struct timespec){(time_t)(ns / 1000000000), (long)(ns % 1000000000)};
    return ts;
}

int
mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns)
{
    struct timespec ts;
    struct timespec *timeout = timeout_of(&ts, timeout_ns);
    return mn_futex_call(word, FUTEX_WAIT, expected, timeout) == 0 ? 0 : -errno;
}

int
mn_futex_wake(mn_a32 *word, int n)
{
    long woken = mn_futex_call(word, FUTEX_WAKE, (uint32_t)n, NULL);
    return woken >= 0 ? (int)woken : -errno;
}

/* ---- Threads and locks ---- */

static void *
mn_thread_main(void *self)
{
    struct mn_thread *thread = self;
    (void)pthread_setname_np(pthread_self(), thread->name); /* only a name: may fail */
    thread->fn(thread->arg);
    return NULL;
}

int
mn_thread_start(struct mn_thread *thread, const char *name, void (*fn)(void *), void *arg)
{
    sigset_t all, before;
    thread->fn = fn;
    thread->arg = arg;
    thread->owner = 0;
    (void)snprintf(thread->name, sizeof(thread->name), "%s", name);

    /* The mask is inherited, so it is set here: a signal must not reach the new thread before it
     * could block signals itself. */
    (void)sigfillset(&all);
    int rc = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (rc != 0) {
        return -rc;
    }
    rc = pthread_create(&thread->id, NULL, mn_thread_main, thread);
    int restored = pthread_sigmask(SIG_SETMASK, &before, NULL);
    mn_assert(restored == 0);
    (void)restored;
    if (rc == 0) {
        thread->owner = getpid();
    }
    return -rc;
}

int
mn_thread_join(struct mn_thread *thread)
{
    if (thread->owner == 0) {
        return -EINVAL;
    }
    if (thread->owner != getpid()) {
        return -ESRCH;
    }
    int rc = pthread_join(thread->id, NULL);
    if (rc == 0) {
        thread->owner = 0;
    }
    return -rc;
}

uint32_t
mn_thread_number(void)
{
    return (uint32_t)syscall(SYS_gettid); /* C libraries before 2019 have no gettid() */
}

int
mn_mutex_init(struct mn_mutex *mutex)
{
    return -pthread_mutex_init(&mutex->m, NULL);
}

void
mn_mutex_fini(struct mn_mutex *mutex)
{
    int rc = pthread_mutex_destroy(&mutex->m);
    mn_assert(rc == 0);
    (void)rc;
}

void
mn_mutex_lock(struct mn_mutex *mutex)
{
    int rc = pthread_mutex_lock(&mutex->m);
    mn_assert(rc == 0);
    (void)rc;
}

void
mn_mutex_unlock(struct mn_mutex *mutex)
{
    int rc = pthread_mutex_unlock(&mutex->m);
    mn_assert(rc == 0);
    (void)rc;
}
