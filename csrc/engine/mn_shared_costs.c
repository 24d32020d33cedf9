/* mn_shared_costs.c - see mn_shared_costs.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_shared_costs.h"

#include <errno.h>

int
mn_shared_costs_init(struct mn_shared_costs *s, int64_t n)
{
    int rc = mn_costs_init(&s->costs, n);
    if (rc == 0 && mn_mutex_init(&s->mutex) < 0) {
        mn_costs_fini(&s->costs);
        rc = -ENOMEM;
    }
    return rc;
}

void
mn_shared_costs_fini(struct mn_shared_costs *s)
{
    mn_mutex_fini(&s->mutex);
    mn_costs_fini(&s->costs);
}
