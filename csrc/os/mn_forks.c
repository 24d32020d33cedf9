/* See mn_forks.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "os/mn_forks.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "os/mn_memfd.h"

/* Maps a page of an empty file, which must not be touched. Returns NULL if that is not possible. */
static void *
map_empty(int fd)
{
    void *at = mmap(NULL, 1, PROT_NONE, MAP_SHARED, fd, 0);
    return at != MAP_FAILED ? at : NULL;
}

/* Makes a file of its own for a fork. Returns NULL if that is not possible. */
static struct mn_fork *
own_file(struct mn_forks *forks)
{
    struct stat file;
    if (forks->nliving == MN_FORKS_WATCHED) {
        return NULL;
    }
    struct mn_fork f = {.first = forks->count, .fd = mn_memfd_create_empty("forked")};
    if (f.fd < 0) {
        return NULL;
    }
    f.mapping = fstat(f.fd, &file) == 0 ? map_empty(f.fd) : NULL;
    if (f.mapping == NULL) {
        (void)close(f.fd);
        return NULL;
    }
    f.device = file.st_dev;
    f.inode = file.st_ino;
    forks->living[forks->nliving] = f;
    return &forks->living[forks->nliving++];
}

/* Returns whether the descriptor still belongs to our file. Programs close descriptors that are not
 * theirs, and the number may then belong to another file. */
static bool
ours(const struct mn_fork *f)
{
    struct stat file;
    return fstat(f->fd, &file) == 0 && file.st_dev == f->device && file.st_ino == f->inode;
}

/* Returns the newest file that no other thread is forking with now; NULL: it cannot be shared. */
static struct mn_fork *
shared_file(struct mn_forks *forks)
{
    for (size_t i = forks->nliving; i > 0; i--) {
        struct mn_fork *f = &forks->living[i - 1];
        if (f->mapping == NULL) {
            f->mapping = ours(f) ? map_empty(f->fd) : NULL;
            return f->mapping != NULL ? f : NULL;
        }
    }
    return NULL;
}

static void
unknown(struct mn_forks *forks, uint64_t first, uint64_t last)
{
    if (forks->unknown_last == 0 || first < forks->unknown_first) {
        forks->unknown_first = first;
    }
    if (last > forks->unknown_last) {
        forks->unknown_last = last;
    }
}

void
mn_forks_before(struct mn_forks *forks)
{
    mn_forks_look(forks); /* forks that are gone do not count against the limit */
    forks->count++;
    struct mn_fork *f = own_file(forks);
    if (f == NULL && (f = shared_file(forks)) == NULL) {
        forks->nblind++;
        unknown(forks, forks->count, forks->count);
        return;
    }
    f->thread = pthread_self();
}

/* Returns the entry that the calling thread is forking with now, or NULL. */
static struct mn_fork *
own_fork(struct mn_forks *forks)
{
    for (size_t i = forks->nliving; i > 0; i--) {
        struct mn_fork *f = &forks->living[i - 1];
        if (f->mapping != NULL && pthread_equal(f->thread, pthread_self())) {
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
        (void)mn_memfd_unmap(f->mapping, 1);
        f->mapping = NULL;
        f->last = ++forks->count;
    }
    else if (forks->nblind > 0) {
        forks->nblind--;
        forks->count++;
        unknown(forks, forks->count, forks->count);
    }
}

void
mn_forks_in_child(struct mn_forks *forks)
{
    const struct mn_fork *own = own_fork(forks);
    for (size_t i = 0; i < forks->nliving; i++) {
        const struct mn_fork *f = &forks->living[i];
        if (ours(f)) {
            (void)close(f->fd);
        }
        if (f->mapping != NULL && f != own) {
            (void)mn_memfd_unmap(f->mapping, 1);
        }
    }
    memset(forks, 0, sizeof(*forks)); /* the own mapping stays for as long as the process lives */
}

/* Forgets forks that are gone, or all except those in progress. */
static void
forget(struct mn_forks *forks, bool all)
{
    size_t nliving = 0;
    for (size_t i = 0; i < forks->nliving; i++) {
        const struct mn_fork f = forks->living[i];
        if (f.mapping != NULL) {
            forks->living[nliving++] = f;
        }
        else if (!ours(&f)) {
            unknown(forks, f.first, f.last);
        }
        else if (all || fcntl(f.fd, F_ADD_SEALS, F_SEAL_WRITE) == 0) { /* no process maps it */
            (void)close(f.fd); /* a child that is being forked now sees that it is no longer ours */
        }
        else {
            forks->living[nliving++] = f;
        }
    }
    forks->nliving = nliving;
}

void
mn_forks_look(struct mn_forks *forks)
{
    forget(forks, false);
}

void
mn_forks_forget(struct mn_forks *forks)
{
    forget(forks, true);
    if (forks->nblind == 0) {
        forks->unknown_first = forks->unknown_last = 0;
    }
}

bool
mn_forks_see(const struct mn_forks *forks, uint64_t after, uint64_t until)
{
    bool seen = forks->unknown_last != 0 && forks->unknown_first <= until
                && (forks->nblind > 0 || forks->unknown_last > after);
    for (size_t i = 0; i < forks->nliving && !seen; i++) {
        const struct mn_fork *f = &forks->living[i];
        seen = f->first <= until && (f->mapping != NULL || f->last > after);
    }
    return seen;
}
