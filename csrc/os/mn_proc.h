/* Whether a process still lives, its end, and killing exactly it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: whether the process of an id lives, and signals to it, by pidfds: the system's own word,
 * which needs no /proc.  An id alone may be reused once its process is reaped, so the caller knows
 * that this one is not: workers/mn_records.h says why an id in a worker's entry is none that is.
 * "Dead" means that the process can no longer write memory: gone, or a zombie all of whose
 * threads have ended. A process whose first thread alone has ended is alive.
 * Reaping is the parent's business; nothing here reaps.
 * What asks with every batch whether it still is in the process that made it asks mn_proc_self():
 * a system call costs a quarter of a microsecond on some machines. The number is written at the
 * first call, and in a child by a handler of fork(), before fork() returns there; any thread may
 * read it.
 *
 *   mn_proc_pidfd    close(fd)
 */
#ifndef MN_PROC_H
#define MN_PROC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* The calling process, without a system call but for the first. Not for a child that was made
 * without fork(), as by clone(2). */
pid_t
mn_proc_self(void);

/* A close-on-exec descriptor that becomes readable when the process ends; or -errno. */
int
mn_proc_pidfd(pid_t pid);

/* 1: the process lives; 0: it is dead, or there is none; or -errno when that cannot be found out
 * (no descriptor left). */
int
mn_proc_alive(pid_t pid);

/* Signals a process. -ESRCH when it is dead. */
int
mn_proc_kill(pid_t pid, int sig);

/* Makes the calling process the parent of each descendant whose own parent dies, in place of init.
 * 0 or -errno. */
int
mn_proc_adopt_orphans(void);

/* Signals the process of a pidfd. 0, -ESRCH when it has ended, or another -errno. */
int
mn_proc_kill_pidfd(int fd, int sig);

/* Waits for the end of the process (< 0: forever). 0, -ETIMEDOUT, -EINTR, -EBADF. */
int
mn_proc_wait_pidfd(int fd, int64_t timeout_ns);

#endif /* MN_PROC_H */
