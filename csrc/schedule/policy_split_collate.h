/* Whether a batch with a collate_fn of the user's is split over workers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Such a batch is one task in one worker, as in torch: its samples never leave the process
 *   that collates them. Split, its samples are tasks of their own and travel once more, to
 *   the worker that collates. That pays where one slow sample holds back the others of its
 *   batch, and it must cost next to nothing.
 *
 * Rule
 *   At least MN_SPLIT_EVIDENCE samples were seen, and what sending one costs is known.
 *   uneven  = of 1000 parts of all time, those in samples that take over twice the lower
 *             quartile. Of time, not of samples: a hiccup now and then is a small part of
 *             the whole. The lower quartile and not the median: where most samples are the
 *             slow ones, the median is theirs.
 *   cheap   = sending one takes at most 1/MN_SPLIT_SHARE of what one costs
 *   Split when cheap and uneven >= MN_SPLIT_ON. Once split, stay so until uneven < MN_SPLIT_OFF
 *   or it is no longer cheap by half (hysteresis, so that batches do not go to and fro).
 *   A constant cost is never uneven: all samples lie within twice the lower quartile.
 */
#ifndef MN_POLICY_SPLIT_COLLATE_H
#define MN_POLICY_SPLIT_COLLATE_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/policy_histogram.h"

#define MN_SPLIT_EVIDENCE 32
#define MN_SPLIT_ON 150
#define MN_SPLIT_OFF 80
/* Three parts in a hundred: less than a worker idles where costs are uneven. */
#define MN_SPLIT_SHARE 32

/* send_ns of batches whose samples cannot be sent, or are not known yet. */
#define MN_SPLIT_CANNOT (-1)

/* Returns whether to split. on: the answer so far. mean_ns: of a sample. send_ns: of sending one,
 * or MN_SPLIT_CANNOT. */
static inline bool
mn_split_worth(bool on, const struct mn_histogram *wall, int64_t mean_ns, int64_t send_ns)
{
    if (send_ns < 0 || wall->total < MN_SPLIT_EVIDENCE) {
        return false;
    }
    int64_t most = mean_ns / MN_SPLIT_SHARE;
    if (send_ns > (on ? most + most / 2 : most)) {
        return false;
    }
    int64_t quartile = mn_histogram_quantile(wall, 250);
    if (quartile > INT64_MAX / 2) {
        return false;
    }
    return mn_histogram_weight(wall, 2 * quartile) >= (on ? MN_SPLIT_OFF : MN_SPLIT_ON);
}

#endif
