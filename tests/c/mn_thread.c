/* Threads without signals, joins, locks, and the two clocks.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "mn_test.h"
#include "os/mn_thread.h"

struct facts {
    sigset_t blocked;
    char name[MN_THREAD_NAME_MAX];
};

static void
look_around(void *arg)
{
    struct facts *f = arg;
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &f->blocked) == 0);
    CHECK(pthread_getname_np(pthread_self(), f->name, sizeof(f->name)) == 0);
}

static void
signals_are_blocked_in_it_only(void)
{
    struct facts f;
    struct mn_thread t;
    sigset_t ours;
    CHECK_EQ(mn_thread_start(&t, "a name that is too long", look_around, &f), 0);
    CHECK_EQ(mn_thread_join(&t), 0);
    CHECK(sigismember(&f.blocked, SIGINT) && sigismember(&f.blocked, SIGCHLD));
    CHECK(sigismember(&f.blocked, SIGTERM) && sigismember(&f.blocked, SIGUSR1));
    CHECK(strcmp(f.name, "a name that is ") == 0);
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &ours) == 0);
    CHECK(!sigismember(&ours, SIGINT) && !sigismember(&ours, SIGCHLD));
    CHECK_EQ(mn_thread_join(&t), -EINVAL);
}

static int create_fails;

int __real_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *arg);
int __wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *arg);

int
__wrap_pthread_create(pthread_t *t, const pthread_attr_t *attr, void *(*fn)(void *),
                      void *arg)
{
    return create_fails != 0 ? create_fails : __real_pthread_create(t, attr, fn, arg);
}

static void
a_failed_start_restores_signals(void)
{
    struct facts f;
    struct mn_thread t;
    sigset_t ours;
    create_fails = EAGAIN;
    CHECK_EQ(mn_thread_start(&t, "never", look_around, &f), -EAGAIN);
    create_fails = 0;
    CHECK_EQ(mn_thread_join(&t), -EINVAL);
    CHECK(pthread_sigmask(SIG_SETMASK, NULL, &ours) == 0);
    CHECK(!sigismember(&ours, SIGINT));
}

struct counter {
    struct mn_mutex lock;
    long n;
};

static void
count(void *arg)
{
    struct counter *c = arg;
    for (int i = 0; i < 20000; i++) {
        mn_mutex_lock(&c->lock);
        c->n++;
        mn_mutex_unlock(&c->lock);
    }
}

static void
locks_exclude(void)
{
    struct counter c = {.n = 0};
    struct mn_thread t[3];
    CHECK_EQ(mn_mutex_init(&c.lock), 0);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(mn_thread_start(&t[i], "count", count, &c), 0);
    }
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(mn_thread_join(&t[i]), 0);
    }
    CHECK_EQ(c.n, 60000);
    mn_mutex_fini(&c.lock);
}

static void
join_of_another(void *arg)
{
    CHECK_EQ(mn_thread_join(arg), -ESRCH);
}

static void
a_child_does_not_join(void)
{
    struct facts f;
    struct mn_thread t;
    CHECK_EQ(mn_thread_start(&t, "parent's", look_around, &f), 0);
    CHECK_EQ(mn_test_reap(mn_test_fork(join_of_another, &t)), 0);
    CHECK_EQ(mn_thread_join(&t), 0);
}

static void
clocks_go_forward(void)
{
    uint64_t cpu = mn_thread_cpu_ns(), work = 0, state = 1;
    while (mn_thread_cpu_ns() - cpu < 1000000) { /* ends only if work makes it move */
        work += mn_test_random(&state);
    }
    CHECK(work != 0);
    uint64_t last = mn_now_ns();
    for (int i = 0; i < 1000; i++) {
        uint64_t next = mn_now_ns();
        CHECK(next >= last);
        last = next;
    }
}

static const struct mn_test tests[] = {
    MN_TEST("plain", clocks_go_forward),
    MN_TEST("thread", signals_are_blocked_in_it_only),
    MN_TEST("thread", a_failed_start_restores_signals),
    MN_TEST("thread", locks_exclude),
    MN_TEST("fork", a_child_does_not_join),
};

MN_TEST_MAIN(tests)
