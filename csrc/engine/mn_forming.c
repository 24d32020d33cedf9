/* mn_forming.c - see mn_forming.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_forming.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "engine/mn_plan_internal.h"
#include "os/mn_clock.h"

/* What it takes to mix a batch of its rows: a copy, at what one core moves where memory is cold,
 * and some bookkeeping for each. Whoever waits that long before it mixes loses no more by waiting
 * than it may have spared. */
#define COPY_BYTES_A_NS 4
#define MIX_ROW_NS 50
#define MIX_NS 20000

/* ---- life --------------------------------------------------------------------------- */

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

void
mn_forming_clear(struct mn_engine *e)
{
    struct mn_forming *f = e->plan->forming;
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        const struct mn_unit *u = &f->units[i];
        if (u->ended && u->left != 0 && u->block_off != 0) {
            mn_batch_drop(e, mn_batch_find(e, u->block_off));
        }
    }
    reset(f);
}

/* ---- units -------------------------------------------------------------------------- */

/* Nothing from the first unit past the policy's horizon on may start. */
static void
set_horizon(struct mn_plan *p)
{
    const struct mn_forming *f = p->forming;
    int64_t horizon = mn_ready_horizon(&f->policy);
    uint32_t i = f->oldest;
    while (i < f->nunits && f->units[i].first < horizon) {
        i++;
    }
    p->horizon = i < f->nunits ? f->units[i].sequence : p->next;
}

int
mn_forming_room(struct mn_forming *f)
{
    if (f->oldest > f->nunits / 2) {
        f->nunits -= f->oldest;
        memmove(f->units, f->units + f->oldest, f->nunits * sizeof(*f->units));
        f->oldest = 0;
    }
    if (f->nunits == f->room) {
        uint32_t room = f->room != 0 ? 2 * f->room : 64;
        struct mn_unit *more = realloc(f->units, room * sizeof(*more));
        if (more == NULL) {
            return -ENOMEM;
        }
        f->units = more;
        f->room = room;
    }
    return 0;
}

void
mn_forming_add(struct mn_plan *p, uint64_t sequence, uint32_t nrows)
{
    struct mn_forming *f = p->forming;
    mn_assert(f->nunits < f->room);
    f->units[f->nunits++] = (struct mn_unit){.sequence = sequence,
                                             .first = f->planned,
                                             .nrows = nrows,
                                             .left = nrows,
                                             .unmarked = nrows};
    f->planned += nrows;
    (void)mn_ready_end(&f->policy, INT64_MAX); /* if that was said, it was not the end */
    set_horizon(p);
}

void
mn_forming_end(struct mn_plan *p)
{
    (void)mn_ready_end(&p->forming->policy, p->forming->planned);
    set_horizon(p);
}

uint64_t
mn_forming_head(const struct mn_plan *p)
{
    const struct mn_forming *f = p->forming;
    int64_t place = f->policy.formed * f->policy.batch;
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        const struct mn_unit *u = &f->units[i];
        if (u->first + u->nrows > place) {
            return u->sequence;
        }
    }
    return p->next;
}

struct mn_refusal
mn_forming_refused(const struct mn_forming *f, uint64_t sequence)
{
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        if (f->units[i].sequence == sequence) {
            return f->units[i].refusal;
        }
    }
    return (struct mn_refusal){MN_REFUSED_NOT, 0, 0};
}

/* ---- what is ready ------------------------------------------------------------------ */

/* Rows of a unit are ready, as far as the policy may know. b: NULL where none is slow. */
static void
mark(struct mn_plan *p, struct mn_unit *u, uint32_t row0, uint32_t nrows, const struct mn_batch *b)
{
    struct mn_ready *r = &p->forming->policy;
    if (mn_ready_is_marked(r, u->first + row0 + nrows - 1)) {
        return;
    }
    int64_t slow = p->costs != NULL ? p->known.timeout_ns : MN_SLOW_NEVER;
    for (uint32_t row = row0; row < row0 + nrows; row++) {
        bool late = b != NULL && b->reports[row].wall_ns > (uint64_t)slow;
        u->unmarked -= mn_ready_mark(r, u->first + row, late) == 0;
    }
}

static void
mark_tasks(struct mn_engine *e, struct mn_unit *u, const struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_task *t = mn_task_at(&e->shm, tasks[i]);
        const struct mn_result *result = &e->tasks.results[tasks[i]];
        bool lost = mn_word_status(mn_a64_load_acquire(&t->word)) == MN_TASK_LOST; /* [T4] */
        if (result->accepted || lost) {
            mark(e->plan, u, result->row0, result->nrows, b);
        }
    }
}

/* All tasks of the unit have ended: the plan goes on without it. */
static void
leave_plan(struct mn_engine *e, struct mn_unit *u, struct mn_batch *b)
{
    u->ended = true;
    if (b != NULL) {
        b->detached = true;
        mn_plan_learn(e, b);
    }
    mn_plan_taken(e->plan, u->sequence);
}

