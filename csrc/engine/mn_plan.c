/* mn_plan.c - see mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"
#include "engine/mn_forming.h"
#include "engine/mn_plan_internal.h"
#include "schedule/policy_memory.h"

/* Depth of the run queues: work for so long, or a quarter of a task a worker. */
#define BOARD_NS 1000000
/* Workers that run dry sleep, and waking them costs more than cheap samples do: the window
 * is at least so much work, as long as its batches are not large. And as much as lasts while
 * the slowest are made: when several of those come together, what the consumer takes
 * meanwhile has to be there, and no worker to have idled, where it is as fast as they are. */
#define WINDOW_NS (INT64_C(2) * 1000 * 1000)

int
mn_plan_open(struct mn_plan **out, const struct mn_engine_config *cfg, uint32_t ntasks)
{
    struct mn_plan *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -ENOMEM;
    }
    uint32_t most = cfg->max_workers > cfg->workers ? cfg->max_workers : cfg->workers;
    p->keeps = cfg->keeps && cfg->costs != NULL;
    p->forming = cfg->ready_batch != 0 ? mn_forming_open(cfg->ready_batch, cfg->ready_bound,
                                                         cfg->ready_mixes)
                                       : NULL;
    p->shares = calloc(most, sizeof(*p->shares));
    p->nshares = most;
    p->sent_ns = calloc(ntasks, sizeof(*p->sent_ns));
    p->nsent = ntasks;
    p->chain.owner = -1;
    p->room = MN_PLAN_BATCHES;
    while (p->room < cfg->blocks && p->room < MN_PLAN_BATCHES_MOST) {
        p->room *= 2;
    }
    p->memory = malloc(mn_dispatch_bytes(MN_PLAN_TASKS));
    p->batches = calloc(p->room, sizeof(struct mn_planned *));
    p->found = calloc(p->room, sizeof(*p->found));
    struct mn_dispatch_rates rates = {.period_ns = 1000000,
                                      .window = cfg->window,
                                      .starved_below = cfg->window,
                                      .workers = cfg->workers};
    if (p->memory == NULL || p->batches == NULL || p->found == NULL
        || p->shares == NULL || p->sent_ns == NULL
        || (cfg->ready_batch != 0 && p->forming == NULL)
        || mn_dispatch_init(&p->dispatch, p->memory, MN_PLAN_TASKS, &rates) < 0) {
        mn_plan_close(p);
        return -ENOMEM;
    }
    p->window = cfg->window;
    p->horizon = INT64_MAX;
    p->in_order = cfg->in_order;
    p->costs = cfg->costs;
    if (p->costs != NULL) {
        mn_costs_new_workers(p->costs);
    }
    *out = p;
    return 0;
}

void
mn_plan_close(struct mn_plan *p)
{
    if (p == NULL) {
        return;
    }
    if (p->batches != NULL) {
        mn_plan_clear(p);
    }
    mn_forming_close(p->forming);
    free(p->batches);
    free(p->shares);
    free(p->sent_ns);
    free(p->found);
    free(p->memory);
    free(p);
}

static void
free_planned(struct mn_planned *q)
{
    if (q != NULL) {
        free(q->pieces);
        free(q);
    }
}

static struct mn_planned **
place_of(const struct mn_plan *p, uint64_t sequence)
{
    return &p->batches[sequence & (p->room - 1)];
}

struct mn_planned *
mn_plan_at(const struct mn_plan *p, uint64_t sequence)
{
    struct mn_planned *q = *place_of(p, sequence);
    return q != NULL && q->sequence == sequence ? q : NULL;
}

void
mn_plan_clear(struct mn_plan *p)
{
    for (uint32_t i = 0; i < p->room; i++) {
        free_planned(p->batches[i]);
        p->batches[i] = NULL;
    }
    mn_pieces_reset(p);
    mn_dispatch_clear(&p->dispatch);
    mn_dispatch_reopen(&p->dispatch);
    p->head = p->begun = p->next;
    p->refused = p->unmade = p->stuck_ns = 0;
    p->full = false;
    p->nfound = p->found_at = 0;
    mn_a64_store_relaxed(&p->prefetched, 0);
}

/* ---- planning ---------------------------------------------------------------------- */

