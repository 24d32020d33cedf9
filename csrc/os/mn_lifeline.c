/* See mn_lifeline.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_lifeline.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/stat.h>
#include <unistd.h>

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
