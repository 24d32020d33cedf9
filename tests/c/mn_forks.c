/* Forks that may still see shared memory: their ends, two at once, more than are watched, and
 * processes that close all descriptors.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/resource.h>

#include "mn_test.h"
#include "os/mn_forks.h"

static struct mn_forks forks;

/* count: the first or the last count of the fork. */
static bool
see(uint64_t count)
{
    mn_forks_look(&forks);
    return mn_forks_see(&forks, count - 1, count);
}

/* Waits until the fork is gone; the program's deadline applies. The processes may have no parent
 * here, and a process that has just been forked may still have mappings of others. */
static void
wait_unseen(uint64_t count)
{
    while (see(count)) {
        sched_yield();
    }
}

static void
wait_living(size_t n)
{
    while (mn_forks_look(&forks), forks.nliving > n) {
        sched_yield();
    }
    CHECK_EQ(forks.nliving, n);
}

static int
descriptors(void)
{
    int n = 0;
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != NULL);
    while (readdir(folder) != NULL) {
        n++;
    }
    closedir(folder);
    return n;
}

static void
live(void *unused)
{
    (void)unused;
    mn_forks_in_child(&forks);
    for (;;) {
        pause();
    }
}

static pid_t
fork_one(void)
{
    mn_forks_before(&forks);
    pid_t pid = mn_test_fork(live, NULL);
    mn_forks_in_parent(&forks);
    return pid;
}

static void
end(pid_t pid)
{
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(WIFSIGNALED(mn_test_reap(pid)));
}

static void
one_that_fails_is_seen_by_nobody(void)
{
    int before = descriptors();
    mn_forks_before(&forks);
    CHECK(see(forks.count)); /* it may exist at any moment */
    mn_forks_in_parent(&forks);
    CHECK(!see(forks.count));
    mn_forks_in_parent(&forks); /* for a fork that was not counted */
    CHECK_EQ(descriptors(), before);
}

static void
a_child_sees_what_was_there_until_it_is_gone(void)
{
    int before = descriptors();
    pid_t first = fork_one(), second = fork_one();
    uint64_t count = forks.count;
    CHECK(see(count) && see(count - 2));
    CHECK(!mn_forks_see(&forks, count, count)); /* memory that came into use after it */
    end(first);
    wait_unseen(count - 2);
    CHECK(see(count));
    end(second);
    wait_unseen(count);
    CHECK_EQ(descriptors(), before);
}

static void
what_comes_into_use_while_a_fork_is_made_is_seen(void)
{
    mn_forks_before(&forks);
    uint64_t born = forks.count;
    CHECK(mn_forks_see(&forks, born, born)); /* even if freed before the fork ends */
    pid_t pid = mn_test_fork(live, NULL);
    CHECK(mn_forks_see(&forks, born, born));
    mn_forks_in_parent(&forks);
    CHECK(mn_forks_see(&forks, born, born) && mn_forks_see(&forks, born, forks.count));
    CHECK(!mn_forks_see(&forks, forks.count, forks.count));
    CHECK(!mn_forks_see(&forks, 0, born - 1));
    end(pid);
    wait_living(0);
}

static int told[2];

static void
close_all(void)
{
    for (int fd = 3; fd < 1024; fd++) {
        if (fd != told[1]) {
            (void)close(fd);
        }
    }
}

static void
fork_and_end(void *closing)
{
    mn_forks_in_child(&forks);
    mn_forks_before(&forks);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        if (closing != NULL) {
            close_all();
            pid = getpid();
            CHECK(write(told[1], &pid, sizeof(pid)) == (ssize_t)sizeof(pid));
        }
        live(NULL);
    }
    CHECK(closing != NULL || write(told[1], &pid, sizeof(pid)) == (ssize_t)sizeof(pid));
}

