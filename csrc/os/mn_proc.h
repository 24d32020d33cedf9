/* Whether a process still lives, and killing exactly it.
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

/* Signals the process of a pidfd. Returns 0, -ESRCH if it has ended, or another -errno. */
int
mn_proc_kill_pidfd(int fd, int sig);

/* Returns whether the process of a pidfd has ended; false if the descriptor is closed. */
bool
mn_proc_ended(int fd);

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

/* ---- Lifeline: a pipe by which other processes notice the end of this one ----
 *
 * Purpose: the trainer holds the write end and never writes. Its zygote and workers hold the read
 * end: a hang-up there means that the trainer is gone. This needs no /proc, and works across
 * namespaces of process ids.
 * That is true only if no other process holds the write end. An executed program does not, because
 * the descriptor is close-on-exec. A fork of the trainer closes all write ends that it has
 * inherited. A handler of fork() does this before fork() returns in the child. So a process that
 * the trainer has forked and that outlives it keeps no worker alive.
 * Lock: one for the process guards the list of write ends. The handlers hold it across a fork, so
 * no fork falls between the creation of a pipe and its entry in the list. It is held for a few
 * system calls, none of which waits.
 * Limit: a child that was made without fork(), as by clone(2), and that executes nothing, keeps
 * inherited write ends open until it ends.
 * A crash closes everything.
 *
 *   mn_lifeline_open    mn_lifeline_close (write end), close (read end)
 */

/* The trainer's end. The struct must not move until it is closed. */
struct mn_lifeline {
    int fd; /* -1: closed, also in a fork of the process that opened it */
    struct mn_lifeline *next;
};

/* The other end, as a worker process has it. */
struct mn_lifeline_end {
    int fd;
    uint64_t device; /* with the inode: which pipe it is. A program may close descriptors that */
    uint64_t inode; /* are not its own, and the number may then belong to another file. */
};

/* Stores the read end's descriptor, which the caller owns; both are close-on-exec. Returns 0 or
 * -errno. */
int
mn_lifeline_open(struct mn_lifeline *line, int *end);

/* Closes the write end. Call it once, in the process that opened it; does nothing in a fork. */
void
mn_lifeline_close(struct mn_lifeline *line);

/* Records which pipe a descriptor belongs to. If it is not a pipe (-1, for example),
 * mn_lifeline_is_cut() is always false. */
void
mn_lifeline_hold(struct mn_lifeline_end *end, int fd);

/* Returns whether the process at the other end is gone. False if the descriptor no longer belongs
 * to that pipe. */
bool
mn_lifeline_is_cut(const struct mn_lifeline_end *end);

#endif /* MN_PROC_H */
