/* Whether a process still lives, waiting for its end, and killing exactly it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: whether the process of an id lives, and signals to it, by pidfds. These come from the
 * kernel and need no /proc. An id alone may be reused once its process is reaped, so the caller
 * must know that it is not. The header workers/mn_records.h says why the id in a worker's entry is
 * never reused. "Dead" means that the process can no longer write memory: it is gone, or a zombie
 * all of whose threads have ended. A process of which only the first thread has ended is alive.
 * Reaping is the parent's business; nothing here reaps.
 * Code that checks with every batch whether it still runs in the process that made the batch calls
 * mn_proc_self(). A system call costs a quarter of a microsecond on some machines. The number is
 * written at the first call, and in a child by a handler of fork(), before fork() returns there.
 * Any thread may read it.
 *
 *   mn_proc_pidfd    close(fd)
 */
#ifndef MN_PROC_H
#define MN_PROC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Returns the calling process, without a system call except for the first time. Not for a child
 * that was made without fork(), as by clone(2). */
pid_t
mn_proc_self(void);

/* Returns a close-on-exec descriptor that becomes readable when the process ends; or -errno. */
int
mn_proc_pidfd(pid_t pid);

/* Returns 1: the process lives; 0: it is dead, or there is none; -errno if that cannot be found out
 * (no descriptor left). */
int
mn_proc_alive(pid_t pid);

/* Signals a process. Returns 0, -ESRCH if it is dead, or another -errno. */
int
mn_proc_kill(pid_t pid, int sig);

/* Makes the calling process the parent of each descendant whose own parent dies, in place of init.
 * 0 or -errno. */
int
mn_proc_adopt_orphans(void);

/* on: the system kills the calling process when the thread that forked it ends. A child of the
 * calling process does not inherit this. 0 or -errno. */
int
mn_proc_die_with_parent(bool on);

/* Signals the process of a pidfd. Returns 0, -ESRCH if it has ended, or another -errno. */
int
mn_proc_kill_pidfd(int fd, int sig);

/* Waits for the end of the process (< 0: forever). Returns 0, -ETIMEDOUT, -EINTR, -EBADF. */
int
mn_proc_wait_pidfd(int fd, int64_t timeout_ns);

/* ---- How busy CPUs and processes have been ----
 *
 * Cumulative times; callers take differences. Read from /proc, a few microseconds per call: call
 * them some times a second, not per sample.
 */

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
