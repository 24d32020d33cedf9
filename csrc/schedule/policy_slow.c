/* When a sample in flight counts as slow: see policy_slow.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_slow.h"

#include "schedule/policy_arithmetic.h"

void
mn_slow_init(struct mn_slow *s)
{
    s->timeout_ns = MN_SLOW_NEVER;
    s->tail = false;
    s->dissent = 0;
}

/* Returns what an ordinary sample takes. */
static int64_t
norm_of(const struct mn_histogram *h)
{
    int64_t median = mn_histogram_quantile(h, 500);
    if (mn_histogram_above(h, mn_times(median, MN_SLOW_FACTOR)) <= MN_SLOW_MOST) {
        return median;
    }
    return mn_histogram_quantile(h, 900);
}

static int64_t
learn(const struct mn_slow *s, const struct mn_histogram *h, bool *tail)
{
    int64_t line = mn_times(norm_of(h), MN_SLOW_FACTOR);
    int share = mn_histogram_above(h, line);
    *tail = share >= (s->tail ? MN_SLOW_OFF : MN_SLOW_ON);
    int64_t t = *tail ? line : mn_times(mn_histogram_quantile(h, 990), MN_SLOW_GUARD);
    return t < MN_SLOW_LEAST_NS ? MN_SLOW_LEAST_NS : t;
}

int64_t
mn_slow_update(struct mn_slow *s, const struct mn_histogram *wall)
{
    if (wall->total < MN_SLOW_EVIDENCE) {
        return s->timeout_ns;
    }
    bool tail;
    int64_t wanted = learn(s, wall, &tail);
    if (s->timeout_ns == MN_SLOW_NEVER) {
        s->timeout_ns = wanted;
        s->tail = tail;
        return wanted;
    }
    if (tail == s->tail && !mn_moved(s->timeout_ns, wanted, 4)) {
        s->dissent = 0;
        return s->timeout_ns;
    }
    if (++s->dissent >= MN_SLOW_AGREE) {
        s->timeout_ns = wanted;
        s->tail = tail;
        s->dissent = 0;
    }
    return s->timeout_ns;
}
