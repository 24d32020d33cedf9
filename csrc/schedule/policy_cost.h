/* What a sample costs: a running cost per index, and the distribution over all of them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Predicts the wall time of the sample at position `index` of the dataset, so that a slow
 *   one can be started early, and remembers which worker made it last. Numbers in, numbers
 *   out: reports come from the tasks.
 *
 * Model
 *   One cell of 12 bytes an index, in memory given by the caller (or none: then there is
 *   only the mean). A prediction is the cell's cost; failing that the running mean over
 *   everything, which has a memory of MN_COST_MEMORY samples, so that it follows a machine
 *   that slows down.
 *
 * One cell's update with an observation x
 *   The first one replaces whatever is there. Then c += (x - c) / k, with k the number
 *   of observations up to MN_COST_MAX_AGE: a mean first, then exponentially weighted.
 *   An x beyond a factor MN_COST_SURPRISE of c is a surprise: it counts as if it were
 *   that factor away, and is remembered. A second surprise in a row to the same side is
 *   taken for a change: c = x, and averaging begins anew. So one outlier, in either
 *   direction, leaves c between 3/4 and 3/2 of what it was, and a change of level
 *   is followed after two epochs.
 *
 *   A sample that is slow at random (an augmentation drawn anew each epoch) is
 *   not predictable from its history; its c wanders between the levels, which costs
 *   nothing but a few starts earlier than needed.
 *
 * Memory: the caller's; cells are plain data and may be anywhere. No errors but -EINVAL.
 */
#ifndef MN_POLICY_COST_H
#define MN_POLICY_COST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "schedule/policy_histogram.h"

#define MN_COST_MEMORY 4096
#define MN_COST_MAX_AGE 4
#define MN_COST_SURPRISE 2.0
/* Anything above counts as this, eleven days, so that sums over a plan cannot overflow. Hints in
 * a wrong unit may come here. */
#define MN_COST_MOST_NS INT64_C(1000000000000000)

enum mn_cost_mark {
    MN_COST_FOLLOWED = 1u << 0, /* it was made right after its neighbour by one worker, and */
    MN_COST_OPENS = 1u << 1,    /* was dear even so: it begins a group (policy_locality.h) */
    MN_COST_ABROAD = 1u << 2,   /* what is known of its cost is not from where it is at home */
    MN_COST_APART = 1u << 3,    /* nor from beside its neighbour, when nobody knew of groups */
    MN_COST_EARLY = 1u << 4,    /* it is from there, and from then: it may have opened a group */
};

struct mn_cost_cell {
    float wall_ns;
    uint16_t home; /* 1 + the worker that made it last; 0: not known */
    uint8_t term;  /* of the workers that `home` counts among */
    uint8_t marks; /* enum mn_cost_mark */
    uint16_t seen; /* observations, saturating */
    int8_t surprise; /* side of the last surprise: -1, 0, +1 */
    uint8_t age;   /* observations averaged over, up to MN_COST_MAX_AGE; 0: the next replaces */
};

struct mn_cost {
    struct mn_cost_cell *cells; /* [n], the caller's */
    int64_t n;
    int64_t known;      /* cells with an observation */
    uint64_t samples;   /* observations in all */
    double mean_wall_ns;
    struct mn_histogram wall;
};

/* Bytes of memory for n indices. */
static inline size_t
mn_cost_bytes(int64_t n)
{
    return (size_t)n * sizeof(struct mn_cost_cell);
}

/* cells: mn_cost_bytes(n) bytes, or NULL with n 0. 0 or -EINVAL. */
int
mn_cost_init(struct mn_cost *m, void *cells, int64_t n);

/* One sample's report. An index outside the array only enters mean and distribution. */
void
mn_cost_observe(struct mn_cost *m, int64_t index, int64_t wall_ns);

/* Asks for an index's cell to be in cache soon. Compilers take what only does that for a function
 * without any effect, and leave out calls of it: the empty statement says that it has one. */
static inline void
mn_cost_fetch(const struct mn_cost *m, int64_t index)
{
    if (index >= 0 && index < m->n) {
        __builtin_prefetch(&m->cells[index], 1);
        __asm__ __volatile__("");
    }
}

/* Predicted wall time; 0 when nothing at all is known. */
int64_t
mn_cost_wall(const struct mn_cost *m, int64_t index);

/* True once this index was observed. */
bool
mn_cost_knows(const struct mn_cost *m, int64_t index);

/* Copies out up to cap observed cells from *cursor on and moves it past them: call until it
 * returns 0. The two arrays are the whole state worth keeping. */
int64_t
mn_cost_save(const struct mn_cost *m, int64_t *cursor, int64_t cap, int64_t *index,
             int64_t *wall_ns);

/* The observed cells of the largest wall time, largest first, of equal ones the lowest index; at
 * most so many. Returns how many. One walk over all cells. */
int64_t
mn_cost_slowest(const struct mn_cost *m, int64_t most, int64_t *index, int64_t *wall_ns);

/* Takes n saved cells as one observation each. Indices outside the array are left
 * out (the dataset has shrunk). Returns how many were taken. */
int64_t
mn_cost_load(struct mn_cost *m, int64_t n, const int64_t *index, const int64_t *wall_ns);

#endif /* MN_POLICY_COST_H */