static void
a_childs_child_sees_it(void *closing)
{
    pid_t theirs;
    CHECK(pipe(told) == 0);
    mn_forks_before(&forks);
    pid_t pid = mn_test_fork(fork_and_end, closing);
    mn_forks_in_parent(&forks);
    CHECK_EQ(mn_test_reap(pid), 0);
    CHECK(read(told[0], &theirs, sizeof(theirs)) == (ssize_t)sizeof(theirs));
    CHECK(see(forks.count));
    CHECK(kill(theirs, SIGKILL) == 0);
    wait_unseen(forks.count);
    CHECK(close(told[0]) == 0 && close(told[1]) == 0);
}

static void
what_a_child_has_forked_sees_it_too(void)
{
    a_childs_child_sees_it(NULL);
    a_childs_child_sees_it(told); /* a daemon without descriptors */
}

static void
expect_it_open(void *fd)
{
    mn_forks_in_child(&forks);
    CHECK(fcntl(*(int *)fd, F_GETFD) >= 0);
}

/* The program has closed the descriptor, and its number belongs to another file: one that has hung
 * up, and one that could be sealed. */
static void
a_descriptor_that_is_another_files_is_left_alone(void)
{
    for (int way = 0; way < 2; way++) {
        pid_t pid = fork_one();
        uint64_t lost = forks.count;
        int ends[2], number = forks.living[0].fd, file = memfd_create("other", MFD_ALLOW_SEALING);
        CHECK(file >= 0 && pipe(ends) == 0);
        mn_forks_before(&forks);
        CHECK(dup2(way == 0 ? ends[0] : file, number) == number);
        CHECK(close(ends[1]) == 0);
        pid_t other = mn_test_fork(expect_it_open, &number);
        mn_forks_in_parent(&forks);
        CHECK_EQ(mn_test_reap(other), 0);
        end(pid);
        wait_living(0);
        CHECK(see(lost) && !see(lost + 2)); /* nothing can show its end */
        CHECK(fcntl(number, F_GETFD) >= 0);
        CHECK_EQ(fcntl(file, F_GET_SEALS), 0);
        mn_forks_forget(&forks);
        CHECK(!see(lost));
        CHECK(close(number) == 0 && close(file) == 0 && close(ends[0]) == 0);
    }
}

/* Two threads, each of which begins before the other is done. */
struct fork_of_a_thread {
    pthread_t thread;
    pthread_barrier_t *turn;
    pid_t pid;
};

static void *
fork_in_turn(void *arg)
{
    struct fork_of_a_thread *t = arg;
    mn_forks_before(&forks);
    pthread_barrier_wait(t->turn);
    pthread_barrier_wait(t->turn); /* the other has begun, or is done */
    t->pid = mn_test_fork(live, NULL);
    mn_forks_in_parent(&forks);
    pthread_barrier_wait(t->turn);
    pthread_barrier_wait(t->turn); /* its child ends with it */
    return NULL;
}

static void
forks_of_two_threads_are_two(void)
{
    for (int way = 0; way < 4; way++) { /* which thread forks first, and whose child ends first */
        pthread_barrier_t turn;
        struct fork_of_a_thread other = {.turn = &turn};
        CHECK(pthread_barrier_init(&turn, NULL, 2) == 0);
        CHECK(pthread_create(&other.thread, NULL, fork_in_turn, &other) == 0);
        pthread_barrier_wait(&turn);
        uint64_t its = forks.count, own = its + 1;
        mn_forks_before(&forks);
        pid_t pid = 0;
        for (int act = 0; act < 2; act++) {
            if (act == way % 2) {
                pid = mn_test_fork(live, NULL);
                mn_forks_in_parent(&forks);
            }
            else {
                pthread_barrier_wait(&turn);
                pthread_barrier_wait(&turn);
            }
        }
        CHECK(see(its) && see(own));
        end(way / 2 == 0 ? pid : other.pid);
        wait_living(1);
        CHECK(see(own)); /* it began before the other was done */
        CHECK(see(its) == (way / 2 == 0));
        end(way / 2 == 0 ? other.pid : pid);
        wait_living(0);
        CHECK(!see(its) && !see(own));
        pthread_barrier_wait(&turn);
        CHECK(pthread_join(other.thread, NULL) == 0);
        CHECK(pthread_barrier_destroy(&turn) == 0);
    }
}

