/* The cost of a sample by the dataset's hint: hint times a ratio that is learned.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A dataset may predict the cost of a sample from the random numbers that the sample will
 *   draw. The hint belongs to one sample of one epoch, so it knows what the history of an index
 *   cannot know. It is in seconds, or in any other unit. This model learns the unit, and how
 *   well the hint predicts compared with history. Numbers in, numbers out.
 *
 * Three predictors
 *   MN_HINT_HISTORY  the earlier cost of the index (policy_cost.h); the mean where it is new
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
 *
 * Memory: the caller's; ratios are plain floats. No errors.
 */
#ifndef MN_POLICY_COST_BY_HINT_H
#define MN_POLICY_COST_BY_HINT_H

#include <stdint.h>

#include "schedule/policy_moments.h"

/* Hinted samples before predictors are compared. */
#define MN_HINT_TRIAL 16

enum mn_hint_by {
    MN_HINT_HISTORY = 0,
    MN_HINT_SCALE = 1,
    MN_HINT_RATIO = 2,
};
#define MN_HINT_PREDICTORS 3

struct mn_hint {
    float *ratio;      /* [n] ns per unit of each index, 0: unknown; the caller's, or NULL */
    int64_t n;
    double log_scale;  /* of ns per unit, once scaled is not 0 */
    double zero_ns;    /* mean cost of samples whose hint is 0, once zeros is not 0 */
    uint64_t scaled;   /* samples with a hint above 0 */
    uint64_t zeros;    /* samples with a hint of 0 */
    uint64_t compared; /* samples that the errors are means of */
    double error[MN_HINT_PREDICTORS]; /* mean squared logarithms */
    struct mn_moments of[MN_HINT_PREDICTORS]; /* x: log of the prediction, y: log of the cost */
};

/* ratio: n floats of 0, or NULL with n 0. */
void
mn_hint_init(struct mn_hint *m, float *ratio, int64_t n);

/* The predictor that serves now. */
enum mn_hint_by
mn_hint_best(const struct mn_hint *m);

/* The cost in ns of a sample with this hint (finite, not negative). history_ns: what the history
 * of the index says, 0 where nothing is known. */
int64_t
mn_hint_predict(const struct mn_hint *m, int64_t index, float hint, int64_t history_ns);

/* A sample with this hint has cost wall_ns. history_ns: as history said before. */
void
mn_hint_observe(struct mn_hint *m, int64_t index, float hint, int64_t history_ns,
                int64_t wall_ns);

/* Copies out the ratio of each index, 0: unknown. */
void
mn_hint_save(const struct mn_hint *m, int64_t n, const int64_t *index, float *ratio);

/* Takes n saved ratios. Leaves out indices outside the array, and ratios that are not finite and
 * above 0. */
void
mn_hint_load(struct mn_hint *m, int64_t n, const int64_t *index, const float *ratio);

/* Takes saved errors: roots of mean squares, finite and not negative. The predictor that served
 * does so again, until as many samples as in a trial say otherwise. */
void
mn_hint_load_errors(struct mn_hint *m, const double error[MN_HINT_PREDICTORS]);

#endif
