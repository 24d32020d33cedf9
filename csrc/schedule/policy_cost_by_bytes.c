/* The cost of a sample by its bytes: see policy_cost_by_bytes.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_cost_by_bytes.h"

#include <math.h>
#include <string.h>

#include "schedule/policy_cost.h"

/* Costs that grow faster than this power of the bytes are not believed. */
#define SLOPE_MOST 2.0
/* No error counts as more than this: the logarithm of 1000. */
#define ERROR_MOST 6.91

void
mn_bytes_init(struct mn_bytes *m, float *log_bytes, int64_t n)
{
    memset(m, 0, sizeof(*m));
    m->log_bytes = log_bytes;
    m->n = n;
}

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
weight(const struct mn_bytes *m)
{
    double apart = m->hh + m->bb - 2.0 * m->hb; /* mean square of what the two differ by */
    if (!m->serves || m->history.n < MN_BYTES_TRIAL || !(apart > 0.0)) {
        return 0.0;
    }
    double w = (m->hh - m->hb) / apart;
    return w < MN_BYTES_EDGE ? 0.0 : w > 1.0 - MN_BYTES_EDGE ? 1.0 : w;
}

static void
learn(struct mn_bytes *m, double size, double cost)
{
    mn_moments_add(&m->fit, size, cost);
    double n = 1.0 / mn_moments_weight(m->fit.n), r = mn_moments_correlation(&m->fit);
    double least = m->serves ? MN_BYTES_LEAVE : MN_BYTES_SERVE;
    m->serves = m->fit.n >= MN_BYTES_TRIAL && r > 0.0 && n * r * r >= least;
}

void
mn_bytes_tell(struct mn_bytes *m, int64_t index, int64_t bytes, int64_t history_ns)
{
    if (index < 0 || index >= m->n || bytes < 2) {
        return;
    }
    m->known += !(m->log_bytes[index] > 0.0f);
    m->log_bytes[index] = (float)log((double)bytes);
    if (history_ns > 0) { /* of a loaded state, or told late */
        learn(m, size_of(m, index), log((double)history_ns));
    }
}

int64_t
mn_bytes_predict(const struct mn_bytes *m, int64_t index, int64_t history_ns, bool known)
{
    double size = size_of(m, index), w = known ? weight(m) : 1.0;
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
    return fmax(-ERROR_MOST, fmin(ERROR_MOST, error));
}

static void
compare(struct mn_bytes *m, double size, double history, double cost)
{
    double bytes = by_bytes(m, size), w = weight(m);
    mn_moments_add(&m->both, w * bytes + (1.0 - w) * history, cost);
    mn_moments_add(&m->history, history, cost);
    double h = bounded(cost - history), b = bounded(cost - bytes);
    double part = mn_moments_weight(m->history.n);
    m->hh += (h * h - m->hh) * part;
    m->bb += (b * b - m->bb) * part;
    m->hb += (h * b - m->hb) * part;
}

void
mn_bytes_observe(struct mn_bytes *m, int64_t index, int64_t history_ns, int64_t wall_ns)
{
    double size = size_of(m, index);
    if (!(size > 0.0) || wall_ns <= 0) {
        return;
    }
    double cost = log((double)wall_ns);
    if (history_ns > 0 && m->fit.n >= MN_BYTES_TRIAL) {
        compare(m, size, log((double)history_ns), cost);
    }
    learn(m, size, cost);
}

enum mn_bytes_by
mn_bytes_best(const struct mn_bytes *m)
{
    if (!m->serves) {
        return MN_BYTES_HISTORY;
    }
    double w = weight(m);
    bool whole = m->history.n >= MN_BYTES_TRIAL && !(w > 0.0 && w < 1.0);
    return !whole ? MN_BYTES_BOTH : w > 0.0 ? MN_BYTES_ALONE : MN_BYTES_HISTORY;
}

unsigned
mn_bytes_revision(const struct mn_bytes *m)
{
    if (!m->serves) {
        return 0;
    }
    return 1u + (m->fit.n >= 4 * MN_BYTES_TRIAL) + (m->fit.n >= 16 * MN_BYTES_TRIAL);
}

void
mn_bytes_quality(const struct mn_bytes *m, double error[MN_BYTES_PREDICTORS],
                 double correlation[MN_BYTES_PREDICTORS])
{
    double w = weight(m), v = 1.0 - w;
    bool compared = m->history.n != 0;
    error[MN_BYTES_HISTORY] = compared ? sqrt(m->hh) : (double)NAN;
    error[MN_BYTES_ALONE] = compared ? sqrt(m->bb) : (double)NAN;
    double both = w * w * m->bb + v * v * m->hh + 2.0 * w * v * m->hb;
    error[MN_BYTES_BOTH] = compared ? sqrt(fmax(0.0, both)) : (double)NAN;
    correlation[MN_BYTES_HISTORY] = mn_moments_correlation(&m->history);
    correlation[MN_BYTES_ALONE] = mn_moments_correlation(&m->fit);
    correlation[MN_BYTES_BOTH] = mn_moments_correlation(&m->both);
}
