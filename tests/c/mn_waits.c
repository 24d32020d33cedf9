/* The caller's stopwatch, with a fake clock.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "engine/mn_waits.h"
#include "mn_test.h"

static void
waits_and_uses_are_told_apart(void)
{
    struct mn_waits w = {0};
    CHECK_EQ(mn_waits_ask(&w, 100), -1); /* no batch before */
    mn_waits_give(&w, 130, true);
    CHECK_EQ(mn_waits_ask(&w, 180), 50);
    mn_waits_give(&w, 190, true);
    CHECK_EQ(w.n, 2);
    CHECK_EQ(w.wait_ns, 40);
    CHECK_EQ(w.used_ns, 50);
    CHECK_EQ(w.first_ns, 30);
    CHECK_EQ(w.max_ns, 30);
}

/* A timeout gives nothing, and the wait goes on. */
static void
a_wait_may_take_several_calls(void)
{
    struct mn_waits w = {0};
    CHECK_EQ(mn_waits_ask(&w, 100), -1);
    mn_waits_give(&w, 200, false);
    CHECK_EQ(w.n, 0);
    CHECK_EQ(mn_waits_ask(&w, 250), -1); /* time between the calls is no use of a batch */
    CHECK_EQ(w.asked_ns, 100);
    mn_waits_give(&w, 300, true);
    CHECK_EQ(w.n, 1);
    CHECK_EQ(w.wait_ns, 150);
    CHECK_EQ(w.first_ns, 200);
    CHECK_EQ(w.max_ns, 200);
    CHECK_EQ(w.used_ns, 0);
}

static void
between_epochs_nothing_is_used(void)
{
    struct mn_waits w = {0};
    (void)mn_waits_ask(&w, 100);
    mn_waits_give(&w, 110, true);
    mn_waits_forget(&w);
    CHECK_EQ(mn_waits_ask(&w, 1000), -1);
    CHECK_EQ(w.used_ns, 0);
    CHECK_EQ(w.asked_ns, 1000);
}

static void
first_batches_of_later_epochs_are_counted_apart(void)
{
    struct mn_waits w = {0};
    (void)mn_waits_ask(&w, 100);
    mn_waits_give(&w, 150, true); /* the first of all */
    (void)mn_waits_ask(&w, 160);
    mn_waits_give(&w, 167, true);
    mn_waits_forget(&w);
    (void)mn_waits_ask(&w, 1000);
    mn_waits_give(&w, 1010, false); /* a timeout: the wait goes on */
    (void)mn_waits_ask(&w, 1020);
    mn_waits_give(&w, 1030, true);
    (void)mn_waits_ask(&w, 1040);
    mn_waits_give(&w, 1045, true);
    CHECK_EQ(w.first_ns, 50);
    CHECK_EQ(w.starts, 1);
    CHECK_EQ(w.starts_ns, 30);
    CHECK_EQ(w.steady_max_ns, 7);
    CHECK_EQ(w.max_ns, 50);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", waits_and_uses_are_told_apart),
    MN_TEST("plain", a_wait_may_take_several_calls),
    MN_TEST("plain", between_epochs_nothing_is_used),
    MN_TEST("plain", first_batches_of_later_epochs_are_counted_apart),
};

MN_TEST_MAIN(tests)
