/* Threads that take no signals, and locks in memory that is private to one process.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: the engine's helper threads. Every signal is blocked in them, so the interpreter's main
 * thread continues to get the signals of the process.
 * Owner: the struct belongs to the code that starts the thread. It must not move before the join,
 * and is used by one thread at a time.
 * Fork: a thread exists only in the process that started it. Joining it in a child returns -ESRCH
 * and touches nothing. A lock must not be used across a fork.
 * A crash takes the threads and the locks along; neither is ever in shared memory.
 *
 *   mn_thread_start   mn_thread_join
 *   mn_mutex_init     mn_mutex_fini
 *   mn_mutex_lock     mn_mutex_unlock
 */
#ifndef MN_THREAD_H
#define MN_THREAD_H

#include <pthread.h>
#include <stdint.h>
#include <sys/types.h>

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
