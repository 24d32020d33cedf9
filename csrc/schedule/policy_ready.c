/* Batches from whichever samples are ready first: see policy_ready.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_ready.h"

#include <errno.h>
#include <string.h>

#include "base/mn_error.h"

enum { PENDING = 0, FAST = 1, SLOW = 2, CHOSEN = 3, DELIVERED = 4 };

size_t
mn_ready_bytes(int64_t batch, int64_t bound)
{
    int64_t blocks, span;
    if (batch < 1 || bound < 0 || __builtin_mul_overflow(bound, 2, &blocks)
        || __builtin_mul_overflow(blocks + 1, batch, &span)) {
        return 0;
    }
    return (size_t)span;
}

int
mn_ready_init(struct mn_ready *r, void *memory, int64_t batch, int64_t bound)
{
    size_t bytes = mn_ready_bytes(batch, bound);
    if (bytes == 0 || memory == NULL) {
        return -EINVAL;
    }
    memset(r, 0, sizeof(*r));
    memset(memory, PENDING, bytes);
    r->state = memory;
    r->span = (int64_t)bytes;
    r->batch = batch;
    r->bound = bound;
    r->total = INT64_MAX;
    return 0;
}

int
mn_ready_end(struct mn_ready *r, int64_t total)
{
    if (total < r->marked[0] + r->marked[1]) {
        return -EINVAL;
    }
    r->total = total;
    return 0;
}

/* The oldest position that may still be undelivered. */
static int64_t
base_of(const struct mn_ready *r)
{
    return r->formed > r->bound ? (r->formed - r->bound) * r->batch : 0;
}

int64_t
mn_ready_horizon(const struct mn_ready *r)
{
    int64_t end = (r->formed + r->bound + 1) * r->batch;
    return end < r->total ? end : r->total;
}

static uint8_t *
at(struct mn_ready *r, int64_t position)
{
    return &r->state[position % r->span];
}

int
mn_ready_mark(struct mn_ready *r, int64_t position, bool slow)
{
    if (position < base_of(r) || position >= mn_ready_horizon(r)) {
        return -ERANGE;
    }
    if (*at(r, position) != PENDING) {
        return -EALREADY;
    }
    *at(r, position) = slow ? SLOW : FAST;
    r->ready[slow]++;
    r->marked[slow]++;
    return 0;
}

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Chooses up to want samples in state `kind` from positions [from, to), oldest first. */
static int64_t
take(struct mn_ready *r, uint8_t kind, int64_t from, int64_t to, int64_t want)
{
    int64_t got = 0;
    for (int64_t p = from; p < to && got < want; p++) {
        if (*at(r, p) == kind) {
            *at(r, p) = CHOSEN;
            got++;
        }
    }
    r->ready[kind == SLOW] -= got;
    r->slow_out += kind == SLOW ? got : 0;
    return got;
}

/* The due block: the first B positions from the base on, once they are D batches late. */
static bool
due_ready(struct mn_ready *r, int64_t from, int64_t to)
{
    for (int64_t p = from; p < to; p++) {
        if (*at(r, p) == PENDING) {
            return false;
        }
    }
    return true;
}

/* How many slow samples batch k may take beyond the due ones. */
static int64_t
slow_quota(struct mn_ready *r)
{
    int64_t all = r->marked[0] + r->marked[1];
    double share = all > 0 ? (double)r->marked[1] / (double)all : 0.0;
    double each = share * (double)r->batch;
    double owed = each * (double)(r->formed + 1) - (double)r->slow_out;
    double most = each * MN_READY_CARRY + 1.0;
    if (owed > most) {
        /* What was not used long ago is forgotten. */
        r->slow_out += (int64_t)(owed - most);
        owed = most;
    }
    return owed > 0.0 ? (int64_t)(owed + 0.999) : 0;
}

static void
emit(struct mn_ready *r, int64_t from, int64_t to, int64_t *out, int64_t n)
{
    int64_t i = 0;
    for (int64_t p = from; p < to && i < n; p++) {
        if (*at(r, p) == CHOSEN) {
            *at(r, p) = DELIVERED;
            int64_t away = r->formed - p / r->batch;
            away = away < 0 ? -away : away;
            r->displaced_sum += away;
            r->displaced_max = away > r->displaced_max ? away : r->displaced_max;
            out[i++] = p;
        }
    }
}

/* Batch k is out: the oldest block can hold nothing any more; its places become those of
 * the block that has come within reach. */
static void
advance(struct mn_ready *r)
{
    int64_t from = base_of(r);
    r->formed++;
    if (base_of(r) > from) {
        for (int64_t p = from; p < from + r->batch; p++) {
            *at(r, p) = PENDING;
        }
    }
}

int
mn_ready_form(struct mn_ready *r, int64_t *out, int64_t *n)
{
    *n = 0;
    int64_t done = r->formed * r->batch;
    if (done >= r->total) {
        return MN_CLOSED;
    }
    int64_t want = least(r->batch, r->total - done);
    int64_t from = base_of(r);
    int64_t to = mn_ready_horizon(r);
    int64_t due = r->formed >= r->bound ? least(from + r->batch, r->total) : from;
    if (r->ready[0] + r->ready[1] < want || !due_ready(r, from, due)) {
        return MN_EMPTY;
    }
    int64_t quota = slow_quota(r);
    int64_t before = r->slow_out;
    int64_t got = take(r, FAST, from, due, want);
    got += take(r, SLOW, from, due, want - got);
    quota -= r->slow_out - before;
    got += take(r, SLOW, from, to, quota < want - got ? quota : want - got);
    got += take(r, FAST, from, to, want - got);
    got += take(r, SLOW, from, to, want - got);
    emit(r, from, to, out, got);
    *n = got;
    advance(r);
    return MN_OK;
}
