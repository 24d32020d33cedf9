/* See mn_cache_locks.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_locks.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/mn_thread.h"

#define NAP_NS 200000

static int
set_lock(int fd, short kind, int64_t byte)
{
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (fcntl(fd, F_OFD_SETLK, &lock) < 0) {
        if (errno != EINTR) {
            return errno == EACCES ? -EAGAIN : -errno;
        }
    }
    return 0;
}

int
mn_cache_lock_try(int fd, int64_t byte)
{
    return set_lock(fd, F_WRLCK, byte);
}

int
mn_cache_lock_wait(int fd, int64_t byte, int64_t timeout_ns)
{
    uint64_t start = mn_now_ns();
    for (;;) {
        int rc = mn_cache_lock_try(fd, byte);
        if (rc != -EAGAIN) {
            return rc;
        }
        if (mn_now_ns() - start >= (uint64_t)timeout_ns) {
            return -ETIMEDOUT;
        }
        mn_nap_ns(NAP_NS);
    }
}

void
mn_cache_unlock(int fd, int64_t byte)
{
    (void)set_lock(fd, F_UNLCK, byte);
}

bool
mn_cache_is_locked(int fd, int64_t first, int64_t n)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = n};
    while (fcntl(fd, F_OFD_GETLK, &lock) < 0) {
        if (errno != EINTR) {
            return true;
        }
    }
    return lock.l_type != F_UNLCK;
}

bool
mn_cache_locks_ours(int fd, uint64_t device, uint64_t inode)
{
    struct stat file;
    return fstat(fd, &file) == 0 && file.st_dev == device && file.st_ino == inode;
}
