/* Forks of this process that may still see its shared memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: a forked child sees pages of shared memory, not a copy of them. So memory that existed
 * at the fork may be reused only when the child, and every process that it has forked in turn, is
 * gone. The count goes up before a fork and after it. The owner of such memory notes the count when
 * the memory comes into use and when it goes out of use. A fork sees the memory if it was not done
 * at the first count and began before the second, wherever in between it took place.
 *
 * How the end is noticed: the process has an empty file mapped while it forks. Afterwards only the
 * child and its forks still have that mapping, and no program that they execute. The system refuses
 * to seal the file against writing while a mapping exists. A descriptor would not do: daemons, and
 * others, close all descriptors that they find.
 *
 * Limit: each fork costs the parent a descriptor. When MN_FORKS_WATCHED forks are watched, or no
 * descriptor is left, a fork shares the newest file and needs no descriptor. Forks that share a
 * file count as gone when all of them are. So at the limit, memory waits longer, but the end of a
 * child is never missed. In two cases nothing shows the end of a child. One is that sharing is
 * refused too (no descriptor at all and nothing to share, or no memory for a mapping). The other is
 * that the program has closed the descriptor, which is not its own. Memory that is in use at that
 * moment, or waits for another child then, is never used again. Other memory is not affected.
 *
 * Actors: the steps before the fork, the fork and the steps after it run in one thread; other
 * threads may fork in between. Each thread unmaps its own mapping. The child unmaps those that it
 * has inherited from other threads.
 *
 * Owner: one struct for a process, zero before its first use, guarded by a lock of the owner's that
 * is not held across the fork. Nothing here allocates, and nothing waits.
 *
 * A crash takes all of it along.
 *
 *   mn_forks_before   mn_forks_in_parent, and mn_forks_in_child in the child
 */
#ifndef MN_FORKS_H
#define MN_FORKS_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* A quarter of the descriptors that a process usually may have. */
#define MN_FORKS_WATCHED 256

/* Forks that share a file: from the first one's count before it to the last one's after it. */
struct mn_fork {
    uint64_t first, last;
    int fd;
    dev_t device; /* with the inode: which file fd is, unless the program closes it */
    ino_t inode;
    void *mapping; /* while one of them is in progress, by that thread; else NULL */
    pthread_t thread;
};

struct mn_forks {
    uint64_t count; /* so far */
    size_t nliving;
    struct mn_fork living[MN_FORKS_WATCHED];
    uint64_t unknown_first, unknown_last; /* forks whose end nothing can show; 0: none */
    unsigned nblind;                      /* how many of these are in progress */
};

/* Counts a fork that the calling thread is about to make. */
void
mn_forks_before(struct mn_forks *forks);

/* Call it after the fork, even if the fork has failed. */
void
mn_forks_in_parent(struct mn_forks *forks);

/* Call it first thing in the child, which starts with no forks of its own. */
void
mn_forks_in_child(struct mn_forks *forks);

/* Forgets forks whose processes are gone. */
void
mn_forks_look(struct mn_forks *forks);

/* Forgets all forks except those in progress: no memory is in use that others could see. */
void
mn_forks_forget(struct mn_forks *forks);

/* Returns whether a fork exists that was not done at count `after`, began before count `until`, and
 * is not known to be gone. */
bool
mn_forks_see(const struct mn_forks *forks, uint64_t after, uint64_t until);

#endif
