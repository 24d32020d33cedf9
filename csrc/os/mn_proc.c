/* Process liveness by pidfd.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_proc.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/mn_atomic.h"

static struct {
    mn_a32 pid; /* 0: no handler keeps it up to date */
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

bool
mn_proc_ended(int fd)
{
    struct pollfd p = {.fd = fd, .events = POLLIN};
    return poll(&p, 1, 0) == 1 && (p.revents & POLLNVAL) == 0;
}

int
mn_proc_alive(pid_t pid)
{
    int fd = pid > 0 ? mn_proc_pidfd(pid) : -ESRCH;
    if (fd < 0) {
        return fd == -ESRCH || fd == -EINVAL ? 0 : fd; /* EINVAL: the id of a thread alone */
    }
    bool lives = !mn_proc_ended(fd);
    (void)close(fd);
    return lives;
}

int
mn_proc_kill_pidfd(int fd, int sig)
{
    return syscall(SYS_pidfd_send_signal, fd, sig, NULL, 0u) == 0 ? 0 : -errno;
}

int
mn_proc_kill(pid_t pid, int sig)
{
    int fd = pid > 0 ? mn_proc_pidfd(pid) : -ESRCH;
    if (fd < 0) {
        return fd == -EINVAL ? -ESRCH : fd;
    }
    int rc = mn_proc_ended(fd) ? -ESRCH : mn_proc_kill_pidfd(fd, sig);
    (void)close(fd);
    return rc;
}

/* More CPUs than any kernel is built for. */
#define MOST_CPUS (1 << 15)

/* Adds one CPU's line of /proc/stat, if the process may run on that CPU. */
static bool
add_cpu(const char *line, const cpu_set_t *allowed, size_t size, uint64_t *busy,
        uint64_t *total)
{
    uint64_t t[8] = {0}; /* user nice system idle iowait irq softirq steal */
    unsigned cpu;
    int n = sscanf(line, "cpu%u %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64
                         " %" SCNu64 " %" SCNu64 " %" SCNu64,
                   &cpu, &t[0], &t[1], &t[2], &t[3], &t[4], &t[5], &t[6], &t[7]);
    if (n < 5 || (allowed != NULL && (cpu >= MOST_CPUS || !CPU_ISSET_S(cpu, size, allowed)))) {
        return false;
    }
    for (int i = 0; i < 8; i++) {
        *total += t[i];
        *busy += i == 3 || i == 4 ? 0 : t[i];
    }
    return true;
}

int
mn_cputime_machine(uint64_t *busy, uint64_t *total)
{
    FILE *f = fopen("/proc/stat", "re");
    if (f == NULL) {
        return -errno;
    }
    size_t size = CPU_ALLOC_SIZE(MOST_CPUS);
    cpu_set_t *set = CPU_ALLOC(MOST_CPUS);
    bool known = set != NULL && sched_getaffinity(0, size, set) == 0, any = false;
    char line[256];
    *busy = *total = 0;
    while (fgets(line, sizeof(line), f) != NULL && line[0] == 'c') {
        any |= add_cpu(line, known ? set : NULL, size, busy, total);
    }
    if (set != NULL) {
        CPU_FREE(set);
    }
    fclose(f);
    return any ? 0 : -EPROTO;
}

/* Reads a number of a thread's line "on CPU, in the run queue, times run". */
static int
schedstat(pid_t pid, const char *format, uint64_t *ns)
{
    char path[64];
    snprintf(path, sizeof(path), "/proc/%ld/schedstat", (long)pid);
    FILE *f = fopen(path, "re");
    if (f == NULL) {
        return -errno;
    }
    int n = fscanf(f, format, ns);
    fclose(f);
    return n == 1 ? 0 : -EPROTO;
}

int
mn_cputime_process(pid_t pid, uint64_t *ns)
{
    return schedstat(pid, "%" SCNu64, ns);
}

int
mn_cputime_queued(pid_t pid, uint64_t *ns)
{
    return schedstat(pid, "%*u %" SCNu64, ns);
}

static struct {
    pthread_mutex_t lock;
    struct mn_lifeline *first;
    pthread_once_t once;
    int refused; /* errno: forks cannot be watched */
} mn_lifelines = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static void
lock(void)
{
    (void)pthread_mutex_lock(&mn_lifelines.lock);
}

static void
unlock(void)
{
    (void)pthread_mutex_unlock(&mn_lifelines.lock);
}

static void
let_go(void)
{
    for (struct mn_lifeline *l = mn_lifelines.first; l != NULL; l = l->next) {
        (void)close(l->fd);
        l->fd = -1;
    }
    mn_lifelines.first = NULL;
    unlock();
}

static void
watch_forks(void)
{
    mn_lifelines.refused = pthread_atfork(lock, unlock, let_go);
}

int
mn_lifeline_open(struct mn_lifeline *line, int *end)
{
    (void)pthread_once(&mn_lifelines.once, watch_forks);
    if (mn_lifelines.refused != 0) {
        return -mn_lifelines.refused;
    }
    int fds[2], rc = 0;
    lock();
    if (pipe2(fds, O_CLOEXEC) == 0) {
        *end = fds[0];
        *line = (struct mn_lifeline){fds[1], mn_lifelines.first};
        mn_lifelines.first = line;
    }
    else {
        rc = -errno;
    }
    unlock();
    return rc;
}

void
mn_lifeline_close(struct mn_lifeline *line)
{
    lock();
    struct mn_lifeline **at = &mn_lifelines.first;
    while (*at != NULL && *at != line) {
        at = &(*at)->next;
    }
    if (*at == line) {
        *at = line->next;
        (void)close(line->fd);
        line->fd = -1;
    }
    unlock();
}

void
mn_lifeline_hold(struct mn_lifeline_end *end, int fd)
{
    struct stat file;
    bool is_pipe = fstat(fd, &file) == 0 && S_ISFIFO(file.st_mode);
    *end = is_pipe ? (struct mn_lifeline_end){fd, file.st_dev, file.st_ino}
                   : (struct mn_lifeline_end){.fd = -1};
}

bool
mn_lifeline_is_cut(const struct mn_lifeline_end *end)
{
    struct stat file;
    struct pollfd p = {.fd = end->fd, .events = 0};
    return end->fd >= 0 && fstat(end->fd, &file) == 0 && file.st_dev == end->device
           && file.st_ino == end->inode && poll(&p, 1, 0) == 1 && (p.revents & POLLHUP) != 0;
}
