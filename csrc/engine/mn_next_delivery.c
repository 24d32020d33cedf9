/* mn_next_delivery.c - which batch is delivered next, and what finished batches teach about costs.
 * SPDX-License-Identifier: Apache-2.0
 *
 * In order: the head of the plan. Out of order: the batch that was done first. In ready mode
 * (mn_forming.h): the formed batch. A batch is done when its tasks have ended and their results
 * were accepted, or when it is refused. Balanced scheduling only. All functions need the engine's
 * mutex; learning takes the lock of the costs.
 */
#include <stdlib.h>

#include "base/mn_assert.h"
#include "engine/mn_batches.h"
#include "engine/mn_engine_parts.h"
#include "engine/mn_shared_costs.h"
#include "os/mn_clock.h"
#include "schedule/mn_forming.h"

/* ---- costs ------------------------------------------------------------------------------ */

/* Teaches what the batch took in addition to its samples: its collate task, or the rest of its only
 * task. */
static void
learn_collate(struct mn_engine *e, struct mn_block *b, uint64_t rows_ns)
{
    const struct mn_result *t = &e->tasks.results[mn_block_tasks(b)[b->ntasks - 1]];
    if (!t->accepted) {
        return;
    }
    if (t->kind == MN_KIND_COLLATE) {
        mn_costs_collated(&e->cfg.costs->costs, (int64_t)t->wall_ns);
    }
    else if (t->kind == MN_KIND_BATCH && rows_ns != 0) {
        mn_costs_collated(&e->cfg.costs->costs,
                          t->wall_ns > rows_ns ? (int64_t)(t->wall_ns - rows_ns) : 0);
    }
}

/* Teaches what the rows of each task cost, and which worker made them. Returns the sum. */
static uint64_t
learn_rows(struct mn_engine *e, const struct mn_batch *batch, struct mn_block *b,
           const int64_t *index)
{
    uint64_t sum = 0;
    const struct mn_planned *q = mn_plan_at(e->plan, batch->sequence);
    const float *hint = q != NULL ? q->batch.hint : NULL;
    for (uint32_t i = 0; i < b->ntasks; i++) {
        uint32_t task = mn_block_tasks(b)[i];
        const struct mn_result *t = &e->tasks.results[task];
        if (!t->accepted || t->kind == MN_KIND_COLLATE) {
            continue;
        }
        uint32_t how = mn_task_at(&e->shm, task)->made; /* unchecked: it is only compared */
        struct mn_costs_made made = {.worker = t->worker,
                                     .learn_locality = e->cfg.group_neighbours,
                                     .follows = how == MN_MADE_NEXT,
                                     .newcomer = how == MN_MADE_FIRST,
                                     .edge = t->row0 == 0};
        sum += mn_costs_observe_rows(&e->cfg.costs->costs, index != NULL ? index + t->row0 : NULL,
                                     hint != NULL ? hint + t->row0 : NULL,
                                     &batch->reports[t->row0].wall_ns,
                                     MN_REPORT_STEP, t->nrows,
                                     &made);
    }
    return sum;
}

void
mn_learn_costs(struct mn_engine *e, struct mn_batch *batch)
{
    struct mn_block *b = mn_block_at(&e->shm, batch->block_off);
    if (e->plan == NULL || e->cfg.costs == NULL || b->nrows == 0 || batch->learned) {
        return;
    }
    batch->learned = true;
    const int64_t *index = b->index_kind != MN_INDEX_PICKLE ? mn_block_index(b) : NULL;
    mn_shared_costs_lock(e->cfg.costs);
    bool news = mn_plan_is_news(e->plan, b->epoch, index, &batch->reports->wall_ns,
                                MN_REPORT_STEP, b->nrows);
    uint64_t rows_ns = learn_rows(e, batch, b, index);
    if (b->ntasks != 0) {
        learn_collate(e, b, rows_ns);
    }
    mn_plan_learned(e->plan, news);
    mn_shared_costs_unlock(e->cfg.costs);
}

void
mn_learn_costs_waiting(struct mn_engine *e)
{
    for (struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (!b->abandoned && mn_engine_poll(e, b->block_off) == MN_BLOCK_DONE
            && mn_batch_accept(e, b) == MN_BLOCK_DONE) {
            mn_learn_costs(e, b);
            mn_batch_learn_envelopes(e, b);
        }
    }
}

/* ---- delivery --------------------------------------------------------------------------- */

/* ---- ready mode: which rows of each unit are ready; the batches formed of them ---- */

