/* Batches of the samples that are ready first: see policy_ready.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_ready.h"

#include <errno.h>
#include <string.h>

#include "base/mn_base.h"

enum { PENDING = 0, FAST = 1, SLOW = 2, CHOSEN = 3, DELIVERED = 4 };

size_t
mn_ready_bytes(int64_t batch, int64_t bound)
{
    int64_t live, span, counts, all;
    if (batch < 1 || bound < 0 || __builtin_mul_overflow(bound, 2, &live)
        || __builtin_add_overflow(live, 1, &live) || __builtin_mul_overflow(live, batch, &span)
        || __builtin_mul_overflow(live, (int64_t)sizeof(struct mn_ready_natural), &counts)
        || __builtin_add_overflow(span, counts, &all)) {
        return 0;
    }
    return (size_t)all;
}

int
mn_ready_init(struct mn_ready *r, void *memory, int64_t batch, int64_t bound)
{
    size_t bytes = mn_ready_bytes(batch, bound);
    if (bytes == 0 || memory == NULL) {
        return -EINVAL;
    }
    memset(r, 0, sizeof(*r));
    memset(memory, 0, bytes);
    r->natural = memory;
    r->state = (uint8_t *)(r->natural + 2 * bound + 1);
    r->span = (2 * bound + 1) * batch;
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

/* Returns the oldest natural batch that may have undelivered samples. */
static int64_t
base_of(const struct mn_ready *r)
{
    return r->formed > r->bound ? r->formed - r->bound : 0;
}

int64_t
mn_ready_horizon(const struct mn_ready *r)
{
    return mn_min_i64((r->formed + r->bound + 1) * r->batch, r->total);
}

/* Returns how many natural batches begin before the horizon. */
static int64_t
within_reach(const struct mn_ready *r)
{
    int64_t most = (r->total - 1) / r->batch + 1;
    return r->total == 0 ? 0 : mn_min_i64(r->formed + r->bound + 1, most);
}

static uint8_t *
at(const struct mn_ready *r, int64_t position)
{
    return &r->state[position % r->span];
}

/* Returns the counts of natural batch j. From the oldest due one up to the horizon there are at
 * most 2 D + 1, so each has a place of its own. */
static struct mn_ready_natural *
natural(const struct mn_ready *r, int64_t j)
{
    return &r->natural[j % (2 * r->bound + 1)];
}

static int64_t
size_of(const struct mn_ready *r, int64_t j)
{
    return mn_min_i64(r->batch, r->total - j * r->batch);
}

bool
mn_ready_is_marked(const struct mn_ready *r, int64_t position)
{
    return position < base_of(r) * r->batch
           || (position < mn_ready_horizon(r) && *at(r, position) != PENDING);
}

int
mn_ready_mark(struct mn_ready *r, int64_t position, bool slow)
{
    if (position < base_of(r) * r->batch || position >= mn_ready_horizon(r)) {
        return -ERANGE;
    }
    if (*at(r, position) != PENDING) {
        return -EALREADY;
    }
    *at(r, position) = slow ? SLOW : FAST;
    natural(r, position / r->batch)->ready[slow]++;
    r->ready[slow]++;
    r->marked[slow]++;
    return 0;
}

/* ---- which batch -------------------------------------------------------------------- */

static bool
is_whole(const struct mn_ready *r, int64_t j)
{
    const struct mn_ready_natural *b = natural(r, j);
    return b->gone == 0 && b->ready[0] + b->ready[1] == size_of(r, j);
}

/* Returns whether the due natural batch, if there is one, has no pending sample. */
static bool
due_is_ready(const struct mn_ready *r)
{
    int64_t j = base_of(r);
    const struct mn_ready_natural *b = natural(r, j);
    return r->formed < r->bound || j >= within_reach(r)
           || b->gone + b->ready[0] + b->ready[1] == size_of(r, j);
}

static int64_t
wanted(const struct mn_ready *r)
{
    return mn_min_i64(r->batch, r->total - r->formed * r->batch);
}

bool
mn_ready_could_mix(const struct mn_ready *r)
{
    int64_t want = wanted(r);
    return want > 0 && r->ready[0] + r->ready[1] >= want && due_is_ready(r);
}

/* Returns the natural number of slow samples per batch. */
static double
slow_share(const struct mn_ready *r)
{
    int64_t all = r->marked[0] + r->marked[1];
    return all > 0 ? (double)r->marked[1] / (double)all * (double)r->batch : 0.0;
}

/* Returns the most slow samples that a batch may have while others are ready. */
static double
slow_most(const struct mn_ready *r)
{
    return slow_share(r) * MN_READY_CARRY + 1.0;
}

/* Returns how many slow samples this batch should have, the due ones included, so that their share
 * of the delivered samples is the natural one. Negative if too many were delivered. */
static double
slow_owed(struct mn_ready *r)
{
    double owed = slow_share(r) * (double)(r->formed + 1) - (double)r->slow_out;
    double most = slow_most(r);
    if (owed > most) {
        /* A share that was not used long ago is forgotten. */
        r->slow_out += (int64_t)(owed - most);
        owed = most;
    }
    return owed;
}

enum { MIXED = -1, NONE_WHOLE = -2, STARVING = -3 };

/* Returns the natural batch to deliver as it lies; MIXED; STARVING: mixed, because slow samples
 * have waited too long; NONE_WHOLE: mixed if the caller likes. */
