/* mn_plan.c - planned batches from add to taken. See mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_attr.h"
#include "base/mn_error.h"
#include "schedule/mn_forming.h"
#include "schedule/mn_plan_state.h"

/* Returns NULL if memory is short. */
static struct mn_planned *
make(const struct mn_plan_batch *b)
{
    struct mn_planned *q;
    size_t starts = ((size_t)b->nrows + 2) * sizeof(uint32_t);
    starts = (starts + 7) & ~(size_t)7;
    size_t rows = ((size_t)b->nrows + 1 + 7) & ~(size_t)7;
    size_t flags = rows * (sizeof(*q->sent) + sizeof(*q->border));
    size_t index_bytes = (b->index_bytes + 7) & ~(size_t)7; /* of a pickle it is any number */
    size_t hint_bytes = b->hint != NULL ? rows * sizeof(*b->hint) : 0;
    size_t bytes = sizeof(struct mn_planned) + starts + index_bytes + hint_bytes + flags;
    q = calloc(1, bytes + (b->begins != NULL ? b->nrows : 0));
    if (q == NULL) {
        return NULL;
    }
    q->sent = (uint16_t *)(void *)((char *)q + bytes - flags);
    q->border = (uint8_t *)(q->sent + rows);
    q->sequence = b->sequence;
    q->batch = *b;
    char *index = (char *)q->row0 + starts;
    if (b->index_bytes != 0) {
        memcpy(index, b->index, b->index_bytes);
    }
    q->batch.index = index;
    if (b->hint != NULL) {
        q->batch.hint = memcpy(index + index_bytes, b->hint, b->nrows * sizeof(*b->hint));
    }
    if (b->begins != NULL) {
        q->batch.begins = memcpy((char *)q + bytes, b->begins, b->nrows);
    }
    return q;
}

static void
free_planned(struct mn_planned *q)
{
    if (q != NULL) {
        free(q->pieces);
        free(q);
    }
}

/* Starved workers sleep, and waking them costs more than cheap samples do. So the window is at
 * least this much work, unless its batches are large. It is also as much as lasts while the slowest
 * samples are made. When several of those coincide, the consumer then has batches to take
 * meanwhile. If the consumer is as fast as the workers, no worker has idled. */
#define WINDOW_NS (INT64_C(2) * 1000 * 1000)

int
mn_plan_open(struct mn_plan **out, const struct mn_plan_config *cfg)
{
    struct mn_plan *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -ENOMEM;
    }
    p->cfg = *cfg;
    p->pace.active = cfg->workers;
    p->pace.steady = cfg->window;
    p->together.may = cfg->group_neighbours && cfg->costs != NULL;
    p->view.forming = cfg->ready_batch != 0 ? mn_forming_open(cfg->ready_batch, cfg->ready_bound,
                                                         cfg->ready_mixes)
                                       : NULL;
    p->shares.of = calloc(cfg->max_workers, sizeof(*p->shares.of));
    p->shares.chain.owner = -1;
    p->horizon = INT64_MAX;
    p->view.capacity = MN_PLAN_BATCHES;
    while (p->view.capacity < cfg->batches && p->view.capacity < MN_PLAN_BATCHES_MOST) {
        p->view.capacity *= 2;
    }
    p->memory = malloc(mn_dispatch_bytes(MN_PLAN_TASKS));
    p->batches = calloc(p->view.capacity, sizeof(struct mn_planned *));
    struct mn_dispatch_rates rates = {.period_ns = 1000000,
                                      .window = cfg->window,
                                      .starved_below = cfg->window,
                                      .workers = cfg->workers};
    if (p->memory == NULL || p->batches == NULL || p->shares.of == NULL
        || (cfg->ready_batch != 0 && p->view.forming == NULL)
        || mn_dispatch_init(&p->dispatch, p->memory, MN_PLAN_TASKS, &rates) < 0) {
        mn_plan_close(p);
        return -ENOMEM;
    }
    if (p->cfg.costs != NULL) {
        mn_costs_new_workers(p->cfg.costs);
        p->view.known = mn_costs_look(p->cfg.costs);
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
    if (p->batches != NULL && p->shares.of != NULL) {
        mn_plan_clear(p);
    }
    mn_forming_close(p->view.forming);
    free(p->batches);
    free(p->shares.of);
    free(p->memory);
    free(p);
}

void
mn_plan_clear(struct mn_plan *p)
{
    struct mn_plan_order *o = &p->view.order;
    for (uint64_t n = o->head; n < o->next; n++) { /* no other place holds one */
        free_planned(*mn_plan_place(p, n));
        *mn_plan_place(p, n) = NULL;
    }
    mn_pieces_reset(p);
    if (p->view.forming != NULL) {
        mn_forming_clear(p->view.forming);
    }
    mn_dispatch_clear(&p->dispatch);
    mn_dispatch_reopen(&p->dispatch);
    o->head = o->begun = o->next;
    p->refused = p->unmade = 0;
    p->stall.full = false;
    p->stall.starved_ns = 0;
    mn_a64_store_relaxed(&p->prefetched, 0);
}

void
mn_plan_set_active(struct mn_plan *p, uint32_t workers)
{
    p->pace.active = workers;
}

void
mn_plan_set_rows(struct mn_plan *p, const struct mn_plan_rows *rows)
{
    p->pace.rows_of = *rows;
}

/* ---- planning ---------------------------------------------------------------------- */

