/* simulate_groups.c - the engine's own plan, against workers and a clock that are simulated.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Linked with the engine and --wrap=mn_now_ns, and called from simulate_groups.py. There is one
 * thread. Time stands still while anybody can do something, and then goes on to the next event:
 * a worker is done, the consumer is, or somebody who waits looks again. Workers hold the groups
 * that they opened last; a sample costs what it costs and what opening its group does.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"
#include "engine/mn_engine.h"
#include "engine/mn_shared_costs.h"
#include "engine/mn_engine_state.h"
#include "os/mn_thread.h"
#include "workers/mn_tasks_and_retries.h"

#define SIM_EXPORT __attribute__((visibility("default")))
/* A program that waits looks again after so long, and so does the engine (mn_engine.c). */
#define SIM_LOOK_NS (INT64_C(5) * 1000 * 1000)
#define SIM_NAP_NS (INT64_C(100) * 1000 * 1000)
/* Nothing runs and nothing is delivered for so long: it has stopped for good. */
#define SIM_STUCK_NS (UINT64_C(60) * 1000 * 1000 * 1000)
#define SIM_ROW_BYTES UINT64_C(4096)
/* Batches planned beyond what the window asks (minato/iterators/planner.py). */
#define SIM_AHEAD_LEAST 128
#define SIM_AHEAD_MOST 512
#define SIM_NEVER UINT64_MAX

static uint64_t sim_now;

uint64_t
__wrap_mn_now_ns(void);

uint64_t
__wrap_mn_now_ns(void)
{
    return sim_now;
}

struct sim_case {
    int64_t workers, batch, window, in_order, group_neighbours;
    int64_t far;         /* the sampler is torch's own: batches are drawn beyond the window */
    int64_t held;        /* groups that a worker holds, the last ones */
    int64_t overhead_ns; /* of a task */
    int64_t consumer_ns; /* of a batch */
    int64_t memory;      /* batches that may be out at once */
    int64_t n;
    const int64_t *cost_ns;    /* [n], by index */
    const int64_t *group;      /* [n] */
    const int64_t *opening_ns; /* by group */
};

/* What an epoch was. */
struct sim_result {
    int64_t wall_ns;
    int64_t opened;     /* groups, also again */
    int64_t helped;     /* times that a worker took over part of another's share */
    int64_t starved_ns; /* no worker made the first unfinished batch, and one was idle */
    int64_t most_bytes; /* of the arena at once */
    int64_t limit_bytes;
    int64_t most_ahead; /* batches begun beyond the one to be delivered next */
    int64_t near, home; /* enum mn_contrast_answer, in the end */
    int64_t first_ns;   /* the first batch is delivered */
};

enum sim_fault {
    SIM_STUCK = -1,    /* no worker can continue */
    SIM_TWICE = -2,    /* a sample was delivered twice, or one that was not asked for */
    SIM_ORDER = -3,    /* batches out of order */
    SIM_REFUSED = -4,  /* a batch could not be made */
    SIM_PLAN = -5,     /* the engine did not take a batch */
    SIM_LIMIT = -6,    /* more memory than allowed */
    SIM_LOST = -7,     /* a sample was not delivered */
};

struct sim_worker {
    struct mn_worker_side side;
    int64_t *held; /* groups, the last one first */
    int64_t nheld;
    uint32_t task;
    uint64_t until; /* SIM_NEVER: idle */
};

struct sim {
    struct sim_case c;
    struct mn_engine *e;
    struct mn_shared_costs costs;
    struct sim_worker *workers;
    uint64_t row_bytes[1];
    uint64_t epoch, sequence, expected;
    uint64_t free_at; /* the consumer asks for its next batch */
    uint8_t *seen;    /* [n] */
    /* the present epoch */
    const int64_t *order;
    const uint8_t *begins; /* where groups begin, by the dataset's word; or NULL */
    int64_t count, drawn, delivered, batches;
    bool waits;
    struct sim_result r;
    int fault;
};

/* ---- workers ------------------------------------------------------------------------ */

