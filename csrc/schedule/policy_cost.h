/* The cost of a sample: a running cost per index, and the distribution over all of them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Predicts the wall time of the sample at position `index` of the dataset, so that a slow
 *   one can be started early. Remembers which worker made it last. Numbers in, numbers out: reports
 *   come from the tasks.
 *
 * Model
 *   One cell of 12 bytes per index, in memory given by the caller (or none: then there is only the
 *   mean). A prediction is the cell's cost, or without one the running mean over everything. That
 *   mean has a memory of MN_COST_MEMORY samples, so it follows a machine that slows down.
 *
 * One cell's update with an observation x
 *   The first one replaces whatever is there. Then c += (x - c) / k, with k the number
 *   of observations up to MN_COST_MAX_AGE: a mean first, then exponentially weighted.
 *   An x beyond a factor MN_COST_SURPRISE of c is a surprise: it counts as if it were
 *   that factor away, and is remembered. A second surprise in a row to the same side is
 *   taken for a change: c = x, and averaging begins anew. So one outlier, in either
 *   direction, leaves c between 3/4 and 3/2 of what it was. A change of level is followed after two
 *   epochs.
 *
 *   A sample that is slow at random (an augmentation drawn anew each epoch) is
 *   not predictable from its history. Its c wanders between the levels, which costs nothing but a
 *   few starts earlier than needed.
 *
 * Memory: the caller's; cells are plain data and may be anywhere. No errors but -EINVAL.
 */
#ifndef MN_POLICY_COST_H
#define MN_POLICY_COST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- the distribution ------------------------------------------------------------------ */

/* A log-bucketed histogram of durations: quantiles of a stream in constant memory.
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

/* ---- costs by index -------------------------------------------------------------------- */

#define MN_COST_MEMORY 4096
#define MN_COST_MAX_AGE 4
#define MN_COST_SURPRISE 2.0
/* Anything above counts as this, eleven days, so that sums over a plan cannot overflow. Hints in
 * a wrong unit may come here. */
#define MN_COST_MOST_NS INT64_C(1000000000000000)

enum mn_cost_mark {
    MN_COST_FOLLOWED = 1u << 0, /* one worker made it right after its neighbour */
    MN_COST_OPENS = 1u << 1,    /* and it was expensive even so: it opens a group
                                 * (policy_locality.h) */
    MN_COST_ABROAD = 1u << 2,   /* its known cost was not measured at its home */
    MN_COST_APART = 1u << 3,    /* nor after its neighbour, before groups were known */
    MN_COST_EARLY = 1u << 4,    /* measured after it, before groups were known */
};

struct mn_cost_cell {
    float wall_ns;
    uint16_t home; /* 1 + the worker that made it last; 0: not known */
    uint8_t term;  /* term of the workers that `home` refers to */
    uint8_t marks; /* enum mn_cost_mark */
    uint16_t seen; /* observations, saturating */
    int8_t surprise; /* side of the last surprise: -1, 0, +1 */
    uint8_t age;   /* observations averaged over, up to MN_COST_MAX_AGE; 0: the next one replaces
                    * the cost */
};

struct mn_cost {
    struct mn_cost_cell *cells; /* [n]; owned by the caller */
    int64_t n;
    int64_t known;      /* cells with an observation */
    uint64_t samples;   /* observations in total */
    double mean_wall_ns;
    struct mn_histogram wall;
};

/* Bytes of memory for n indices. */
static inline size_t
mn_cost_bytes(int64_t n)
{
    return (size_t)n * sizeof(struct mn_cost_cell);
}

/* cells: mn_cost_bytes(n) bytes, or NULL with n 0. Returns 0 or -EINVAL. */
int
mn_cost_init(struct mn_cost *m, void *cells, int64_t n);

/* Learns from one sample's report. An index outside the array only enters mean and distribution. */
void
mn_cost_observe(struct mn_cost *m, int64_t index, int64_t wall_ns);

/* Prefetches an index's cell into the cache. Compilers regard a function that only prefetches as
 * one without effect and drop calls of it; the empty statement counts as an effect. */
static inline void
mn_cost_fetch(const struct mn_cost *m, int64_t index)
{
    if (index >= 0 && index < m->n) {
        __builtin_prefetch(&m->cells[index], 1);
        __asm__ __volatile__("");
    }
}

/* Returns the predicted wall time; 0 if nothing at all is known. */
int64_t
mn_cost_wall(const struct mn_cost *m, int64_t index);

/* Returns whether this index was observed. */
bool
mn_cost_knows(const struct mn_cost *m, int64_t index);

/* Copies out up to cap observed cells from *cursor on and moves it past them: call until it returns
 * 0. The two arrays are all the state that is worth saving. */
int64_t
mn_cost_save(const struct mn_cost *m, int64_t *cursor, int64_t cap, int64_t *index,
             int64_t *wall_ns);

/* Copies out the `most` observed cells of largest wall time, largest first, among equals lowest
 * index first. Returns their number. One walk over all cells. */
int64_t
mn_cost_slowest(const struct mn_cost *m, int64_t most, int64_t *index, int64_t *wall_ns);

/* Takes n saved cells as one observation each. Indices outside the array are left out (the dataset
 * has shrunk). Returns how many were taken. */
int64_t
mn_cost_load(struct mn_cost *m, int64_t n, const int64_t *index, const int64_t *wall_ns);

/* ---- when a sample in flight counts as slow: a timeout learned from the costs seen so far ----
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
