/* An event count with one sleeper: "wake me if anything happens" without locks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   One thread (the sleeper) waits until a condition that other threads publish elsewhere
 *   is true. Publishing costs one load while the sleeper is busy and one system call while
 *   it sleeps. The event count carries no data and counts nothing.
 *
 * Actors and owners
 *   word     the sleeper alone moves AWAKE -> ASLEEP; sleeper and notifiers move it back.
 *   sleeper  one thread at a time, in any process that maps it.
 *   notifiers  any number of threads of any processes.
 *
 * The two call sequences
 *
 *   sleeper                                    notifier
 *     mn_event_prepare_wait(event)     [B1]      publish X                         [B2]
 *     if X is there (seq_cst load)     [B3]      mn_event_notify(event)            [B4]
 *         mn_event_cancel_wait(event)
 *     else
 *         mn_event_commit_wait(event, timeout)
 *     look for X again, for any result
 *
 * No wake-up is lost (order pairs)
 *   [B1] -> [B4], [B2] -> [B3]  all four seq_cst. In their single total order either B1 precedes
 *         B4, which then reads ASLEEP and wakes. Or B4 precedes B1, hence B2 precedes B3, which
 *         then reads X. Acquire and release are not enough: both sides store one word and load
 *         another, and both loads may run first.
 *         [B2] (caller) and [B3] (caller) are written where the event is used.
 *         The publish MUST be a seq_cst store or read-modify-write (mn_a32_..._seqcst),
 *         and the look after prepare_wait a seq_cst load of the same word.
 *   [B5] -> [B6]  for a publish that is release only, use mn_event_notify_released. B5, its
 *         read-modify-write of the event (acq_rel), and B6, in prepare_wait, are exchanges of
 *         one word and so are ordered. B5 after B6 reads ASLEEP and wakes. B6 after B5 reads
 *         from it, directly or through the chain of exchanges between them. No plain store ever
 *         touches the word after init, which is why cancel_wait is an exchange, too. So the publish
 *         happens before the look, for which acquire is then enough.
 *   [B7] -> [B8]  B7, the notifier's exchange to AWAKE, releases. B8, the sleeper's read of AWAKE
 *         in mn_event_commit_wait, acquires. So a sleep that returns 0 makes visible what was
 *         published before the notification.
 *   A notifier writes before it wakes, and the kernel compares the word under its own lock
 *   before it puts the sleeper to sleep. So a notification between prepare_wait and the
 *   sleep is not lost either.
 *
 * Spurious wake-ups
 *   0 from mn_event_commit_wait means that a notifier has acted since prepare_wait. It may
 *   have published what an earlier look had found already, because a late notifier may meet
 *   the next wait. Always look again. When the futex wakes without a notification,
 *   mn_event_commit_wait goes back to sleep by itself.
 *
 * Wrap and ABA: two values and no counter, so nothing wraps. AWAKE -> ASLEEP -> AWAKE seen by a
 * slow notifier costs one useless system call or one spurious notification, nothing else.
 *
 * After a crash
 *   Dead sleeper: the word stays ASLEEP. The next notification sets it AWAKE and wakes no
 *   thread, at the price of one system call; no count is off. The next sleeper on this event
 *   simply prepares to sleep.
 *   Dead notifier: killed after B7 but before its system call, it leaves the word AWAKE and the
 *   sleeper in the kernel. There, later notifications would not see it. There are two remedies. A
 *   sleeper whose notifiers can be killed bounds its sleep. Or the process that confirms such a
 *   death calls mn_event_notify_always, which wakes without looking at the word first.
 *   Dead after B2, before B4: published and not notified; mn_event_notify_always repairs
 *   that, too.
 *   A notifier may be stopped between B7 and its system call (SIGSTOP, or off its core for long).
 *   It then mutes the others in the same way, without any death. Only the bound of the sleep helps,
 *   so every sleeper here has one. The engine has a tenth of a second, the program's thread half a
 *   second. A worker that waits for memory has a fifth of a second, an idle worker one second.
 *
 *   call                      pairs with
 *   mn_event_prepare_wait     exactly one of mn_event_cancel_wait, mn_event_commit_wait
 */
#ifndef MN_EVENT_H
#define MN_EVENT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mn_atomic.h"
#include "base/mn_base.h"

#define MN_EVENT_AWAKE 0u
#define MN_EVENT_ASLEEP 1u

/* How long a sleeper spins before it sleeps, where there are cores to spare. That is somewhat less
 * than what a sleep and its wake-up cost, fifty microseconds between processes. If the spinning is
 * in vain, the total cost is less than twice that of sleeping at once. */
#define MN_EVENT_SPIN_NS 30000u

/* Zeroed memory is a valid event. Put each on a cache line that other threads seldom write. */
struct mn_event {
    mn_a32 word;
};

MN_STATIC_ASSERT(sizeof(struct mn_event) == 4, "layout shared between processes");

/* Sleeper, before prepare_wait: pauses, and returns whether to look once more. It does so for
 * spin_ns. *until_ns must be 0 before the first call. */
bool
mn_event_spin(uint32_t spin_ns, uint64_t *until_ns);

/* Sleeper: notifications count from now on. Look at the condition after this call. */
static inline void
mn_event_prepare_wait(struct mn_event *event)
{
    (void)mn_a32_xchg_seqcst(&event->word, MN_EVENT_ASLEEP); /* [B1] [B6] */
}

/* Sleeper: the look found something, so do not sleep. */
static inline void
mn_event_cancel_wait(struct mn_event *event)
{
    (void)mn_a32_xchg_acqrel(&event->word, MN_EVENT_AWAKE); /* continues the chain of B5, B6 */
}

/* Sleeper, after prepare_wait: waits for a notification for at most timeout_ns (< 0: forever, 0:
 * only looks). Returns 0: notified; -ETIMEDOUT; -EINTR. If the kernel refuses to wait, returns
 * another error after a millisecond. A notification that coincides with a timeout or a signal
 * counts as a notification. On every return the event is AWAKE again. */
int
mn_event_commit_wait(struct mn_event *event, int64_t timeout_ns);

/* The rare half of notifying: claims the sleeper and wakes it. Returns whether this call did. */
bool
mn_event_wake(struct mn_event *event);

/* Notifier, after a seq_cst publish. Returns whether a sleeper was woken. */
static inline bool
mn_event_notify(struct mn_event *event)
{
    if (mn_likely(mn_a32_load_seqcst(&event->word) == MN_EVENT_AWAKE)) { /* [B4] */
        return false;
    }
    return mn_event_wake(event);
}

/* Notifier, after a publish of release order: always makes one read-modify-write. */
static inline bool
mn_event_notify_released(struct mn_event *event)
{
    if (mn_likely(mn_a32_add_acqrel(&event->word, 0) == MN_EVENT_AWAKE)) { /* [B5] */
        return false;
    }
    return mn_event_wake(event);
}

/* Any thread, after a notifier's death was confirmed: ends the current sleep, if there is one. */
void
mn_event_notify_always(struct mn_event *event);

#endif
