/* Means, variances and correlation of pairs: see policy_moments.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_moments.h"

#include <math.h>

double
mn_moments_weight(uint64_t n)
{
    return 1.0 / (double)(n < MN_MOMENTS_MEMORY ? n : MN_MOMENTS_MEMORY);
}

void
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

double
mn_moments_correlation(const struct mn_moments *m)
{
    double both = m->xx * m->yy;
    return both > 0.0 ? fmax(-1.0, fmin(1.0, m->xy / sqrt(both))) : (double)NAN;
}

double
mn_moments_slope(const struct mn_moments *m)
{
    return m->xx > 0.0 ? m->xy / m->xx : 0.0;
}
