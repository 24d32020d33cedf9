/* The sleeping and waking halves of the bell. The argument is in the header.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "sync/mn_bell.h"

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "os/mn_clock.h"
#include "os/mn_futex.h"

/* Where the kernel refuses to wait (a sandbox), sleeps last so long. */
#define MN_BELL_REFUSED_NS 1000000

/* Ends the sleep for another reason than a ring, unless a ring came first. */
static int
mn_bell_give_up(struct mn_bell *bell, int reason)
{
    /* An exchange, so that a ring is either seen here or finds the sleeper awake. [B8] */
    uint32_t was = mn_a32_xchg_acqrel(&bell->word, MN_BELL_AWAKE);
    return was == MN_BELL_AWAKE ? 0 : reason;
}

int
mn_bell_sleep(struct mn_bell *bell, int64_t timeout_ns)
{
    uint64_t start = timeout_ns > 0 ? mn_now_ns() : 0;
    int64_t left_ns = timeout_ns;
    MN_FAULT("bell.announced");
    for (;;) {
        uint32_t word = mn_a32_load_acquire(&bell->word); /* [B8] */
        if (word == MN_BELL_AWAKE) {
            return 0;
        }
        if (word != MN_BELL_ASLEEP) { /* somebody wrote over it */
            return mn_bell_give_up(bell, 0);
        }
        if (left_ns == 0) {
            return mn_bell_give_up(bell, -ETIMEDOUT);
        }
        int rc = mn_futex_wait(&bell->word, MN_BELL_ASLEEP, left_ns);
        if (rc != 0 && rc != -EAGAIN) {
            if (rc != -ETIMEDOUT && rc != -EINTR) { /* refused: whoever looks again must not spin */
                mn_nap_ns(MN_BELL_REFUSED_NS);
            }
            return mn_bell_give_up(bell, rc);
        }
        if (timeout_ns > 0) {
            uint64_t passed = mn_now_ns() - start;
            left_ns = passed < (uint64_t)timeout_ns ? timeout_ns - (int64_t)passed : 0;
        }
    }
}

bool
mn_bell_wake(struct mn_bell *bell)
{
    uint32_t asleep = MN_BELL_ASLEEP;
    /* One of several ringers wins and makes the one system call. [B7] */
    if (!mn_a32_cas_acqrel(&bell->word, &asleep, MN_BELL_AWAKE)) {
        return false;
    }
    MN_FAULT("bell.claimed");
    (void)mn_futex_wake(&bell->word, 1);
    return true;
}

void
mn_bell_kick(struct mn_bell *bell)
{
    (void)mn_a32_xchg_acqrel(&bell->word, MN_BELL_AWAKE); /* [B7] */
    (void)mn_futex_wake(&bell->word, 1);
}
