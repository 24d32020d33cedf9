/* Means, variances and correlation of pairs of numbers, over the last ones.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first MN_MOMENTS_MEMORY pairs count alike; then older ones fade away, so that the numbers
 * follow a change. All zeros is the empty state. No errors.
 */
#ifndef MN_POLICY_MOMENTS_H
#define MN_POLICY_MOMENTS_H

#include <math.h>
#include <stdint.h>

#define MN_MOMENTS_MEMORY 512

struct mn_moments {
    uint64_t n;        /* pairs added in total */
    double x, y;       /* means */
    double xx, yy, xy; /* variances, covariance */
};

/* The weight of the n-th observation, counted from 1, in a mean over the last MN_MOMENTS_MEMORY. */
static inline double
mn_moments_weight(uint64_t n)
{
    return 1.0 / (double)(n < MN_MOMENTS_MEMORY ? n : MN_MOMENTS_MEMORY);
}

static inline void
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
static inline double
mn_moments_correlation(const struct mn_moments *m)
{
    double both = m->xx * m->yy;
    return both > 0.0 ? fmax(-1.0, fmin(1.0, m->xy / sqrt(both))) : (double)NAN;
}

/* Returns the slope of the line of least squares of y over x; 0 where x does not vary. */
static inline double
mn_moments_slope(const struct mn_moments *m)
{
    return m->xx > 0.0 ? m->xy / m->xx : 0.0;
}

#endif
