/* Waiting on, and waking waiters of, a word in memory that processes share.
 * SPDX-License-Identifier: Apache-2.0
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
#ifndef MN_FUTEX_H
#define MN_FUTEX_H

#include <stdint.h>

#include "base/mn_atomic.h"

/* Sleeps while *word == expected, for at most timeout_ns of monotonic time (< 0: forever). Returns
 * 0: woken, maybe spuriously; -EAGAIN: *word differed; -ETIMEDOUT; -EINTR. */
int
mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns);

/* Wakes up to n waiters. Returns how many, or a negative errno. */
int
mn_futex_wake(mn_a32 *word, int n);

#endif
