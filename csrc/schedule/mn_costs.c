/* mn_costs.c - see mn_costs.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_costs.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"

/* ---- the distribution of costs: a log-bucketed histogram ----
 *
 * Purpose
 *   The shape of the cost distribution, for the slow verdict, the dispatch order and the
 *   statistics. Fixed size, O(1) to add, O(buckets) to ask.
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
 */

/* Long enough that a class of 1 in 1000 is seen 8 times in the younger half. */
#define MN_HIST_KEEP 16384
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

static void
halve(struct mn_histogram *h)
{
    h->total = 0;
    for (unsigned b = 0; b < MN_HIST_BUCKETS; b++) {
        h->count[b] = (h->count[b] + 1) / 2;
        h->total += h->count[b];
    }
}

/* Counts one duration; negative ones count as 0. */
static void
mn_histogram_add(struct mn_histogram *h, int64_t value_ns)
{
    if (h->total >= MN_HIST_KEEP) {
        halve(h);
    }
    h->count[bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0)]++;
    h->total++;
}

/* Returns the duration that permille of 1000 samples do not exceed; 0 if nothing was added.
 * permille is clamped to [0, 1000]. */
static int64_t
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

/* Returns how many of 1000 samples, rounded down, are in buckets wholly above value. */
static int
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

/* Returns the same, in 1000 parts of the samples' sum instead of their number. */
static int
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

/* ---- the cost of a sample by the history of its index ----
 *
 * Model
 *   One cell of 12 bytes per index. A prediction is the cell's cost, or without one the running
 *   mean over everything. That mean has a memory of MN_COST_MEMORY samples, so it follows a machine
 *   that slows down.
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
 */

#define MN_COST_MEMORY 4096
#define MN_COST_MAX_AGE 4
#define MN_COST_SURPRISE 2.0

static struct mn_cost_cell *
cell_at(const struct mn_cost *m, int64_t index)
{
    return index >= 0 && index < m->n ? &m->cells[index] : NULL;
}

/* Returns on which side of c the value x is a surprise: -1, +1, or 0 for neither. */
static int8_t
surprise_of(double c, double x)
{
    if (x > c * MN_COST_SURPRISE) {
        return 1;
    }
    return x < c / MN_COST_SURPRISE ? -1 : 0;
}

static void
cell_restart(struct mn_cost_cell *c, double wall)
{
    c->wall_ns = (float)wall;
    c->age = 1;
    c->surprise = 0;
}

static void
cell_update(struct mn_cost_cell *c, double wall)
{
    if (c->seen < UINT16_MAX) {
        c->seen++;
    }
    double was = (double)c->wall_ns;
    int8_t side = surprise_of(was, wall);
    if (c->seen == 1 || c->age == 0 || (side != 0 && side == c->surprise)) {
        cell_restart(c, wall);
        return;
    }
    c->surprise = side;
    double factor = side > 0 ? MN_COST_SURPRISE : 1.0 / MN_COST_SURPRISE;
    double x = side == 0 ? wall : was * factor;
    if (c->age < MN_COST_MAX_AGE) {
        c->age++;
    }
    c->wall_ns = (float)(was + (x - was) / c->age);
}

/* Learns from one sample's report. An index outside the array only enters mean and distribution. */
static void
mn_cost_observe(struct mn_cost *m, int64_t index, int64_t wall_ns)
{
    wall_ns = wall_ns < MN_COST_MOST_NS ? wall_ns : MN_COST_MOST_NS;
    double wall = wall_ns > 0 ? (double)wall_ns : 0.0;
    m->samples++;
    double weight = (double)(m->samples < MN_COST_MEMORY ? m->samples : MN_COST_MEMORY);
    m->mean_wall_ns += (wall - m->mean_wall_ns) / weight;
    mn_histogram_add(&m->wall, wall_ns);
    struct mn_cost_cell *c = cell_at(m, index);
    if (c != NULL) {
        m->known += c->seen == 0;
        cell_update(c, wall);
    }
}

/* Returns whether this index was observed. */
static bool
mn_cost_knows(const struct mn_cost *m, int64_t index)
{
    const struct mn_cost_cell *c = cell_at(m, index);
    return c != NULL && c->seen > 0;
}

/* Returns the predicted wall time; 0 if nothing at all is known. */
static int64_t
mn_cost_wall(const struct mn_cost *m, int64_t index)
{
    return (int64_t)(mn_cost_knows(m, index) ? (double)m->cells[index].wall_ns
                                             : m->mean_wall_ns);
}

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
learn_timeout(const struct mn_slow *s, const struct mn_histogram *h, bool *tail)
{
    int64_t line = mn_times(norm_of(h), MN_SLOW_FACTOR);
    int share = mn_histogram_above(h, line);
    *tail = share >= (s->tail ? MN_SLOW_OFF : MN_SLOW_ON);
    int64_t t = *tail ? line : mn_times(mn_histogram_quantile(h, 990), MN_SLOW_GUARD);
    return t < MN_SLOW_LEAST_NS ? MN_SLOW_LEAST_NS : t;
}

