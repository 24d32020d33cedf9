/* mn_next_delivery.c - which batch is delivered next.
 * SPDX-License-Identifier: Apache-2.0
 *
 * In order: the head of the plan. Out of order: the batch that was done first. In ready mode: the
 * formed batch. A batch is done when its tasks have ended and their results were accepted, or when
 * it is refused. Balanced scheduling only. All functions need the engine's mutex; learning takes
 * the lock of the costs.
 *
 * Ready mode (batching="ready") forms batches of the samples that are ready first. The plan holds
 * the sampler's batches, called *units* here. They are cut, started and made like any other batch,
 * so that single samples have no extra cost. The rows of a task are ready when the task has ended,
 * in whatever way.
 * policy_ready.h says which rows form a batch. As a rule they are one unit, which is then
 * delivered as it lies. Else the batch is a list of runs of rows from several units, which the
 * code that takes it must gather.
 *
 * A unit whose tasks have all ended leaves the plan, which goes on to the next unit. The unit's
 * block stays until its last row was taken. So the head of the plan is the first unit that is not
 * made yet. Only it may exceed the memory limit, and it never waits for other units.
 *
 * Batches that a worker collates cannot be mixed: all rows of a unit are ready when it has ended.
 * For them, forming only says which batch comes next.
 *
 * Places count the rows of an epoch in the order in which they were planned. In an epoch that is
 * resumed in the middle, some rows were delivered already. Then a unit may be shorter than a
 * batch, and a batch may consist of several units.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "base/mn_fault.h"
#include "engine/mn_batches.h"
#include "engine/mn_engine_state.h"
#include "os/mn_clock.h"

/* ---- ready mode: units, and the batches formed of them ------------------------------------ */

/* The cost of mixing a batch: a copy, at the speed of one core on cold memory, and some bookkeeping
 * for each row. A caller that waits this long before it mixes loses by waiting at most what mixing
 * costs. */
#define COPY_BYTES_A_NS 4
#define MIX_ROW_NS 50
#define MIX_NS 20000

static void
reset(struct mn_forming *f)
{
    (void)mn_ready_init(&f->policy, f->memory, f->policy.batch, f->policy.bound);
    f->nruns = f->oldest = f->nunits = 0;
    f->planned = 0;
    f->could_ns = 0;
}

struct mn_forming *
mn_forming_open(uint32_t batch, uint32_t bound, bool mixes)
{
    struct mn_forming *f = calloc(1, sizeof(*f));
    size_t bytes = mn_ready_bytes(batch, bound);
    if (f == NULL || bytes == 0) {
        free(f);
        return NULL;
    }
    f->memory = malloc(bytes);
    f->places = calloc(batch, sizeof(*f->places));
    f->runs = calloc(batch, sizeof(*f->runs));
    if (f->memory == NULL || f->places == NULL || f->runs == NULL) {
        mn_forming_close(f);
        return NULL;
    }
    f->policy.batch = batch;
    f->policy.bound = bound;
    f->mixes = mixes;
    reset(f);
    return f;
}

void
mn_forming_close(struct mn_forming *f)
{
    if (f != NULL) {
        free(f->memory);
        free(f->places);
        free(f->runs);
        free(f->units);
        free(f);
    }
}

/* Tells the plan which unit would be the first in the next batch if all rows were ready, and that
 * no unit from the first one past the policy's horizon on may start. */
static void
set_span(struct mn_engine *e)
{
    const struct mn_forming *f = e->forming;
    int64_t place = f->policy.formed * f->policy.batch, horizon = mn_ready_horizon(&f->policy);
    uint32_t head = f->oldest;
    while (head < f->nunits && f->units[head].first + f->units[head].nrows <= place) {
        head++;
    }
    uint32_t end = head;
    while (end < f->nunits && f->units[end].first < horizon) {
        end++;
    }
    uint64_t next = mn_plan_view(e->plan)->order.next;
    mn_plan_set_span(e->plan, head < f->nunits ? f->units[head].sequence : next,
                     end < f->nunits ? f->units[end].sequence : next);
}

int
mn_forming_room(struct mn_forming *f)
{
    if (f->oldest > f->nunits / 2) {
        f->nunits -= f->oldest;
        memmove(f->units, f->units + f->oldest, f->nunits * sizeof(*f->units));
        f->oldest = 0;
    }
    if (f->nunits == f->capacity) {
        uint32_t capacity = f->capacity != 0 ? 2 * f->capacity : 64;
        struct mn_unit *more = realloc(f->units, capacity * sizeof(*more));
        if (more == NULL) {
            return -ENOMEM;
        }
        f->units = more;
        f->capacity = capacity;
    }
    return 0;
}

