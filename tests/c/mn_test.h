/* Shared by the C tests: checks, seeds, a deadline, shared memory, children.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A test program is a table of cases, each of one kind: "plain" (one thread), "thread", or "fork"
 * (several processes). It runs the kinds named on its command line, or all, and fails if there are
 * none. A deadline by SIGALRM turns a hang into a failure. Environment: MINATO_STRESS_SECONDS,
 * MINATO_TEST_SEED, MINATO_TEST_DEADLINE.
 *
 * qemu-user answers 0 to any madvise and does nothing (except MADV_DONTNEED of private memory). A
 * case that needs the advice to be followed is one of MN_TEST_ADVISED: an emulator leaves it out.
 */
#ifndef MN_TEST_H
#define MN_TEST_H

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/mn_base.h"

#define CHECK(cond)                                                                     \
    do {                                                                                \
        if (!(cond)) {                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #cond);                  \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

#define CHECK_EQ(a, b)                                                                  \
    do {                                                                                \
        long long a_ = (long long)(a), b_ = (long long)(b);                             \
        if (a_ != b_) {                                                                 \
            fprintf(stderr, "%s:%d: %s is %lld, not %s (%lld)\n", __FILE__, __LINE__,   \
                    #a, a_, #b, b_);                                                    \
            exit(1);                                                                    \
        }                                                                               \
    } while (0)

struct mn_test {
    const char *kind;
    const char *name;
    void (*fn)(void);
    bool advised; /* needs a system that follows madvise */
    void (*within)(void (*fn)(void)); /* calls the case in other circumstances; NULL: as it is */
};

#define MN_TEST(kind, name) {kind, #name, name, false, NULL}
#define MN_TEST_ADVISED(kind, name) {kind, #name, name, true, NULL}
#define MN_TEST_WITHIN(kind, name, within) {kind, #name ", " #within, name, false, within}
#define MN_TEST_BOTH(kind, name, within)                                                \
    MN_TEST_WITHIN(kind, name, within), MN_TEST(kind, name)

static MN_UNUSED double
mn_test_env(const char *name, double otherwise)
{
    const char *text = getenv(name);
    return text != NULL && *text != '\0' ? strtod(text, NULL) : otherwise;
}

static MN_UNUSED uint64_t
mn_test_clock_ns(void)
{
    struct timespec ts;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &ts) == 0);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

/* Returns when a stress body that starts now should stop. */
static MN_UNUSED uint64_t
mn_test_stop_ns(void)
{
    return mn_test_clock_ns() + (uint64_t)(mn_test_env("MINATO_STRESS_SECONDS", 0.3) * 1e9);
}

/* Returns the bytes of memory (and swap) that a file uses now; st_blocks counts 512 by
 * definition. */
static MN_UNUSED uint64_t
mn_test_resident(int fd)
{
    struct stat st;
    CHECK(fstat(fd, &st) == 0);
    return (uint64_t)st.st_blocks * 512;
}

/* splitmix64: any state will do, so a thread's seed is the test's plus a number. */
static MN_UNUSED uint64_t
mn_test_random(uint64_t *state)
{
    uint64_t z = (*state += UINT64_C(0x9e3779b97f4a7c15));
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

/* Printed, so that a failure can be repeated. */
static MN_UNUSED uint64_t
mn_test_seed(void)
{
    uint64_t seed = (uint64_t)mn_test_env("MINATO_TEST_SEED", 0);
    if (seed == 0) {
        seed = mn_test_clock_ns() % 1000000000u + 1;
    }
    printf("  seed %llu\n", (unsigned long long)seed);
    fflush(stdout);
    return seed;
}

static MN_UNUSED void *
mn_test_shared(size_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(p != MAP_FAILED);
    return p;
}

static MN_UNUSED pid_t
mn_test_fork(void (*fn)(void *), void *arg)
{
    fflush(NULL);
    pid_t parent = getpid();
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        /* A test that fails or meets its deadline leaves no child behind. */
        CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == parent);
        fn(arg);
        fflush(NULL);
        _exit(0);
    }
    return pid;
}

/* Returns the wait status; 0 is a clean end. */
static MN_UNUSED int
mn_test_reap(pid_t pid)
{
    int status;
    while (waitpid(pid, &status, 0) != pid) {
        CHECK(errno == EINTR);
    }
    return status;
}

/* Ties the calling thread to the CPU of that number among those allowed. By itself the scheduler
 * moves a waker and its sleeper to one CPU. There no two instructions ever run at once, and no
 * order can be wrong. */
static MN_UNUSED void
mn_test_settle(int me)
{
    cpu_set_t all, one;
    CHECK(sched_getaffinity(0, sizeof(all), &all) == 0);
    int nth = me % CPU_COUNT(&all);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (CPU_ISSET(cpu, &all) && nth-- == 0) {
            CPU_ZERO(&one);
            CPU_SET(cpu, &one);
            CHECK(sched_setaffinity(0, sizeof(one), &one) == 0);
            return;
        }
    }
}

/* Returns one letter: the state of a process or of one of our threads, from /proc. */
static MN_UNUSED char
mn_test_state(pid_t pid, pid_t tid)
{
    char path[64], text[512], state = '?';
    snprintf(path, sizeof(path), "/proc/%d/task/%d/stat", (int)pid, (int)tid);
    FILE *f = fopen(path, "r");
    if (f != NULL) {
        size_t got = fread(text, 1, sizeof(text) - 1, f);
        text[got] = '\0';
        const char *after = strrchr(text, ')');
        state = after != NULL ? after[2] : '?';
        fclose(f);
    }
    return state;
}

/* Returns whether madvise is real: Linux refuses unknown advice, even for no bytes. */
static MN_UNUSED bool
mn_test_advice_is_read(void)
{
    return madvise(NULL, 0, -1) != 0;
}

static MN_UNUSED int
mn_test_main(int argc, char **argv, const struct mn_test *tests, size_t n)
{
    alarm((unsigned)mn_test_env("MINATO_TEST_DEADLINE",
                                120 + 40 * mn_test_env("MINATO_STRESS_SECONDS", 0)));
    size_t ran = 0;
    for (size_t i = 0; i < n; i++) {
        bool wanted = argc < 2;
        for (int a = 1; a < argc; a++) {
            wanted = wanted || strcmp(argv[a], tests[i].kind) == 0;
        }
        if (wanted && tests[i].advised && !mn_test_advice_is_read()) {
            printf("left out, an emulator reads no advice: %s\n", tests[i].name);
        }
        else if (wanted) {
            printf("%s %s\n", tests[i].kind, tests[i].name);
            fflush(stdout);
            if (tests[i].within != NULL) {
                tests[i].within(tests[i].fn);
            }
            else {
                tests[i].fn();
            }
            ran++;
        }
    }
    if (ran == 0) {
        fprintf(stderr, "no case is of the kinds asked for\n");
        return 2;
    }
    return 0;
}

#define MN_TEST_MAIN(tests)                                                             \
    int main(int argc, char **argv)                                                     \
    {                                                                                   \
        return mn_test_main(argc, argv, tests, sizeof(tests) / sizeof((tests)[0]));     \
    }

#endif
