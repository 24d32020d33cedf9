/* May another task start, as far as memory goes?
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Bounds the bytes of samples in flight and of ready samples not delivered yet. The
 *   caller charges what a task will occupy when it starts (a sample, or the whole slot
 *   of its batch with the batch's first task), and gives it back when the batch is
 *   delivered and released.
 *
 * Terms
 *   used    all bytes charged, what the user still holds included if the caller does so
 *   head    the next batch to deliver (out of order: the oldest incomplete one)
 *   ahead   bytes charged for other batches than the head: used - head_used
 *   room    bytes of the largest batch known: what any head may come to need
 *
 * Rule
 *   A task of the head batch always starts: nothing can be freed before it is done.
 *   Another starts if used + bytes <= limit and ahead + bytes + room <= limit.
 *   That is also how one larger than the limit passes, alone: everything else is
 *   refused.
 *
 * No deadlock: the head's tasks are never refused, so the head is delivered and frees
 * its bytes, and the next batch becomes the head.
 *
 * Bound: if no batch is larger than room <= limit, then used <= limit always. A task past
 *   the head leaves ahead <= limit - room behind; ahead falls when the head moves on;
 *   the head itself never holds more than room; so used = ahead + head <= limit. If a
 *   batch does not fit (or was underestimated) the excess is at most that one batch, it is
 *   counted in `overruns`, and nothing else is started until it is gone.
 */
#ifndef MN_POLICY_MEMORY_H
#define MN_POLICY_MEMORY_H

#include <stdint.h>

enum mn_memory_answer {
    MN_MEMORY_NO = 0,
    MN_MEMORY_YES = 1,
    MN_MEMORY_ALONE = 2, /* over the limit, but nothing else is charged */
    MN_MEMORY_HEAD = 3,  /* over the limit, but everything waits for it */
};

struct mn_memory {
    int64_t limit;
    int64_t used;
    int64_t room;
    int64_t peak;     /* highest used */
    int64_t overruns; /* charges that went over the limit */
};

/* 0 or -EINVAL for a limit that is not positive. */
int
mn_memory_init(struct mn_memory *m, int64_t limit);

/* A batch of this size was met or is expected: room never shrinks. */
void
mn_memory_batch(struct mn_memory *m, int64_t bytes);

/* Pure question. is_head: the task belongs to the head batch, which holds head_used. */
enum mn_memory_answer
mn_memory_may(const struct mn_memory *m, int64_t bytes, int is_head, int64_t head_used);

void
mn_memory_charge(struct mn_memory *m, int64_t bytes);

void
mn_memory_release(struct mn_memory *m, int64_t bytes);

#endif /* MN_POLICY_MEMORY_H */
