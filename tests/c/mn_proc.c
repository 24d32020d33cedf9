/* Liveness of processes: running, half ended, zombies, gone.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>

#include "mn_test.h"
#include "os/mn_proc.h"

struct lifeline {
    int up[2];   /* the child reports that it is ready */
    int down[2]; /* the child lives until this closes */
};

static void
lifeline_open(struct lifeline *l)
{
    CHECK(pipe2(l->up, O_CLOEXEC) == 0 && pipe2(l->down, O_CLOEXEC) == 0);
}

static void
child_ready(struct lifeline *l)
{
    close(l->down[1]);
    CHECK(write(l->up[1], "x", 1) == 1);
}

static void
child_wait(struct lifeline *l)
{
    char c;
    (void)!read(l->down[0], &c, 1);
}

static void
live(void *arg)
{
    child_ready(arg);
    child_wait(arg);
}

static void
parent_await(struct lifeline *l)
{
    char c;
    CHECK(read(l->up[0], &c, 1) == 1);
}

static void
lifeline_end(struct lifeline *l)
{
    close(l->up[0]);
    close(l->up[1]);
    close(l->down[0]);
    if (l->down[1] >= 0) {
        close(l->down[1]);
    }
}

static void
ourselves(void)
{
    CHECK_EQ(mn_proc_alive(getpid()), 1);
    CHECK_EQ(mn_proc_kill(getpid(), 0), 0);
    int fd = mn_proc_pidfd(getpid());
    CHECK(fd >= 0 && (fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(!mn_proc_ended(fd));
    CHECK(close(fd) == 0);
    CHECK(!mn_proc_ended(fd));
}

static void
nobody(void)
{
    CHECK_EQ(mn_proc_alive(0), 0);
    CHECK_EQ(mn_proc_alive(-5), 0);
    CHECK_EQ(mn_proc_kill(0, SIGKILL), -ESRCH);
    CHECK_EQ(mn_proc_kill(-1, SIGKILL), -ESRCH);
}

static void
await_end(int fd)
{
    while (!mn_proc_ended(fd)) {
        sched_yield();
    }
}

static void
a_life(void)
{
    struct lifeline l;
    lifeline_open(&l);
    pid_t pid = mn_test_fork(live, &l);
    parent_await(&l);
    CHECK_EQ(mn_proc_alive(pid), 1);

    int fd = mn_proc_pidfd(pid);
    CHECK(fd >= 0);
    CHECK_EQ(mn_proc_kill(pid, SIGSTOP), 0);
    while (mn_test_state(pid, pid) != 'T') {
        sched_yield();
    }
    CHECK_EQ(mn_proc_alive(pid), 1);
    CHECK_EQ(mn_proc_kill(pid, SIGKILL), 0);
    await_end(fd);
    CHECK_EQ(mn_test_state(pid, pid), 'Z');
    CHECK_EQ(mn_proc_alive(pid), 0); /* a zombie, not reaped yet */
    CHECK_EQ(mn_proc_kill(pid, SIGKILL), -ESRCH);
    int status = mn_test_reap(pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK_EQ(mn_proc_alive(pid), 0);
    CHECK_EQ(mn_proc_kill(pid, SIGKILL), -ESRCH);
    CHECK_EQ(mn_proc_pidfd(pid), -ESRCH);
    close(fd);
    lifeline_end(&l);
}

static void *
live_on(void *arg)
{
    struct lifeline *l = arg;
    while (mn_test_state(getpid(), getpid()) != 'Z') {
        sched_yield();
    }
    child_ready(l);
    child_wait(l);
    _exit(0);
}

static void
lose_the_first_thread(void *arg)
{
    pthread_t t;
    CHECK(pthread_create(&t, NULL, live_on, arg) == 0);
    pthread_exit(NULL);
}

static void
a_headless_process_lives(void)
{
    static struct lifeline l; /* static: the thread may end before the child has used it */
    lifeline_open(&l);
    pid_t pid = mn_test_fork(lose_the_first_thread, &l);
    parent_await(&l);
    CHECK_EQ(mn_test_state(pid, pid), 'Z'); /* looks dead, but is not */
    CHECK_EQ(mn_proc_alive(pid), 1);
    int fd = mn_proc_pidfd(pid);
    CHECK(fd >= 0);
    CHECK(!mn_proc_ended(fd));
    close(l.down[1]);
    l.down[1] = -1;
    await_end(fd);
    CHECK_EQ(mn_proc_alive(pid), 0);
    CHECK_EQ(mn_test_reap(pid), 0);
    close(fd);
    lifeline_end(&l);
}

static void
know_themselves(void *arg)
{
    CHECK_EQ(mn_proc_self(), getpid());
    if (arg != NULL) {
        CHECK_EQ(mn_test_reap(mn_test_fork(know_themselves, NULL)), 0);
    }
}

static void
forks_know_themselves(void)
{
    int grandchild;
    know_themselves(NULL);
    CHECK_EQ(mn_test_reap(mn_test_fork(know_themselves, &grandchild)), 0);
    know_themselves(NULL);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", ourselves),
    MN_TEST("plain", nobody),
    MN_TEST("fork", forks_know_themselves),
    MN_TEST("fork", a_life),
    MN_TEST("fork", a_headless_process_lives),
};

MN_TEST_MAIN(tests)
