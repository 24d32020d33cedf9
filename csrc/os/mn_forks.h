/* Forks of this process that may still see what it had in shared memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: a forked child sees pages of shared memory and no copy of them, so what was there when
 * it was forked may be used for something else only when the child, and whatever it has forked in
 * turn, is gone. Forks are counted, and whoever keeps such memory notes the count when it comes
 * into use and when it goes out of it: every fork in between sees it.
 * How the end is known: by a pipe whose write end only the child keeps (and its forks do, and no
 * program that it executes). The end of file comes with the end of the last of them.
 * Limit: each costs the parent a descriptor. Where so many are watched, or no two descriptors are
 * left for a pipe, a fork shares the newest pipe: the system opens its write end again by the name
 * of its read end in /proc. Those that share one are gone when all of them are. So what is lost
 * at the limit is memory, for a while, and never the end of a child. Only where that is refused
 * too (no descriptor at all, no /proc) nothing will tell the end of the child: what is out at that
 * moment is never used again, and nothing else.
 * Actors: before the fork, the fork and what comes after it run in one thread; other threads may
 * fork in between. Each closes the write end that is its own, and the child closes those that it
 * has inherited of others.
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

/* A quarter of the descriptors that a process may have as a rule. */
#define MN_FORKS_WATCHED 256

/* Those that share a pipe: first, last and some in between. */
struct mn_fork {
    uint64_t first, last;
    int read;
    int write;        /* while one of them is being made, by that thread; else -1 */
    pthread_t thread;
};

struct mn_forks {
    uint64_t count; /* so far */
    size_t nliving;
    struct mn_fork living[MN_FORKS_WATCHED];
    uint64_t unknown_first, unknown_last; /* those that nothing can tell the end of; 0: none */
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

/* Whether there was one, after that many had been counted and until that many had been, that is
 * not known to be gone. */
bool
mn_forks_see(const struct mn_forks *forks, uint64_t after, uint64_t until);

#endif /* MN_FORKS_H */