static void
retime(struct mn_plan *p, const struct mn_plan_batch *b)
{
    if (p->cfg.costs == NULL) {
        return;
    }
    struct mn_costs_view v = p->view.known;
    struct mn_dispatch_rates r = p->dispatch.rates;
    const struct mn_plan_pace *pace = &p->pace;
    r.typical_ns = pace->cut_tasks != 0 ? v.median_ns * pace->cut_rows / pace->cut_tasks
                                        : v.median_ns;
    r.period_ns = mn_plan_period(p, b);
    r.workers = pace->active;
    r.window = (int64_t)p->cfg.window * pace->active / p->cfg.workers;
    /* Before any worker exists, no planned batch has a block, so its size is computed here. */
    uint64_t bytes = b->whole ? 0 : mn_plan_rows_bytes(p, b->nrows);
    bytes = bytes > p->view.batch_bytes ? bytes : p->view.batch_bytes;
    if (r.period_ns > 0 && bytes != 0) {
        int64_t lasts = v.slowest_ns > WINDOW_NS ? v.slowest_ns : WINDOW_NS;
        int64_t cheap = mn_min_i64(lasts / r.period_ns,
                              (int64_t)(MN_PLAN_LARGE_BYTES / bytes));
        r.window = cheap > r.window ? cheap : r.window;
    }
    p->pace.steady = (uint64_t)r.window;
    if (p->view.by_piece) { /* a chain for each worker */
        double rows = b->nrows != 0 ? b->nrows : 1;
        int64_t chains = (int64_t)(v.group / rows + 1.0) * pace->active;
        chains = mn_min_i64(chains, (int64_t)(p->view.order.next - p->view.order.head) + 1);
        r.window = chains > r.window ? chains : r.window;
    }
    r.starved_below = r.window > 1 ? r.window / 2 : 1;
    r.consumer_ns = p->view.consumer_ns;
    if (r.period_ns > 0) {
        (void)mn_dispatch_retime(&p->dispatch, &r);
    }
}

int
mn_plan_add(struct mn_plan *p, const struct mn_plan_batch *b)
{
    if (b->sequence != p->view.order.next) {
        return -EINVAL;
    }
    if (p->cfg.costs != NULL) {
        p->together.declared = b->begins != NULL;
        if (p->together.may && b->integers) {
            struct mn_costs *c = p->cfg.costs;
            mn_locality_drawn(&c->locality, b->index, b->nrows, c->model.n);
        }
        mn_plan_look(p);
        mn_plan_settle(p);
    }
    if (b->hint != NULL && (p->cfg.costs == NULL || mn_costs_hinted(p->cfg.costs) < 0)) {
        return -ENOMEM;
    }
    p->stall.full = *mn_plan_place(p, b->sequence) != NULL || !mn_plan_room(p, b, 0);
    if (p->stall.full) {
        return MN_FULL;
    }
    int64_t *cost = malloc(((size_t)b->nrows + 1) * sizeof(*cost));
    struct mn_planned *q = cost != NULL ? make(b) : NULL;
    if (q == NULL || (p->view.forming != NULL && mn_forming_room(p->view.forming) < 0)) {
        free(q);
        free(cost);
        return -ENOMEM;
    }
    if (p->cfg.costs != NULL && p->view.order.head == p->view.order.next) {
        struct mn_costs_view known = mn_costs_look(p->cfg.costs);
        p->pace.split = known.split; /* nothing else is planned */
        p->pace.revision = known.revision;
    }
    retime(p, b);
    q->rows = p->rows;
    if (mn_plan_cut(p, q, cost, 0) < 0) {
        free_planned(q);
        free(cost);
        return -ENOMEM;
    }
    *mn_plan_place(p, b->sequence) = q;
    mn_dispatch_reopen(&p->dispatch); /* it was not the end, or a next epoch begins */
    p->pace.cut_rows = b->nrows;
    p->pace.cut_tasks = p->view.by_piece && q->npieces != 0 ? q->npieces : q->ntasks;
    p->view.order.next++;
    p->rows += b->nrows;
    if (p->view.forming != NULL) {
        mn_forming_add(p, b->sequence, b->nrows);
    }
    free(cost);
    return MN_OK;
}

void
mn_plan_end(struct mn_plan *p)
{
    mn_dispatch_close(&p->dispatch);
    if (p->view.forming != NULL) {
        mn_forming_end(p);
    }
}

void
mn_plan_used(struct mn_plan *p, int64_t used_ns)
{
    int64_t mean = p->view.consumer_ns;
    p->view.consumer_ns = mean == 0 ? used_ns : (3 * mean + used_ns) / 4;
}

static bool
is_of(const struct mn_dispatch_task *t, void *sequence)
{
    return (uint64_t)t->batch == *(const uint64_t *)sequence;
}

void
mn_plan_refuse(struct mn_plan *p, struct mn_planned *q, const struct mn_refusal *why)
{
    uint64_t sequence = q->sequence;
    q->refusal = *why;
    p->refused++;
    p->view.order.begun = sequence >= p->view.order.begun ? sequence + 1 : p->view.order.begun;
    mn_dispatch_drop(&p->dispatch, is_of, &sequence);
    mn_pieces_forget(p, q);
}

bool
mn_plan_prefetched(struct mn_plan *p, int more)
{
    uint64_t n = mn_a64_load_relaxed(&p->prefetched); /* written by this thread */
    if (!p->cfg.in_order || (n == 0 && more < 0)) {
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
        *mn_plan_place(p, sequence) = NULL;
        mn_pieces_forget(p, q);
        free_planned(q);
    }
    struct mn_plan_order *o = &p->view.order;
    while (o->head < o->next && *mn_plan_place(p, o->head) == NULL) {
        o->head++;
        p->stall.starved_ns = 0;
    }
}
