/* mn_cache_raise.c - results of csrc/cache as exceptions.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/cache/mn_cache_module.h"

#include <errno.h>
#include <stdio.h>

/* Why the folder cannot hold a cache. Two texts are formatted into text. */
static const char *
reason(int refusal, char *text, size_t size)
{
    switch (refusal) {
    case MN_CACHE_NOT_IN_MEMORY:
        return "it is not on a file system in memory (tmpfs)";
    case MN_CACHE_FOREIGN:
        return "it, or the file in it, belongs to another user, is a symbolic link, or lets other "
               "users write; remove it, or make it yours alone (chmod 700)";
    case MN_CACHE_TOO_SMALL:
        return "its file system is too small. Docker gives a container 64 MB unless it is started "
               "with --shm-size (or --ipc=host)";
    case MN_CACHE_NO_LOCKS:
        return "its file system does not lock files or share memory as a local one does";
    case MN_CACHE_DAMAGED:
        return "the file in it is damaged";
    case MN_CACHE_BUSY:
        (void)snprintf(text, size,
                       "another process has held the file's lock for %d seconds; it may be stopped",
                       MN_CACHE_HEADER_WAIT_S);
        return text;
    case MN_CACHE_NO_SLOT:
        (void)snprintf(text, size, "%u processes use the file already", MN_CACHE_SLOTS);
        return text;
    case MN_CACHE_OTHER_LAYOUT:
        return "the file in it was made by another version of minato, in another format";
    case MN_CACHE_REMOTE:
        return "it is on a network's file system, or on one that a program provides (FUSE), where "
               "processes may see different bytes; take a folder on a local disk";
    case MN_CACHE_NO_RESERVING:
        return "its file system cannot reserve room for a file (fallocate)";
    case MN_CACHE_OTHER_FILE:
        return "a file of the cache's name is in it that no cache has made; move it elsewhere";
    case MN_CACHE_IN_USE:
        return "processes use the file";
    default:
        (void)snprintf(text, size, "unknown reason (%d)", refusal);
        return text;
    }
}

int
mn_cache_raise(struct mn_cache_state *st, int rc, const char *folder)
{
    if (rc == 0) {
        return 0;
    }
    if (rc == -ENOMEM) {
        PyErr_NoMemory();
    }
    else if (rc < 0) {
        errno = -rc;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, folder);
    }
    else {
        char text[128];
        const char *why = reason(rc, text, sizeof(text));
        if (rc == MN_CACHE_DAMAGED || rc == MN_CACHE_OTHER_LAYOUT) {
            PyErr_Format(st->refused,
                         "%s cannot hold a cache: %s; `minato cache drop %s` removes it", folder,
                         why, folder);
        }
        else {
            PyErr_Format(st->refused, "%s cannot hold a cache: %s", folder, why);
        }
    }
    return -1;
}
