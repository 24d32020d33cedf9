/* The sleeping and waking halves of the bell. The argument is in the header.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "sync/mn_bell.h"

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "os/mn_clock.h"
#include "os/mn_futex.h"

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
        if (mn_a32_load_acquire(&bell->word) != MN_BELL_ASLEEP) { /* [B8] */
            return mn_bell_give_up(bell, 0); /* also from a word that is neither */
        }
        if (left_ns == 0) {
            return mn_bell_give_up(bell, -ETIMEDOUT);
        }
        int rc = mn_futex_wait(&bell->word, MN_BELL_ASLEEP, left_ns);
        if (rc != 0 && rc != -EAGAIN) {
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
