/* Futexes: every result, and waking across processes.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "mn_test.h"
#include "os/mn_thread.h"

#define LONG_NS INT64_C(60000000000)

struct meeting {
    mn_a32 word;
    mn_a32 woken;
};

static void
another_value_does_not_wait(void)
{
    mn_a32 w = 5;
    CHECK_EQ(mn_futex_wait(&w, 6, -1), -EAGAIN);
    CHECK_EQ(mn_futex_wait(&w, 6, 0), -EAGAIN);
}

static void
timeouts_end_the_wait(void)
{
    mn_a32 w = 5;
    CHECK_EQ(mn_futex_wait(&w, 5, 0), -ETIMEDOUT);
    uint64_t start = mn_test_clock_ns();
    CHECK_EQ(mn_futex_wait(&w, 5, 2000000), -ETIMEDOUT);
    CHECK(mn_test_clock_ns() - start >= 2000000);
}

static void
nobody_to_wake(void)
{
    mn_a32 w = 0;
    CHECK_EQ(mn_futex_wake(&w, 10), 0);
}

static void
a_bad_word_is_an_error(void)
{
    CHECK_EQ(mn_futex_wake((mn_a32 *)(void *)((char *)mn_test_shared(4096) + 1), 1), -EINVAL);
}

static void
wait_for_change(void *arg)
{
    struct meeting *m = arg;
    while (mn_a32_load_acquire(&m->word) == 0) {
        int rc = mn_futex_wait(&m->word, 0, LONG_NS);
        CHECK(rc == 0 || rc == -EAGAIN || rc == -EINTR);
    }
    mn_a32_add_acqrel(&m->woken, 1);
}

static void *
wait_in_thread(void *arg)
{
    wait_for_change(arg);
    return NULL;
}

static void
threads_wake(void)
{
    struct meeting *m = mn_test_shared(sizeof(*m));
    pthread_t t[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&t[i], NULL, wait_in_thread, m) == 0);
    }
    mn_a32_store_seqcst(&m->word, 1);
    CHECK(mn_futex_wake(&m->word, 2) >= 0);
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(t[i], NULL) == 0);
    }
    CHECK_EQ(mn_a32_load_relaxed(&m->woken), 2);
}

static void
await_sleep(pid_t pid)
{
    while (mn_test_state(pid, pid) != 'S') {
        sched_yield();
    }
}

static void
processes_wake(void)
{
    struct meeting *m = mn_test_shared(sizeof(*m));
    pid_t pid = mn_test_fork(wait_for_change, m);
    await_sleep(pid);
    mn_a32_store_seqcst(&m->word, 1);
    CHECK_EQ(mn_futex_wake(&m->word, 5), 1);
    CHECK_EQ(mn_test_reap(pid), 0);
    CHECK_EQ(mn_a32_load_relaxed(&m->woken), 1);
}

static void
ignore(int sig)
{
    (void)sig;
}

static void
wait_for_signal(void *arg)
{
    struct meeting *m = arg;
    struct sigaction act = {.sa_handler = ignore};
    CHECK(sigaction(SIGUSR1, &act, NULL) == 0);
    mn_a32_store_release(&m->woken, 1);
    CHECK_EQ(mn_futex_wait(&m->word, 0, -1), -EINTR);
}

static void
signals_end_the_wait(void)
{
    struct meeting *m = mn_test_shared(sizeof(*m));
    pid_t pid = mn_test_fork(wait_for_signal, m);
    while (mn_a32_load_acquire(&m->woken) == 0) {
        sched_yield();
    }
    await_sleep(pid);
    CHECK(kill(pid, SIGUSR1) == 0);
    CHECK_EQ(mn_test_reap(pid), 0);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", another_value_does_not_wait),
    MN_TEST("plain", timeouts_end_the_wait),
    MN_TEST("plain", nobody_to_wake),
    MN_TEST("fork", a_bad_word_is_an_error), /* misaligned on purpose: not for UBSan */
    MN_TEST("thread", threads_wake),
    MN_TEST("fork", processes_wake),
    MN_TEST("fork", signals_end_the_wait),
};

MN_TEST_MAIN(tests)