static struct mn_planned *
make_planned(const struct mn_plan_batch *b)
{
    size_t starts = ((size_t)b->nrows + 2) * sizeof(uint32_t);
    starts = (starts + 7) & ~(size_t)7;
    size_t flags = 2 * (((size_t)b->nrows + 1 + 7) & ~(size_t)7);
    size_t bytes = sizeof(struct mn_planned) + starts + b->index_bytes + flags;
    struct mn_planned *q = calloc(1, bytes + (b->begins != NULL ? b->nrows : 0));
    if (q == NULL) {
        return NULL;
    }
    q->sent = (uint8_t *)q + bytes - flags;
    q->border = q->sent + flags / 2;
    q->sequence = b->sequence;
    q->batch = *b;
    char *index = (char *)q->row0 + starts;
    if (b->index_bytes != 0) {
        memcpy(index, b->index, b->index_bytes);
    }
    q->batch.index = index;
    if (b->begins != NULL) {
        q->batch.begins = memcpy((char *)q + bytes, b->begins, b->nrows);
    }
    return q;
}

static int64_t
min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

void
mn_plan_look(struct mn_plan *p)
{
    p->known = mn_costs_look(p->costs);
    bool near = p->declared || p->known.near != MN_CONTRAST_NO;
    p->wanted = p->keeps && p->nshares > 1 && (near || p->known.home == MN_CONTRAST_YES
                             || (p->known.home == MN_CONTRAST_UNKNOWN && p->again
                                 && p->known.median_ns >= MN_LOCALITY_WORTH_NS));
}

static void
retime(struct mn_engine *e, uint32_t nrows, bool whole)
{
    struct mn_plan *p = e->plan;
    if (p->costs == NULL) {
        return;
    }
    struct mn_costs_view v = p->known;
    struct mn_dispatch_rates r = p->dispatch.rates;
    r.typical_ns = p->cut_tasks != 0 ? v.median_ns * p->cut_rows / p->cut_tasks : v.median_ns;
    int64_t rows = nrows != 0 ? nrows : 1;
    int64_t mean = v.mean_ns + (whole ? v.collate_ns / rows : 0);
    r.period_ns = mn_dispatch_period(p->consumer_ns, mean, rows, e->active);
    r.workers = e->active;
    r.window = (int64_t)p->window * e->active / e->cfg.workers;
    /* What is planned before any worker is there has made none of its blocks yet. */
    uint64_t bytes = whole ? 0 : mn_form_bytes(&p->form, nrows);
    bytes = bytes > p->batch_bytes ? bytes : p->batch_bytes;
    if (r.period_ns > 0 && bytes != 0) {
        int64_t lasts = v.slowest_ns > WINDOW_NS ? v.slowest_ns : WINDOW_NS;
        int64_t cheap = min64(lasts / r.period_ns,
                              (int64_t)(MN_PLAN_LARGE_BYTES / bytes));
        r.window = cheap > r.window ? cheap : r.window;
    }
    if (p->by_piece) { /* a chain for each worker */
        int64_t chains = (int64_t)(v.group / (double)rows + 1.0) * e->active;
        chains = min64(chains, (int64_t)(p->next - p->head) + 1);
        r.window = chains > r.window ? chains : r.window;
    }
    r.starved_below = r.window > 1 ? r.window / 2 : 1;
    r.consumer_ns = p->consumer_ns;
    if (r.period_ns > 0) {
        (void)mn_dispatch_retime(&p->dispatch, &r);
    }
}

