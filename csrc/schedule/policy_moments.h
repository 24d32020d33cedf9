/* Means, variances and correlation of pairs of numbers, over the last ones.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The first MN_MOMENTS_MEMORY pairs count alike; then older ones fade away, so that the numbers
 * follow a change. All zeros is the empty state. No errors.
 */
#ifndef MN_POLICY_MOMENTS_H
#define MN_POLICY_MOMENTS_H

#include <stdint.h>

#define MN_MOMENTS_MEMORY 512

struct mn_moments {
    uint64_t n;        /* pairs added in total */
    double x, y;       /* means */
    double xx, yy, xy; /* variances, covariance */
};

/* The weight of the n-th observation, counted from 1, in a mean over the last MN_MOMENTS_MEMORY. */
double
mn_moments_weight(uint64_t n);

void
mn_moments_add(struct mn_moments *m, double x, double y);

/* Returns the correlation, from -1 to 1; NAN where one of the two does not vary. */
double
mn_moments_correlation(const struct mn_moments *m);

/* Returns the slope of the line of least squares of y over x; 0 where x does not vary. */
double
mn_moments_slope(const struct mn_moments *m);

#endif
