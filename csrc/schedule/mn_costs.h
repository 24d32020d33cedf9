/* mn_costs.h - what samples have cost so far, and what later samples are expected to cost.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The cost model (policy_cost.h), together with what the policies of slow samples, splitting and
 * locality derive from the same observations. No clock, no lock: several iterators of a loader
 * share one model, under the lock of mn_shared_costs.h.
 */
#ifndef MN_COSTS_H
#define MN_COSTS_H

#include "schedule/policy_cost_by_bytes.h"
#include "schedule/policy_chunk.h"
#include "schedule/policy_cost.h"
#include "schedule/policy_cost_by_hint.h"
#include "schedule/policy_locality.h"

struct mn_costs {
    struct mn_cost model;
    struct mn_hint hint;  /* of the dataset's own hints, if it gives any */
    struct mn_bytes bytes; /* of what samples are read from, where that is known */
    struct mn_slow slow;
    void *cells;
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
 * from the dataset, for each sample (policy_cost_by_hint.h), or NULL. */
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
    unsigned revision; /* mn_bytes_revision(): when it changes, predictions have */
    uint64_t samples;
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
mn_costs_look(struct mn_costs *c);

#endif