int
mn_plan_add(struct mn_engine *e, const struct mn_plan_batch *b)
{
    struct mn_plan *p = e->plan;
    if (b->sequence != p->next) {
        return -EINVAL;
    }
    if (p->next == 0) {
        p->first_epoch = b->epoch;
    }
    if (p->costs != NULL) {
        p->again = b->epoch != p->first_epoch && b->index_kind == MN_INDEX_INT64
                   && p->costs->model.n != 0;
        p->declared = b->begins != NULL;
        if (p->keeps && b->index_kind == MN_INDEX_INT64) {
            mn_costs_drawn(p->costs, b->index, b->nrows);
        }
        mn_plan_look(p);
        mn_plan_settle(e);
    }
    p->full = *place_of(p, b->sequence) != NULL || !mn_plan_room(p, b, 0);
    if (p->full) {
        return MN_FULL;
    }
    int64_t *cost = malloc(((size_t)b->nrows + 1) * sizeof(*cost));
    struct mn_planned *q = cost != NULL ? make_planned(b) : NULL;
    if (q == NULL || (p->forming != NULL && mn_forming_room(p->forming) < 0)) {
        free(q);
        free(cost);
        return -ENOMEM;
    }
    if (p->costs != NULL && p->head == p->next) {
        p->split = mn_costs_look(p->costs).split; /* nothing else is planned */
    }
    retime(e, b->nrows, b->whole);
    q->rows = p->rows;
    if (mn_plan_cut(e, q, cost, 0) < 0) {
        free_planned(q);
        free(cost);
        return -ENOMEM;
    }
    *place_of(p, b->sequence) = q;
    mn_dispatch_reopen(&p->dispatch); /* it was not the end, or a next epoch begins */
    p->cut_rows = b->nrows;
    p->cut_tasks = p->by_piece && q->npieces != 0 ? q->npieces : q->ntasks;
    p->next++;
    p->rows += b->nrows;
    if (p->forming != NULL) {
        mn_forming_add(p, b->sequence, b->nrows);
    }
    free(cost);
    return MN_OK;
}

/* ---- starting ---------------------------------------------------------------------- */

bool
mn_plan_begins(const struct mn_plan *p)
{
    const struct mn_planned *q = mn_plan_at(p, p->head);
    return q != NULL && q->batch.number == 0;
}

uint64_t
mn_plan_block(const struct mn_plan *p, uint64_t sequence)
{
    const struct mn_planned *q = mn_plan_at(p, sequence);
    return q != NULL ? q->block_off : 0;
}

int64_t
mn_plan_first(const struct mn_plan *p)
{
    return p->forming != NULL ? (int64_t)mn_forming_head(p)
                              : (int64_t)(p->head - mn_a64_load_relaxed(&p->prefetched));
}

/* With batches formed of what is ready: of it, and of what nobody has looked at yet. */
static int64_t
could_form(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    int64_t ready = mn_forming_ready(p->forming);
    for (uint64_t n = p->head; n < p->begun && ready < p->dispatch.rates.starved_below; n++) {
        uint64_t off = mn_plan_block(p, n);
        ready += off != 0 && mn_engine_poll(e, off) != MN_BLOCK_BUSY;
    }
    return ready;
}

int64_t
mn_plan_ready(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    int64_t ready = 0;
    if (p->forming != NULL) {
        return could_form(e);
    }
    for (uint64_t n = p->head; n < p->begun; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        bool done = q != NULL && mn_planned_done(e, q);
        ready += done;
        if (!done && (p->in_order || ready >= p->dispatch.rates.starved_below)) {
            break;
        }
    }
    return ready;
}

bool
mn_plan_memory_allows(struct mn_engine *e, const struct mn_planned *q)
{
    struct mn_plan *p = e->plan;
    if (q->block_off != 0) {
        return true; /* its room is taken already */
    }
    bool head = q->sequence == p->head;
    if (!head && e->tasks.nfree < q->ntasks + MN_PLAN_BATCH_TASKS) {
        return false; /* descriptors are kept back for the head, too */
    }
    struct mn_memory m = {.limit = (int64_t)e->arena.limit,
                          .used = (int64_t)mn_arena_used(&e->arena),
                          .room = (int64_t)p->batch_bytes};
    uint64_t bytes = mn_form_bytes(&p->form, q->batch.nrows);
    if (p->form.nfields == 0) {
        bytes = e->flight.mean_envelope_bytes; /* not known before it is made */
        m.used += p->by_piece ? (int64_t)(bytes * p->unmade) : 0; /* is in no sum yet */
    }
    return mn_memory_may(&m, (int64_t)bytes, head, 0)
           != MN_MEMORY_NO;
}

int
mn_plan_start(struct mn_engine *e, struct mn_planned *q, uint32_t number, uint32_t queue,
              enum mn_dispatch_why why)
{
    struct mn_plan *p = e->plan;
    int rc = mn_plan_begin(e, q);
    if (rc != MN_OK) {
        return rc;
    }
    struct mn_block *block = mn_block_at(&e->shm, q->block_off);
    uint32_t task = mn_block_tasks(block)[number];
    mn_task_at(&e->shm, task)->why = (uint32_t)why;
    if (mn_tasks_publish(&e->tasks, task, queue) != MN_OK) {
        return MN_EMPTY; /* it stays planned, and its block is there already */
    }
    q->sent[number] = 1;
    p->starts[why]++;
    return MN_OK;
}

