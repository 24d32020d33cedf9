/* Floor 0: the atomics have the orders of their names, results have names, assertions report.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "base/mn_atomic.h"
#include "base/mn_base.h"
#include "mn_test.h"

#define WORD_TEST(W, T)                                                                 \
    static void W##_words(void)                                                         \
    {                                                                                   \
        W w;                                                                            \
        T big = (T)~(T)0, seen;                                                         \
        W##_store_relaxed(&w, big);                                                     \
        CHECK(W##_load_relaxed(&w) == big);                                             \
        W##_store_release(&w, 5);                                                       \
        CHECK(W##_load_acquire(&w) == 5);                                               \
        W##_store_seqcst(&w, 6);                                                        \
        CHECK(W##_load_seqcst(&w) == 6);                                                \
        CHECK(W##_xchg_acqrel(&w, 7) == 6 && W##_xchg_seqcst(&w, 8) == 7);              \
        seen = 7;                                                                       \
        CHECK(!W##_cas_acqrel(&w, &seen, 9) && seen == 8);                              \
        CHECK(W##_cas_acqrel(&w, &seen, 9) && seen == 8 && W##_load_relaxed(&w) == 9);  \
        CHECK(!W##_cas_seqcst(&w, &seen, 1) && seen == 9);                              \
        CHECK(W##_cas_seqcst(&w, &seen, big) && W##_load_relaxed(&w) == big);           \
        CHECK(W##_add_relaxed(&w, 1) == big && W##_load_relaxed(&w) == 0);              \
        CHECK(W##_add_acqrel(&w, (T)0 - 3) == 0 && W##_add_seqcst(&w, 3) == (T)0 - 3);  \
        CHECK(W##_load_relaxed(&w) == 0);                                               \
    }

WORD_TEST(mn_a32, uint32_t)
WORD_TEST(mn_a64, uint64_t)

enum { ADDERS = 3, ADDS = 20000 };

static mn_a32 sum32;
static mn_a64 sum64;

static void *
adder(void *arg)
{
    for (int i = 0; i < ADDS; i++) {
        mn_a32_add_relaxed(&sum32, 1);
        uint64_t seen = mn_a64_load_relaxed(&sum64);
        while (!mn_a64_cas_acqrel(&sum64, &seen, seen + 3)) {
            mn_cpu_pause();
        }
    }
    return arg;
}

static void
sums_from_threads(void)
{
    pthread_t t[ADDERS];
    for (int i = 0; i < ADDERS; i++) {
        CHECK(pthread_create(&t[i], NULL, adder, NULL) == 0);
    }
    for (int i = 0; i < ADDERS; i++) {
        CHECK(pthread_join(t[i], NULL) == 0);
    }
    CHECK_EQ(mn_a32_load_relaxed(&sum32), ADDERS * ADDS);
    CHECK_EQ(mn_a64_load_relaxed(&sum64), 3 * ADDERS * ADDS);
}

static void
fail_an_assertion(void *arg)
{
    mn_assert(2 > 1);
    (void)dup2(*(const int *)arg, STDERR_FILENO);
    mn_assert(1 > 2);
}

static void
assertions_tell_their_text_and_abort(void)
{
    int ends[2];
    char told[256] = "";
    CHECK(pipe(ends) == 0);
    int status = mn_test_reap(mn_test_fork(fail_an_assertion, &ends[1]));
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(read(ends[0], told, sizeof(told) - 1) > 0);
    CHECK(strstr(told, "mn_base.c") != NULL && strstr(told, "assertion failed: 1 > 2") != NULL);
    (void)close(ends[0]);
    (void)close(ends[1]);
}

static char label[32];

static void
note_fault(const char *name)
{
    snprintf(label, sizeof(label), "%s", name);
}

static void
fault_points_call_the_hook(void)
{
    MN_FAULT("test.unset"); /* no hook: does nothing */
    mn_fault_hook = note_fault;
    MN_FAULT("test.set");
    mn_fault_hook = NULL;
    CHECK(strcmp(label, "test.set") == 0);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", mn_a32_words),
    MN_TEST("plain", mn_a64_words),
    MN_TEST("plain", fault_points_call_the_hook),
    MN_TEST("thread", sums_from_threads),
    MN_TEST("fork", assertions_tell_their_text_and_abort),
};

MN_TEST_MAIN(tests)