void
mn_forming_add(struct mn_engine *e, uint64_t sequence, uint32_t nrows)
{
    struct mn_forming *f = e->forming;
    mn_assert(f->nunits < f->capacity);
    f->units[f->nunits++] = (struct mn_unit){.sequence = sequence,
                                             .first = f->planned,
                                             .nrows = nrows,
                                             .left = nrows,
                                             .unmarked = nrows};
    f->planned += nrows;
    (void)mn_ready_end(&f->policy, INT64_MAX); /* if an end was declared, it was not the end */
    set_span(e);
}

void
mn_forming_end(struct mn_engine *e)
{
    /* It cannot fail: no more is marked than was planned. */
    (void)mn_ready_end(&e->forming->policy, e->forming->planned);
    set_span(e);
}

/* ---- what is ready ------------------------------------------------------------------ */

/* Marks rows of a unit as ready; the policy may not yet accept all of them. wall_ns[row * step]:
 * what they took, or NULL if none is slow. */
static void
mark(struct mn_engine *e, struct mn_unit *u, uint32_t row0, uint32_t nrows,
     const uint64_t *wall_ns, size_t step)
{
    struct mn_ready *r = &e->forming->policy;
    if (mn_ready_is_marked(r, u->first + row0 + nrows - 1)) {
        return;
    }
    int64_t slow = e->cfg.costs != NULL ? mn_plan_view(e->plan)->known.timeout_ns
                                          : MN_SLOW_NEVER;
    for (uint32_t row = row0; row < row0 + nrows; row++) {
        bool late = wall_ns != NULL && wall_ns[row * step] > (uint64_t)slow;
        u->unmarked -= mn_ready_mark(r, u->first + row, late) == 0;
    }
}

static bool
could_mix(const struct mn_forming *f)
{
    return f->mixes && mn_ready_could_mix(&f->policy);
}

/* ---- a batch ------------------------------------------------------------------------ */

/* Turns the policy's places into runs of rows. Both ascend. */
static void
find_runs(struct mn_forming *f, int64_t n)
{
    uint32_t at = f->oldest;
    struct mn_run *run = NULL;
    f->nruns = 0;
    for (int64_t i = 0; i < n; i++) {
        while (f->places[i] >= f->units[at].first + f->units[at].nrows) {
            at++;
        }
        const struct mn_unit *u = &f->units[at];
        uint32_t row = (uint32_t)(f->places[i] - u->first);
        if (run == NULL || run->sequence != u->sequence || run->row0 + run->nrows != row) {
            run = &f->runs[f->nruns++];
            *run = (struct mn_run){u->sequence, u->block_off, row, 0};
        }
        run->nrows++;
    }
}

/* Returns how long to wait for a batch that needs no mixing, once one could be mixed. */
static int64_t
patience_ns(const struct mn_engine *e)
{
    int64_t copy_ns = (int64_t)mn_plan_view(e->plan)->batch_bytes / COPY_BYTES_A_NS;
    return copy_ns + MIX_ROW_NS * e->forming->policy.batch + MIX_NS;
}

/* Forms a batch of ready rows if possible: one unit as it lies, or mixed. Returns whether it
 * did. */
static bool
form(struct mn_engine *e, bool mix)
{
    struct mn_forming *f = e->forming;
    int64_t n;
    if (mn_ready_form(&f->policy, mix, f->places, &n) != MN_OK) {
        return false;
    }
    f->could_ns = 0;
    find_runs(f, n);
    set_span(e);
    return true;
}

/* Returns the next unit after the given one (NULL: the first) that may be useful now and has rows
 * not known to be ready. NULL: there is none. */
static struct mn_unit *
unmarked(struct mn_engine *e, const struct mn_unit *after)
{
    struct mn_forming *f = e->forming;
    int64_t horizon = mn_ready_horizon(&f->policy);
    uint32_t i = after != NULL ? (uint32_t)(after - f->units) + 1 : f->oldest;
    for (; i < f->nunits && f->units[i].first < horizon; i++) {
        struct mn_unit *u = &f->units[i];
        if (u->sequence >= mn_plan_view(e->plan)->order.begun && !u->ended) {
            return NULL;
        }
        if (u->unmarked != 0) {
            return u;
        }
    }
    return NULL;
}

/* ---- which rows of each unit are ready ---- */

static void
mark_tasks(struct mn_engine *e, struct mn_unit *u, const struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *result = &e->tasks.results[tasks[i]];
        bool lost = mn_word_status(mn_tasks_word(&e->tasks, tasks[i])) == MN_TASK_LOST;
        if (result->accepted || lost) {
            mark(e, u, result->row0, result->nrows, &b->reports->wall_ns, MN_REPORT_STEP);
        }
    }
}

