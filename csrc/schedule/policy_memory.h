/* Whether memory allows another task to start.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Bounds the bytes of batches in flight and of ready ones that were not delivered yet. The
 *   caller charges what a task will occupy when it starts (all of its batch, with the batch's first
 *   task). It returns that when the batch was delivered and is released.
 *
 * Terms
 *   used    all bytes charged
 *   head    the next batch to deliver (out of order: the oldest incomplete one)
 *   ahead   bytes charged for other batches than the head
 *   reserve bytes of the largest batch known: what any head may come to need
 *
 * Rule
 *   A task of the head batch always starts: nothing can be freed before it is done.
 *   Another starts if used + bytes + reserve <= limit.
 *   That is also how a batch larger than the limit passes, alone: everything else is refused.
 *
 * No deadlock: the head's tasks are never refused, so the head is delivered and frees its bytes,
 * and the next batch becomes the head.
 *
 * Bound: if no batch is larger than reserve <= limit, then used <= limit always. A task past the
 * head leaves ahead <= limit - reserve behind. ahead falls when the head moves on; the head itself
 * never uses more than reserve; so used = ahead + head <= limit. If a batch does not fit (or was
 * underestimated) the excess is at most that one batch. Nothing else is started until it is gone.
 * Memory of delivered batches that the program retains is used as well, and comes on top: the code
 * that delivers must bound it.
 */
#ifndef MN_POLICY_MEMORY_H
#define MN_POLICY_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

/* Bytes; none is negative. */
struct mn_memory {
    int64_t limit;
    int64_t used;
    int64_t reserve;
};

/* Returns whether a task that will occupy bytes may start. is_head: it belongs to the head
 * batch. */
static inline bool
mn_memory_may(const struct mn_memory *m, int64_t bytes, bool is_head)
{
    /* used + bytes + reserve <= limit, without overflow */
    bool fits = m->used <= m->limit && bytes <= m->limit - m->used
                && m->reserve <= m->limit - m->used - bytes;
    return is_head || fits;
}

#endif
