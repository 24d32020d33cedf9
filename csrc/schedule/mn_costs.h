/* mn_costs.h - what samples have cost so far, and what later samples are expected to cost.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The model predicts the wall time of a sample by the history of its index, by the bytes that it is
 * read from, and by the dataset's hint, where these are known. From the same observations follows
 * when a sample counts as slow, whether batches of a collate_fn are split over workers, and what is
 * gained by keeping neighbours together (policy_locality.h). mn_costs.c has the rules.
 *
 * No clock, no lock: several iterators of a loader share one model, under the lock of
 * mn_shared_costs.h.
 */
#ifndef MN_COSTS_H
#define MN_COSTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/policy_locality.h"

/* ---- the parts of the model ---- */

/* Buckets of durations: each octave is cut into 2^MN_HIST_SUB_BITS. */
#define MN_HIST_SUB_BITS 4
#define MN_HIST_BUCKETS ((64 - MN_HIST_SUB_BITS) << MN_HIST_SUB_BITS)

struct mn_histogram {
    uint32_t count[MN_HIST_BUCKETS];
    uint32_t total; /* sum of count */
};

/* Anything above counts as this, eleven days, so that sums over a plan cannot overflow. Hints in
 * a wrong unit may come here. */
#define MN_COST_MOST_NS INT64_C(1000000000000000)

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

/* The history of each index. */
struct mn_cost {
    struct mn_cost_cell *cells; /* [n] */
    int64_t n;
    int64_t known;      /* cells with an observation */
    uint64_t samples;   /* observations in total */
    double mean_wall_ns;
    struct mn_histogram wall;
};

#define MN_SLOW_NEVER INT64_MAX

struct mn_slow {
    int64_t timeout_ns; /* MN_SLOW_NEVER: no sample counts as slow */
    bool tail;          /* a heavy tail is seen */
    uint32_t dissent;   /* updates in a row that wanted another timeout */
};

/* Returns whether a sample of known cost is slow enough to be started by itself, ahead of its
 * neighbours. It takes twice as long as most, and a millisecond more. */
static inline bool
mn_slow_starts_alone(int64_t cost_ns, int64_t typical_ns)
{
    return cost_ns > 2 * typical_ns + 1000 * 1000;
}

/* Pairs of numbers. */
struct mn_moments {
    uint64_t n;        /* pairs added in total */
    double x, y;       /* means */
    double xx, yy, xy; /* variances, covariance */
};

enum mn_bytes_by {
    MN_BYTES_HISTORY = 0,
    MN_BYTES_ALONE = 1,
    MN_BYTES_BOTH = 2, /* or, in the beginning, bytes for new indices and history for known ones */
};
#define MN_BYTES_PREDICTORS 3

struct mn_bytes {
    float *log_bytes;      /* [n] logarithm of each index's bytes, 0: unknown; NULL: all are */
    int64_t n;
    int64_t known;         /* indices with bytes */
    bool serves;
    struct mn_moments fit; /* x: log of bytes, y: log of cost */
    /* Of samples whose index history knew. x: log of the prediction, y: log of the cost */
    struct mn_moments history, both;
    double hh, bb, hb; /* means of the products of the errors, over history.n samples */
};

enum mn_hint_by {
    MN_HINT_HISTORY = 0,
    MN_HINT_SCALE = 1,
    MN_HINT_RATIO = 2,
};
#define MN_HINT_PREDICTORS 3

struct mn_hint {
    float *ratio;      /* [n] ns per unit of each index, 0: unknown; NULL: all are */
    int64_t n;
    double log_scale;  /* of ns per unit, once scaled is not 0 */
    double zero_ns;    /* mean cost of samples whose hint is 0, once zeros is not 0 */
    uint64_t scaled;   /* samples with a hint above 0 */
    uint64_t zeros;    /* samples with a hint of 0 */
    uint64_t compared; /* samples that the errors are means of */
    double error[MN_HINT_PREDICTORS]; /* mean squared logarithms */
    struct mn_moments of[MN_HINT_PREDICTORS]; /* x: log of the prediction, y: log of the cost */
};

/* send_ns of batches whose samples cannot be sent, or are not known yet. */
#define MN_SPLIT_CANNOT (-1)

struct mn_costs {
    struct mn_cost model;
    struct mn_hint hint;  /* of the dataset's own hints, if it gives any */
    struct mn_bytes bytes; /* of what samples are read from, where that is known */
    struct mn_slow slow;
    uint64_t since; /* observations since the quantiles below were computed */
    int64_t median_ns;
    int64_t slowest_ns; /* all but one sample in 200 cost less */
    int64_t timeout_ns; /* after which a sample counts as slow; MN_SLOW_NEVER */
    int64_t send_ns;    /* time to send a sample to another worker; MN_SPLIT_CANNOT */
    bool refused;       /* a sample could not be sent: never split again */
    bool split;         /* split batches that one worker would make */
    int64_t collate_ns; /* of a batch, in addition to its samples; running mean */
    struct mn_locality locality;
    uint64_t tasks;     /* of cheap samples: only some of them are checked for locality */
    uint8_t term;       /* of the present workers: homes from earlier terms do not count */
};