static void
mark_tasks(struct mn_engine *e, struct mn_unit *u, const struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *result = &e->tasks.results[tasks[i]];
        bool lost = mn_word_status(mn_tasks_word(&e->tasks, tasks[i])) == MN_TASK_LOST;
        if (result->accepted || lost) {
            mn_forming_mark(e->plan, u, result->row0, result->nrows, &b->reports->wall_ns,
                            MN_REPORT_STEP);
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
        mn_learn_costs(e, b);
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
        mn_forming_mark(p, u, 0, u->nrows, NULL, 0);
        if (!u->ended) {
            leave_plan(e, u, NULL);
        }
        return;
    }
    if (u->block_off == 0) {
        return;
    }
    struct mn_batch *b = mn_batch_find(e, u->block_off);
    if (mn_plan_view(p)->forming->mixes) {
        mn_batch_accept_some(e, b);
        mark_tasks(e, u, b);
    }
    /* After the marks: so that a unit whose marks are complete is seen to have ended. */
    if (!u->ended
        && (mn_engine_poll(e, u->block_off) == MN_BLOCK_BUSY
            || mn_batch_accept(e, b) == MN_BLOCK_BUSY)) {
        return;
    }
    if (mn_plan_view(p)->forming->mixes) {
        mark_tasks(e, u, b);
    }
    else {
        mn_forming_mark(p, u, 0, u->nrows, NULL, 0);
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
mn_ready_rows_nap(const struct mn_engine *e)
{
    const struct mn_plan *p = e->plan;
    const struct mn_forming *f = mn_plan_view(p)->forming;
    uint64_t since = f != NULL && memory_allows(e) ? f->could_ns : 0;
    if (since == 0) {
        return INT64_MAX;
    }
    int64_t left = mn_forming_patience_ns(p) - (int64_t)(mn_now_ns() - since);
    return left > 0 ? left : 1;
}

/* Forms a batch without mixing, unless there is one already. Looks no further than that needs: each
 * unit that leaves the plan lets the next one pass the memory limit. */
static bool
form_whole(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    bool formed = mn_plan_view(p)->forming->nruns != 0 || mn_forming_form(p, false);
    struct mn_unit *u = formed ? NULL : mn_forming_unmarked(p, NULL);
    for (; u != NULL && !formed; u = mn_forming_unmarked(p, u)) {
        look_at(e, u);
        formed = mn_forming_form(p, false);
    }
    return formed;
}

/* Returns whether mn_ready_rows_form() should be called: there is a batch, or one could be mixed
 * that it does not know of yet. */
static bool
mn_ready_rows_any(struct mn_engine *e)
{
    const struct mn_forming *f = mn_plan_view(e->plan)->forming;
    return form_whole(e) || (f->could_ns == 0 && mn_forming_could_mix(f));
}

/* Forms the next batch if that is possible, else notes whether one could be mixed. Returns whether
 * there is a batch. */
static bool
mn_ready_rows_form(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_forming *f = mn_plan_view(p)->forming;
    if (form_whole(e)) {
        return true;
    }
    if (!mn_forming_could_mix(f)) {
        return false;
    }
    uint64_t now = mn_now_ns();
    f->could_ns = f->could_ns == 0 ? now : f->could_ns;
    return (int64_t)(now - f->could_ns) >= mn_forming_patience_ns(p) && memory_allows(e)
           && mn_forming_form(p, true);
}

/* Returns how many batches could be formed of the ready rows, including those not looked at yet. */
static int64_t
mn_ready_rows_batches(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    int64_t ready = mn_forming_ready(mn_plan_view(p)->forming);
    struct mn_plan_order order = mn_plan_view(p)->order;
    int64_t enough = mn_plan_window(p).starved_below;
    for (uint64_t n = order.head; n < order.begun && ready < enough; n++) {
        uint64_t off = mn_plan_block(p, n);
        ready += off != 0 && mn_engine_poll(e, off) != MN_BLOCK_BUSY;
    }
    return ready;
}

void
mn_ready_rows_taken(struct mn_engine *e)
{
    for (uint32_t i = 0; i < mn_plan_view(e->plan)->forming->nruns; i++) {
        const struct mn_unit *u = mn_forming_take_run(e->plan, i);
        if (u->left == 0 && u->block_off != 0) {
            struct mn_batch *b = mn_batch_find(e, u->block_off);
            mn_batch_learn_envelopes(e, b);
            mn_batch_drop(e, b);
        }
    }
    mn_forming_taken(e->plan);
}

void
mn_ready_rows_drop(struct mn_engine *e)
{
    const struct mn_forming *f = mn_plan_view(e->plan)->forming;
    for (uint32_t i = f->oldest; i < f->nunits; i++) {
        const struct mn_unit *u = &f->units[i];
        if (u->ended && u->left != 0 && u->block_off != 0) {
            mn_batch_drop(e, mn_batch_find(e, u->block_off));
        }
    }
}

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
    if (mn_plan_view(p)->forming != NULL) {
        return mn_ready_rows_batches(e);
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
    const struct mn_forming *f = mn_plan_view(e->plan)->forming;
    if (f != NULL) {
        bool formed = mn_ready_rows_form(e);
        *sequence = formed ? f->runs[0].sequence : 0;
        *block_off = formed ? f->runs[0].block_off : 0;
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
    bool forms = mn_plan_view(e->plan)->forming != NULL;
    return forms ? mn_ready_rows_any(e) : first_done(e) != UINT64_MAX;
}

bool
mn_next_delivery_may_take(struct mn_engine *e, uint64_t sequence, uint64_t block_off)
{
    const struct mn_forming *f = mn_plan_view(e->plan)->forming;
    if (f != NULL) {
        return f->nruns != 0 && f->runs[0].sequence == sequence;
    }
    struct mn_planned *q = mn_plan_at(e->plan, sequence);
    return q != NULL && mn_plan_block(e->plan, sequence) == block_off && is_done(e, q);
}
