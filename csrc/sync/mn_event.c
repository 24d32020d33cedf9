/* The sleeping and waking halves of the event. The argument is in the header.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "sync/mn_event.h"

#include "base/mn_base.h"
#include "os/mn_thread.h"

/* Where the kernel refuses to wait (a sandbox), sleeps last this long. */
#define MN_EVENT_REFUSED_NS 1000000

/* Pauses between two looks: about a microsecond, so that looks do not take the cache lines away
 * from the threads that write them. */
#define MN_EVENT_PAUSES 50

bool
mn_event_spin(uint32_t spin_ns, uint64_t *until_ns)
{
    if (spin_ns == 0) {
        return false;
    }
    uint64_t now = mn_now_ns();
    if (*until_ns == 0) {
        *until_ns = now + spin_ns;
    }
    else if (now >= *until_ns) {
        return false;
    }
    for (int i = 0; i < MN_EVENT_PAUSES; i++) {
        mn_cpu_pause();
    }
    return true;
}

/* Ends the sleep for another reason than a notification, unless a notification came first. */
static int
mn_event_give_up(struct mn_event *event, int reason)
{
    /* An exchange, so that a notification is either seen here or finds the sleeper awake. [B8] */
    uint32_t was = mn_a32_xchg_acqrel(&event->word, MN_EVENT_AWAKE);
    return was == MN_EVENT_AWAKE ? 0 : reason;
}

int
mn_event_commit_wait(struct mn_event *event, int64_t timeout_ns)
{
    uint64_t start = timeout_ns > 0 ? mn_now_ns() : 0;
    int64_t left_ns = timeout_ns;
    MN_FAULT("event.prepared");
    for (;;) {
#ifdef MN_BUG_EVENT_ORDER
        uint32_t word = mn_a32_load_relaxed(&event->word);
#else
        uint32_t word = mn_a32_load_acquire(&event->word); /* [B8] */
#endif
        if (word == MN_EVENT_AWAKE) {
            return 0;
        }
        if (word != MN_EVENT_ASLEEP) { /* a stray write has damaged it */
            return mn_event_give_up(event, 0);
        }
        if (left_ns == 0) {
            return mn_event_give_up(event, -ETIMEDOUT);
        }
        int rc = mn_futex_wait(&event->word, MN_EVENT_ASLEEP, left_ns);
        if (rc != 0 && rc != -EAGAIN) {
            if (rc != -ETIMEDOUT && rc != -EINTR) { /* refused: a caller in a loop must not spin */
                mn_nap_ns(MN_EVENT_REFUSED_NS);
            }
            return mn_event_give_up(event, rc);
        }
        if (timeout_ns > 0) {
            uint64_t passed = mn_now_ns() - start;
            left_ns = passed < (uint64_t)timeout_ns ? timeout_ns - (int64_t)passed : 0;
        }
    }
}

bool
mn_event_wake(struct mn_event *event)
{
    uint32_t asleep = MN_EVENT_ASLEEP;
    /* One of several notifiers wins and makes the one system call. [B7] */
    if (!mn_a32_cas_acqrel(&event->word, &asleep, MN_EVENT_AWAKE)) {
        return false;
    }
    MN_FAULT("event.claimed");
    (void)mn_futex_wake(&event->word, 1);
    return true;
}

void
mn_event_notify_always(struct mn_event *event)
{
    (void)mn_a32_xchg_acqrel(&event->word, MN_EVENT_AWAKE); /* [B7] */
    (void)mn_futex_wake(&event->word, 1);
}
