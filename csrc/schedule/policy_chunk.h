/* How many neighbouring samples form one task.
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

#include <stdint.h>

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

#endif
