/* Whether a dead worker is replaced: see policy_respawn.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/policy_respawn.h"

bool
mn_respawn_died(struct mn_respawn *r, const struct mn_respawn_death *death)
{
    r->crash_loop = death->finished ? 0 : r->crash_loop + 1;
    if (death->finished || death->began) {
        r->unready = 0;
        return true;
    }
    if (r->unready++ == 0) {
        r->unready_ns = death->now_ns;
    }
    uint64_t most_ns = death->killed ? MN_RESPAWN_KILLED_NS : MN_RESPAWN_NS;
    bool long_ago = death->not_started || death->now_ns - r->unready_ns >= most_ns;
    return r->unready < MN_RESPAWN_DEATHS || !long_ago;
}

uint16_t
mn_respawn_pause_ms(const struct mn_respawn *r)
{
    if (r->crash_loop < 2) {
        return 0;
    }
    uint32_t doublings = r->crash_loop - 2;
    return (uint16_t)(doublings < 4 ? MN_RESPAWN_PAUSE_FIRST_MS << doublings
                                    : MN_RESPAWN_PAUSE_MOST_MS);
}