static bool
open_group(struct sim *s, struct sim_worker *w, int64_t group)
{
    int64_t at = 0;
    while (at < w->nheld && w->held[at] != group) {
        at++;
    }
    bool opened = at == w->nheld;
    if (opened && w->nheld < s->c.held) {
        w->nheld++;
    }
    at = at < w->nheld ? at : w->nheld - 1;
    memmove(w->held + 1, w->held, (size_t)at * sizeof(*w->held));
    w->held[0] = group;
    s->r.opened += opened;
    return opened;
}

/* Makes the samples of a task at once, and is done with them later. */
static void
run(struct sim *s, struct sim_worker *w)
{
    struct mn_task *t = mn_task_at(&s->e->shm, w->task);
    struct mn_block *b = mn_block_at(&s->e->shm, t->block_off);
    const int64_t *index = mn_block_index(b);
    int64_t sum = 0;
    for (uint32_t row = t->row0; row < t->row0 + t->nrows; row++) {
        int64_t group = s->c.group[index[row]], ns = s->c.cost_ns[index[row]];
        ns += open_group(s, w, group) ? s->c.opening_ns[group] : 0;
        ns = ns > 0 ? ns : 1;
        sum += ns;
        mn_block_reports(b)[row].wall_ns = (uint64_t)ns;
        mn_block_reports(b)[row].status = MN_ROW_WRITTEN;
    }
    t->wall_ns = (uint64_t)sum;
    t->cpu_ns = 0;
    t->flags = 0;
    mn_a64_store_relaxed(&w->side.me->since_ns, sim_now);
    w->until = sim_now + (uint64_t)(sum + s->c.overhead_ns);
}

static bool
workers_go_on(struct sim *s)
{
    bool any = false;
    for (int64_t i = 0; i < s->c.workers; i++) {
        struct sim_worker *w = &s->workers[i];
        if (w->until == sim_now) {
            w->until = SIM_NEVER;
            uint32_t collate = mn_worker_done(&w->side, w->task);
            mn_assert(collate == MN_NO_TASK);
            any = true;
        }
        if (w->until == SIM_NEVER && mn_worker_try(&w->side, &w->task) == MN_OK) {
            run(s, w);
            any = true;
        }
    }
    return any;
}

/* ---- the trainer -------------------------------------------------------------------- */

static int64_t
rows_of(const struct sim *s, int64_t number)
{
    int64_t left = s->count - number * s->c.batch;
    return left < s->c.batch ? left : s->c.batch;
}

static bool
plan_one(struct sim *s)
{
    int64_t at = s->drawn * s->c.batch, rows = rows_of(s, s->drawn);
    struct mn_plan_batch b = {.sequence = s->sequence,
                              .number = (uint64_t)s->drawn,
                              .epoch = s->epoch,
                              .position = (uint64_t)at,
                              .nrows = (uint32_t)rows,
                              .index_kind = MN_INDEX_INT64,
                              .index = s->order + at,
                              .index_bytes = (uint64_t)rows * sizeof(*s->order),
                              .begins = s->begins != NULL ? s->begins + at : NULL};
    int rc = mn_engine_plan(s->e, &b);
    if (rc != MN_OK) {
        s->fault = rc == MN_FULL ? s->fault : SIM_PLAN;
        return false;
    }
    s->sequence++;
    s->drawn++;
    return true;
}

/* Draws like the loader: its window, and further once costs are known. */
static bool
fill(struct sim *s, bool dry)
{
    int64_t most = s->c.window;
    struct mn_costs_view v = mn_costs_look(&s->costs.costs);
    if (s->c.far && dry) {
        most += s->drawn - s->delivered;
    }
    else if (s->c.far && s->costs.costs.model.samples != 0) {
        int64_t batch = v.mean_ns * s->c.batch / s->c.workers;
        int64_t slow = batch > 0 ? 3 * v.slowest_ns / batch : 0;
        slow = slow < SIM_AHEAD_LEAST ? SIM_AHEAD_LEAST : slow;
        slow = slow < SIM_AHEAD_MOST ? slow : SIM_AHEAD_MOST;
        most = slow > 2 * most ? slow : 2 * most;
    }
    bool any = false;
    while (s->drawn < s->batches && s->drawn - s->delivered < most && plan_one(s)) {
        any = true;
    }
    if (s->drawn == s->batches) {
        mn_engine_plan_end(s->e);
    }
    return any;
}

