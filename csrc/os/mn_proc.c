/* Process liveness by pidfd and /proc.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_proc.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/mn_atomic.h"

struct mn_proc_stat {
    char state;
    long threads;
    uint64_t start;
};

static struct {
    mn_a32 pid; /* 0: nobody keeps it up to date */
    pthread_once_t once;
} mn_proc_known = {.once = PTHREAD_ONCE_INIT};

static void
mn_proc_note_self(void)
{
    mn_a32_store_relaxed(&mn_proc_known.pid, (uint32_t)getpid());
}

static void
mn_proc_watch_forks(void)
{
    if (pthread_atfork(NULL, NULL, mn_proc_note_self) == 0) {
        mn_proc_note_self();
    }
}

pid_t
mn_proc_self(void)
{
    pid_t pid = (pid_t)mn_a32_load_relaxed(&mn_proc_known.pid);
    if (pid == 0) {
        (void)pthread_once(&mn_proc_known.once, mn_proc_watch_forks);
        pid = getpid();
    }
    return pid;
}

int
mn_proc_pidfd(pid_t pid)
{
    long fd = syscall(SYS_pidfd_open, pid, 0u);
    return fd >= 0 ? (int)fd : -errno;
}

/* Reads a whole small file. Returns its length or -errno. */
static int
mn_proc_slurp(const char *path, char *text, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    size_t len = 0;
    int rc = 0;
    while (len < size - 1) {
        ssize_t got = read(fd, text + len, size - 1 - len);
        if (got < 0) {
            if (errno == EINTR) {
                continue;
            }
            rc = -errno;
            break;
        }
        if (got == 0) {
            break;
        }
        len += (size_t)got;
    }
    (void)close(fd);
    text[len] = '\0';
    return rc != 0 ? rc : (int)len;
}

static int
mn_proc_read_stat(pid_t pid, struct mn_proc_stat *out)
{
    char path[64];
    char text[1024];
    /* Its first thread's file says the same as its own. In place of a process's own, qemu-user
     * shows one to it in which each of its threads was started at another time. */
    (void)snprintf(path, sizeof(path), "/proc/%ld/task/%ld/stat", (long)pid, (long)pid);
    int rc = pid > 0 ? mn_proc_slurp(path, text, sizeof(text)) : -ESRCH;
    if (rc == -ENOENT) { /* no such process, or no /proc at all */
        return access("/proc/self/stat", F_OK) == 0 ? -ESRCH : -ENOENT;
    }
    if (rc < 0) {
        return rc;
    }
    /* Field 2 is the program's name in parentheses and may hold anything, parentheses
     * included; the last one ends it. Fields 3, 20 and 22 are what we are after. */
    char *after = strrchr(text, ')');
    if (after == NULL
        || sscanf(after + 1,
                  " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s"
                  " %ld %*s %" SCNu64,
                  &out->state, &out->threads, &out->start)
               != 3) {
        return -EPROTO;
    }
    return 0;
}

int
mn_proc_start_time(pid_t pid, uint64_t *ticks)
{
    struct mn_proc_stat st;
    int rc = mn_proc_read_stat(pid, &st);
    if (rc == 0) {
        *ticks = st.start;
    }
    return rc;
}

/* A zombie with more than one thread is a process whose first thread has ended while
 * others run on and may write memory. */
static bool
mn_proc_stat_dead(const struct mn_proc_stat *st)
{
    return st->state == 'X' || (st->state == 'Z' && st->threads <= 1);
}

int
mn_proc_alive(pid_t pid, uint64_t start)
{
    struct mn_proc_stat st;
    int rc = mn_proc_read_stat(pid, &st);
    if (rc == -ESRCH) {
        return 0;
    }
    if (rc != 0) {
        return rc;
    }
    return st.start == start && !mn_proc_stat_dead(&st);
}

/* What a pidfd is of is in its fdinfo, in a line of its own. */
static pid_t
mn_proc_of_pidfd(int fd)
{
    char path[64];
    char text[1024];
    (void)snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
    const char *line = fd >= 0 && mn_proc_slurp(path, text, sizeof(text)) > 0
                           ? strstr(text, "\nPid:") : NULL;
    long pid;
    return line != NULL && sscanf(line, "\nPid: %ld", &pid) == 1 ? (pid_t)pid : 0;
}

bool
mn_proc_is_stopped(int fd)
{
    struct mn_proc_stat st;
    return mn_proc_read_stat(mn_proc_of_pidfd(fd), &st) == 0 && st.state == 'T';
}

int
mn_proc_kill_pidfd(int fd, int sig)
{
    return syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0u) == 0 ? 0 : -errno;
}

int
mn_proc_kill(pid_t pid, uint64_t start, int sig)
{
    int fd = mn_proc_pidfd(pid);
    if (fd < 0) {
        return fd == -EINVAL ? -ESRCH : fd; /* EINVAL: not the id of a whole process */
    }
    /* The descriptor came first, so if the wanted process is there now it also was when the
     * descriptor was made, and the descriptor is its. */
    int rc = mn_proc_alive(pid, start);
    if (rc == 1) {
        rc = mn_proc_kill_pidfd(fd, sig);
    }
    else if (rc == 0) {
        rc = -ESRCH;
    }
    (void)close(fd);
    return rc;
}

int
mn_proc_wait_pidfd(int fd, int64_t timeout_ns)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    struct timespec ts;
    struct timespec *timeout = NULL;
    if (timeout_ns >= 0) {
        ts.tv_sec = (time_t)(timeout_ns / 1000000000);
        ts.tv_nsec = (long)(timeout_ns % 1000000000);
        timeout = &ts;
    }
    int n = ppoll(&p, 1, timeout, NULL);
    if (n < 0) {
        return -errno;
    }
    if (n == 0) {
        return -ETIMEDOUT;
    }
    return (p.revents & POLLNVAL) != 0 ? -EBADF : 0;
}
