/* Whether memory allows another task to start. See policy_memory.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_memory.h"

bool
mn_memory_may(const struct mn_memory *m, int64_t bytes, bool is_head)
{
    /* used + bytes + reserve <= limit, without overflow */
    bool fits = m->used <= m->limit && bytes <= m->limit - m->used
                && m->reserve <= m->limit - m->used - bytes;
    return is_head || fits;
}
