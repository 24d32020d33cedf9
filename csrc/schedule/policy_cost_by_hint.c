/* The cost of a sample by the dataset's hint: see policy_cost_by_hint.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_cost_by_hint.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "schedule/policy_cost.h"

#define NS_PER_SECOND 1e9
/* No prediction is off by more than this in the errors: the square of log(1000). */
#define ERROR_MOST 47.7

void
mn_hint_init(struct mn_hint *m, float *ratio, int64_t n)
{
    memset(m, 0, sizeof(*m));
    m->ratio = ratio;
    m->n = n;
}

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

enum mn_hint_by
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

int64_t
mn_hint_predict(const struct mn_hint *m, int64_t index, float hint, int64_t history_ns)
{
    double ns = predict_by(m, mn_hint_best(m), index, (double)hint, (double)history_ns);
    return ns < (double)MN_COST_MOST_NS ? (int64_t)ns : MN_COST_MOST_NS;
}

static void
compare(struct mn_hint *m, int64_t index, double hint, double history_ns, double wall)
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
        square = square < ERROR_MOST ? square : ERROR_MOST;
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

void
mn_hint_observe(struct mn_hint *m, int64_t index, float hint, int64_t history_ns,
                int64_t wall_ns)
{
    if (wall_ns <= 0) {
        return;
    }
    double unit = (double)hint, wall = (double)wall_ns;
    if (unit > 0.0 ? m->scaled != 0 : m->zeros != 0) {
        compare(m, index, unit, (double)history_ns, wall);
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

void
mn_hint_save(const struct mn_hint *m, int64_t n, const int64_t *index, float *ratio)
{
    for (int64_t k = 0; k < n; k++) {
        const float *own = ratio_at(m, index[k]);
        ratio[k] = own != NULL ? *own : 0.0f;
    }
}

void
mn_hint_load(struct mn_hint *m, int64_t n, const int64_t *index, const float *ratio)
{
    for (int64_t k = 0; k < n; k++) {
        float *own = ratio_at(m, index[k]);
        if (own != NULL && isfinite(ratio[k]) && ratio[k] > 0.0f) {
            *own = ratio[k];
            learn_scale(m, (double)ratio[k]);
        }
    }
}

void
mn_hint_load_errors(struct mn_hint *m, const double error[MN_HINT_PREDICTORS])
{
    m->compared = MN_HINT_TRIAL;
    for (int by = 0; by < MN_HINT_PREDICTORS; by++) {
        double square = error[by] * error[by];
        m->error[by] = square < ERROR_MOST ? square : ERROR_MOST;
    }
}