/* Learns from the distribution. Call it about every ten to a hundred samples. Returns the timeout
 * in use. */
static int64_t
mn_slow_update(struct mn_slow *s, const struct mn_histogram *wall)
{
    if (wall->total < MN_SLOW_EVIDENCE) {
        return s->timeout_ns;
    }
    bool tail;
    int64_t wanted = learn_timeout(s, wall, &tail);
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

/* ---- means, variances and correlation of pairs of numbers, over the last ones ----
 *
 * The first MN_MOMENTS_MEMORY pairs count alike; then older ones fade away, so that the numbers
 * follow a change. All zeros is the empty state.
 */

#define MN_MOMENTS_MEMORY 512

/* The weight of the n-th observation, counted from 1, in a mean over the last MN_MOMENTS_MEMORY. */
static double
mn_moments_weight(uint64_t n)
{
    return 1.0 / (double)(n < MN_MOMENTS_MEMORY ? n : MN_MOMENTS_MEMORY);
}

static void
mn_moments_add(struct mn_moments *m, double x, double y)
{
    m->n++;
    double w = mn_moments_weight(m->n), dx = x - m->x, dy = y - m->y;
    m->x += w * dx;
    m->y += w * dy;
    m->xx = (1.0 - w) * (m->xx + w * dx * dx);
    m->yy = (1.0 - w) * (m->yy + w * dy * dy);
    m->xy = (1.0 - w) * (m->xy + w * dx * dy);
}

/* Returns the correlation, from -1 to 1; NAN where one of the two does not vary. */
static double
mn_moments_correlation(const struct mn_moments *m)
{
    double both = m->xx * m->yy;
    return both > 0.0 ? fmax(-1.0, fmin(1.0, m->xy / sqrt(both))) : (double)NAN;
}

/* Returns the slope of the line of least squares of y over x; 0 where x does not vary. */
static double
mn_moments_slope(const struct mn_moments *m)
{
    return m->xx > 0.0 ? m->xy / m->xx : 0.0;
}

/* ---- the cost of a sample by its bytes, weighed against the history of its index ----
 *
 * Purpose
 *   The loader knows how many bytes a sample is read from before any worker has made it. Where cost
 *   grows with bytes, this tells slow samples in the first epoch. Later it steadies a history that
 *   consists of few noisy observations. Numbers in, numbers out.
 *
 * Prediction
 *   By bytes: a line through the logarithms of bytes and cost, by least squares over the last
 *   samples. Its slope is 1 where cost is proportional to bytes, and less where a sample costs
 *   something without bytes. It serves once the correlation is too large for chance: a new index is
 *   predicted by it alone.
 *
 *   By both: a known index is predicted by bytes^w * history^(1 - w). The errors are the logarithms
 *   of cost / prediction; w is the weight for which the mean squared error of the mix has been
 *   least. With errors h of history and b of bytes:
 *
 *       w = (hh - hb) / (hh + bb - 2 hb), from 0 to 1
 *
 *   A weight near an end counts as that end. So a history that is right is not changed, and neither
 *   is one that was compared with less than MN_BYTES_TRIAL samples.
 */

/* Samples before bytes serve, and comparisons before they are weighed against history. */
#define MN_BYTES_TRIAL 16
/* n * r * r, of n samples with correlation r, from which on bytes serve, and below which they no
 * longer do. Without any relation its mean is 1. */
#define MN_BYTES_SERVE 9.0
#define MN_BYTES_LEAVE 4.0
/* A weight closer than this to 0 or 1 counts as 0 or 1. */
#define MN_BYTES_EDGE 0.1

/* Costs that grow faster than this power of the bytes are not believed. */
#define SLOPE_MOST 2.0
/* No error counts as more than this: the logarithm of 1000. */
#define LOG_ERROR_MOST 6.91

/* Returns the logarithm of an index's bytes; 0 if they are unknown. */
static double
size_of(const struct mn_bytes *m, int64_t index)
{
    return index >= 0 && index < m->n ? (double)m->log_bytes[index] : 0.0;
}

/* Returns the logarithm of the cost by bytes alone. */
static double
by_bytes(const struct mn_bytes *m, double size)
{
    double slope = fmax(0.0, fmin(SLOPE_MOST, mn_moments_slope(&m->fit)));
    return m->fit.y + slope * (size - m->fit.x);
}

/* Returns the weight of bytes for an index that history knows. */
static double
weight_of_bytes(const struct mn_bytes *m)
{
    double apart = m->hh + m->bb - 2.0 * m->hb; /* mean square of what the two differ by */
    if (!m->serves || m->history.n < MN_BYTES_TRIAL || !(apart > 0.0)) {
        return 0.0;
    }
    double w = (m->hh - m->hb) / apart;
    return w < MN_BYTES_EDGE ? 0.0 : w > 1.0 - MN_BYTES_EDGE ? 1.0 : w;
}

static void
learn_bytes(struct mn_bytes *m, double size, double cost)
{
    mn_moments_add(&m->fit, size, cost);
    double n = 1.0 / mn_moments_weight(m->fit.n), r = mn_moments_correlation(&m->fit);
    double least = m->serves ? MN_BYTES_LEAVE : MN_BYTES_SERVE;
    m->serves = m->fit.n >= MN_BYTES_TRIAL && r > 0.0 && n * r * r >= least;
}

/* Tells the bytes of an index. Two bytes or more count. history_ns: what the index has cost so far,
 * 0 if it is new. */
static void
mn_bytes_tell(struct mn_bytes *m, int64_t index, int64_t bytes, int64_t history_ns)
{
    if (index < 0 || index >= m->n || bytes < 2) {
        return;
    }
    m->known += !(m->log_bytes[index] > 0.0f);
    m->log_bytes[index] = (float)log((double)bytes);
    if (history_ns > 0) { /* of a loaded state, or told late */
        learn_bytes(m, size_of(m, index), log((double)history_ns));
    }
}

/* Returns the predicted cost in ns. history_ns: what history says. known: it has seen the index. */
static int64_t
mn_bytes_predict(const struct mn_bytes *m, int64_t index, int64_t history_ns, bool known)
{
    double size = size_of(m, index), w = known ? weight_of_bytes(m) : 1.0;
    if (!m->serves || !(size > 0.0) || !(w > 0.0)) {
        return history_ns;
    }
    double said = by_bytes(m, size);
    if (known && history_ns > 0) {
        said = w * said + (1.0 - w) * log((double)history_ns);
    }
    double ns = exp(said);
    return ns < (double)MN_COST_MOST_NS ? (int64_t)ns : MN_COST_MOST_NS;
}

static double
bounded(double error)
{
    return fmax(-LOG_ERROR_MOST, fmin(LOG_ERROR_MOST, error));
}

static void
compare_bytes(struct mn_bytes *m, double size, double history, double cost)
{
    double bytes = by_bytes(m, size), w = weight_of_bytes(m);
    mn_moments_add(&m->both, w * bytes + (1.0 - w) * history, cost);
    mn_moments_add(&m->history, history, cost);
    double h = bounded(cost - history), b = bounded(cost - bytes);
    double part = mn_moments_weight(m->history.n);
    m->hh += (h * h - m->hh) * part;
    m->bb += (b * b - m->bb) * part;
    m->hb += (h * b - m->hb) * part;
}

/* Learns from a sample that has cost wall_ns. history_ns: as history said before, 0 if the index
 * was new. */
static void
mn_bytes_observe(struct mn_bytes *m, int64_t index, int64_t history_ns, int64_t wall_ns)
{
    double size = size_of(m, index);
    if (!(size > 0.0) || wall_ns <= 0) {
        return;
    }
    double cost = log((double)wall_ns);
    if (history_ns > 0 && m->fit.n >= MN_BYTES_TRIAL) {
        compare_bytes(m, size, log((double)history_ns), cost);
    }
    learn_bytes(m, size, cost);
}

/* The predictor that serves now. */
static enum mn_bytes_by
mn_bytes_best(const struct mn_bytes *m)
{
    if (!m->serves) {
        return MN_BYTES_HISTORY;
    }
    double w = weight_of_bytes(m);
    bool whole = m->history.n >= MN_BYTES_TRIAL && !(w > 0.0 && w < 1.0);
    return !whole ? MN_BYTES_BOTH : w > 0.0 ? MN_BYTES_ALONE : MN_BYTES_HISTORY;
}

/* A number that changes when predictions have become much better. 0: bytes do not serve. */
static unsigned
mn_bytes_revision(const struct mn_bytes *m)
{
    if (!m->serves) {
        return 0;
    }
    return 1u + (m->fit.n >= 4 * MN_BYTES_TRIAL) + (m->fit.n >= 16 * MN_BYTES_TRIAL);
}

/* ---- the cost of a sample by the dataset's hint: hint times a ratio that is learned ----
 *
 * Purpose
 *   A dataset may predict the cost of a sample from the random numbers that the sample will
 *   draw. The hint belongs to one sample of one epoch, so it knows what the history of an index
 *   cannot know. It is in seconds, or in any other unit. This model learns the unit, and how
 *   well the hint predicts compared with history. Numbers in, numbers out.
 *
 * Three predictors
 *   MN_HINT_HISTORY  the earlier cost of the index; the mean where it is new
 *   MN_HINT_SCALE    hint * scale; the scale is the geometric mean of cost / hint
 *   MN_HINT_RATIO    hint * ratio; the ratio is the same index's own cost / hint of earlier
 *                    epochs, and the scale where the index is new
 *
 *   Each observation is compared with all three predictions. The error is the squared logarithm
 *   of cost / prediction. So a factor of two counts alike in both directions, and a missed slow
 *   sample counts more than many small errors. The predictor with the least mean error is used,
 *   or history on a tie. So a hint that is constant, wrong, or the opposite of the truth is not
 *   used for long.
 *
 *   Until MN_HINT_TRIAL hinted samples are known the hint is believed, and taken for seconds
 *   until one is.
 *
 *   A hint of 0 says nothing about a ratio: such samples are predicted by their own mean.
 */

/* Hinted samples before predictors are compared. */
#define MN_HINT_TRIAL 16

#define NS_PER_SECOND 1e9
/* No prediction is off by more than this in the errors: the square of log(1000). */
#define SQUARE_ERROR_MOST 47.7

static float *
ratio_at(const struct mn_hint *m, int64_t index)
{
    return index >= 0 && index < m->n ? &m->ratio[index] : NULL;
}

static double
scale_of(const struct mn_hint *m)
{
    return m->scaled != 0 ? exp(m->log_scale) : NS_PER_SECOND;
}

/* Returns a predictor's answer in ns; 0 if it knows nothing. */
static double
predict_by(const struct mn_hint *m, enum mn_hint_by by, int64_t index, double hint,
           double history_ns)
{
    if (by == MN_HINT_HISTORY) {
        return history_ns;
    }
    if (!(hint > 0.0)) {
        return m->zeros != 0 ? m->zero_ns : history_ns;
    }
    const float *ratio = by == MN_HINT_RATIO ? ratio_at(m, index) : NULL;
    return hint * (ratio != NULL && *ratio > 0.0f ? (double)*ratio : scale_of(m));
}

/* The predictor that serves now. */
static enum mn_hint_by
mn_hint_best(const struct mn_hint *m)
{
    if (m->compared < MN_HINT_TRIAL) {
        return MN_HINT_RATIO;
    }
    enum mn_hint_by best = MN_HINT_HISTORY;
    for (int by = MN_HINT_SCALE; by < MN_HINT_PREDICTORS; by++) {
        best = m->error[by] < m->error[best] ? (enum mn_hint_by)by : best;
    }
    return best;
}

/* The cost in ns of a sample with this hint (finite, not negative). history_ns: what the history
 * of the index says, 0 where nothing is known. */
static int64_t
mn_hint_predict(const struct mn_hint *m, int64_t index, float hint, int64_t history_ns)
{
    double ns = predict_by(m, mn_hint_best(m), index, (double)hint, (double)history_ns);
    return ns < (double)MN_COST_MOST_NS ? (int64_t)ns : MN_COST_MOST_NS;
}

static void
compare_hint(struct mn_hint *m, int64_t index, double hint, double history_ns, double wall)
{
    double said[MN_HINT_PREDICTORS];
    for (int by = 0; by < MN_HINT_PREDICTORS; by++) {
        said[by] = predict_by(m, (enum mn_hint_by)by, index, hint, history_ns);
        if (!(said[by] > 0.0)) {
            return; /* nothing to compare yet */
        }
    }
    m->compared++;
    for (int by = 0; by < MN_HINT_PREDICTORS; by++) {
        double off = log(wall / said[by]), square = off * off;
        square = square < SQUARE_ERROR_MOST ? square : SQUARE_ERROR_MOST;
        m->error[by] += (square - m->error[by]) * mn_moments_weight(m->compared);
        mn_moments_add(&m->of[by], log(said[by]), log(wall));
    }
}

static void
learn_scale(struct mn_hint *m, double ratio)
{
    m->scaled++;
    m->log_scale += (log(ratio) - m->log_scale) * mn_moments_weight(m->scaled);
}

/* A sample with this hint has cost wall_ns. history_ns: as history said before. */
static void
mn_hint_observe(struct mn_hint *m, int64_t index, float hint, int64_t history_ns,
                int64_t wall_ns)
{
    if (wall_ns <= 0) {
        return;
    }
    double unit = (double)hint, wall = (double)wall_ns;
    if (unit > 0.0 ? m->scaled != 0 : m->zeros != 0) {
        compare_hint(m, index, unit, (double)history_ns, wall);
    }
    if (!(unit > 0.0)) {
        m->zeros++;
        m->zero_ns += (wall - m->zero_ns) * mn_moments_weight(m->zeros);
        return;
    }
    double ratio = wall / unit;
    learn_scale(m, ratio);
    float *own = ratio_at(m, index);
    if (own != NULL) { /* half of what was known, half of what is new, as factors */
        *own = (float)(*own > 0.0f ? sqrt((double)*own * ratio) : ratio);
    }
}

/* ---- whether a batch with a collate_fn of the user's is split over workers ----
 *
 * Purpose
 *   Such a batch is one task in one worker, as in torch: its samples never leave the process
 *   that collates them. Split, its samples are tasks of their own and travel once more, to
 *   the worker that collates. That pays where one slow sample holds back the others of its
 *   batch, and it must cost next to nothing.
 *
 * Rule
 *   At least MN_SPLIT_EVIDENCE samples were seen, and what sending one costs is known.
 *   uneven  = of 1000 parts of all time, those in samples that take over twice the lower
 *             quartile. Of time, not of samples: a hiccup now and then is a small part of
 *             the whole. The lower quartile and not the median: where most samples are the
 *             slow ones, the median is theirs.
 *   cheap   = sending one takes at most 1/MN_SPLIT_SHARE of what one costs
 *   Split when cheap and uneven >= MN_SPLIT_ON. Once split, stay so until uneven < MN_SPLIT_OFF
 *   or it is no longer cheap by half (hysteresis, so that batches do not go to and fro).
 *   A constant cost is never uneven: all samples lie within twice the lower quartile.
 */

#define MN_SPLIT_EVIDENCE 32
#define MN_SPLIT_ON 150
#define MN_SPLIT_OFF 80
/* Three parts in a hundred: less than a worker idles where costs are uneven. */
#define MN_SPLIT_SHARE 32

/* Returns whether to split. */
static bool
mn_split_worth(const struct mn_costs *c)
{
    const struct mn_histogram *wall = &c->model.wall;
    if (c->send_ns < 0 || wall->total < MN_SPLIT_EVIDENCE) {
        return false;
    }
    int64_t most = (int64_t)c->model.mean_wall_ns / MN_SPLIT_SHARE;
    if (c->send_ns > (c->split ? most + most / 2 : most)) {
        return false;
    }
    int64_t quartile = mn_histogram_quantile(wall, 250);
    if (quartile > INT64_MAX / 2) {
        return false;
    }
    return mn_histogram_weight(wall, 2 * quartile) >= (c->split ? MN_SPLIT_OFF : MN_SPLIT_ON);
}

/* ---- the whole model ---- */

/* Quantiles cost a walk over the histogram; they move slowly, */
#define QUANTILES_EVERY 32u
/* ... the more slowly the more samples there are: by this part of the histogram. */
#define QUANTILES_PART 64u
/* The first samples say little about the others: until there are more, by this part of them. */
#define QUANTILES_FIRST 4u
/* Of tasks with cheap samples, one in this many is checked for where it was made. */
#define PLACES_EVERY 8u
/* The model's cells are prefetched this many rows ahead. A shuffled order hits none in cache, and
 * some ten misses are under way at a time. */
#define FETCH_AHEAD 12u

/* Prefetches an index's cell into the cache. Compilers regard a function that only prefetches as
 * one without effect and drop calls of it; the empty statement counts as an effect. */
static inline void
fetch(const struct mn_cost *m, int64_t index)
{
    if (index >= 0 && index < m->n) {
        __builtin_prefetch(&m->cells[index], 1);
        __asm__ __volatile__("");
    }
}

/* Prefetches the cells of the first rows; later, each row prefetches one more. */
static void
fetch_first(const struct mn_costs *c, const int64_t *index, uint32_t n)
{
    for (uint32_t i = 0; index != NULL && i < n && i < FETCH_AHEAD; i++) {
        fetch(&c->model, index[i]);
    }
}

static void
fetch_ahead(const struct mn_costs *c, const int64_t *index, uint32_t n, uint32_t i)
{
    if (index != NULL && i + FETCH_AHEAD < n) {
        fetch(&c->model, index[i + FETCH_AHEAD]);
    }
}

int
mn_costs_init(struct mn_costs *c, int64_t n)
{
    memset(c, 0, sizeof(*c));
    bool fits = n <= (int64_t)(PTRDIFF_MAX / sizeof(struct mn_cost_cell));
    c->model.n = n;
    c->model.cells = n > 0 && fits ? calloc((size_t)n, sizeof(*c->model.cells)) : NULL;
    if (n > 0 && c->model.cells == NULL) {
        return -ENOMEM;
    }
    c->slow.timeout_ns = c->timeout_ns = MN_SLOW_NEVER;
    c->send_ns = MN_SPLIT_CANNOT;
    mn_locality_init(&c->locality);
    return 0;
}

void
mn_costs_fini(struct mn_costs *c)
{
    free(c->model.cells);
    free(c->hint.ratio);
    free(c->bytes.log_bytes);
}

/* Makes space for a number of each index, unless that was done or there are no indices. Returns 0
 * or -ENOMEM. */
static int
make_numbers(const struct mn_costs *c, float **numbers, int64_t *n)
{
    if (*numbers == NULL && c->model.n > 0) {
        *numbers = calloc((size_t)c->model.n, sizeof(**numbers));
        *n = *numbers != NULL ? c->model.n : 0;
        return *numbers != NULL ? 0 : -ENOMEM;
    }
    return 0;
}

int
mn_costs_hinted(struct mn_costs *c)
{
    return make_numbers(c, &c->hint.ratio, &c->hint.n);
}

int
mn_costs_tell_bytes(struct mn_costs *c, const int64_t *index, const int64_t *bytes, int64_t n)
{
    int rc = make_numbers(c, &c->bytes.log_bytes, &c->bytes.n);
    for (int64_t i = 0; rc == 0 && i < n; i++) {
        bool known = mn_cost_knows(&c->model, index[i]);
        mn_bytes_tell(&c->bytes, index[i], bytes[i],
                      known ? mn_cost_wall(&c->model, index[i]) : 0);
    }
    return rc;
}

/* Returns a sample's marks by what is known of groups now. One that followed its neighbour before,
 * and was expensive even so, has opened a group. */
static uint8_t
marks_of(const struct mn_costs *c, const struct mn_cost_cell *cell)
{
    const struct mn_locality *l = &c->locality;
    if (!(cell->marks & MN_COST_EARLY) || l->near.answer != MN_CONTRAST_YES) {
        return cell->marks;
    }
    unsigned opens = mn_locality_opens(l, (int64_t)cell->wall_ns) ? MN_COST_OPENS : 0u;
    return (uint8_t)((cell->marks & ~(unsigned)MN_COST_OPENS) | MN_COST_FOLLOWED | opens);
}

/* Returns what a sample will cost where it is best made, by the earlier cost of its index. */
static int64_t
predict_by_history(const struct mn_costs *c, int64_t index, bool usual)
{
    int64_t wall = mn_cost_wall(&c->model, index);
    const struct mn_contrast *home = &c->locality.home;
    if (index < 0 || index >= c->model.n || !mn_cost_knows(&c->model, index)) {
        return usual && c->median_ns < wall ? c->median_ns : wall;
    }
    const struct mn_cost_cell *cell = &c->model.cells[index];
    if (cell->marks & MN_COST_APART) {
        wall = mn_locality_beside(&c->locality, wall);
    }
    bool abroad = home->answer == MN_CONTRAST_YES && (cell->marks & MN_COST_ABROAD)
                  && cell->term == c->term;
    return abroad && wall > (int64_t)home->cheap_ns ? (int64_t)home->cheap_ns : wall;
}

/* Does the same, by its bytes, too, if they are known. */
static int64_t
predict_without_hint(const struct mn_costs *c, int64_t index, bool usual)
{
    int64_t wall = predict_by_history(c, index, usual);
    if (!c->bytes.serves) {
        return wall;
    }
    return mn_bytes_predict(&c->bytes, index, wall, mn_cost_knows(&c->model, index));
}

void
mn_costs_observe(struct mn_costs *c, int64_t index, const float *hint, int64_t wall_ns)
{
    if (hint != NULL) { /* before history has seen this cost */
        mn_hint_observe(&c->hint, index, *hint, predict_without_hint(c, index, false), wall_ns);
    }
    if (c->bytes.log_bytes != NULL) {
        bool known = mn_cost_knows(&c->model, index);
        mn_bytes_observe(&c->bytes, index, known ? predict_by_history(c, index, false) : 0,
                         wall_ns);
    }
    mn_cost_observe(&c->model, index, wall_ns);
    uint64_t all = c->model.wall.total, first = all / QUANTILES_FIRST;
    uint64_t every = first < QUANTILES_EVERY ? first : QUANTILES_EVERY;
    if (c->since == 0 || (c->since >= every && c->since >= all / QUANTILES_PART)) {
        c->since = 0;
        c->median_ns = mn_histogram_quantile(&c->model.wall, 500);
        c->slowest_ns = mn_histogram_quantile(&c->model.wall, 995);
        c->timeout_ns = mn_slow_update(&c->slow, &c->model.wall);
        /* A sample that opens a group is not slow for that reason. */
        int64_t opens = MN_SLOW_FACTOR * mn_locality_opening(&c->locality);
        c->timeout_ns = c->timeout_ns > opens ? c->timeout_ns : opens;
        c->split = mn_split_worth(c);
    }
    c->since++;
}

/* Does the same, by its hint if it has one. */
static int64_t
predict(const struct mn_costs *c, int64_t index, const float *hint, bool usual)
{
    int64_t wall = predict_without_hint(c, index, usual);
    return hint != NULL ? mn_hint_predict(&c->hint, index, *hint, wall) : wall;
}

/* Learns how a sample's cost depends on where it was made. Returns what it would cost next to its
 * neighbours and at home: the price of being away is not its property. */
static int64_t
observe_place(struct mn_costs *c, int64_t index, const float *hint, int64_t cost,
              const struct mn_costs_made *made, bool follows, bool edge)
{
    struct mn_locality *l = &c->locality;
    bool known = index >= 0 && index < c->model.n;
    struct mn_cost_cell none = {0}, *cell = known ? &c->model.cells[index] : &none;
    const unsigned unaware = MN_COST_APART | MN_COST_EARLY;
    unsigned now = follows ? MN_COST_EARLY : MN_COST_APART;
    now = l->near.answer != MN_CONTRAST_YES ? now : 0;
    if ((cell->marks & unaware & ~now) != 0) {
        cell->age = 0; /* its earlier cost says nothing about now */
    }
    now |= cell->marks & MN_COST_ABROAD;
    bool lived = cell->home != 0 && cell->term == c->term;
    /* Slow samples start alone, anywhere. How they were made would suggest that samples cost more
     * without their neighbours and away from home. */
    bool slow = mn_slow_starts_alone(predict(c, index, hint, true), c->median_ns);
    bool away = lived && cell->home != made->worker + 1 && l->home.answer == MN_CONTRAST_YES;
    bool alone = slow && l->near.answer != MN_CONTRAST_YES;
    uint8_t near = cell->marks; /* the price of being away says nothing about neighbours */
    if (!away && !alone) {
        near = mn_locality_observe_near(l, follows, edge, marks_of(c, cell), cost);
    }
    cell->marks = (uint8_t)((near & ~(unaware | MN_COST_ABROAD)) | now);
    int64_t own = cost; /* without the price of being away */
    if (!follows && !(cell->marks & MN_COST_OPENS)) {
        own = mn_locality_beside(l, cost);
    }
    bool together = l->near.answer != MN_CONTRAST_YES || follows;
    if (lived && together) {
        bool home = cell->home == made->worker + 1;
        if (!slow) {
            mn_locality_observe_home(l, home, cost);
        }
        own = home ? own : mn_locality_at_home(l, own);
    }
    bool again = cell->home == made->worker + 1 && cell->term == c->term;
    if (again && (cell->marks & MN_COST_ABROAD)) {
        cell->age = 0; /* its cost elsewhere says nothing about here */
    }
    cell->marks = (uint8_t)((cell->marks & ~(unsigned)MN_COST_ABROAD)
                            | (again ? 0u : (unsigned)MN_COST_ABROAD));
    cell->home = (uint16_t)(made->worker + 1);
    cell->term = c->term;
    return own;
}

void
mn_costs_new_workers(struct mn_costs *c)
{
    if (++c->term == 0) { /* it has wrapped: no old term may pass for a new one */
        for (int64_t i = 0; i < c->model.n; i++) {
            c->model.cells[i].home = 0;
        }
    }
}

void
mn_costs_places(struct mn_costs *c, const int64_t *index, uint32_t n, uint16_t *home,
                uint8_t *marks)
{
    bool homes = c->locality.home.answer == MN_CONTRAST_YES;
    for (uint32_t i = 0; i < n; i++) {
        bool known = index != NULL && index[i] >= 0 && index[i] < c->model.n;
        const struct mn_cost_cell *cell = known ? &c->model.cells[index[i]] : NULL;
        home[i] = cell != NULL && homes && cell->term == c->term ? cell->home : 0;
        marks[i] = cell != NULL ? marks_of(c, cell) : 0;
    }
}

/* Returns whether to learn how the rows of a task depend on where they were made. For cheap rows
 * that are known not to depend on it, only now and then: learning takes as long as they do. */
static bool
looks_at_place(struct mn_costs *c)
{
    bool little = c->locality.near.answer == MN_CONTRAST_NO
                  && c->median_ns < MN_LOCALITY_WORTH_NS;
    return !little || c->tasks++ % PLACES_EVERY == 0;
}

uint64_t
mn_costs_observe_rows(struct mn_costs *c, const int64_t *index, const float *hint,
                      const uint64_t *wall_ns, size_t step, uint32_t n,
                      const struct mn_costs_made *made)
{
    uint64_t sum = 0;
    bool looks = made->learn_locality && looks_at_place(c);
    fetch_first(c, index, n);
    for (uint32_t i = 0; i < n; i++) {
        fetch_ahead(c, index, n, i);
        uint64_t wall = wall_ns[i * step];
        if (wall != 0) {
            sum += wall;
            int64_t at = index != NULL ? index[i] : -1, cost = (int64_t)wall;
            const float *own = hint != NULL ? hint + i : NULL;
            if (looks && (i > 0 || !made->newcomer)) {
                cost = observe_place(c, at, own, cost, made, i > 0 || made->follows,
                                     i == 0 && made->edge);
            }
            else if (looks && at >= 0 && at < c->model.n) {
                /* A worker's very first sample also pays for the worker's start. */
                c->model.cells[at].marks |= MN_COST_APART;
            }
            mn_costs_observe(c, at, own, cost);
        }
    }
    return sum;
}

void
mn_costs_sends(struct mn_costs *c, int64_t send_ns)
{
    c->refused = c->refused || send_ns < 0;
    if (c->refused) {
        c->send_ns = MN_SPLIT_CANNOT;
        c->split = false;
    }
    else {
        /* of several workers' values the lowest: noise only adds */
        c->send_ns = c->send_ns < 0 || send_ns < c->send_ns ? send_ns : c->send_ns;
        c->split = mn_split_worth(c);
    }
}

void
mn_costs_collated(struct mn_costs *c, int64_t ns)
{
    c->collate_ns = c->collate_ns == 0 ? ns : (3 * c->collate_ns + ns) / 4;
}

void
mn_costs_predict(struct mn_costs *c, const int64_t *index, const float *hint, uint32_t n,
                 bool usual, int64_t *out_ns)
{
    fetch_first(c, index, n);
    for (uint32_t i = 0; i < n; i++) {
        fetch_ahead(c, index, n, i);
        out_ns[i] = predict(c, index != NULL ? index[i] : -1, hint != NULL ? hint + i : NULL,
                            usual);
    }
}

struct mn_costs_view
mn_costs_look(const struct mn_costs *c)
{
    const struct mn_locality *l = &c->locality;
    return (struct mn_costs_view){.mean_ns = (int64_t)c->model.mean_wall_ns,
                                  .median_ns = c->median_ns,
                                  .slowest_ns = c->slowest_ns,
                                  .timeout_ns = c->timeout_ns,
                                  .collate_ns = c->collate_ns,
                                  .split = c->split,
                                  .revision = mn_bytes_revision(&c->bytes),
                                  .near = l->near.answer,
                                  .home = l->home.answer,
                                  .joins = mn_locality_joins(l),
                                  .believes = mn_locality_believes(l),
                                  .opening_ns = mn_locality_opening(l),
                                  .away_ns = mn_locality_away(l),
                                  .group = mn_locality_length(l)};
}

int64_t
mn_costs_quantile(const struct mn_costs *c, int permille)
{
    return mn_histogram_quantile(&c->model.wall, permille);
}

struct mn_costs_quality
mn_costs_quality(const struct mn_costs *c)
{
    const struct mn_bytes *m = &c->bytes;
    double w = weight_of_bytes(m), v = 1.0 - w;
    double both = w * w * m->bb + v * v * m->hh + 2.0 * w * v * m->hb;
    double square[MN_BYTES_PREDICTORS] = {
        [MN_BYTES_HISTORY] = m->hh, [MN_BYTES_ALONE] = m->bb, [MN_BYTES_BOTH] = fmax(0.0, both)};
    const struct mn_moments *of[MN_BYTES_PREDICTORS] = {
        [MN_BYTES_HISTORY] = &m->history, [MN_BYTES_ALONE] = &m->fit, [MN_BYTES_BOTH] = &m->both};
    struct mn_costs_quality q = {.hint_by = mn_hint_best(&c->hint), .bytes_by = mn_bytes_best(m)};
    q.hint_scale_ns = c->hint.scaled != 0 ? exp(c->hint.log_scale) : 0.0;
    for (int by = 0; by < MN_HINT_PREDICTORS; by++) {
        q.hint_errors[by] = c->hint.compared != 0 ? sqrt(c->hint.error[by]) : (double)NAN;
        q.hint_correlations[by] = mn_moments_correlation(&c->hint.of[by]);
    }
    for (int by = 0; by < MN_BYTES_PREDICTORS; by++) {
        q.bytes_errors[by] = m->history.n != 0 ? sqrt(square[by]) : (double)NAN;
        q.bytes_correlations[by] = mn_moments_correlation(of[by]);
    }
    return q;
}

/* ---- what a state holds, and what a person reads ---- */

int64_t
mn_costs_save(const struct mn_costs *c, int64_t most, int64_t *index, int64_t *wall_ns,
              float *ratio)
{
    int64_t out = 0;
    for (int64_t i = 0; i < c->model.n && out < most; i++) {
        if (c->model.cells[i].seen > 0) {
            index[out] = i;
            wall_ns[out] = (int64_t)c->model.cells[i].wall_ns;
            if (ratio != NULL) {
                const float *own = ratio_at(&c->hint, i);
                ratio[out] = own != NULL ? *own : 0.0f;
            }
            out++;
        }
    }
    return out;
}

static void
load_hints(struct mn_hint *m, int64_t n, const int64_t *index, const float *ratio,
           const double *error)
{
    for (int64_t k = 0; k < n; k++) {
        float *own = ratio_at(m, index[k]);
        if (own != NULL && isfinite(ratio[k]) && ratio[k] > 0.0f) {
            *own = ratio[k];
            learn_scale(m, (double)ratio[k]);
        }
    }
    /* The predictor that served does so again, until as many samples as in a trial say
     * otherwise. */
    for (int by = 0; error != NULL && by < MN_HINT_PREDICTORS; by++) {
        double square = error[by] * error[by];
        m->error[by] = square < SQUARE_ERROR_MOST ? square : SQUARE_ERROR_MOST;
        m->compared = MN_HINT_TRIAL;
    }
}

int64_t
mn_costs_load(struct mn_costs *c, int64_t n, const int64_t *index, const int64_t *wall_ns,
              const float *ratio, const double *error)
{
    int64_t taken = 0;
    for (int64_t k = 0; k < n; k++) {
        if (cell_at(&c->model, index[k]) != NULL) {
            mn_cost_observe(&c->model, index[k], wall_ns[k]);
            taken++;
        }
    }
    c->since = 0;
    if (ratio != NULL && mn_costs_hinted(c) == 0) { /* else they are learned again */
        load_hints(&c->hint, n, index, ratio, error);
    }
    return taken;
}

int64_t
mn_costs_slowest(const struct mn_costs *c, int64_t most, int64_t *index, int64_t *wall_ns)
{
    int64_t n = 0;
    for (int64_t i = 0; i < c->model.n; i++) {
        int64_t wall = (int64_t)c->model.cells[i].wall_ns;
        if (c->model.cells[i].seen == 0 || most == 0 || (n == most && wall <= wall_ns[n - 1])) {
            continue;
        }
        int64_t at = n < most ? n++ : n - 1;
        for (; at > 0 && wall_ns[at - 1] < wall; at--) {
            index[at] = index[at - 1];
            wall_ns[at] = wall_ns[at - 1];
        }
        index[at] = i;
        wall_ns[at] = wall;
    }
    return n;
}
