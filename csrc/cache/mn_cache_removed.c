/* See mn_cache_removed.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_removed.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PARENTS 32
#define PATH_BYTES 4352

/* 0: unknown, or none. */
static pid_t
parent_of(pid_t pid)
{
    char path[32], text[512];
    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    if (fd >= 0) {
        (void)close(fd);
    }
    text[n > 0 ? n : 0] = 0;
    const char *end = strrchr(text, ')'); /* of its name, which may hold anything */
    int parent = 0;
    return end != NULL && sscanf(end + 1, " %*c %d", &parent) == 1 ? (pid_t)parent : 0;
}

/* Opens the file of a process that is shown as `shown`. -1: it has none. */
static int
open_of(pid_t pid, const char *shown)
{
    char path[32], to[PATH_BYTES];
    (void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    int fd = -1;
    for (struct dirent *e; fd < 0 && dir != NULL && (e = readdir(dir)) != NULL;) {
        ssize_t n = readlinkat(dirfd(dir), e->d_name, to, sizeof(to) - 1);
        to[n > 0 ? n : 0] = 0;
        if (strcmp(to, shown) == 0) {
            fd = openat(dirfd(dir), e->d_name, O_RDWR | O_CLOEXEC);
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return fd;
}

int
mn_cache_open_removed(int folder, const char *name)
{
    char path[32], shown[PATH_BYTES];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", folder);
    ssize_t n = readlink(path, shown, sizeof(shown) / 2);
    if (n <= 0) {
        return -1;
    }
    (void)snprintf(shown + n, sizeof(shown) - (size_t)n, "/%s (deleted)", name);
    int fd = -1;
    pid_t pid = getppid();
    for (int i = 0; fd < 0 && pid > 0 && i < PARENTS; i++, pid = parent_of(pid)) {
        fd = open_of(pid, shown);
    }
    return fd;
}
