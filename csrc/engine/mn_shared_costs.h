/* mn_shared_costs.h - one model of costs for all iterators of a loader.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Several iterators of a loader may be alive, each with its own engine, and all of them teach the
 * model and ask it. Every use of the model needs its lock, which may be taken while an engine's
 * mutex is held. No system call is made under it, except those of malloc. The model is private
 * memory of the trainer. A forked child has a copy and must initialize the lock anew before it
 * uses it.
 */
#ifndef MN_SHARED_COSTS_H
#define MN_SHARED_COSTS_H

#include <errno.h>
#include "os/mn_thread.h"
#include "schedule/mn_costs.h"

struct mn_shared_costs {
    struct mn_mutex mutex;
    struct mn_costs costs;
};

/* NULL: no model. Does nothing then. */
static inline void
mn_shared_costs_lock(struct mn_shared_costs *s)
{
    if (s != NULL) {
        mn_mutex_lock(&s->mutex);
    }
}

static inline void
mn_shared_costs_unlock(struct mn_shared_costs *s)
{
    if (s != NULL) {
        mn_mutex_unlock(&s->mutex);
    }
}

/* n: length of the dataset; 0: unknown. Returns 0 or -ENOMEM. */
static inline int
mn_shared_costs_init(struct mn_shared_costs *s, int64_t n)
{
    int rc = mn_costs_init(&s->costs, n);
    if (rc == 0 && mn_mutex_init(&s->mutex) < 0) {
        mn_costs_fini(&s->costs);
        rc = -ENOMEM;
    }
    return rc;
}

static inline void
mn_shared_costs_fini(struct mn_shared_costs *s)
{
    mn_mutex_fini(&s->mutex);
    mn_costs_fini(&s->costs);
}

#endif
