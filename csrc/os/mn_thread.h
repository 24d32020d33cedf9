/* Time, threads that take no signals, and locks in memory that is private to one process.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   mn_futex_wait     mn_futex_wake
 *   mn_thread_start   mn_thread_join
 *   mn_mutex_init     mn_mutex_fini
 *   mn_mutex_lock     mn_mutex_unlock
 */
#ifndef MN_THREAD_H
#define MN_THREAD_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "base/mn_atomic.h"

/* ---- Time, in nanoseconds ----
 *
 * The only place that reads a clock; policies are given its numbers. The machine has one monotonic
 * clock: processes may compare what they read.
 */

/* Returns monotonic time since some point in the past. It never goes back and stops in suspend. */
uint64_t
mn_now_ns(void);

/* Sleeps for about ns; a signal ends the sleep. */
void
mn_nap_ns(int64_t ns);

/* Returns the CPU time that the calling thread has used, user and system. */
uint64_t
mn_thread_cpu_ns(void);

/* Returns the CPU time of all threads of this process. */
uint64_t
mn_process_cpu_ns(void);

/* ---- Waiting on, and waking waiters of, a word in memory that processes share ----
 *
 * The kernel's futex in its shared flavour. The kernel finds waiters by the page behind the word,
 * so two processes that map it at different addresses meet.
 * Actors: any thread of any process that maps the word.
 * It orders nothing: callers put the memory order on their own atomic operations. sync/mn_event.h
 * is the one protocol built on it and contains the argument.
 * A crash leaves nothing: the kernel forgets a waiter that dies.
 *
 *   waiter                          waker
 *   mn_futex_wait(w, seen, t)       change *w, then mn_futex_wake(w, n)
 */

/* Sleeps while *word == expected, for at most timeout_ns of monotonic time (< 0: forever). Returns
 * 0: woken, maybe spuriously; -EAGAIN: *word differed; -ETIMEDOUT; -EINTR. */
int
mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns);

/* Wakes up to n waiters. Returns how many, or a negative errno. */
int
mn_futex_wake(mn_a32 *word, int n);

/* ---- Threads and locks ----
 *
 * Purpose: the engine's helper threads. Every signal is blocked in them, so the interpreter's main
 * thread continues to get the signals of the process.
 * Owner: the struct belongs to the code that starts the thread. It must not move before the join,
 * and is used by one thread at a time.
 * Fork: a thread exists only in the process that started it. Joining it in a child returns -ESRCH
 * and touches nothing. A lock must not be used across a fork.
 * A crash takes the threads and the locks along; neither is ever in shared memory.
 */

#define MN_THREAD_NAME_MAX 16 /* the kernel's limit, terminator included */

struct mn_thread {
    pthread_t id;
    pid_t owner; /* process that started it; 0: not running */
    void (*fn)(void *);
    void *arg;
    char name[MN_THREAD_NAME_MAX];
};

struct mn_mutex {
    pthread_mutex_t m;
};

/* Runs fn(arg) in a thread of that name (cut to 15 bytes). Returns 0, -EAGAIN or -EPERM. */
int
mn_thread_start(struct mn_thread *thread, const char *name, void (*fn)(void *), void *arg);

/* Waits for the end of fn. Returns 0; -EINVAL if not running; -ESRCH in a forked child. */
int
mn_thread_join(struct mn_thread *thread);

/* Returns the calling thread's number, which /proc uses. */
uint32_t
mn_thread_number(void);

/* Returns 0, -ENOMEM or -EAGAIN. */
int
mn_mutex_init(struct mn_mutex *mutex);

void
mn_mutex_fini(struct mn_mutex *mutex);

void
mn_mutex_lock(struct mn_mutex *mutex);

void
mn_mutex_unlock(struct mn_mutex *mutex);

#endif
