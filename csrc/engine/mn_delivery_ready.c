/* mn_delivery_ready.c - ready mode (batching="ready"): batches of the samples that are ready first.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The plan holds the sampler's batches, called *units* here. They are cut, started and made like
 * any other batch, so that single samples have no extra cost. The rows of a task are ready when the
 * task has ended, in whatever way.
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

#include "base/mn_base.h"
#include "engine/mn_batches.h"
#include "engine/mn_delivery.h"
#include "engine/mn_engine_state.h"
#include "os/mn_thread.h"
#include "schedule/policy_ready.h"

struct mn_forming {
    struct mn_ready policy;
    void *memory;
    int64_t *places;       /* [batch] */
    struct mn_run *runs;   /* [batch]; of the batch that is formed and not taken */
    uint32_t nruns;        /* 0: no batch is formed */
    /* [capacity]; held from oldest on, in the order of planning, until their last row was taken */
    struct mn_batch **units;
    uint32_t oldest, nunits, capacity;
    int64_t planned;       /* places assigned so far */
    bool mixes;            /* units may be delivered in parts */
    uint64_t could_ns;     /* since when a batch could be mixed; 0: none could */
};

static uint32_t
rows_of(const struct mn_batch *u)
{
    return u->planned.batch.nrows;
}

static struct mn_forming *
ready_of(const struct mn_engine *e)
{
    return e->delivery_state;
}

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

/* Tells the plan which unit would be the first in the next batch if all rows were ready, and that
 * no unit from the first one past the policy's horizon on may start. */
static void
set_span(struct mn_engine *e)
{
    const struct mn_forming *f = ready_of(e);
    int64_t place = f->policy.formed * f->policy.batch, horizon = mn_ready_horizon(&f->policy);
    uint32_t head = f->oldest;
    while (head < f->nunits && f->units[head]->first + rows_of(f->units[head]) <= place) {
        head++;
    }
    uint32_t end = head;
    while (end < f->nunits && f->units[end]->first < horizon) {
        end++;
    }
    uint64_t next = mn_plan_view(e->plan)->order.next;
    mn_plan_set_span(e->plan, head < f->nunits ? f->units[head]->planned.sequence : next,
                     end < f->nunits ? f->units[end]->planned.sequence : next);
}

/* Makes space for one more unit. Returns 0 or -ENOMEM. */
static int
make_room(struct mn_forming *f)
{
    if (f->oldest > f->nunits / 2) {
        f->nunits -= f->oldest;
        memmove(f->units, f->units + f->oldest, f->nunits * sizeof(struct mn_batch *));
        f->oldest = 0;
    }
    if (f->nunits == f->capacity) {
        uint32_t capacity = f->capacity != 0 ? 2 * f->capacity : 64;
        struct mn_batch **more = realloc(f->units, capacity * sizeof(struct mn_batch *));
        if (more == NULL) {
            return -ENOMEM;
        }
        f->units = more;
        f->capacity = capacity;
    }
    return 0;
}

static int
add(struct mn_engine *e, const struct mn_plan_batch *b)
{
    struct mn_forming *f = ready_of(e);
    int rc = make_room(f);
    rc = rc < 0 ? rc : mn_plan_add(e->plan, b);
    if (rc != MN_OK) {
        return rc;
    }
    struct mn_batch *u = mn_batch_of(mn_plan_at(e->plan, b->sequence));
    u->planned.holders++;
    u->first = f->planned;
    u->left = u->unmarked = b->nrows;
    f->units[f->nunits++] = u;
    f->planned += b->nrows;
    (void)mn_ready_end(&f->policy, INT64_MAX); /* if an end was declared, it was not the end */
    set_span(e);
    return MN_OK;
}

static void
end(struct mn_engine *e)
{
    mn_plan_end(e->plan);
    /* It cannot fail: no more is marked than was planned. */
    (void)mn_ready_end(&ready_of(e)->policy, ready_of(e)->planned);
    set_span(e);
}

/* ---- what is ready ------------------------------------------------------------------ */

/* Marks rows of a unit as ready; the policy may not yet accept all of them. wall_ns[row * step]:
 * what they took, or NULL if none is slow. */
static void
mark(struct mn_engine *e, struct mn_batch *u, uint32_t row0, uint32_t nrows,
     const uint64_t *wall_ns, size_t step)
{
    struct mn_ready *r = &ready_of(e)->policy;
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
        while (f->places[i] >= f->units[at]->first + rows_of(f->units[at])) {
            at++;
        }
        const struct mn_batch *u = f->units[at];
        uint32_t row = (uint32_t)(f->places[i] - u->first);
        if (run == NULL || run->sequence != u->planned.sequence
            || run->row0 + run->nrows != row) {
            run = &f->runs[f->nruns++];
            *run = (struct mn_run){u->planned.sequence, u->planned.block_off, row, 0};
        }
        run->nrows++;
    }
}

