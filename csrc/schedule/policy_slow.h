/* When a sample in flight counts as slow: a timeout learned from the costs seen so far.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   For samples of which nothing is known yet. A verdict costs nothing by itself (no
 *   work is cancelled or repeated). For a sample in flight, it counts in the statistics and
 *   may add a standby worker. The engine thread looks a few times within the timeout.
 *   For a done sample, it says whether it is slow in ready mode (policy_ready.h). It must be
 *   silent when costs barely vary: a fixed percentile as the timeout always flags its share.
 *
 * Rule
 *   At least MN_SLOW_EVIDENCE samples, else no timeout.
 *   norm    = the median. But if more than MN_SLOW_MOST of 1000 samples take over twice the median,
 *             they are not a tail but a second norm. The 90th percentile then takes the median's
 *             place.
 *   tail    = share of samples over MN_SLOW_FACTOR * norm
 *   tail seen (>= MN_SLOW_ON of 1000; once seen, until under MN_SLOW_OFF):
 *             timeout = MN_SLOW_FACTOR * norm
 *   none:     timeout = MN_SLOW_GUARD * the 99th percentile. The first of a new kind is still
 *             found, and noise of a few times the usual is not.
 *   Never below MN_SLOW_LEAST_NS, the size of a scheduling hiccup.
 *   A constant cost whose samples all stay below 1.9 times their median flags nothing.
 *   None is over FACTOR * median (of which the histogram knows 1/32 more or less), so
 *   there is no tail. And GUARD * p99 is far above all of them.
 *
 * Hysteresis: the timeout in use changes after two checks in a row. In both, the learned one
 * differs from it by more than a quarter, or the tail has appeared or disappeared.
 */
#ifndef MN_POLICY_SLOW_H
#define MN_POLICY_SLOW_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/policy_cost.h"

#define MN_SLOW_EVIDENCE 32
#define MN_SLOW_FACTOR 2
#define MN_SLOW_GUARD 3
#define MN_SLOW_MOST 333
#define MN_SLOW_ON 5
#define MN_SLOW_OFF 2
#define MN_SLOW_LEAST_NS 5000000
/* The timeout moves when this many updates in a row agree. */
#define MN_SLOW_AGREE 2

#define MN_SLOW_NEVER INT64_MAX

struct mn_slow {
    int64_t timeout_ns; /* MN_SLOW_NEVER: no sample counts as slow */
    bool tail;          /* a heavy tail is seen */
    uint32_t dissent;   /* updates in a row that wanted another timeout */
};

void
mn_slow_init(struct mn_slow *s);

/* Learns from the distribution. Call it about every ten to a hundred samples. Returns the timeout
 * in use. */
int64_t
mn_slow_update(struct mn_slow *s, const struct mn_histogram *wall);

/* Returns whether a sample of known cost is slow enough to be started by itself, ahead of its
 * neighbours. It takes twice as long as most, and a millisecond more. */
static inline bool
mn_slow_starts_alone(int64_t cost_ns, int64_t typical_ns)
{
    return cost_ns > 2 * typical_ns + 1000 * 1000;
}

#endif
