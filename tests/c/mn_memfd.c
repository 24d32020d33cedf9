/* The arena's file: sparse, shared, populated and punched; and each of its failures.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Linked with --wrap for the system calls that are made to fail.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <sys/types.h>

#include "base/mn_atomic.h"
#include "mn_test.h"
#include "os/mn_memfd.h"

#define MB ((uint64_t)1 << 20)

/* The call that must fail next, with which errno, and how often. */
static const char *failing = "";
static int failing_errno, failing_times;

static bool
fails(const char *name)
{
    if (strcmp(failing, name) == 0 && failing_times > 0) {
        failing_times--;
        errno = failing_errno;
        return true;
    }
    return false;
}

static void
make_fail(const char *name, int err, int times)
{
    failing = name;
    failing_errno = err;
    failing_times = times;
}

#define NOEXEC_SEAL 8u

static bool noexec;

int __real_memfd_create(const char *name, unsigned flags);
int __wrap_memfd_create(const char *name, unsigned flags);
int __real_ftruncate(int fd, off_t len);
int __wrap_ftruncate(int fd, off_t len);
void *__real_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off);
void *__wrap_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off);
int __real_madvise(void *addr, size_t len, int advice);
int __wrap_madvise(void *addr, size_t len, int advice);

int
__wrap_memfd_create(const char *name, unsigned flags)
{
    if (noexec && (flags & NOEXEC_SEAL) == 0) { /* as with vm.memfd_noexec = 2 */
        errno = EACCES;
        return -1;
    }
    return fails("memfd_create") ? -1 : __real_memfd_create(name, flags & ~NOEXEC_SEAL);
}

int
__wrap_ftruncate(int fd, off_t len)
{
    return fails("ftruncate") ? -1 : __real_ftruncate(fd, len);
}

void *
__wrap_mmap(void *addr, size_t len, int prot, int flags, int fd, off_t off)
{
    return fails("mmap") ? MAP_FAILED : __real_mmap(addr, len, prot, flags, fd, off);
}

int
__wrap_madvise(void *addr, size_t len, int advice)
{
    return fails("madvise") ? -1 : __real_madvise(addr, len, advice);
}

static int
open_files(void)
{
    int n = 0;
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir != NULL);
    while (readdir(dir) != NULL) {
        n++;
    }
    closedir(dir);
    return n;
}

static unsigned char *
open_file(uint64_t bytes, int *fd)
{
    void *p = NULL;
    *fd = mn_memfd_create("minato-test", bytes);
    CHECK(*fd >= 0);
    CHECK((fcntl(*fd, F_GETFD) & FD_CLOEXEC) != 0);
    CHECK_EQ(mn_memfd_map(*fd, bytes, &p), 0);
    return p;
}

static void
close_file(unsigned char *p, uint64_t bytes, int fd)
{
    CHECK_EQ(mn_memfd_unmap(p, bytes), 0);
    CHECK(close(fd) == 0);
}

static void
pages_come_and_go(void)
{
    int fd;
    uint64_t bytes = (uint64_t)1 << 36; /* more than the machine has */
    unsigned char *p = open_file(bytes, &fd);
    CHECK_EQ(mn_test_resident(fd), 0);
    p[3 * MB] = 7;
    CHECK_EQ(mn_memfd_populate(p + 2 * MB, 2 * MB), 0);
    CHECK_EQ(mn_test_resident(fd), 2 * MB);
    CHECK(p[3 * MB] == 7);
    p[bytes - 1] = 1;
    CHECK(mn_test_resident(fd) > 2 * MB);
    CHECK_EQ(mn_memfd_punch_mapped(p + 2 * MB, MB), 0);
    CHECK_EQ(mn_memfd_punch_mapped(p, 0), 0);
    CHECK(mn_test_resident(fd) < 2 * MB && p[3 * MB] == 7);
    make_fail("madvise", EINTR, 2);
    CHECK_EQ(mn_memfd_punch_mapped(p + 3 * MB, MB), 0);
    CHECK(p[3 * MB] == 0 && p[bytes - 1] == 1);
    close_file(p, bytes, fd);
}

static void
a_mapped_punch_spares_neighbours(void)
{
    int fd;
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    unsigned char *p = open_file(MB, &fd);
    memset(p, 9, MB);
    /* From within page 0 to within page 3: pages 1 and 2 are removed, 0 and 3 stay whole. */
    CHECK_EQ(mn_memfd_punch_mapped(p + page - 1, 2 * page + 2), 0);
    CHECK(p[page - 1] == 9 && p[page] == 0 && p[3 * page - 1] == 0 && p[3 * page] == 9);
    CHECK_EQ(mn_memfd_punch_mapped(p + 4 * page + 1, page - 1), 0);
    CHECK(p[4 * page] == 9 && p[4 * page + 1] == 9);
    CHECK_EQ(mn_test_resident(fd), MB); /* reading a hole filled it again */
    close_file(p, MB, fd);
}

static void
populate_without_kernel_help(void)
{
    int fd;
    unsigned char *p = open_file(4 * MB, &fd);
    p[MB + 5] = 3;
    make_fail("madvise", EINVAL, 1);
    CHECK_EQ(mn_memfd_populate(p + MB + 1, MB), 0);
    CHECK(mn_test_resident(fd) >= MB && p[MB + 5] == 3 && p[MB] == 0);
    make_fail("madvise", ENOMEM, 1);
    CHECK_EQ(mn_memfd_populate(p, MB), -ENOMEM);
    make_fail("madvise", EAGAIN, 3); /* the kernel may ask to try again */
    CHECK_EQ(mn_memfd_populate(p, MB), 0);
    CHECK_EQ(failing_times, 0);
    close_file(p, 4 * MB, fd);
}

