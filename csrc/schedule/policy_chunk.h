/* How many neighbouring samples form one task, and whether a batch of a collate_fn is split.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A task costs `overhead` to publish, claim, wake for and report, whatever is in it.
 *   One sample per task is best for spreading work, but wasteful when a sample takes
 *   microseconds.
 *
 * Rule, for a batch of samples that cost about `cost` each
 *   target  = max(MN_CHUNK_TARGET_NS, MN_CHUNK_AMORTISE * overhead). A task this long spends at
 *             most 1/MN_CHUNK_AMORTISE of itself on overhead. Costlier samples go alone.
 *   size    = as many samples as reach the target, but no more than the batch has.
 *   When the batch is wanted now and `idle` workers could share it, latency counts: at
 *   most ceil(batch / idle) samples per task. But no task is shorter than MN_CHUNK_SPREAD /
 *   MN_CHUNK_AMORTISE of the target (that many times the overhead). Below that, waking another
 *   worker takes longer than doing the work.
 *   The result is evened out: ceil(batch / ceil(batch / size)), so that 10 samples in
 *   tasks of at most 7 become 5 + 5.
 *   In the steady state (idle 0) different batches keep different workers busy, and
 *   splitting one batch finer has no benefit.
 *
 * mn_chunk_next cuts by the samples' own predicted costs. A sample whose cost reaches the target is
 * always alone, so that no cheap neighbour waits for it and it can be started early.
 */
#ifndef MN_POLICY_CHUNK_H
#define MN_POLICY_CHUNK_H

#include <stdbool.h>
#include <stdint.h>

#include "schedule/policy_cost.h"

/* A cross-process futex round trip was measured at 50 us; six of them. */
#define MN_CHUNK_TARGET_NS 300000
#define MN_CHUNK_AMORTISE 16
#define MN_CHUNK_SPREAD 2

/* Returns samples per task, in [1, batch]; 1 when the cost is not known (0). batch < 1 counts as 1.
 * idle: workers without work while the caller waits for this batch, 0 in the steady state. */
int64_t
mn_chunk_size(int64_t cost_ns, int64_t overhead_ns, int64_t batch, int64_t idle);

/* Returns the length of the task that begins at costs_ns[0], in [1, n] (0 only for n 0). n samples
 * of the batch are left. limit: most samples that a task may have (mn_chunk_size). */
int64_t
mn_chunk_next(const int64_t *costs_ns, int64_t n, int64_t overhead_ns, int64_t limit);

/* ---- batches of a collate_fn ------------------------------------------------------------ */

/* Whether a batch with a collate_fn of the user's is split over workers.
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