static void
check(struct sim *s, uint64_t sequence, uint64_t block_off)
{
    if (block_off == 0) {
        s->fault = SIM_REFUSED;
        return;
    }
    struct mn_block *b = mn_block_at(&s->e->shm, block_off);
    const int64_t *index = mn_block_index(b);
    if (s->c.in_order && sequence != s->expected) {
        s->fault = SIM_ORDER;
    }
    s->expected = sequence + 1;
    for (uint32_t i = 0; i < b->nrows; i++) {
        if (index[i] != s->order[b->position + i] || s->seen[index[i]]++ != 0) {
            s->fault = SIM_TWICE;
        }
    }
}

static bool
trainer_goes_on(struct sim *s)
{
    if (s->free_at > sim_now || s->delivered == s->batches) {
        return false;
    }
    uint64_t sequence, block_off;
    int rc = mn_engine_next(s->e, 0, &sequence, &block_off);
    s->waits = rc != MN_NEXT_BATCH;
    if (rc == MN_NEXT_PLAN) {
        return fill(s, true);
    }
    if (rc != MN_NEXT_BATCH) {
        return false;
    }
    check(s, sequence, block_off);
    mn_engine_taken(s->e, sequence, block_off, false);
    s->r.first_ns = s->delivered == 0 ? (int64_t)sim_now : s->r.first_ns;
    s->delivered++;
    s->free_at = sim_now + (uint64_t)s->c.consumer_ns;
    (void)fill(s, false);
    return true;
}

/* ---- time --------------------------------------------------------------------------- */

static void
settle(struct sim *s)
{
    bool any = true;
    while (any && s->fault == 0) {
        any = trainer_goes_on(s);
        mn_mutex_lock(&s->e->mutex);
        any |= mn_engine_step(s->e);
        mn_engine_unlock(s->e);
        any |= workers_go_on(s);
        int64_t used = (int64_t)mn_arena_used(&s->e->arena);
        s->r.most_bytes = used > s->r.most_bytes ? used : s->r.most_bytes;
    }
    struct mn_plan_order order = mn_plan_view(s->e->plan)->order;
    int64_t ahead = (int64_t)(order.begun - order.head);
    s->r.most_ahead = ahead > s->r.most_ahead ? ahead : s->r.most_ahead;
}

/* Whether a worker is idle while the head batch is not done and no worker makes it. */
static bool
starves(struct sim *s)
{
    struct mn_plan *p = s->e->plan;
    uint64_t off = mn_plan_block(p, mn_plan_view(p)->order.head);
    bool idle = false;
    if (s->delivered == s->batches || (off != 0 && mn_engine_poll(s->e, off) != MN_BLOCK_BUSY)) {
        return false;
    }
    for (int64_t i = 0; i < s->c.workers; i++) {
        const struct sim_worker *w = &s->workers[i];
        if (w->until != SIM_NEVER && mn_task_at(&s->e->shm, w->task)->block_off == off) {
            return false;
        }
        idle |= w->until == SIM_NEVER;
    }
    return idle;
}

static uint64_t
next_event(struct sim *s)
{
    uint64_t next = s->free_at > sim_now ? s->free_at : SIM_NEVER;
    bool idle = false;
    for (int64_t i = 0; i < s->c.workers; i++) {
        next = s->workers[i].until < next ? s->workers[i].until : next;
        idle |= s->workers[i].until == SIM_NEVER;
    }
    uint64_t look = sim_now + (uint64_t)(s->waits ? SIM_LOOK_NS : SIM_NAP_NS);
    uint64_t nap = sim_now + (uint64_t)mn_plan_nap(s->e->plan, sim_now, SIM_NAP_NS);
    look = nap < look ? nap : look;
    look = look > sim_now ? look : sim_now + 1;
    return idle && look < next ? look : next;
}

