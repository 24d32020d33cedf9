/* May another task start, as far as memory goes? See policy_memory.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_memory.h"

#include <errno.h>
#include <string.h>

int
mn_memory_init(struct mn_memory *m, int64_t limit)
{
    if (limit <= 0) {
        return -EINVAL;
    }
    memset(m, 0, sizeof(*m));
    m->limit = limit;
    return 0;
}

void
mn_memory_batch(struct mn_memory *m, int64_t bytes)
{
    m->room = bytes > m->room ? bytes : m->room;
}

/* a + b + c <= limit, for values that are not negative, without overflow. */
static int
fits(int64_t limit, int64_t a, int64_t b, int64_t c)
{
    return a <= limit && b <= limit - a && c <= limit - a - b;
}

enum mn_memory_answer
mn_memory_may(const struct mn_memory *m, int64_t bytes, int is_head, int64_t head_used)
{
    bytes = bytes < 0 ? 0 : bytes;
    int whole = fits(m->limit, m->used, bytes, 0);
    if (is_head) {
        return whole ? MN_MEMORY_YES : m->used == 0 ? MN_MEMORY_ALONE : MN_MEMORY_HEAD;
    }
    int room = fits(m->limit, m->used - head_used, bytes, m->room);
    return whole && room ? MN_MEMORY_YES : MN_MEMORY_NO;
}

void
mn_memory_charge(struct mn_memory *m, int64_t bytes)
{
    m->used += bytes < 0 ? 0 : bytes;
    m->peak = m->used > m->peak ? m->used : m->peak;
    m->overruns += m->used > m->limit;
}

void
mn_memory_release(struct mn_memory *m, int64_t bytes)
{
    bytes = bytes < 0 ? 0 : bytes;
    m->used -= bytes < m->used ? bytes : m->used;
}
