/* A log-bucketed histogram of durations: see policy_histogram.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_histogram.h"

#include <string.h>

#define SUB ((uint64_t)1 << MN_HIST_SUB_BITS)

/* Values under SUB have a bucket each; above, the octave and its leading bits. */
static unsigned
bucket_of(uint64_t v)
{
    if (v < SUB) {
        return (unsigned)v;
    }
    unsigned octave = 63u - (unsigned)__builtin_clzll(v);
    unsigned shift = octave - MN_HIST_SUB_BITS;
    return ((shift + 1) << MN_HIST_SUB_BITS) + (unsigned)((v >> shift) & (SUB - 1));
}

static uint64_t
bucket_low(unsigned b)
{
    if (b < SUB) {
        return b;
    }
    unsigned shift = (b >> MN_HIST_SUB_BITS) - 1;
    return (SUB + (b & (SUB - 1))) << shift;
}

static uint64_t
bucket_middle(unsigned b)
{
    unsigned shift = b < SUB ? 0 : (b >> MN_HIST_SUB_BITS) - 1;
    return bucket_low(b) + (((uint64_t)1 << shift) >> 1);
}

void
mn_histogram_init(struct mn_histogram *h)
{
    memset(h, 0, sizeof(*h));
}

static void
halve(struct mn_histogram *h)
{
    h->total = 0;
    for (unsigned b = 0; b < MN_HIST_BUCKETS; b++) {
        h->count[b] = (h->count[b] + 1) / 2;
        h->total += h->count[b];
    }
}

void
mn_histogram_add(struct mn_histogram *h, int64_t value_ns)
{
    if (h->total >= MN_HIST_KEEP) {
        halve(h);
    }
    h->count[bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0)]++;
    h->total++;
}

int64_t
mn_histogram_quantile(const struct mn_histogram *h, int permille)
{
    if (h->total == 0) {
        return 0;
    }
    uint64_t p = permille < 0 ? 0 : permille > 1000 ? 1000 : (uint64_t)permille;
    uint64_t rank = (p * h->total + 999) / 1000;
    rank = rank == 0 ? 1 : rank;
    uint64_t seen = 0;
    unsigned b = 0;
    for (; b < MN_HIST_BUCKETS; b++) {
        seen += h->count[b];
        if (seen >= rank) {
            break;
        }
    }
    return (int64_t)bucket_middle(b);
}

int
mn_histogram_above(const struct mn_histogram *h, int64_t value_ns)
{
    if (h->total == 0) {
        return 0;
    }
    uint64_t above = 0;
    unsigned first = bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0) + 1;
    for (unsigned b = first; b < MN_HIST_BUCKETS; b++) {
        above += h->count[b];
    }
    return (int)(above * 1000 / h->total);
}

int
mn_histogram_weight(const struct mn_histogram *h, int64_t value_ns)
{
    unsigned first = bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0) + 1;
    double all = 0.0, above = 0.0;
    for (unsigned b = 0; b < MN_HIST_BUCKETS; b++) {
        double sum = (double)h->count[b] * (double)bucket_middle(b);
        all += sum;
        above += b >= first ? sum : 0.0;
    }
    return all > 0.0 ? (int)(1000.0 * above / all) : 0;
}
