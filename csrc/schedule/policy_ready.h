/* Batches of the samples that are ready first, with a bound on how far any sample moves.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Terms
 *   B samples per batch; natural batch of position p: p / B; batches are formed as k = 0, 1...
 *   bound D >= 0: every sample is delivered in a batch k with |k - p / B| <= D.
 *   A sample is marked ready as fast or slow (slow: it outlived the slow timeout).
 *   A natural batch is whole while all of it is ready and nothing of it delivered. It is open once
 *   a part of it was delivered.
 *
 * Whole batches first
 *   The samples of a natural batch lie together in memory and are delivered as they lie. A
 *   batch that is mixed from several costs a copy of all of it. It leaves each of them in memory
 *   until its last sample is delivered. So while there are whole ones they are delivered, oldest
 *   first, and a batch that a slow sample holds up waits for it. It comes when it is whole, or when
 *   the bound demands it. Where nothing is slow, every batch is a natural one, and forming costs
 *   nothing.
 *   With none whole, B ready samples could be mixed now, or some task may end in a moment. The
 *   caller decides (mix). Let a caller wait as long as the copy would take, and then copy. It never
 *   spends more than twice what the best choice would have cost.
 *
 * Rule for batch k
 *   Waits until every undelivered sample of natural batch k - D is ready. They are due: this is
 *   their last batch. Also waits until B samples of natural batches <= k + D are ready (fewer only
 *   for the last batch of the epoch). Then it is
 *     - the natural batch that is due, where that is whole; where a part of it is due, mixed;
 *     - mixed where B samples of open ones are ready: nothing is gained by waiting, and their
 *       memory is free after it. Also mixed where slow samples wait and have fallen behind their
 *       natural share by a batch's share and one more, even after those of the oldest whole
 *       batch;
 *     - the oldest whole natural batch with no more slow samples than may be carried over;
 *     - mixed if the caller says so.
 *   Mixed, it takes, always oldest first:
 *     1. the due ones;
 *     2. slow ones up to their natural share: of open natural batches, and where one is owed,
 *        of any;
 *     3. fast ones of open natural batches, then of those that are not whole, then of any:
 *        open batches are used up before more are opened;
 *     4. the slow ones left, until the batch is full.
 *   The natural share: of all samples delivered after k batches, slow / marked of
 *   them may be slow. An unused share is carried over, up to the share of MN_READY_CARRY batches.
 *   So slow samples neither starve behind the fast nor arrive bunched when several end together.
 *
 * Bound, by induction over k. Before batch k is formed, every sample with p / B < k - D has been
 * delivered, and none with p / B > k - 1 + D.
 *   Lower: those with p / B = k - D are at most B, are all ready when the batch is formed, and go
 *   first. So they all fit into batch k. Upper: nothing past natural batch k + D is taken. For D =
 *   0 both say p / B = k: the sampler's batches exactly.
 * Full: when batch k is due, k B samples are delivered and (k + D + 1) B may be, or all of the
 * epoch. At least B remain, or the rest of the epoch. So waiting for B ready ones ends once workers
 * finish what they may start, and all batches but the last have B. A natural batch that is shorter
 * is whole only as the last one.
 *
 * Exactly once: a position goes from pending to ready to delivered once; a second mark is refused.
 *
 * Data: a ring with one byte per position, for the (2 D + 1) B positions that can be live. Counts
 * for each of their natural batches. A whole one is found without a look at positions.
 */
#ifndef MN_POLICY_READY_H
#define MN_POLICY_READY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MN_READY_CARRY 2

/* Counts of one natural batch. */
struct mn_ready_natural {
    int64_t ready[2]; /* undelivered: fast, slow */
    int64_t gone;     /* delivered */
};

struct mn_ready {
    struct mn_ready_natural *natural; /* [2 * bound + 1], in the caller's memory */
    uint8_t *state; /* [span], behind natural */
    int64_t span;
    int64_t batch;
    int64_t bound;
    int64_t formed;     /* batches formed so far */
    int64_t total;      /* samples of the epoch; INT64_MAX until known */
    int64_t ready[2];   /* marked and undelivered: fast, slow */
    int64_t marked[2];  /* in total */
    int64_t slow_out;   /* delivered slow ones that used up share */
    int64_t displaced_max; /* largest |k - p / B| so far */
    int64_t displaced_sum;
};

/* Returns bytes of memory; 0 if batch or bound make no sense. */
size_t
mn_ready_bytes(int64_t batch, int64_t bound);

/* memory: of mn_ready_bytes() bytes, aligned as malloc does. */
int
mn_ready_init(struct mn_ready *r, void *memory, int64_t batch, int64_t bound);

/* Sets the number of samples of the epoch (INT64_MAX: not known yet). Returns 0, or -EINVAL if more
 * were marked already. */
int
mn_ready_end(struct mn_ready *r, int64_t total);

/* Returns the first position that must not be started yet, because it could not be marked. */
int64_t
mn_ready_horizon(const struct mn_ready *r);

/* Returns whether the position is ready or was delivered. */
bool
mn_ready_is_marked(const struct mn_ready *r, int64_t position);

/* Marks a position as ready. Returns 0; -ERANGE outside [oldest due, horizon); -EALREADY if it was
 * marked before. */
int
mn_ready_mark(struct mn_ready *r, int64_t position, bool slow);

/* Forms the next batch: *n positions, ascending, into out[batch]. Returns MN_OK; MN_EMPTY: wait;
 * MN_CLOSED: the epoch is over. mix: even if waiting could avoid the copy. */
int
mn_ready_form(struct mn_ready *r, bool mix, int64_t *out, int64_t *n);

/* Returns whether a batch could be mixed now. */
bool
mn_ready_could_mix(const struct mn_ready *r);

#endif