static void
past_the_limit_none_is_forgotten_too_early_or_never(void)
{
    enum { MORE = 5 };
    static pid_t pids[MN_FORKS_WATCHED + MORE];
    int before = descriptors();
    uint64_t first = forks.count + 1, last = forks.count + 2 * (MN_FORKS_WATCHED + MORE);
    for (int i = 0; i < MN_FORKS_WATCHED + MORE; i++) {
        pids[i] = fork_one();
    }
    CHECK_EQ(descriptors(), before + MN_FORKS_WATCHED);
    uint64_t shared = first + 2 * (MN_FORKS_WATCHED - 1); /* the first of those that share a file */
    for (int i = MORE; i > 0; i--) {
        end(pids[MN_FORKS_WATCHED - 1 + i]);
        CHECK(see(shared) && see(last));
    }
    end(pids[MN_FORKS_WATCHED - 1]);
    wait_unseen(last);
    CHECK(!see(shared) && see(first));
    for (int i = 0; i < MN_FORKS_WATCHED - 1; i++) {
        end(pids[i]);
    }
    wait_living(0);
    CHECK(!see(first) && !mn_forks_see(&forks, 0, forks.count));
    CHECK_EQ(descriptors(), before);
}

static void
leave_none(const struct rlimit *usual)
{
    int fd = dup(0);
    CHECK(fd >= 0 && close(fd) == 0);
    struct rlimit few = {(rlim_t)fd, usual->rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &few) == 0);
}

static void
what_nobody_can_see_is_forgotten(void)
{
    int before = descriptors();
    pid_t pid = fork_one();
    mn_forks_before(&forks);
    mn_forks_forget(&forks);
    CHECK(see(forks.count)); /* it is in progress, and may exist at any moment */
    CHECK(!see(forks.count - 1) && descriptors() == before + 1);
    mn_forks_in_parent(&forks);
    wait_living(0);
    CHECK_EQ(descriptors(), before);
    end(pid);
}

static void
without_descriptors_only_what_was_out_is_lost(void)
{
    struct rlimit usual;
    CHECK(getrlimit(RLIMIT_NOFILE, &usual) == 0);
    pid_t first = fork_one();
    leave_none(&usual);
    pid_t second = fork_one(); /* it shares a file */
    end(first);
    CHECK(see(forks.count));
    end(second);
    wait_unseen(forks.count);
    leave_none(&usual); /* not even its former one */
    mn_forks_before(&forks);
    CHECK(mn_forks_see(&forks, forks.count, forks.count));
    second = mn_test_fork(live, NULL);
    mn_forks_in_parent(&forks);
    uint64_t lost = forks.count;
    CHECK(setrlimit(RLIMIT_NOFILE, &usual) == 0);
    end(second);
    CHECK(see(lost) && see(lost - 1) && !see(lost - 2));
    end(fork_one());
    wait_unseen(lost + 2);
    CHECK(see(lost));
    mn_forks_forget(&forks);
    CHECK(!see(lost));
}

static const struct mn_test tests[] = {
    MN_TEST("plain", one_that_fails_is_seen_by_nobody),
    MN_TEST("fork", a_child_sees_what_was_there_until_it_is_gone),
    MN_TEST("fork", what_comes_into_use_while_a_fork_is_made_is_seen),
    MN_TEST("fork", what_a_child_has_forked_sees_it_too),
    MN_TEST("fork", a_descriptor_that_is_another_files_is_left_alone),
    MN_TEST("fork", forks_of_two_threads_are_two),
    MN_TEST("fork", past_the_limit_none_is_forgotten_too_early_or_never),
    MN_TEST("fork", what_nobody_can_see_is_forgotten),
    MN_TEST("fork", without_descriptors_only_what_was_out_is_lost),
};

MN_TEST_MAIN(tests)
