/* Which free memory goes back to the system, and when: see policy_trim.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "memory/policy_trim.h"

bool
mn_trim_turn(struct mn_trim *r, uint64_t now_ns, uint64_t allocs)
{
    if (r->turned_ns == 0) {
        r->turned_ns = now_ns;
        r->allocs = allocs;
    }
    uint64_t lasts = allocs != r->allocs ? MN_TRIM_TURN_NS : MN_TRIM_PAUSE_NS;
    if (now_ns - r->turned_ns < lasts) {
        return false;
    }
    r->turned_ns = now_ns;
    r->allocs = allocs;
    r->turns++;
    return true;
}

void
mn_trim_begin(struct mn_trim *r, const struct mn_trim_view *v)
{
    uint64_t busy = v->used > v->kept ? v->used - v->kept : 0;
    r->age = MN_TRIM_COLD;
    r->spare = busy / 4 > MN_TRIM_SPARE ? busy / 4 : MN_TRIM_SPARE;
    if (r->turns >= MN_TRIM_COLD * MN_TRIM_LONG) {
        r->turns = 0;
        r->age = MN_TRIM_COLD * MN_TRIM_LONG;
        r->spare = 0;
    }
    if (v->used > v->limit || v->warm > v->limit - v->used) {
        uint64_t below = v->used < v->limit ? v->limit - v->used : 0;
        r->age = MN_TRIM_COLD / 2;
        r->spare = r->spare < below ? r->spare : below;
    }
    if (v->warm <= r->spare) {
        r->age = 0;
    }
}

uint64_t
mn_trim_keep(struct mn_trim *r, uint64_t len)
{
    uint64_t keep = len < r->spare ? len : r->spare;
    r->spare -= keep;
    return keep;
}
