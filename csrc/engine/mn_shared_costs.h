/* mn_shared_costs.h - one model of costs for all iterators of a loader.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Several iterators of a loader may be alive, each with an engine of its own, and all of them
 * teach and ask.  Whoever uses the model holds the lock, which may be taken with an engine's
 * mutex held; no system call is made under it, but for what malloc does.  Private memory of the
 * trainer; a forked child has a copy, whose lock it must make anew before it uses it.
 */
#ifndef MN_SHARED_COSTS_H
#define MN_SHARED_COSTS_H

#include "os/mn_thread.h"
#include "schedule/mn_costs.h"

struct mn_shared_costs {
    struct mn_mutex mutex;
    struct mn_costs costs;
};

/* n: length of the dataset, 0 when unknown. 0 or -ENOMEM. */
int
mn_shared_costs_init(struct mn_shared_costs *s, int64_t n);

void
mn_shared_costs_fini(struct mn_shared_costs *s);

/* NULL is no model, which is nobody's. */
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

#endif
