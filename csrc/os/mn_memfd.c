/* memfd, its mapping, and the madvise calls that the arena needs.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_memfd.h"

#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mn_atomic.h"

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 8u /* Linux 6.3 */
#endif
#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14; older C library headers lack the name */
#endif

static uintptr_t
mn_memfd_pagesize(void)
{
    return (uintptr_t)sysconf(_SC_PAGESIZE);
}

static int
mn_memfd_open(const char *name, unsigned flags)
{
    /* Where vm.memfd_noexec is 2, the kernel refuses files that could be executed. */
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_NOEXEC_SEAL | flags);
    if (fd < 0 && errno == EINVAL) {
        fd = memfd_create(name, MFD_CLOEXEC | flags);
    }
    return fd < 0 ? -errno : fd;
}

int
mn_memfd_create_empty(const char *name)
{
    return mn_memfd_open(name, MFD_ALLOW_SEALING);
}

int
mn_memfd_create(const char *name, uint64_t bytes)
{
    if (bytes == 0 || bytes > INT64_MAX) {
        return -EINVAL;
    }
    int fd = mn_memfd_open(name, 0);
    if (fd < 0) {
        return fd;
    }
    while (ftruncate(fd, (off_t)bytes) != 0) {
        int err = errno;
        if (err != EINTR) {
            (void)close(fd);
            return -err;
        }
    }
    return fd;
}

int
mn_memfd_map(int fd, uint64_t bytes, void **out)
{
    if (bytes == 0 || bytes > SIZE_MAX) {
        return -EINVAL;
    }
    void *addr = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (addr == MAP_FAILED) {
        return -errno;
    }
    *out = addr;
    return 0;
}

int
mn_memfd_unmap(void *addr, uint64_t bytes)
{
    return munmap(addr, (size_t)bytes) == 0 ? 0 : -errno;
}

/* Calls madvise for all pages that the range touches. */
static int
mn_memfd_advise(void *addr, uint64_t len, int advice)
{
    uintptr_t mask = mn_memfd_pagesize() - 1;
    uintptr_t first = (uintptr_t)addr & ~mask;
    uintptr_t end = ((uintptr_t)addr + (uintptr_t)len + mask) & ~mask;
    if (len == 0) {
        return 0;
    }
    while (madvise((void *)first, end - first, advice) != 0) {
        if (errno != EINTR && errno != EAGAIN) {
            return -errno;
        }
    }
    return 0;
}

/* Makes a write fault on each page. It adds 0 atomically instead of a load and a store, so a byte
 * that another process writes at the same moment is not lost. */
static void
mn_memfd_touch(void *addr, uint64_t len)
{
    uintptr_t page = mn_memfd_pagesize();
    uintptr_t first = (uintptr_t)addr & ~(page - 1);
    uintptr_t end = (uintptr_t)addr + (uintptr_t)len;
    for (uintptr_t at = first; at < end; at += page) {
        (void)mn_a32_add_relaxed((mn_a32 *)at, 0); /* relaxed: carries no message */
    }
}

int
mn_memfd_punch_mapped(void *addr, uint64_t len)
{
    uintptr_t mask = mn_memfd_pagesize() - 1;
    uintptr_t first = ((uintptr_t)addr + mask) & ~mask;
    uintptr_t end = ((uintptr_t)addr + (uintptr_t)len) & ~mask;
    if (end <= first) {
        return 0;
    }
    /* Narrowed to whole pages, whereas mn_memfd_advise widens: a neighbour's bytes must not
     * vanish. */
    return mn_memfd_advise((void *)first, end - first, MADV_REMOVE);
}

int
mn_memfd_populate(void *addr, uint64_t len)
{
    int rc = mn_memfd_advise(addr, len, MADV_POPULATE_WRITE);
    if (rc == -EINVAL || rc == -ENOSYS) { /* a kernel that does not know the advice */
        mn_memfd_touch(addr, len);
        rc = 0;
    }
    return rc;
}

int
mn_memfd_dontdump(void *addr, uint64_t len)
{
    return mn_memfd_advise(addr, len, MADV_DONTDUMP);
}

int
mn_memfd_dontfork(void *addr, uint64_t len)
{
    return mn_memfd_advise(addr, len, MADV_DONTFORK);
}