/* All tasks of the unit have ended: the plan continues without it. */
static void
leave_plan(struct mn_engine *e, struct mn_unit *u, struct mn_batch *b)
{
    u->ended = true;
    if (b != NULL) {
        b->detached = true;
        mn_batch_learn(e, b);
    }
    mn_plan_taken(e->plan, u->sequence);
}

static void
look_at(struct mn_engine *e, struct mn_unit *u)
{
    if (!u->ended) {
        const struct mn_planned *q = mn_plan_at(e->plan, u->sequence);
        mn_assert(q != NULL);
        u->block_off = q->block_off;
        u->refusal = q->refusal;
    }
    if (u->refusal.why != MN_REFUSED_NOT) {
        mark(e, u, 0, u->nrows, NULL, 0);
        if (!u->ended) {
            leave_plan(e, u, NULL);
        }
        return;
    }
    if (u->block_off == 0) {
        return;
    }
    struct mn_batch *b = mn_batch_find(e, u->block_off);
    if (e->forming->mixes) {
        mn_batch_accept_some(e, b);
        mark_tasks(e, u, b);
    }
    /* After the marks: so that a unit whose marks are complete is seen to have ended. */
    if (!u->ended
        && (mn_engine_poll(e, u->block_off) == MN_BLOCK_BUSY
            || mn_batch_accept(e, b) == MN_BLOCK_BUSY)) {
        return;
    }
    if (e->forming->mixes) {
        mark_tasks(e, u, b);
    }
    else {
        mark(e, u, 0, u->nrows, NULL, 0);
    }
    if (!u->ended) {
        leave_plan(e, u, b);
    }
}

/* A mixed batch is in memory twice until the last sample of each of its units was delivered. */
static bool
memory_allows(const struct mn_engine *e)
{
    uint64_t bytes = mn_plan_view(e->plan)->batch_bytes;
    return !mn_arena_exceeds(&e->arena, bytes != 0 ? bytes : e->flight.mean_envelope_bytes);
}

int64_t
mn_forming_nap(const struct mn_engine *e)
{
    const struct mn_forming *f = e->forming;
    uint64_t since = memory_allows(e) ? f->could_ns : 0;
    if (since == 0) {
        return INT64_MAX;
    }
    int64_t left = patience_ns(e) - (int64_t)(mn_now_ns() - since);
    return left > 0 ? left : 1;
}

/* Forms a batch without mixing, unless there is one already. Looks no further than that needs: each
 * unit that leaves the plan lets the next one pass the memory limit. */
static bool
form_whole(struct mn_engine *e)
{
    bool formed = e->forming->nruns != 0 || form(e, false);
    struct mn_unit *u = formed ? NULL : unmarked(e, NULL);
    for (; u != NULL && !formed; u = unmarked(e, u)) {
        look_at(e, u);
        formed = form(e, false);
    }
    return formed;
}

/* Forms the next batch if that is possible, else notes whether one could be mixed. Returns whether
 * there is a batch. */
static bool
form_next(struct mn_engine *e)
{
    struct mn_forming *f = e->forming;
    if (form_whole(e)) {
        return true;
    }
    if (!could_mix(f)) {
        return false;
    }
    uint64_t now = mn_now_ns();
    f->could_ns = f->could_ns == 0 ? now : f->could_ns;
    return (int64_t)(now - f->could_ns) >= patience_ns(e) && memory_allows(e)
           && form(e, true);
}

/* Returns how many batches could be formed of the ready rows, including those not looked at yet. */
static int64_t
formed_ready(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    const struct mn_ready *r = &e->forming->policy;
    int64_t ready = (r->ready[0] + r->ready[1]) / r->batch + (e->forming->nruns != 0);
    struct mn_plan_order order = mn_plan_view(p)->order;
    int64_t enough = mn_plan_window(p).starved_below;
    for (uint64_t n = order.head; n < order.begun && ready < enough; n++) {
        uint64_t off = mn_plan_block(p, n);
        ready += off != 0 && mn_engine_poll(e, off) != MN_BLOCK_BUSY;
    }
    return ready;
}

/* The formed batch was read: frees the units whose rows are all delivered. */
static void
formed_taken(struct mn_engine *e)
{
    struct mn_forming *f = e->forming;
    for (uint32_t i = 0; i < f->nruns; i++) {
        struct mn_unit *u = &f->units[f->oldest];
        while (u->sequence != f->runs[i].sequence) {
            u++;
        }
        u->left -= f->runs[i].nrows;
        mn_assert(u->ended || u->left != 0);
        if (u->left == 0 && u->block_off != 0) {
            mn_batch_drop(e, mn_batch_find(e, u->block_off));
        }
    }
    f->nruns = 0;
    while (f->oldest < f->nunits && f->units[f->oldest].left == 0) {
        f->oldest++;
    }
}

