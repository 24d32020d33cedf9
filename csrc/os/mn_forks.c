/* See mn_forks.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_forks.h"

#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* NULL: there is none to be had. */
static struct mn_fork *
own_pipe(struct mn_forks *forks)
{
    int ends[2];
    if (forks->nliving == MN_FORKS_WATCHED || pipe2(ends, O_CLOEXEC) < 0) {
        return NULL;
    }
    struct mn_fork *f = &forks->living[forks->nliving++];
    *f = (struct mn_fork){.first = forks->count, .read = ends[0], .write = ends[1]};
    return f;
}

/* The newest that no other thread is just forking with; NULL: it cannot be shared. */
static struct mn_fork *
shared_pipe(struct mn_forks *forks)
{
    for (size_t i = forks->nliving; i > 0; i--) {
        struct mn_fork *f = &forks->living[i - 1];
        if (f->write < 0) {
            char name[32];
            (void)snprintf(name, sizeof(name), "/proc/self/fd/%d", f->read);
            f->write = open(name, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
            return f->write < 0 ? NULL : f;
        }
    }
    return NULL;
}

void
mn_forks_before(struct mn_forks *forks)
{
    mn_forks_look(forks); /* those that are gone count against no limit */
    forks->count++;
    struct mn_fork *f = own_pipe(forks);
    if (f == NULL && (f = shared_pipe(forks)) == NULL) {
        if (forks->unknown_last == 0) {
            forks->unknown_first = forks->count;
        }
        forks->unknown_last = forks->count;
        return;
    }
    f->last = forks->count;
    f->thread = pthread_self();
}

/* What the calling thread is just forking with, or NULL. */
static struct mn_fork *
own_fork(struct mn_forks *forks)
{
    for (size_t i = forks->nliving; i > 0; i--) {
        struct mn_fork *f = &forks->living[i - 1];
        if (f->write >= 0 && pthread_equal(f->thread, pthread_self())) {
            return f;
        }
    }
    return NULL;
}

void
mn_forks_in_parent(struct mn_forks *forks)
{
    struct mn_fork *f = own_fork(forks);
    if (f != NULL) {
        (void)close(f->write);
        f->write = -1;
    }
}

void
mn_forks_in_child(struct mn_forks *forks)
{
    const struct mn_fork *own = own_fork(forks);
    for (size_t i = 0; i < forks->nliving; i++) {
        const struct mn_fork *f = &forks->living[i];
        (void)close(f->read);
        if (f->write >= 0 && f != own) {
            (void)close(f->write);
        }
    }
    memset(forks, 0, sizeof(*forks)); /* the own write end is open as long as the process lives */
}

void
mn_forks_look(struct mn_forks *forks)
{
    struct pollfd ends[MN_FORKS_WATCHED];
    size_t n = forks->nliving, nliving = 0, nover = 0;
    int over[MN_FORKS_WATCHED];
    for (size_t i = 0; i < n; i++) {
        ends[i] = (struct pollfd){.fd = forks->living[i].read}; /* a hang-up is always told */
    }
    if (n == 0 || poll(ends, n, 0) <= 0) {
        return;
    }
    for (size_t i = 0; i < n; i++) {
        if (ends[i].revents & POLLHUP) {
            over[nover++] = forks->living[i].read;
        }
        else {
            forks->living[nliving++] = forks->living[i];
        }
    }
    forks->nliving = nliving;
    while (nover > 0) { /* nobody knows them any more, nor does a child that is forked just now */
        (void)close(over[--nover]);
    }
}

bool
mn_forks_see(const struct mn_forks *forks, uint64_t after, uint64_t until)
{
    bool seen = forks->unknown_last > after && forks->unknown_first <= until;
    for (size_t i = 0; i < forks->nliving && !seen; i++) {
        seen = forks->living[i].last > after && forks->living[i].first <= until;
    }
    return seen;
}