SIM_EXPORT int
sim_epoch(struct sim *s, const int64_t *order, const uint8_t *begins, int64_t count,
          struct sim_result *out)
{
    uint64_t begin = sim_now, moved = sim_now;
    uint64_t helped = mn_plan_view(s->e->plan)->helped;
    s->order = order;
    s->begins = begins;
    s->count = count;
    s->batches = (count + s->c.batch - 1) / s->c.batch;
    s->drawn = s->delivered = 0;
    s->free_at = 0;
    memset(s->seen, 0, (size_t)s->c.n);
    memset(&s->r, 0, sizeof(s->r));
    (void)fill(s, false);
    while (s->fault == 0) {
        int64_t delivered = s->delivered;
        settle(s);
        if (s->delivered == s->batches || s->fault != 0) {
            break;
        }
        bool running = false;
        for (int64_t i = 0; i < s->c.workers; i++) {
            running |= s->workers[i].until != SIM_NEVER;
        }
        moved = running || delivered != s->delivered ? sim_now : moved;
        if (sim_now - moved > SIM_STUCK_NS) {
            s->fault = SIM_STUCK;
        }
        bool starved = starves(s);
        uint64_t next = next_event(s);
        s->r.starved_ns += starved ? (int64_t)(next - sim_now) : 0;
        sim_now = next;
    }
    for (int64_t i = 0; i < count && s->fault == 0; i++) {
        s->fault = s->seen[order[i]] == 1 ? 0 : SIM_LOST;
    }
    s->r.limit_bytes = (int64_t)s->e->arena.limit;
    s->r.wall_ns = (int64_t)(sim_now - begin);
    s->r.first_ns -= (int64_t)begin;
    s->r.helped = (int64_t)(mn_plan_view(s->e->plan)->helped - helped);
    s->r.near = (int64_t)mn_plan_view(s->e->plan)->known.near;
    s->r.home = (int64_t)mn_plan_view(s->e->plan)->known.home;
    *out = s->r;
    s->epoch++;
    return s->fault;
}

/* From now on the consumer takes so long for a batch. */
SIM_EXPORT void
sim_consumer(struct sim *s, int64_t ns)
{
    s->c.consumer_ns = ns;
}

SIM_EXPORT void
sim_free(struct sim *s)
{
    if (s->e != NULL) {
        mn_engine_stop(s->e);
        mn_engine_close(s->e);
    }
    mn_shared_costs_fini(&s->costs);
    for (int64_t i = 0; s->workers != NULL && i < s->c.workers; i++) {
        free(s->workers[i].held);
    }
    free(s->workers);
    free(s->seen);
    free(s);
}

SIM_EXPORT struct sim *
sim_new(const struct sim_case *c)
{
    struct sim *s = calloc(1, sizeof(*s));
    if (s == NULL || mn_shared_costs_init(&s->costs, c->n) < 0) {
        free(s);
        return NULL;
    }
    sim_now = sim_now != 0 ? sim_now : UINT64_C(1000000000000000);
    s->c = *c;
    s->workers = calloc((size_t)c->workers, sizeof(*s->workers));
    s->seen = calloc((size_t)c->n + 1, 1);
    struct mn_engine_config cfg = {
        .workers = (uint32_t)c->workers,
        .max_workers = (uint32_t)c->workers,
        .arena_bytes = UINT64_C(1) << 32,
        .memory_limit = (uint64_t)(c->memory * c->batch) * SIM_ROW_BYTES,
        .window = (uint32_t)c->window,
        .in_order = c->in_order != 0,
        .costs = &s->costs,
        .group_neighbours = c->group_neighbours != 0,
    };
    if (s->workers == NULL || s->seen == NULL || mn_engine_open(&s->e, &cfg) < 0) {
        sim_free(s);
        return NULL;
    }
    for (int64_t i = 0; i < c->workers; i++) {
        struct sim_worker *w = &s->workers[i];
        w->held = calloc((size_t)c->held + 1, sizeof(*w->held));
        w->until = SIM_NEVER;
        if (w->held == NULL || mn_worker_attach(&w->side, &s->e->shm, (uint32_t)i) < 0) {
            sim_free(s);
            return NULL;
        }
        mn_a32_store_release(&w->side.me->state, MN_WORKER_READY);
    }
    s->row_bytes[0] = SIM_ROW_BYTES;
    struct mn_form form = {
        .kind = MN_KIND_ROWS, .layout = 1, .nfields = 1, .row_bytes = s->row_bytes};
    mn_engine_set_form(s->e, &form);
    return s;
}