static void
look_at(struct mn_engine *e, struct mn_unit *u)
{
    struct mn_plan *p = e->plan;
    if (!u->ended) {
        const struct mn_planned *q = mn_plan_at(p, u->sequence);
        mn_assert(q != NULL);
        u->block_off = q->block_off;
        u->refusal = q->refusal;
    }
    if (u->refusal.why != MN_REFUSED_NOT) {
        mark(p, u, 0, u->nrows, NULL);
        if (!u->ended) {
            leave_plan(e, u, NULL);
        }
        return;
    }
    if (u->block_off == 0) {
        return;
    }
    struct mn_batch *b = mn_batch_find(e, u->block_off);
    if (p->forming->mixes) {
        mn_batch_accept_some(e, b);
        mark_tasks(e, u, b);
    }
    /* After the marks: of a unit that they are complete of, this is seen to have ended. */
    if (!u->ended
        && (mn_engine_poll(e, u->block_off) == MN_BLOCK_BUSY
            || mn_batch_accept(e, b) == MN_BLOCK_BUSY)) {
        return;
    }
    if (p->forming->mixes) {
        mark_tasks(e, u, b);
    }
    else {
        mark(p, u, 0, u->nrows, NULL);
    }
    if (!u->ended) {
        leave_plan(e, u, b);
    }
}

static bool
could_mix(const struct mn_forming *f)
{
    return f->mixes && mn_ready_could_mix(&f->policy);
}

int64_t
mn_forming_ready(const struct mn_forming *f)
{
    const struct mn_ready *r = &f->policy;
    return (r->ready[0] + r->ready[1]) / r->batch + (f->nruns != 0);
}

/* ---- a batch ------------------------------------------------------------------------ */

/* The policy's places, as runs of rows. Both ascend. */
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

static int64_t
patience_ns(const struct mn_plan *p)
{
    return (int64_t)p->batch_bytes / COPY_BYTES_A_NS + MIX_ROW_NS * p->forming->policy.batch
           + MIX_NS;
}

/* What is mixed is there twice until the last sample of each of its units was delivered. */
static bool
memory_allows(const struct mn_engine *e)
{
    uint64_t bytes = e->plan->batch_bytes != 0 ? e->plan->batch_bytes
                                               : e->flight.mean_envelope_bytes;
    return !mn_arena_exceeds(&e->arena, bytes);
}

int64_t
mn_forming_nap(const struct mn_engine *e)
{
    const struct mn_plan *p = e->plan;
    uint64_t since = p->forming != NULL && memory_allows(e) ? p->forming->could_ns : 0;
    if (since == 0) {
        return INT64_MAX;
    }
    int64_t left = patience_ns(p) - (int64_t)(mn_now_ns() - since);
    return left > 0 ? left : 1;
}

static bool
form(struct mn_plan *p, bool mix)
{
    struct mn_forming *f = p->forming;
    int64_t n;
    if (mn_ready_form(&f->policy, mix, f->places, &n) != MN_OK) {
        return false;
    }
    f->could_ns = 0;
    find_runs(f, n);
    set_horizon(p);
    return true;
}

/* Forms a batch without mixing one, unless there is one. Looks no further than that takes: what
 * leaves the plan lets the next pass the memory limit. */
static bool
form_whole(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_forming *f = p->forming;
    bool formed = f->nruns != 0 || form(p, false);
    int64_t horizon = mn_ready_horizon(&f->policy);
    for (uint32_t i = f->oldest; !formed && i < f->nunits && f->units[i].first < horizon; i++) {
        struct mn_unit *u = &f->units[i];
        if (u->sequence >= p->begun && !u->ended) {
            break;
        }
        if (u->unmarked != 0) {
            look_at(e, u);
            formed = form(p, false);
        }
    }
    return formed;
}

bool
mn_forming_any(struct mn_engine *e)
{
    struct mn_forming *f = e->plan->forming;
    return form_whole(e) || (f->could_ns == 0 && could_mix(f));
}

bool
mn_forming_form(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_forming *f = p->forming;
    if (form_whole(e)) {
        return true;
    }
    if (!could_mix(f)) {
        return false;
    }
    uint64_t now = mn_now_ns();
    f->could_ns = f->could_ns == 0 ? now : f->could_ns;
    return (int64_t)(now - f->could_ns) >= patience_ns(p) && memory_allows(e) && form(p, true);
}

void
mn_forming_taken(struct mn_engine *e)
{
    struct mn_forming *f = e->plan->forming;
    uint32_t at = f->oldest;
    for (uint32_t i = 0; i < f->nruns; i++) {
        while (f->units[at].sequence != f->runs[i].sequence) {
            at++;
        }
        struct mn_unit *u = &f->units[at];
        u->left -= f->runs[i].nrows;
        mn_assert(u->ended || u->left != 0);
        if (u->left == 0 && u->block_off != 0) {
            struct mn_batch *b = mn_batch_find(e, u->block_off);
            mn_batch_learn_envelopes(e, u->block_off);
            mn_batch_drop(e, b);
        }
    }
    f->nruns = 0;
    while (f->oldest < f->nunits && f->units[f->oldest].left == 0) {
        f->oldest++;
    }
}