/* Returns how long to wait for a batch that needs no mixing, once one could be mixed. */
static int64_t
patience_ns(const struct mn_engine *e)
{
    int64_t copy_ns = (int64_t)mn_plan_view(e->plan)->batch_bytes / COPY_BYTES_A_NS;
    return copy_ns + MIX_ROW_NS * ready_of(e)->policy.batch + MIX_NS;
}

/* Forms a batch of ready rows if possible: one unit as it lies, or mixed. Returns whether it
 * did. */
static bool
form(struct mn_engine *e, bool mix)
{
    struct mn_forming *f = ready_of(e);
    int64_t n;
    if (mn_ready_form(&f->policy, mix, f->places, &n) != MN_OK) {
        return false;
    }
    f->could_ns = 0;
    find_runs(f, n);
    set_span(e);
    return true;
}

/* Returns the number of the first unit from this one on that may be useful now and has rows not
 * known to be ready; nunits if there is none. */
static uint32_t
unmarked(struct mn_engine *e, uint32_t from)
{
    struct mn_forming *f = ready_of(e);
    int64_t horizon = mn_ready_horizon(&f->policy);
    for (uint32_t i = from; i < f->nunits && f->units[i]->first < horizon; i++) {
        const struct mn_batch *u = f->units[i];
        if (u->planned.state == MN_BATCH_PLANNED
            && u->planned.sequence >= mn_plan_view(e->plan)->order.begun) {
            break;
        }
        if (u->unmarked != 0) {
            return i;
        }
    }
    return f->nunits;
}

/* ---- which rows of each unit are ready ---- */

static void
mark_tasks(struct mn_engine *e, struct mn_batch *u)
{
    struct mn_block *block = mn_block_at(&e->shm, u->planned.block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *result = &e->tasks.results[tasks[i]];
        bool lost = mn_word_status(mn_tasks_word(&e->tasks, tasks[i])) == MN_TASK_LOST;
        if (result->accepted || lost) {
            mark(e, u, result->row0, result->nrows, &u->reports->wall_ns, MN_REPORT_STEP);
        }
    }
}

static void
look_at(struct mn_engine *e, struct mn_batch *u)
{
    bool made = u->planned.block_off != 0, by_task = made && ready_of(e)->mixes;
    if (by_task) {
        mn_batch_accept_some(e, u);
        mark_tasks(e, u);
    }
    /* After the marks: so that a unit whose marks are complete is seen to have ended. */
    if (u->planned.state == MN_BATCH_QUEUED
        && mn_engine_poll(e, u->planned.block_off) != MN_BLOCK_BUSY) {
        (void)mn_batch_accept(e, u);
    }
    if (u->planned.state < MN_BATCH_DONE) {
        return;
    }
    if (by_task) {
        mark_tasks(e, u);
    }
    else {
        mark(e, u, 0, rows_of(u), NULL, 0);
    }
    if (u->planned.state == MN_BATCH_DONE) { /* the plan continues without it */
        if (made) {
            mn_batch_learn(e, u);
        }
        mn_plan_taken(e->plan, u->planned.sequence);
    }
}

/* A mixed batch is in memory twice until the last sample of each of its units was delivered. */
static bool
memory_allows(const struct mn_engine *e)
{
    uint64_t bytes = mn_plan_view(e->plan)->batch_bytes;
    return !mn_arena_exceeds(&e->arena, bytes != 0 ? bytes : e->flight.mean_envelope_bytes);
}

static int64_t
nap(const struct mn_engine *e)
{
    const struct mn_forming *f = ready_of(e);
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
    struct mn_forming *f = ready_of(e);
    bool formed = f->nruns != 0 || form(e, false);
    for (uint32_t i = f->oldest; !formed && (i = unmarked(e, i)) < f->nunits; i++) {
        look_at(e, f->units[i]);
        formed = form(e, false);
    }
    return formed;
}

/* Forms the next batch if that is possible, else notes whether one could be mixed. Returns whether
 * there is a batch. */
static bool
form_next(struct mn_engine *e)
{
    struct mn_forming *f = ready_of(e);
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
    const struct mn_ready *r = &ready_of(e)->policy;
    int64_t ready = (r->ready[0] + r->ready[1]) / r->batch + (ready_of(e)->nruns != 0);
    struct mn_plan_order order = mn_plan_view(p)->order;
    int64_t enough = mn_plan_window(p).starved_below;
    for (uint64_t n = order.head; n < order.begun && ready < enough; n++) {
        uint64_t off = mn_plan_block(p, n);
        ready += off != 0 && mn_engine_poll(e, off) != MN_BLOCK_BUSY;
    }
    return ready;
}

