/* The cost of a sample by its bytes, weighed against the history of its index.
 * SPDX-License-Identifier: Apache-2.0
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
 *
 * Memory: the caller's; one float for each index. No errors.
 */
#ifndef MN_POLICY_COST_BY_BYTES_H
#define MN_POLICY_COST_BY_BYTES_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/policy_moments.h"

/* Samples before bytes serve, and comparisons before they are weighed against history. */
#define MN_BYTES_TRIAL 16
/* n * r * r, of n samples with correlation r, from which on bytes serve, and below which they no
 * longer do. Without any relation its mean is 1. */
#define MN_BYTES_SERVE 9.0
#define MN_BYTES_LEAVE 4.0
/* A weight closer than this to 0 or 1 counts as 0 or 1. */
#define MN_BYTES_EDGE 0.1

enum mn_bytes_by {
    MN_BYTES_HISTORY = 0,
    MN_BYTES_ALONE = 1,
    MN_BYTES_BOTH = 2, /* or, in the beginning, bytes for new indices and history for known ones */
};
#define MN_BYTES_PREDICTORS 3

struct mn_bytes {
    float *log_bytes;      /* [n] logarithm of each index's bytes, 0: unknown; the caller's */
    int64_t n;
    int64_t known;         /* indices with bytes */
    bool serves;
    struct mn_moments fit; /* x: log of bytes, y: log of cost */
    /* Of samples whose index history knew. x: log of the prediction, y: log of the cost */
    struct mn_moments history, both;
    double hh, bb, hb; /* means of the products of the errors, over history.n samples */
};

/* log_bytes: n floats of 0. */
void
mn_bytes_init(struct mn_bytes *m, float *log_bytes, int64_t n);

/* Tells the bytes of an index. Two bytes or more count. history_ns: what the index has cost so far,
 * 0 if it is new. */
void
mn_bytes_tell(struct mn_bytes *m, int64_t index, int64_t bytes, int64_t history_ns);

/* Returns the predicted cost in ns. history_ns: what history says. known: it has seen the index. */
int64_t
mn_bytes_predict(const struct mn_bytes *m, int64_t index, int64_t history_ns, bool known);

/* Learns from a sample that has cost wall_ns. history_ns: as history said before, 0 if the index
 * was new. */
void
mn_bytes_observe(struct mn_bytes *m, int64_t index, int64_t history_ns, int64_t wall_ns);

/* The predictor that serves now. */
enum mn_bytes_by
mn_bytes_best(const struct mn_bytes *m);

/* A number that changes when predictions have become much better. 0: bytes do not serve. */
unsigned
mn_bytes_revision(const struct mn_bytes *m);

/* Fills in, by enum mn_bytes_by, root mean squares of the errors and correlations of the logarithms
 * of prediction and cost. NAN: unknown. */
void
mn_bytes_quality(const struct mn_bytes *m, double error[MN_BYTES_PREDICTORS],
                 double correlation[MN_BYTES_PREDICTORS]);

#endif
