/* mn_pagelocks.h - parts of the mapping that a device may read by itself.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device copies from pages that its driver has locked without anybody's help. Locking takes as
 * long as copying the pages, so it is done once, for chunks of the mapping that hold what is to
 * be copied, and kept.  Not for the whole: a locked page is a page in use.
 *
 *   mn_pagelocks_init      mn_pagelocks_fini
 *   mn_pagelocks_set       which driver, for how many bytes
 *   mn_pagelocks_use       mn_pagelocks_used: around the copies from a range
 *   mn_pagelocks_stop      no more of it
 *
 * It is a provider, too, that goes before another: what is to be given back to the system is
 * unlocked before that. A chunk in use is neither unlocked nor given back: a device that reads a
 * page which is gone reads another one.
 *
 * Lock. mutex guards all but the providers, and is held over calls of the driver and of the
 * other provider: whoever comes here holds no other lock that anybody waits for. The engine's
 * mutex is let go of before pages are given back (mn_arena.h).
 *
 * Fork: the locks are the parent's; a child must not come here.
 */
#ifndef MN_PAGELOCKS_H
#define MN_PAGELOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory/mn_arena.h"
#include "os/mn_thread.h"

/* Large enough that a batch has few, small enough that what is locked beside one is little.
 * A copy must not reach from one to the next: drivers refuse it. */
#define MN_PAGELOCKS_CHUNK (UINT64_C(16) << 20)

/* Of a driver. 0 is success; whichever thread calls, it is in the context meanwhile. */
struct mn_pagelocks_driver {
    int (*enter)(void *context);
    int (*leave)(void **context);
    int (*lock)(void *at, size_t bytes, unsigned int flags);
    int (*unlock)(void *at);
    void *context;
    unsigned int flags;
};

struct mn_pagelocks {
    struct mn_provider provider;  /* what the arena is given */
    struct mn_provider *inner;    /* where the mapping comes from */
    struct mn_mutex mutex;
    struct mn_pagelocks_driver driver;
    char *base;            /* of the mapping; NULL: there is none */
    uint64_t bytes;
    uint32_t *chunks;      /* [bytes / chunk]: users, and MN_PAGELOCKED; NULL: no driver was set */
    uint64_t most;         /* bytes that may be locked */
    uint64_t locked_bytes;
    int refused;           /* what the driver said to the first lock that it refused; then no
                            * other is asked for */
    bool stopped;          /* none is to be asked for, and none kept that nobody uses */
};

/* 0 or what mn_mutex_init says. */
int
mn_pagelocks_init(struct mn_pagelocks *l, struct mn_provider *inner);

void
mn_pagelocks_fini(struct mn_pagelocks *l);

/* From now on pages may be locked, so many bytes at most. 0; -EBUSY: there is a driver; -ENOMEM. */
int
mn_pagelocks_set(struct mn_pagelocks *l, const struct mn_pagelocks_driver *driver, uint64_t most);

/* Locks the chunks that a range of the mapping lies in, as far as they are not, and keeps them
 * so until mn_pagelocks_used. 0; -ENOTSUP: no driver, or it has refused; -ENOMEM: so much may not
 * be locked; -EINVAL: it is no range of the mapping. */
int
mn_pagelocks_use(struct mn_pagelocks *l, const void *at, uint64_t bytes);

void
mn_pagelocks_used(struct mn_pagelocks *l, const void *at, uint64_t bytes);

/* From now on nothing is locked. Chunks in use are unlocked by the last who uses them. */
void
mn_pagelocks_stop(struct mn_pagelocks *l);

#endif
