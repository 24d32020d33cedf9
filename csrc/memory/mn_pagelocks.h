/* mn_pagelocks.h - parts of the mapping that a device may read by itself.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A device can copy from pages that its driver has locked, without help of the CPU. Locking takes
 * as long as copying the pages. So it is done once, for chunks of the mapping from which copies
 * are made, and stays. The whole mapping is not locked, because a locked page is a page in use.
 *
 *   mn_pagelocks_init      mn_pagelocks_fini
 *   mn_pagelocks_set       which driver, for how many bytes
 *   mn_pagelocks_use       mn_pagelocks_used: around the copies from a range
 *   mn_pagelocks_stop      locks no more
 *
 * It is also a provider that wraps another one: memory is unlocked before it is returned to the
 * system. A chunk in use is neither unlocked nor returned: a device that reads a removed page would
 * read another one.
 *
 * Lock. mutex guards everything but the providers, and is held during calls of the driver and of
 * the other provider. So a caller must hold no lock that another thread may wait for. The
 * engine's mutex is released before pages are returned (mn_arena.h).
 *
 * Fork: the locks belong to the parent; a child must not call any function here.
 */
#ifndef MN_PAGELOCKS_H
#define MN_PAGELOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "memory/mn_arena.h"
#include "os/mn_thread.h"

/* Large enough that a batch has few chunks, small enough that little else is locked with it.
 * Drivers refuse a copy that spans two chunks. */
#define MN_PAGELOCKS_CHUNK (UINT64_C(16) << 20)

/* Functions of a driver; 0 is success. Any calling thread is in the context during the calls. */
struct mn_pagelocks_driver {
    int (*enter)(void *context);
    int (*leave)(void **context);
    int (*lock)(void *at, size_t bytes, unsigned int flags);
    int (*unlock)(void *at);
    void *context;
    unsigned int flags;
};

struct mn_pagelocks {
    struct mn_provider provider;  /* given to the arena */
    struct mn_provider *inner;    /* the source of the mapping */
    struct mn_mutex mutex;
    struct mn_pagelocks_driver driver;
    char *base;            /* of the mapping; NULL: none */
    uint64_t bytes;
    uint32_t *chunks;      /* [bytes / chunk]: users, and MN_PAGELOCKED; NULL: no driver */
    uint64_t most;         /* bytes that may be locked */
    uint64_t locked_bytes;
    int refused;           /* the driver's error at the first lock that it refused; after it no more
                            * locks are requested */
    bool stopped;          /* request no more locks, and unlock chunks without users */
};

/* Returns 0 or the error of mn_mutex_init(). */
int
mn_pagelocks_init(struct mn_pagelocks *l, struct mn_provider *inner);

void
mn_pagelocks_fini(struct mn_pagelocks *l);

/* Sets the driver and how many bytes may be locked, from now on. Returns 0; -EBUSY: there is a
 * driver; -ENOMEM. */
int
mn_pagelocks_set(struct mn_pagelocks *l, const struct mn_pagelocks_driver *driver, uint64_t most);

/* Locks the chunks that a range of the mapping lies in, unless they are locked already, and keeps
 * them locked until mn_pagelocks_used(). Returns 0; -ENOTSUP: no driver, or it has refused;
 * -ENOMEM: too many bytes; -EINVAL: not a range of the mapping. */
int
mn_pagelocks_use(struct mn_pagelocks *l, const void *at, uint64_t bytes);

void
mn_pagelocks_used(struct mn_pagelocks *l, const void *at, uint64_t bytes);

/* Requests no more locks from now on. The last user of a chunk unlocks it. */
void
mn_pagelocks_stop(struct mn_pagelocks *l);

#endif