static int64_t
choose(const struct mn_ready *r, double owed)
{
    int64_t first = base_of(r), end = within_reach(r), want = wanted(r), open = 0;
    if (r->formed >= r->bound && first < end && natural(r, first)->gone < size_of(r, first)) {
        return is_whole(r, first) && size_of(r, first) == want ? first : MIXED;
    }
    int64_t whole = NONE_WHOLE;
    for (int64_t j = first; j < end; j++) {
        const struct mn_ready_natural *b = natural(r, j);
        open += b->gone != 0 ? b->ready[0] + b->ready[1] : 0;
        if (whole == NONE_WHOLE && is_whole(r, j) && size_of(r, j) == want
            && (double)b->ready[1] <= slow_most(r)) {
            whole = j;
        }
    }
    int64_t slow = whole >= 0 ? natural(r, whole)->ready[1] : 0;
    bool starve = r->ready[1] > slow && owed - (double)slow >= slow_share(r) + 1.0;
    return open >= want ? MIXED : starve ? STARVING : whole;
}

/* ---- which samples ------------------------------------------------------------------ */

/* From which natural batches to take: open ones, also those that are not whole, or any. */
enum { OPEN, NOT_WHOLE, ANY };

/* Chooses up to want samples in state `kind` of natural batches [from, to), oldest first. */
static int64_t
take(struct mn_ready *r, uint8_t kind, int64_t from, int64_t to, int64_t want, int of)
{
    int64_t got = 0;
    bool slow = kind == SLOW;
    for (int64_t j = from; j < to && got < want; j++) {
        struct mn_ready_natural *b = natural(r, j);
        int64_t here = mn_min_i64(b->ready[slow], want - got);
        if ((of == OPEN && b->gone == 0) || (of == NOT_WHOLE && is_whole(r, j))) {
            continue;
        }
        b->ready[slow] -= here;
        b->gone += here;
        got += here;
        for (int64_t p = j * r->batch; here > 0; p++) {
            if (*at(r, p) == kind) {
                *at(r, p) = CHOSEN;
                here--;
            }
        }
    }
    r->ready[slow] -= got;
    r->slow_out += slow ? got : 0;
    return got;
}

/* Takes the due samples first, then slow ones up to their share, then fast ones; more slow ones
 * only if nothing else is ready. While there are others, whole batches are left for later: they can
 * be delivered as they lie. starving: slow samples may come from whole ones, too. */
static int64_t
mix_batch(struct mn_ready *r, double owed, int64_t want, bool starving)
{
    int64_t from = base_of(r), to = within_reach(r);
    int64_t due = r->formed >= r->bound ? mn_min_i64(from + 1, to) : from;
    int64_t quota = owed > 0.0 ? (int64_t)(owed + 0.999) : 0;
    int64_t before = r->slow_out;
    int64_t got = take(r, FAST, from, due, want, ANY);
    got += take(r, SLOW, from, due, want - got, ANY);
    quota -= r->slow_out - before;
    got += take(r, SLOW, from, to, mn_min_i64(quota, want - got), starving ? ANY : OPEN);
    for (int of = OPEN; of <= ANY; of++) {
        got += take(r, FAST, from, to, want - got, of);
    }
    got += take(r, SLOW, from, to, want - got, ANY);
    return got;
}

/* Lists what was chosen of natural batches [from, to). */
static void
emit(struct mn_ready *r, int64_t from, int64_t to, int64_t *out, int64_t n)
{
    int64_t i = 0;
    for (int64_t j = from; j < to && i < n; j++) {
        int64_t away = r->formed < j ? j - r->formed : r->formed - j;
        int64_t end = j * r->batch + size_of(r, j);
        for (int64_t p = j * r->batch; natural(r, j)->gone != 0 && p < end && i < n; p++) {
            if (*at(r, p) == CHOSEN) {
                *at(r, p) = DELIVERED;
                r->displaced_sum += away;
                r->displaced_max = away > r->displaced_max ? away : r->displaced_max;
                out[i++] = p;
            }
        }
    }
}

/* Batch k is delivered: the oldest natural batch is used up. Its places go to the natural batch
 * that has come within reach. */
static void
advance(struct mn_ready *r)
{
    int64_t from = base_of(r);
    r->formed++;
    if (base_of(r) > from) {
        for (int64_t p = from * r->batch; p < (from + 1) * r->batch; p++) {
            *at(r, p) = PENDING;
        }
        memset(natural(r, from), 0, sizeof(struct mn_ready_natural));
    }
}

int
mn_ready_form(struct mn_ready *r, bool mix, int64_t *out, int64_t *n)
{
    *n = 0;
    int64_t want = wanted(r);
    if (want <= 0) {
        return MN_CLOSED;
    }
    if (!mn_ready_could_mix(r)) {
        return MN_EMPTY;
    }
    double owed = slow_owed(r);
    int64_t j = choose(r, owed);
    if (j == NONE_WHOLE && !mix) {
        return MN_EMPTY;
    }
    if (j >= 0) {
        *n = take(r, FAST, j, j + 1, want, ANY);
        *n += take(r, SLOW, j, j + 1, want - *n, ANY);
        emit(r, j, j + 1, out, *n);
    }
    else {
        *n = mix_batch(r, owed, want, j == STARVING);
        emit(r, base_of(r), within_reach(r), out, *n);
    }
    advance(r);
    return MN_OK;
}