/* Frees the units whose rows are all delivered. */
static int
take(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    struct mn_forming *f = ready_of(e);
    (void)block_off;
    if (f->nruns == 0 || f->runs[0].sequence != sequence) {
        return -EINVAL;
    }
    uint32_t at = f->oldest;
    for (uint32_t i = 0; i < f->nruns; i++) {
        while (f->units[at]->planned.sequence != f->runs[i].sequence) {
            at++;
        }
        struct mn_batch *u = f->units[at];
        u->left -= f->runs[i].nrows;
        mn_assert(u->planned.state == MN_BATCH_TAKEN || u->left != 0);
        if (u->left == 0 && u->planned.block_off != 0) {
            mn_batch_drop(e, u);
        }
    }
    f->nruns = 0;
    while (f->oldest < f->nunits && f->units[f->oldest]->left == 0) {
        mn_planned_let_go(&f->units[f->oldest++]->planned);
    }
    return 0;
}

static bool
pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off)
{
    bool formed = form_next(e);
    if (formed) {
        *sequence = ready_of(e)->runs[0].sequence;
        *block_off = ready_of(e)->runs[0].block_off;
    }
    return formed;
}

static bool
any(struct mn_engine *e)
{
    struct mn_forming *f = ready_of(e);
    return form_whole(e) || (f->could_ns == 0 && could_mix(f)); /* one that pick() must note */
}

/* ---- the order ---------------------------------------------------------------------- */

/* Drops the blocks of units that have left the plan, and forgets all units. */
static void
clear(struct mn_engine *e)
{
    struct mn_forming *f = ready_of(e);
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        struct mn_batch *u = f->units[i];
        if (u->planned.state == MN_BATCH_TAKEN && u->planned.block_off != 0) {
            mn_batch_drop(e, u);
        }
        mn_planned_let_go(&u->planned);
    }
    reset(f);
}

static void
close(struct mn_engine *e)
{
    struct mn_forming *f = ready_of(e);
    if (f != NULL) {
        for (uint32_t i = f->oldest; i < f->nunits; i++) {
            mn_planned_let_go(&f->units[i]->planned);
        }
        free(f->memory);
        free(f->places);
        free(f->runs);
        free(f->units);
        free(f);
    }
}

static const struct mn_delivery ready_first = {
    .add = add, .end = end, .clear = clear, .pick = pick, .any = any, .ready = formed_ready,
    .take = take, .nap = nap, .close = close,
};

int
mn_delivery_open_ready(struct mn_engine *e, uint32_t batch, uint32_t bound, bool mixes)
{
    struct mn_forming *f = calloc(1, sizeof(*f));
    size_t bytes = mn_ready_bytes(batch, bound);
    e->delivery = &ready_first;
    e->delivery_state = f;
    if (f == NULL || bytes == 0) {
        return -ENOMEM;
    }
    f->memory = malloc(bytes);
    f->places = calloc(batch, sizeof(*f->places));
    f->runs = calloc(batch, sizeof(*f->runs));
    if (f->memory == NULL || f->places == NULL || f->runs == NULL) {
        return -ENOMEM;
    }
    f->policy.batch = batch;
    f->policy.bound = bound;
    f->mixes = mixes;
    reset(f);
    return 0;
}

/* ---- for other files ---------------------------------------------------------------- */

static const struct mn_forming *
if_ready(const struct mn_engine *e)
{
    return e->delivery == &ready_first ? e->delivery_state : NULL;
}

uint32_t
mn_delivery_runs(const struct mn_engine *e, const struct mn_run **runs)
{
    const struct mn_forming *f = if_ready(e);
    *runs = f != NULL ? f->runs : NULL;
    return f != NULL ? f->nruns : 0;
}

struct mn_refusal
mn_delivery_refusal(const struct mn_engine *e, uint64_t sequence)
{
    const struct mn_forming *f = if_ready(e);
    for (uint32_t i = f != NULL ? f->oldest : 0; f != NULL && i < f->nunits; i++) {
        if (f->units[i]->planned.sequence == sequence) {
            return f->units[i]->planned.refusal;
        }
    }
    return (struct mn_refusal){MN_REFUSED_NOT, 0, 0};
}

int64_t
mn_delivery_displaced(const struct mn_engine *e, int64_t *sum)
{
    const struct mn_forming *f = if_ready(e);
    *sum = f != NULL ? f->policy.displaced_sum : 0;
    return f != NULL ? f->policy.displaced_max : 0;
}
