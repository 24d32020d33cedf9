/* The lifeline: which processes notice the end of the process that opened it.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>

#include "mn_test.h"
#include "base/mn_atomic.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"

static void
open_one(struct mn_lifeline *line, struct mn_lifeline_end *end)
{
    int fd;
    CHECK_EQ(mn_lifeline_open(line, &fd), 0);
    CHECK((fcntl(fd, F_GETFD) & FD_CLOEXEC) != 0 && (fcntl(line->fd, F_GETFD) & FD_CLOEXEC) != 0);
    mn_lifeline_hold(end, fd);
    CHECK_EQ(end->fd, fd);
    CHECK(!mn_lifeline_is_cut(end));
}

/* A fork may just be on its way to its handler. */
static void
await_cut(const struct mn_lifeline_end *end)
{
    while (!mn_lifeline_is_cut(end)) {
        sched_yield();
    }
}

static void
closing_it_cuts_it(void)
{
    struct mn_lifeline lines[3];
    struct mn_lifeline_end ends[3];
    for (int i = 0; i < 3; i++) {
        open_one(&lines[i], &ends[i]);
    }
    static const int order[] = {1, 0, 2};
    for (int i = 0; i < 3; i++) {
        mn_lifeline_close(&lines[order[i]]);
        CHECK_EQ(lines[order[i]].fd, -1);
        for (int j = 0; j < 3; j++) {
            CHECK_EQ(mn_lifeline_is_cut(&ends[j]), lines[j].fd < 0);
        }
        mn_lifeline_close(&lines[order[i]]); /* closing twice does no harm */
    }
    for (int i = 0; i < 3; i++) {
        CHECK(close(ends[i].fd) == 0);
    }
}

/* A number that was closed, or belongs to another file by now, shows nothing. */
static void
other_descriptors_tell_of_no_end(void)
{
    struct mn_lifeline line;
    struct mn_lifeline_end end, none;
    int fds[2];
    mn_lifeline_hold(&none, -1);
    CHECK(none.fd == -1 && !mn_lifeline_is_cut(&none));
    int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
    mn_lifeline_hold(&none, null);
    CHECK(none.fd == -1 && !mn_lifeline_is_cut(&none));
    open_one(&line, &end);
    CHECK(pipe2(fds, O_CLOEXEC) == 0 && close(fds[1]) == 0);
    CHECK_EQ(dup2(fds[0], end.fd), end.fd); /* a pipe that has hung up */
    mn_lifeline_close(&line);
    CHECK(!mn_lifeline_is_cut(&end));
    CHECK(close(end.fd) == 0 && close(fds[0]) == 0 && close(null) == 0);
    CHECK(!mn_lifeline_is_cut(&end));
}

struct family {
    struct mn_lifeline line;
    struct mn_lifeline_end end;
    int live[2]; /* a child lives until this closes */
};

static void
outlive(void *arg)
{
    struct family *f = arg;
    char c;
    CHECK_EQ(f->line.fd, -1);
    mn_lifeline_close(&f->line);
    CHECK(close(f->live[1]) == 0);
    (void)!read(f->live[0], &c, 1);
    CHECK(mn_lifeline_is_cut(&f->end));
}

static void
a_fork_that_lives_on_holds_nothing(void)
{
    struct family f;
    open_one(&f.line, &f.end);
    CHECK(pipe2(f.live, O_CLOEXEC) == 0);
    pid_t child = mn_test_fork(outlive, &f);
    CHECK(!mn_lifeline_is_cut(&f.end)); /* the parent still has it */
    mn_lifeline_close(&f.line);
    await_cut(&f.end); /* although the child lives */
    CHECK(close(f.live[1]) == 0);
    CHECK_EQ(mn_test_reap(child), 0);
    CHECK(close(f.live[0]) == 0 && close(f.end.fd) == 0);
}

static void
leave(void *arg)
{
    struct mn_lifeline_end *end = arg;
    struct mn_lifeline line;
    struct mn_lifeline_end own;
    CHECK(!mn_lifeline_is_cut(end));
    open_one(&line, &own); /* a fork may have its own, which ends with it */
}

static mn_a32 churning;

static void
churn(void *arg)
{
    (void)arg;
    while (mn_a32_load_acquire(&churning) != 0) {
        struct mn_lifeline line;
        struct mn_lifeline_end end;
        open_one(&line, &end);
        mn_lifeline_close(&line);
        await_cut(&end); /* a concurrent fork has closed what it has inherited */
        CHECK(close(end.fd) == 0);
    }
}

static void
forks_beside_a_thread_that_opens_some(void)
{
    struct mn_thread thread;
    struct mn_lifeline line;
    struct mn_lifeline_end end;
    open_one(&line, &end);
    mn_a32_store_release(&churning, 1);
    CHECK_EQ(mn_thread_start(&thread, "churn", churn, NULL), 0);
    for (int i = 0; i < 100; i++) {
        CHECK_EQ(mn_test_reap(mn_test_fork(leave, &end)), 0);
    }
    mn_a32_store_release(&churning, 0);
    CHECK_EQ(mn_thread_join(&thread), 0);
    mn_lifeline_close(&line);
    await_cut(&end);
    CHECK(close(end.fd) == 0);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", closing_it_cuts_it),
    MN_TEST("plain", other_descriptors_tell_of_no_end),
    MN_TEST("fork", a_fork_that_lives_on_holds_nothing),
    MN_TEST("fork", forks_beside_a_thread_that_opens_some),
};

MN_TEST_MAIN(tests)