struct touching {
    unsigned char *p;
    mn_a32 stop;
};

/* Writes a counter that only this thread writes, and checks that it never goes back. */
static void *
count_in_page(void *arg)
{
    struct touching *t = arg;
    mn_a32 *word = (mn_a32 *)(void *)t->p;
    uint32_t mine = 0;
    mn_test_settle(1);
    while (mn_a32_load_relaxed(&t->stop) == 0) {
        CHECK_EQ(mn_a32_load_relaxed(word), mine);
        mn_a32_store_relaxed(word, ++mine);
    }
    return NULL;
}

static void
populate_beside_a_writer(void)
{
    int fd;
    uint64_t stop = mn_test_stop_ns();
    struct touching t = {.p = open_file(MB, &fd), .stop = 0};
    pthread_t thread;
    cpu_set_t before;
    CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
    CHECK(pthread_create(&thread, NULL, count_in_page, &t) == 0);
    mn_test_settle(0);
    while (mn_test_clock_ns() < stop) {
        for (int i = 0; i < 1000; i++) { /* one page, so that it meets the writer often */
            make_fail("madvise", EINVAL, 1);
            CHECK_EQ(mn_memfd_populate(t.p, 1), 0);
        }
    }
    mn_a32_store_relaxed(&t.stop, 1);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
    close_file(t.p, MB, fd);
}

static void
failures_leave_nothing_open(void)
{
    int before = open_files();
    void *p = NULL;
    CHECK_EQ(mn_memfd_create("minato-test", 0), -EINVAL);
    CHECK_EQ(mn_memfd_create("minato-test", UINT64_MAX), -EINVAL);
    make_fail("memfd_create", EMFILE, 1);
    CHECK_EQ(mn_memfd_create("minato-test", MB), -EMFILE);
    make_fail("ftruncate", EFBIG, 1);
    CHECK_EQ(mn_memfd_create("minato-test", MB), -EFBIG);
    CHECK_EQ(open_files(), before);

    make_fail("memfd_create", EINVAL, 1); /* a kernel that does not know the flag */
    int old = mn_memfd_create("minato-test", MB);
    CHECK(old >= 0 && close(old) == 0);
    noexec = true;
    int sealed = mn_memfd_create("minato-test", MB);
    CHECK(sealed >= 0 && close(sealed) == 0);
    noexec = false;

    make_fail("ftruncate", EINTR, 2);
    int fd = mn_memfd_create("minato-test", MB);
    CHECK(fd >= 0);
    make_fail("mmap", ENOMEM, 1);
    CHECK_EQ(mn_memfd_map(fd, MB, &p), -ENOMEM);
    CHECK_EQ(mn_memfd_map(fd, 0, &p), -EINVAL);
    CHECK(p == NULL);
    CHECK(close(fd) == 0);
    CHECK_EQ(mn_memfd_map(fd, MB, &p), -EBADF);
    CHECK_EQ(open_files(), before);
}

/* Returns whether the mapping at p has a two-letter flag in /proc/self/smaps. */
static bool
has_flag(const void *p, const char *flag)
{
    char line[512];
    bool inside = false, found = false;
    FILE *f = fopen("/proc/self/smaps", "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof(line), f) != NULL) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
            inside = from <= (unsigned long)p && (unsigned long)p < to;
        }
        else if (inside && strncmp(line, "VmFlags:", 8) == 0) {
            found = strstr(line, flag) != NULL;
        }
    }
    fclose(f);
    return found;
}

static void
core_dumps_leave_it_out(void)
{
    int fd;
    unsigned char *p = open_file(MB, &fd);
    CHECK(!has_flag(p, " dd"));
    CHECK_EQ(mn_memfd_dontdump(p, MB), 0);
    CHECK(has_flag(p, " dd"));
    close_file(p, MB, fd);
}

static void
write_five(void *arg)
{
    *(unsigned char *)arg = 5;
}

static void
forks_share_until_told_not_to(void)
{
    int fd;
    unsigned char *p = open_file(MB, &fd);
    CHECK_EQ(mn_test_reap(mn_test_fork(write_five, p)), 0);
    CHECK(p[0] == 5);
    p[0] = 1;
    CHECK_EQ(mn_memfd_dontfork(p, MB), 0);
    int status = mn_test_reap(mn_test_fork(write_five, p));
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV);
    CHECK(p[0] == 1);
    close_file(p, MB, fd);
}

static const struct mn_test tests[] = {
    MN_TEST_ADVISED("plain", pages_come_and_go),
    MN_TEST_ADVISED("plain", a_mapped_punch_spares_neighbours),
    MN_TEST("plain", populate_without_kernel_help),
    MN_TEST("plain", failures_leave_nothing_open),
    MN_TEST_ADVISED("plain", core_dumps_leave_it_out),
    MN_TEST("thread", populate_beside_a_writer),
    MN_TEST_ADVISED("fork", forks_share_until_told_not_to),
};

MN_TEST_MAIN(tests)
