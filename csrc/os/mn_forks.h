/* Forks of this process that may still see what it had in shared memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: a forked child sees pages of shared memory and no copy of them, so what was there when
 * it was forked may be used for something else only when the child, and whatever it has forked in
 * turn, is gone. The count goes up before a fork and after it, and whoever keeps such memory notes
 * the count when it comes into use and when it goes out of it: every fork that began before the
 * one and was not done at the other sees it, wherever between the two counts it took place.
 * How the end is known: by an empty file that the process has mapped while it forks. Only the
 * child's copy of the mapping stays, and its forks' do, and no program's that it executes; the
 * system refuses to seal the file against writing as long as there is one. A descriptor would not
 * do: daemons, and others, close all that they find.
 * Limit: each costs the parent a descriptor. Where so many are watched, or there is none left, a
 * fork shares the newest file, for which it takes none. Those that share one are gone when all of
 * them are. So what is lost at the limit is memory, for a while, and never the end of a child.
 * Only where that is refused too (no descriptor at all and nothing to share, no memory for a
 * mapping), or where the program has closed the descriptor, which is not its own, nothing will tell
 * the end of the child: what is out at that moment, or waits for another child then, is never used
 * again, and nothing else.
 * Actors: before the fork, the fork and what comes after it run in one thread; other threads may
 * fork in between. Each lets go of the mapping that is its own, and the child of those that it has
 * inherited of others.
 * Owner: one struct for a process, zero before its first use, behind a lock of the owner's that is
 * not held across the fork. Nothing here allocates, and nothing waits.
 * A crash takes all with it.
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

/* A quarter of the descriptors that a process may have as a rule. */
#define MN_FORKS_WATCHED 256

/* Those that share a file: from the first's count before it to the last's after it. */
struct mn_fork {
    uint64_t first, last;
    int fd;
    dev_t device; /* with the inode: what is behind fd, as long as nobody else closes it */
    ino_t inode;
    void *mapping; /* while one of them is being made, by that thread; else NULL */
    pthread_t thread;
};

struct mn_forks {
    uint64_t count; /* so far */
    size_t nliving;
    struct mn_fork living[MN_FORKS_WATCHED];
    uint64_t unknown_first, unknown_last; /* those that nothing can tell the end of; 0: none */
    unsigned nblind;                      /* of these, how many are being made */
};

/* Counts a fork that the calling thread is about to make. */
void
mn_forks_before(struct mn_forks *forks);

/* After it, also where it has failed. */
void
mn_forks_in_parent(struct mn_forks *forks);

/* In the child, of which it is the first act: it begins with no forks of its own. */
void
mn_forks_in_child(struct mn_forks *forks);

/* Forgets those whose processes are gone. */
void
mn_forks_look(struct mn_forks *forks);

/* Forgets all but those that are being made: nothing is out that others could see. */
void
mn_forks_forget(struct mn_forks *forks);

/* Whether there was one, not done when that much had been counted and begun before that much had
 * been, that is not known to be gone. */
bool
mn_forks_see(const struct mn_forks *forks, uint64_t after, uint64_t until);

#endif /* MN_FORKS_H */
