/* A log-bucketed histogram of durations: quantiles of a stream in constant memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   The shape of the cost distribution, for the slow verdict, the dispatch order and the
 *   statistics. Fixed size, no allocation, O(1) to add, O(buckets) to ask.
 *
 * Error
 *   Each octave [2^k, 2^(k+1)) is cut into 16 equal buckets, so a bucket is at most
 *   1/16 of its lower edge wide. A quantile is answered with the middle of the bucket
 *   that holds the sample of that rank. It differs from that sample by less than 1/32 of it. Values
 *   under 16 are exact.
 *
 * Drift
 *   When MN_HIST_KEEP samples are held, all counts are halved (rounding up, so that a
 *   rare class is never forgotten while new samples come in). Older samples weigh half as much as
 *   the last MN_HIST_KEEP / 2, and so on.
 *
 * Not thread safe: the owner of the model that contains it must hold the model's lock.
 */
#ifndef MN_POLICY_HISTOGRAM_H
#define MN_POLICY_HISTOGRAM_H

#include <stdint.h>

#define MN_HIST_SUB_BITS 4
#define MN_HIST_BUCKETS ((64 - MN_HIST_SUB_BITS) << MN_HIST_SUB_BITS)
/* Long enough that a class of 1 in 1000 is seen 8 times in the younger half. */
#define MN_HIST_KEEP 16384

struct mn_histogram {
    uint32_t count[MN_HIST_BUCKETS];
    uint32_t total; /* sum of count */
};

void
mn_histogram_init(struct mn_histogram *h);

/* Counts one duration; negative ones count as 0. */
void
mn_histogram_add(struct mn_histogram *h, int64_t value_ns);

/* Returns the duration that permille of 1000 samples do not exceed; 0 if nothing was added.
 * permille is clamped to [0, 1000]. */
int64_t
mn_histogram_quantile(const struct mn_histogram *h, int permille);

/* Returns how many of 1000 samples, rounded down, are in buckets wholly above value. */
int
mn_histogram_above(const struct mn_histogram *h, int64_t value_ns);

/* Returns the same, in 1000 parts of the samples' sum instead of their number. */
int
mn_histogram_weight(const struct mn_histogram *h, int64_t value_ns);

#endif
