/* System calls of this process that would change files wait for another process's leave.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A seccomp filter with a listener (Linux 5.5). Calls that name a file to change it, and those that
 * open one with a flag by which it could be changed, are told to the listener. All others go on at
 * once. Calls that would pass the filter by, as those of io_uring, fail with ENOSYS. Writing to a
 * descriptor is not filtered: opening it was. Children inherit the filter. It cannot be removed.
 */
#ifndef MN_WRITE_FILTER_H
#define MN_WRITE_FILTER_H

#include <stdint.h>
#include <sys/types.h>

/* A file that a call names. */
struct mn_write_place {
    int32_t folder;   /* a descriptor, or AT_FDCWD */
    uint32_t length;  /* of a socket's address; 0 for a path */
    uint64_t address; /* of the path, in the caller's memory; 0: the folder itself */
};

struct mn_write_call {
    uint64_t id;
    pid_t pid;
    int places; /* 1 or 2 */
    struct mn_write_place place[2];
};

/* Filters the calling process, which must have one thread. Returns the listener's descriptor, or
 * -errno. */
int
mn_write_filter(void);

/* Takes the next call that waits. Returns 0, -ENOENT if its process has been killed, or -errno. */
int
mn_write_next(int listener, struct mn_write_call *call);

/* Lets it go on. Returns 0, -ENOENT as above, or -errno. */
int
mn_write_allow(int listener, uint64_t id);

#endif