void
mn_forming_clear(struct mn_engine *e)
{
    struct mn_forming *f = e->forming;
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        const struct mn_unit *u = &f->units[i];
        if (u->ended && u->left != 0 && u->block_off != 0) {
            mn_batch_drop(e, mn_batch_find(e, u->block_off));
        }
    }
    reset(f);
}

/* ---- batches as planned ------------------------------------------------------------------- */

/* Returns whether the batch can be delivered, as data or as an error. */
static bool
is_done(struct mn_engine *e, struct mn_planned *q)
{
    if (!q->done /* each look at a block reads many cache lines of other CPUs */
        && (q->refusal.why != MN_REFUSED_NOT
            || (q->block_off != 0 && mn_engine_poll(e, q->block_off) != MN_BLOCK_BUSY
                && mn_batch_accept(e, mn_batch_find(e, q->block_off)) != MN_BLOCK_BUSY))) {
        mn_plan_set_done(e->plan, q);
    }
    return q->done;
}

int64_t
mn_next_delivery_ready(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    int64_t ready = 0;
    if (e->forming != NULL) {
        return formed_ready(e);
    }
    struct mn_plan_order order = mn_plan_view(p)->order;
    int64_t enough = mn_plan_window(p).starved_below;
    for (uint64_t n = order.head; n < order.begun; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        bool done = q != NULL && is_done(e, q);
        ready += done;
        if (!done && (e->cfg.in_order || ready >= enough)) {
            break;
        }
    }
    return ready;
}

/* ---- out of order ------------------------------------------------------------------------- */

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
    struct mn_plan *p = e->plan;
    struct mn_done *d = &e->done;
    d->n = d->at = 0;
    struct mn_plan_order order = mn_plan_view(p)->order;
    for (uint64_t n = order.head; n < order.begun; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && is_done(e, q)) {
            uint64_t ns = q->block_off != 0 ? mn_engine_done_ns(e, q->block_off) : 0;
            d->found[d->n++] = (struct mn_found){n, ns};
        }
    }
    if (d->n > 1) {
        qsort(d->found, d->n, sizeof(*d->found), by_time);
    }
}

/* Returns the sequence of the batch to deliver next; UINT64_MAX: none. */
static uint64_t
first_done(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_done *d = &e->done;
    if (e->cfg.in_order) {
        uint64_t head = mn_plan_view(p)->order.head;
        struct mn_planned *q = mn_plan_at(p, head);
        return q != NULL && is_done(e, q) ? head : UINT64_MAX;
    }
    for (int turn = 0; turn < 2; turn++) {
        while (d->at < d->n) {
            uint64_t sequence = d->found[d->at].sequence;
            if (mn_plan_at(p, sequence) != NULL) {
                return sequence;
            }
            d->at++; /* already taken */
        }
        if (turn == 0) {
            find_done(e);
        }
    }
    return UINT64_MAX;
}

/* ---- next --------------------------------------------------------------------------------- */

bool
mn_next_delivery_pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off)
{
    if (e->forming != NULL) {
        bool formed = form_next(e);
        *sequence = formed ? e->forming->runs[0].sequence : 0;
        *block_off = formed ? e->forming->runs[0].block_off : 0;
        return formed;
    }
    uint64_t first = first_done(e);
    if (first == UINT64_MAX) {
        return false;
    }
    *sequence = first;
    *block_off = mn_plan_block(e->plan, first);
    return true;
}

bool
mn_next_delivery_any(struct mn_engine *e)
{
    const struct mn_forming *f = e->forming;
    if (f == NULL) {
        return first_done(e) != UINT64_MAX;
    }
    return form_whole(e) || (f->could_ns == 0 && could_mix(f)); /* one that form_next() must note */
}

int
mn_next_delivery_take(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    if (e->forming != NULL) {
        if (e->forming->nruns == 0 || e->forming->runs[0].sequence != sequence) {
            return -EINVAL;
        }
        formed_taken(e);
        return 0;
    }
    struct mn_planned *q = mn_plan_at(e->plan, sequence);
    if (q == NULL || q->block_off != block_off || !is_done(e, q)) {
        return -EINVAL;
    }
    if (block_off != 0) { /* else it was refused */
        mn_batch_retire(e, block_off);
    }
    MN_FAULT("engine.taken");
    mn_plan_taken(e->plan, sequence);
    return 0;
}