/* ---- learning and predicting ---- */

/* n: length of the dataset; 0: unknown. Returns 0 or -ENOMEM. */
int
mn_costs_init(struct mn_costs *c, int64_t n);

void
mn_costs_fini(struct mn_costs *c);

/* Learns what a sample has cost. hint: from the dataset, or NULL. */
void
mn_costs_observe(struct mn_costs *c, int64_t index, const float *hint, int64_t wall_ns);

/* How the rows of a task were made. */
struct mn_costs_made {
    uint32_t worker;
    /* Its worker may keep files open, which makes samples cheaper. Else no locality is learned. */
    bool learn_locality;
    bool follows;  /* its worker had just made the sample before the first row */
    bool newcomer; /* the first row was the very first sample of its worker */
    bool edge;     /* the first row is the first of its batch */
};

/* Learns from the rows of a task: row i took wall_ns[i * step], 0 if it did not run. index: of each
 * row, or NULL. hint: from the dataset, for each row, or NULL. Returns the sum of wall_ns. */
uint64_t
mn_costs_observe_rows(struct mn_costs *c, const int64_t *index, const float *hint,
                      const uint64_t *wall_ns, size_t step, uint32_t n,
                      const struct mn_costs_made *made);

/* Declares that new workers start: what earlier ones kept open is gone. */
void
mn_costs_new_workers(struct mn_costs *c);

/* Fills in, for each index, 1 + the present worker that made it last (0: none, or not worth
 * knowing), and its marks (enum mn_cost_mark). */
void
mn_costs_places(struct mn_costs *c, const int64_t *index, uint32_t n, uint16_t *home,
                uint8_t *marks);

/* Fills in the predicted wall time of each index, or 0 if nothing is known of any index. An unknown
 * index gets the mean or, with usual, at most the median, so that it does not count as slow. hint:
 * from the dataset, for each sample, or NULL. */
void
mn_costs_predict(struct mn_costs *c, const int64_t *index, const float *hint, uint32_t n,
                 bool usual, int64_t *out_ns);

/* Allocates memory for learning from hints, when the first ones come. Returns 0 or -ENOMEM. */
int
mn_costs_hinted(struct mn_costs *c);

/* Tells how many bytes n samples are read from. Returns 0 or -ENOMEM. */
int
mn_costs_tell_bytes(struct mn_costs *c, const int64_t *index, const int64_t *bytes, int64_t n);

struct mn_costs_view {
    int64_t mean_ns;
    int64_t median_ns;
    int64_t slowest_ns;
    int64_t timeout_ns;
    int64_t collate_ns;
    bool split;
    unsigned revision; /* when it changes, predictions by bytes have become much better */
    enum mn_contrast_answer near, home; /* policy_locality.h */
    bool joins, believes;
    int64_t opening_ns, away_ns;
    double group; /* mean length in samples */
};

/* Learns what sending a sample to another worker takes; negative: samples cannot be sent. */
void
mn_costs_sends(struct mn_costs *c, int64_t send_ns);

/* Learns what a batch took in addition to its samples. */
void
mn_costs_collated(struct mn_costs *c, int64_t ns);

struct mn_costs_view
mn_costs_look(const struct mn_costs *c);

/* ---- what a state holds, and what a person reads ---- */

/* Copies out up to `most` observed indices, and the ratio of each index unless ratio is NULL.
 * Returns their number. This is all of the state that is worth saving. */
int64_t
mn_costs_save(const struct mn_costs *c, int64_t most, int64_t *index, int64_t *wall_ns,
              float *ratio);

/* Takes n saved costs as one observation each, ratios, and errors of the hint's predictors (finite,
 * not negative). Ratios and errors may be NULL. Leaves out indices outside the dataset, and ratios
 * that are not finite and above 0. Returns how many costs were taken. */
int64_t
mn_costs_load(struct mn_costs *c, int64_t n, const int64_t *index, const int64_t *wall_ns,
              const float *ratio, const double *error);

/* Copies out the `most` observed indices of largest wall time, largest first, among equals lowest
 * index first. Returns their number. One walk over all indices. */
int64_t
mn_costs_slowest(const struct mn_costs *c, int64_t most, int64_t *index, int64_t *wall_ns);

/* Returns the wall time that permille of 1000 samples do not exceed; 0 if none was observed. */
int64_t
mn_costs_quantile(const struct mn_costs *c, int permille);

/* How well samples are predicted, by enum mn_hint_by and mn_bytes_by. The errors are root mean
 * squares of the logarithm of cost / prediction; the correlations are of the logarithms of
 * prediction and cost. NAN: unknown. */
struct mn_costs_quality {
    enum mn_hint_by hint_by;   /* the predictor that serves now */
    double hint_errors[MN_HINT_PREDICTORS], hint_correlations[MN_HINT_PREDICTORS];
    double hint_scale_ns;      /* for one unit of hint; 0: unknown */
    enum mn_bytes_by bytes_by; /* the predictor that serves now */
    double bytes_errors[MN_BYTES_PREDICTORS], bytes_correlations[MN_BYTES_PREDICTORS];
};

struct mn_costs_quality
mn_costs_quality(const struct mn_costs *c);

#endif
