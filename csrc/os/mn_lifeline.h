/* A pipe by which other processes notice the end of this one.
 * SPDX-License-Identifier: Apache-2.0
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
#ifndef MN_LIFELINE_H
#define MN_LIFELINE_H

#include <stdbool.h>
#include <stdint.h>

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

#endif
