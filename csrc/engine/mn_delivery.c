/* mn_delivery.c - batches as they were planned: in order, or the batch that was done first.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A batch is done when its tasks have ended and their results were accepted, or when it is refused.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/mn_base.h"
#include "engine/mn_batches.h"
#include "engine/mn_delivery.h"
#include "engine/mn_engine_state.h"

/* ---- both orders -------------------------------------------------------------------------- */

/* Returns whether the batch can be delivered, as data or as an error. */
static bool
is_done(struct mn_engine *e, struct mn_planned *q)
{
    if (q->state == MN_BATCH_QUEUED /* each look at it reads many cache lines of other CPUs */
        && mn_engine_poll(e, q->block_off) != MN_BLOCK_BUSY) {
        (void)mn_batch_accept(e, mn_batch_of(q));
    }
    return q->state == MN_BATCH_DONE;
}

static int
add(struct mn_engine *e, const struct mn_plan_batch *b)
{
    return mn_plan_add(e->plan, b);
}

static void
end(struct mn_engine *e)
{
    mn_plan_end(e->plan);
}

static int
take(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    struct mn_planned *q = mn_plan_at(e->plan, sequence);
    if (q == NULL || q->block_off != block_off || !is_done(e, q)) {
        return -EINVAL;
    }
    if (block_off != 0) { /* else it was refused */
        mn_batch_retire(e, mn_batch_of(q));
    }
    MN_FAULT("engine.taken");
    mn_plan_taken(e->plan, sequence);
    return 0;
}

static int64_t
nap(const struct mn_engine *e)
{
    (void)e;
    return INT64_MAX;
}

static int64_t
count_ready(struct mn_engine *e, int64_t enough)
{
    struct mn_plan_order order = mn_plan_view(e->plan)->order;
    int64_t ready = 0;
    for (uint64_t n = order.head; n < order.begun; n++) {
        struct mn_planned *q = mn_plan_at(e->plan, n);
        bool done = q != NULL && is_done(e, q);
        ready += done;
        if (!done && ready >= enough) {
            break;
        }
    }
    return ready;
}

/* ---- in order ----------------------------------------------------------------------------- */

static void
nothing(struct mn_engine *e)
{
    (void)e;
}

static bool
head_is_done(struct mn_engine *e)
{
    struct mn_planned *q = mn_plan_at(e->plan, mn_plan_view(e->plan)->order.head);
    return q != NULL && is_done(e, q);
}

static bool
pick_head(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off)
{
    *sequence = mn_plan_view(e->plan)->order.head;
    *block_off = mn_plan_block(e->plan, *sequence);
    return head_is_done(e);
}

static int64_t
ready_from_head(struct mn_engine *e)
{
    return count_ready(e, 0);
}

static const struct mn_delivery in_order = {
    .add = add, .end = end, .clear = nothing, .pick = pick_head, .any = head_is_done,
    .ready = ready_from_head, .take = take, .nap = nap, .close = nothing,
    .head_first = true,
};

/* ---- as done ------------------------------------------------------------------------------ */

struct mn_found {
    uint64_t sequence;
    uint64_t done_ns;
};

/* The batches that were found done, by time, and how many of them are taken. */
struct mn_done {
    uint32_t n, at;
    struct mn_found found[]; /* [capacity of the plan] */
};

static int
by_time(const void *a, const void *b)
{
    uint64_t x = ((const struct mn_found *)a)->done_ns, y = ((const struct mn_found *)b)->done_ns;
    return (x > y) - (x < y);
}

/* Looks at all batches that have started; the next look comes when all that were found are
 * taken. */
static void
find_done(struct mn_engine *e)
{
    struct mn_done *d = e->delivery_state;
    struct mn_plan_order order = mn_plan_view(e->plan)->order;
    d->n = d->at = 0;
    for (uint64_t n = order.head; n < order.begun; n++) {
        struct mn_planned *q = mn_plan_at(e->plan, n);
        if (q != NULL && is_done(e, q)) {
            uint64_t ns = q->block_off != 0 ? mn_engine_done_ns(e, q->block_off) : 0;
            d->found[d->n++] = (struct mn_found){n, ns};
        }
    }
    if (d->n > 1) {
        qsort(d->found, d->n, sizeof(*d->found), by_time);
    }
}

/* Returns the first batch that was found done and is not taken; NULL if there is none. */
static const struct mn_planned *
first_found(struct mn_engine *e)
{
    struct mn_done *d = e->delivery_state;
    const struct mn_planned *q = NULL;
    while (d->at < d->n && (q = mn_plan_at(e->plan, d->found[d->at].sequence)) == NULL) {
        d->at++;
    }
    return q;
}

static const struct mn_planned *
first_done(struct mn_engine *e)
{
    const struct mn_planned *q = first_found(e);
    if (q == NULL) {
        find_done(e);
        q = first_found(e);
    }
    return q;
}

static bool
pick_first_done(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off)
{
    const struct mn_planned *q = first_done(e);
    if (q != NULL) {
        *sequence = q->sequence;
        *block_off = q->block_off;
    }
    return q != NULL;
}

static bool
any_done(struct mn_engine *e)
{
    return first_done(e) != NULL;
}

static int64_t
ready_of_all(struct mn_engine *e)
{
    return count_ready(e, mn_plan_window(e->plan).starved_below);
}

static void
forget_found(struct mn_engine *e)
{
    struct mn_done *d = e->delivery_state;
    d->n = d->at = 0;
}

static void
close_as_done(struct mn_engine *e)
{
    free(e->delivery_state);
}

static const struct mn_delivery as_done = {
    .add = add, .end = end, .clear = forget_found, .pick = pick_first_done, .any = any_done,
    .ready = ready_of_all, .take = take, .nap = nap, .close = close_as_done,
};

int
mn_delivery_open(struct mn_engine *e)
{
    const struct mn_engine_config *c = &e->cfg;
    if (c->ready_batch != 0) {
        return mn_delivery_open_ready(e, c->ready_batch, c->ready_bound, c->ready_mixes);
    }
    e->delivery = c->in_order ? &in_order : &as_done;
    if (!c->in_order) {
        struct mn_done *d = NULL;
        e->delivery_state =
            calloc(1, sizeof(*d) + mn_plan_view(e->plan)->capacity * sizeof(d->found[0]));
    }
    return c->in_order || e->delivery_state != NULL ? 0 : -ENOMEM;
}