/* As mn_plan_start, of what the dispatcher chose, for any worker. */
static int
start(struct mn_engine *e, const struct mn_dispatch_choice *c)
{
    struct mn_planned *q = mn_plan_at(e->plan, c->task.tag >> 24);
    mn_assert(q != NULL);
    int rc = mn_plan_start(e, q, c->task.tag & 0xffffff, MN_QUEUE_NORMAL, c->why);
    if (rc == MN_OK) {
        mn_dispatch_take(&e->plan->dispatch, c->node);
    }
    return rc;
}

static bool
memory_allows(struct mn_engine *e, const struct mn_dispatch_task *t)
{
    return mn_plan_memory_allows(e, mn_plan_at(e->plan, (uint64_t)t->batch));
}

/* How many tasks should be queued. */
static uint64_t
board_depth(const struct mn_engine *e)
{
    uint64_t workers = e->active;
    uint64_t by_count = workers / 4 + 1;
    uint64_t typical = 0;
    const struct mn_dispatch *d = &e->plan->dispatch;
    if (d->count != 0) {
        typical = (uint64_t)d->work_ns / d->count;
    }
    if (typical == 0) {
        return 2 * workers; /* nothing is known yet */
    }
    uint64_t by_time = workers * BOARD_NS / typical;
    return by_time > by_count ? by_time : by_count;
}

uint32_t
mn_plan_start_due(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    mn_plan_settle(e);
    uint32_t started = p->moved;
    p->moved = 0;
    if (p->by_piece) {
        return started + mn_pieces_start_due(e);
    }
    uint64_t depth = board_depth(e), on = mn_plan_queued(e);
    bool more = false;
    int64_t ready = -1, prefetched = (int64_t)mn_a64_load_relaxed(&p->prefetched);
    p->held = false;
    while (on < depth) {
        if (ready < 0) {
            ready = mn_plan_ready(e);
        }
        struct mn_dispatch_view view = {.head_batch = mn_plan_first(p),
                                        .ready_batches = ready + prefetched,
                                        .last_batch = (int64_t)p->horizon - 1};
        struct mn_dispatch_choice c;
        if (mn_dispatch_peek(&p->dispatch, &view, &c) != MN_OK) {
            break;
        }
        if (c.why == MN_DISPATCH_AHEAD && !mn_plan_starved(e, ready, on)) {
            break;
        }
        p->held = !memory_allows(e, &c.task);
        int rc = p->held ? MN_EMPTY : start(e, &c);
        if (rc == MN_EMPTY && mn_dispatch_first(&p->dispatch, &c) == MN_OK) {
            /* The head's own tasks are always let through: see policy_memory.h. */
            p->held = !memory_allows(e, &c.task);
            rc = p->held ? MN_EMPTY : start(e, &c);
        }
        if (rc == MN_EMPTY) {
            break;
        }
        on += rc == MN_OK;
        started += rc == MN_OK;
    }
    more = p->dispatch.count != 0;
    uint32_t mark = more ? (uint32_t)(depth / 2 + 1) : 0;
    if (mn_a32_load_relaxed(&e->shm.ctl->low_water) != mark) { /* ours; every claim reads it */
        mn_a32_store_seqcst(&e->shm.ctl->low_water, mark);
    }
    return started;
}

bool
mn_plan_prefetched(struct mn_plan *p, int more)
{
    uint64_t n = mn_a64_load_relaxed(&p->prefetched); /* ours */
    if (!p->in_order || (n == 0 && more < 0)) {
        return false;
    }
    mn_a64_store_relaxed(&p->prefetched, n + (uint64_t)(int64_t)more);
    return true;
}

void
mn_plan_taken(struct mn_plan *p, uint64_t sequence)
{
    struct mn_planned *q = mn_plan_at(p, sequence);
    if (q != NULL) {
        p->refused -= q->refusal.why != MN_REFUSED_NOT;
        p->unmade -= q->block_off != 0 && !q->done;
        *place_of(p, sequence) = NULL;
        mn_pieces_forget(p, q);
        free_planned(q);
    }
    while (p->head < p->next && *place_of(p, p->head) == NULL) {
        p->head++;
        p->starved_ns = 0;
    }
}
