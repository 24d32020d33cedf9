/* mn_forming.c - see mn_forming.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_forming.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "schedule/mn_plan_state.h"

/* The cost of mixing a batch: a copy, at the speed of one core on cold memory, and some bookkeeping
 * for each row. A caller that waits this long before it mixes loses by waiting at most what mixing
 * costs. */
#define COPY_BYTES_A_NS 4
#define MIX_ROW_NS 50
#define MIX_NS 20000

/* ---- life --------------------------------------------------------------------------- */

void
mn_forming_clear(struct mn_forming *f)
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
    mn_forming_clear(f);
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

/* ---- units -------------------------------------------------------------------------- */

/* No unit from the first one past the policy's horizon on may start. */
static void
set_horizon(struct mn_plan *p)
{
    const struct mn_forming *f = p->view.forming;
    int64_t horizon = mn_ready_horizon(&f->policy);
    uint32_t i = f->oldest;
    while (i < f->nunits && f->units[i].first < horizon) {
        i++;
    }
    p->horizon = i < f->nunits ? f->units[i].sequence : p->view.order.next;
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
mn_forming_add(struct mn_plan *p, uint64_t sequence, uint32_t nrows)
{
    struct mn_forming *f = p->view.forming;
    mn_assert(f->nunits < f->capacity);
    f->units[f->nunits++] = (struct mn_unit){.sequence = sequence,
                                             .first = f->planned,
                                             .nrows = nrows,
                                             .left = nrows,
                                             .unmarked = nrows};
    f->planned += nrows;
    (void)mn_ready_end(&f->policy, INT64_MAX); /* if an end was declared, it was not the end */
    set_horizon(p);
}

void
mn_forming_end(struct mn_plan *p)
{
    /* It cannot fail: no more is marked than was planned. */
    (void)mn_ready_end(&p->view.forming->policy, p->view.forming->planned);
    set_horizon(p);
}

uint64_t
mn_forming_head(const struct mn_plan *p)
{
    const struct mn_forming *f = p->view.forming;
    int64_t place = f->policy.formed * f->policy.batch;
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        const struct mn_unit *u = &f->units[i];
        if (u->first + u->nrows > place) {
            return u->sequence;
        }
    }
    return p->view.order.next;
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

void
mn_forming_mark(struct mn_plan *p, struct mn_unit *u, uint32_t row0, uint32_t nrows,
                const uint64_t *wall_ns, size_t step)
{
    struct mn_ready *r = &p->view.forming->policy;
    if (mn_ready_is_marked(r, u->first + row0 + nrows - 1)) {
        return;
    }
    int64_t slow = p->cfg.costs != NULL ? p->view.known.timeout_ns : MN_SLOW_NEVER;
    for (uint32_t row = row0; row < row0 + nrows; row++) {
        bool late = wall_ns != NULL && wall_ns[row * step] > (uint64_t)slow;
        u->unmarked -= mn_ready_mark(r, u->first + row, late) == 0;
    }
}

bool
mn_forming_could_mix(const struct mn_forming *f)
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

int64_t
mn_forming_patience_ns(const struct mn_plan *p)
{
    int64_t copy_ns = (int64_t)p->view.batch_bytes / COPY_BYTES_A_NS;
    return copy_ns + MIX_ROW_NS * p->view.forming->policy.batch + MIX_NS;
}

bool
mn_forming_form(struct mn_plan *p, bool mix)
{
    struct mn_forming *f = p->view.forming;
    int64_t n;
    if (mn_ready_form(&f->policy, mix, f->places, &n) != MN_OK) {
        return false;
    }
    f->could_ns = 0;
    find_runs(f, n);
    set_horizon(p);
    return true;
}

struct mn_unit *
mn_forming_unmarked(struct mn_plan *p, const struct mn_unit *after)
{
    struct mn_forming *f = p->view.forming;
    int64_t horizon = mn_ready_horizon(&f->policy);
    uint32_t i = after != NULL ? (uint32_t)(after - f->units) + 1 : f->oldest;
    for (; i < f->nunits && f->units[i].first < horizon; i++) {
        struct mn_unit *u = &f->units[i];
        if (u->sequence >= p->view.order.begun && !u->ended) {
            return NULL;
        }
        if (u->unmarked != 0) {
            return u;
        }
    }
    return NULL;
}

struct mn_unit *
mn_forming_take_run(struct mn_plan *p, uint32_t run)
{
    struct mn_forming *f = p->view.forming;
    struct mn_unit *u = &f->units[f->oldest];
    while (u->sequence != f->runs[run].sequence) {
        u++;
    }
    u->left -= f->runs[run].nrows;
    mn_assert(u->ended || u->left != 0);
    return u;
}

void
mn_forming_taken(struct mn_plan *p)
{
    struct mn_forming *f = p->view.forming;
    f->nruns = 0;
    while (f->oldest < f->nunits && f->units[f->oldest].left == 0) {
        f->oldest++;
    }
}
