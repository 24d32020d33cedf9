/* mn_plan.c - see mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load/mn_plan.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "load/mn_engine_internal.h"
#include "load/mn_plan_internal.h"
#include "load/policy_chunk.h"
#include "load/policy_memory.h"

/* What a task costs beside its samples: claim, report, a share of a wake-up. */
#define TASK_OVERHEAD_NS 5000
/* Tasks of one batch at most, so that the head always finds descriptors. */
#define MOST_TASKS 1024u
/* Board depth: work for so long, or a quarter of a task a worker. */
#define BOARD_NS 1000000
/* Workers that run dry sleep, and waking them costs more than cheap samples do: the window
 * is at least so much work, as long as its batches are not large. And as much as lasts while
 * the slowest are made: when several of those come together, what the consumer takes
 * meanwhile has to be there, and no worker to have idled, where it is as fast as they are. */
#define WINDOW_NS (INT64_C(2) * 1000 * 1000)

int
mn_plan_open(struct mn_plan **out, uint32_t workers, uint32_t window, bool in_order,
             struct mn_costs *costs, bool keeps, uint32_t unit_rows,
             uint32_t most_workers)
{
    struct mn_plan *p = calloc(1, sizeof(*p));
    if (p == NULL) {
        return -ENOMEM;
    }
    p->keeps = keeps && costs != NULL;
    p->unit_rows = unit_rows;
    p->shares = calloc(most_workers, sizeof(*p->shares));
    p->nshares = most_workers;
    p->chain.owner = -1;
    p->memory = malloc(mn_dispatch_bytes(MN_PLAN_TASKS));
    p->batches = calloc(MN_PLAN_BATCHES, sizeof(struct mn_planned *));
    struct mn_dispatch_rates rates = {.period_ns = 1000000,
                                      .window = window,
                                      .hungry = window,
                                      .workers = workers};
    if (p->memory == NULL || p->batches == NULL || p->shares == NULL
        || mn_dispatch_init(&p->dispatch, p->memory, MN_PLAN_TASKS, &rates) < 0) {
        mn_plan_close(p);
        return -ENOMEM;
    }
    p->window = window;
    p->horizon = INT64_MAX;
    p->in_order = in_order;
    p->costs = costs;
    if (costs != NULL) {
        mn_costs_new_workers(costs);
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
    free(p->batches);
    free(p->shares);
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
    return &p->batches[sequence % MN_PLAN_BATCHES];
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
    for (uint32_t i = 0; i < MN_PLAN_BATCHES; i++) {
        free_planned(p->batches[i]);
        p->batches[i] = NULL;
    }
    mn_pieces_reset(p);
    mn_dispatch_clear(&p->dispatch);
    mn_dispatch_reopen(&p->dispatch);
    p->head = p->next;
    mn_a64_store_relaxed(&p->in_hand, 0);
}

/* ---- planning ---------------------------------------------------------------------- */

static int64_t
sum(const int64_t *v, uint32_t n)
{
    int64_t s = 0;
    for (uint32_t i = 0; i < n; i++) {
        s += v[i];
    }
    return s;
}

/* What a task costs beside its samples. In a piece whose group was dear to open tasks may be
 * longer: nobody takes a short one over. */
static int64_t
overhead_ns(const struct mn_plan *p)
{
    int64_t opening = p->by_piece ? p->known.opening_ns / (8 * MN_CHUNK_AMORTISE) : 0;
    return opening > TASK_OVERHEAD_NS ? opening : TASK_OVERHEAD_NS;
}

int64_t
mn_plan_chunk_limit(const struct mn_engine *e, const struct mn_plan_batch *b,
                    const int64_t *cost, uint32_t n)
{
    /* The first batches of an epoch are waited for by everybody: spread them. */
    int64_t idle = b->number == 0 ? (int64_t)e->active : 0;
    return mn_chunk_size(sum(cost, n) / (n != 0 ? n : 1), overhead_ns(e->plan), n, idle);
}

uint32_t
mn_plan_chunk(const struct mn_engine *e, const struct mn_plan_batch *b, const int64_t *cost,
              uint32_t n, bool parts, int64_t limit)
{
    if (b->whole && !parts) {
        return n;
    }
    int64_t most = b->whole ? MN_PARTS_MOST : MOST_TASKS;
    int64_t least = (b->nrows + most - 1) / most;
    int64_t rows = mn_chunk_next(cost, n, overhead_ns(e->plan), limit);
    rows = rows < least ? least : rows;
    return rows < n ? (uint32_t)rows : n;
}

/* Batches of which two neighbours are made by one worker, to see whether that is cheaper:
 * one in so many. */
#define PROBE_EVERY 4u

/* A row more for a task of one costly sample, once in some batches, somewhere in the batch. */
static uint32_t
probe(const struct mn_plan *p, const struct mn_plan_batch *b, const int64_t *cost, uint32_t from,
      uint32_t rows)
{
    if (!p->keeps || rows != 1 || b->nrows < 2 || b->number % PROBE_EVERY != 0) {
        return 0;
    }
    uint64_t place = b->number / PROBE_EVERY % (b->nrows - 1);
    bool costly = cost[from] > 2 * p->dispatch.rates.typical_ns
                  || cost[from + (from + 1 < b->nrows)] > 2 * p->dispatch.rates.typical_ns;
    return place == from && !costly ? 1 : 0;
}

/* Cuts the rows into tasks by their predicted costs; fills row0 and returns how many. parts:
 * also where one worker could make the batch. */
static uint32_t
cut(const struct mn_engine *e, const struct mn_plan_batch *b, const int64_t *cost, bool parts,
    uint32_t *row0)
{
    row0[0] = 0;
    if ((b->whole && !parts) || b->nrows == 0) {
        row0[1] = b->nrows;
        return 1;
    }
    int64_t limit = mn_plan_chunk_limit(e, b, cost, b->nrows);
    uint32_t n = 0;
    while (row0[n] < b->nrows) {
        uint32_t from = row0[n];
        uint32_t rows = mn_plan_chunk(e, b, cost + from, b->nrows - from, parts, limit);
        row0[++n] = from + rows + probe(e->plan, b, cost, from, rows);
    }
    return n;
}

/* Whether it is made in parts, which one more task collates. */
static bool
in_parts(const struct mn_planned *q)
{
    return q->batch.whole && q->ntasks > 1;
}

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

uint64_t
mn_plan_form_bytes(const struct mn_form *f, uint32_t nrows)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < f->nfields; i++) {
        bytes += mn_page_round(f->row_bytes[i] * nrows);
    }
    return bytes;
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
    p->wanted = p->keeps && (near || p->known.home == MN_CONTRAST_YES
                             || (p->known.home == MN_CONTRAST_UNKNOWN && p->again));
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
    if (r.period_ns > 0 && p->batch_bytes != 0) {
        int64_t lasts = v.slowest_ns > WINDOW_NS ? v.slowest_ns : WINDOW_NS;
        int64_t cheap = min64(lasts / r.period_ns,
                              (int64_t)(MN_PLAN_LARGE_BYTES / p->batch_bytes));
        r.window = cheap > r.window ? cheap : r.window;
    }
    if (p->by_piece) { /* a chain for each worker */
        int64_t chains = (int64_t)(v.group / (double)rows + 1.0) * e->active;
        chains = min64(chains, (int64_t)(p->next - p->head) + 1);
        r.window = chains > r.window ? chains : r.window;
    }
    r.hungry = r.window > 1 ? r.window / 2 : 1;
    r.consumer_ns = p->consumer_ns;
    if (r.period_ns > 0) {
        (void)mn_dispatch_retime(&p->dispatch, &r);
    }
}

/* Whether there is room for as many tasks as the batch may be cut into, and for others. */
static bool
room_for(const struct mn_plan *p, const struct mn_plan_batch *b, uint64_t others)
{
    uint32_t most = (b->whole && !b->splits) || b->nrows == 0 ? 1 : b->nrows;
    most = most < MOST_TASKS ? most : MOST_TASKS;
    uint64_t there = p->by_piece ? p->piece_tasks : p->dispatch.count;
    return there + most + others <= MN_PLAN_TASKS;
}

/* What a task counts as slow by. A start past the window holds memory for one batch more, and
 * saves no more time than the task takes beyond the typical: where batches are large, what is
 * little more than noise does not count. */
int64_t
mn_plan_worth(const struct mn_plan *p, int64_t cost_ns, int64_t bytes)
{
    int64_t typical = p->dispatch.rates.typical_ns;
    int64_t excess = typical > 0 ? cost_ns - typical : 0;
    bool large = (uint64_t)bytes > MN_PLAN_LARGE_BYTES;
    bool little = large && excess > 0 && excess < mn_plan_patience_ns((uint64_t)bytes);
    return little ? typical : cost_ns;
}

/* Predicts what each row of a batch costs, and returns what its collate task does. */
static int64_t
predict(const struct mn_plan *p, const struct mn_plan_batch *b, int64_t *cost)
{
    memset(cost, 0, b->nrows * sizeof(*cost));
    if (p->costs == NULL) {
        return 0;
    }
    const int64_t *index = b->index_kind == MN_INDEX_INT64 ? b->index : NULL;
    mn_costs_predict(p->costs, index, b->nrows, cost);
    return b->whole ? mn_costs_look(p->costs).collate_ns : 0;
}

/* Hands the dispatcher those tasks of a batch that are not on the board. */
static void
insert_tasks(struct mn_plan *p, const struct mn_planned *q, const int64_t *cost, int64_t collate)
{
    int64_t bytes = (int64_t)mn_plan_form_bytes(&p->form, q->batch.nrows);
    for (uint32_t t = 0; t < q->ntasks; t++) {
        if (q->sent[t]) {
            continue;
        }
        uint32_t from = q->row0[t];
        /* in parts the last to end collates: any of them may be it */
        int64_t ns = sum(cost + from, q->row0[t + 1] - from) + collate / q->ntasks;
        struct mn_dispatch_task task = {
            .position = (int64_t)(q->rows + from),
            .batch = (int64_t)q->sequence,
            .cost_ns = mn_plan_worth(p, ns, bytes),
            .bytes = bytes,
            .tag = q->sequence << 24 | t,
        };
        int rc = mn_dispatch_insert(&p->dispatch, &task, NULL);
        mn_assert(rc == MN_OK);
        (void)rc;
    }
}

/* Cuts a batch that has not started into tasks and hands them on, with room left for one task
 * of each of `others`. cost: room for its rows'. 0 or -ENOMEM. */
static int
cut_planned(struct mn_engine *e, struct mn_planned *q, int64_t *cost, uint64_t others)
{
    struct mn_plan *p = e->plan;
    const struct mn_plan_batch *b = &q->batch;
    int64_t collate = predict(p, b, cost);
    bool parts = b->splits && p->split && room_for(p, b, others);
    if (p->by_piece) {
        int rc = mn_pieces_cut(e, q, cost, parts);
        return rc < 0 ? rc : mn_pieces_insert(e, q, cost);
    }
    q->ntasks = cut(e, b, cost, parts, q->row0);
    insert_tasks(p, q, cost, collate);
    return 0;
}

static bool
every(const struct mn_dispatch_task *t, void *arg)
{
    (void)t;
    (void)arg;
    return true;
}

/* Whether neighbours are kept together has changed: everything that is not on the board is
 * planned anew. */
static int
replan(struct mn_engine *e, int64_t *cost)
{
    struct mn_plan *p = e->plan;
    mn_dispatch_drop(&p->dispatch, every, NULL);
    mn_pieces_reset(p);
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q == NULL) {
            continue;
        }
        q->npieces = 0;
        int rc = 0;
        if (q->block_off == 0) {
            rc = cut_planned(e, q, cost, p->next - n);
        }
        else {
            int64_t collate = predict(p, &q->batch, cost);
            if (p->by_piece) {
                rc = mn_pieces_insert(e, q, cost);
            }
            else {
                insert_tasks(p, q, cost, collate);
            }
        }
        if (rc < 0) {
            return rc;
        }
    }
    return 0;
}

/* Begins or ends to keep neighbours together, or cuts the pieces anew, where what is known has
 * changed. */
static void
settle(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    uint32_t stance = p->known.near | p->known.home << 2 | (uint32_t)p->known.joins << 4;
    if (p->wanted == p->by_piece && (!p->by_piece || stance == p->stance)) {
        return;
    }
    uint32_t rows = 0;
    for (uint64_t n = p->head; n < p->next; n++) {
        const struct mn_planned *q = mn_plan_at(p, n);
        rows = q != NULL && q->batch.nrows > rows ? q->batch.nrows : rows;
    }
    int64_t *cost = malloc(((size_t)rows + 1) * sizeof(*cost));
    if (cost == NULL) {
        return; /* it is tried again */
    }
    p->by_piece = p->wanted;
    p->stance = stance;
    if (replan(e, cost) < 0) { /* pieces need memory; tasks do not */
        p->by_piece = p->wanted = p->keeps = false;
        (void)replan(e, cost);
    }
    for (uint32_t w = 0; w < e->shm.ctl->nworkers && !p->by_piece; w++) {
        mn_a32_store_seqcst(&mn_worker_at(&e->shm, w)->low_own, 0);
        while (mn_pieces_withdraw(e, w, MN_LANE_EXPRESS)) { /* they are anybody's again */
            p->moved++;
        }
    }
    free(cost);
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
        p->again = b->epoch != p->first_epoch;
        p->declared = b->begins != NULL;
        mn_plan_look(p);
        settle(e);
    }
    if (*place_of(p, b->sequence) != NULL || !room_for(p, b, 0)) {
        return MN_FULL;
    }
    int64_t *cost = malloc(((size_t)b->nrows + 1) * sizeof(*cost));
    struct mn_planned *q = cost != NULL ? make_planned(b) : NULL;
    if (q == NULL) {
        free(cost);
        return -ENOMEM;
    }
    if (p->costs != NULL && p->head == p->next) {
        p->split = mn_costs_look(p->costs).split; /* nothing else is planned */
    }
    retime(e, b->nrows, b->whole);
    q->rows = p->rows;
    if (cut_planned(e, q, cost, 0) < 0) {
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
    free(cost);
    return MN_OK;
}

static bool
is_stale(const struct mn_dispatch_task *t, void *arg)
{
    return mn_plan_at(arg, (uint64_t)t->batch)->stale;
}

/* Cuts a batch again, of which nothing has started. False without memory for pieces. */
static bool
recut_planned(struct mn_engine *e, struct mn_planned *q, int64_t *cost, uint64_t others)
{
    struct mn_chain last = e->plan->chain;
    e->plan->chain = q->chain;
    if (cut_planned(e, q, cost, others) < 0) {
        return false;
    }
    if (q->sequence + 1 != e->plan->next) {
        e->plan->chain = last;
    }
    return true;
}

void
mn_plan_recut(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    uint32_t rows = 0;
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && q->stale) {
            q->stale = q->block_off == 0;
            rows = q->stale && q->batch.nrows > rows ? q->batch.nrows : rows;
        }
    }
    int64_t *cost = rows != 0 ? malloc(rows * sizeof(*cost)) : NULL;
    if (cost == NULL) {
        return; /* without memory what is planned stays as it was cut */
    }
    mn_dispatch_drop(&p->dispatch, is_stale, p);
    bool whole = true;
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && q->stale) {
            q->stale = false;
            mn_pieces_forget(p, q);
            whole = whole && recut_planned(e, q, cost, p->next - n);
        }
    }
    if (!whole) { /* no memory for pieces: everything is planned anew, without */
        p->wanted = p->keeps = false;
        settle(e);
    }
    free(cost);
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
mn_plan_ready(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    int64_t ready = 0;
    for (uint64_t n = p->head; n < p->next; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && !q->done) { /* each look at a block is many cache lines of others */
            q->done = q->block_off != 0 && mn_engine_poll(e, q->block_off) != MN_BLOCK_BUSY;
        }
        bool done = q != NULL && q->done;
        ready += done;
        if (!done && (p->in_order || ready >= p->dispatch.rates.hungry)) {
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
    if (!head && e->nfree < q->ntasks + MOST_TASKS) {
        return false; /* descriptors are kept back for the head, too */
    }
    struct mn_memory m = {.limit = (int64_t)e->limit,
                          .used = (int64_t)mn_extents_used(e->arena),
                          .room = (int64_t)p->batch_bytes};
    uint64_t bytes = mn_plan_form_bytes(&p->form, q->batch.nrows);
    if (p->form.nfields == 0) {
        bytes = e->mean_envelope_bytes; /* not known before it is made */
    }
    return mn_memory_may(&m, (int64_t)bytes, head, 0)
           != MN_MEMORY_NO;
}

static int
start_block(struct mn_engine *e, struct mn_planned *q)
{
    struct mn_plan *p = e->plan;
    const struct mn_plan_batch *b = &q->batch;
    struct mn_submit s = {.number = b->number,
                          .epoch = b->epoch,
                          .position = b->position,
                          .base_seed = b->base_seed,
                          .nrows = b->nrows,
                          .kind = in_parts(q) ? (uint32_t)MN_KIND_PART
                                  : b->whole  ? (uint32_t)MN_KIND_BATCH
                                              : p->form.kind,
                          .lane = MN_LANE_NORMAL,
                          .seeded = b->seeded,
                          .user_epoch = b->user_epoch,
                          .index_kind = b->index_kind,
                          .index = b->index,
                          .index_bytes = b->index_bytes};
    if (!b->whole) {
        s.layout = p->form.layout;
        s.nfields = p->form.nfields;
        s.row_bytes = p->form.row_bytes;
        uint64_t bytes = mn_plan_form_bytes(&p->form, b->nrows);
        p->batch_bytes = bytes > p->batch_bytes ? bytes : p->batch_bytes;
    }
    return mn_batch_make(e, &s, q->row0, q->ntasks, &q->block_off);
}

bool
mn_plan_start(struct mn_engine *e, struct mn_planned *q, uint32_t number, uint32_t lane,
              enum mn_dispatch_why why)
{
    struct mn_plan *p = e->plan;
    if (q->block_off == 0 && start_block(e, q) < 0) {
        return false;
    }
    struct mn_block *block = mn_block_at(&e->shm, q->block_off);
    uint32_t task = mn_block_tasks(block)[number];
    mn_task_at(&e->shm, task)->why = (uint32_t)why;
    int rc = mn_board_publish(&e->shm, &e->heads[lane], lane, task, ++e->gens[task], 0);
    mn_assert(rc == MN_OK);
    (void)rc;
    q->sent[number] = 1;
    p->starts[why]++;
    return true;
}

static bool
start(struct mn_engine *e, const struct mn_dispatch_choice *c)
{
    struct mn_planned *q = mn_plan_at(e->plan, c->task.tag >> 24);
    mn_assert(q != NULL);
    if (!mn_plan_start(e, q, c->task.tag & 0xffffff, MN_LANE_NORMAL, c->why)) {
        return false;
    }
    mn_dispatch_take(&e->plan->dispatch, c->node);
    return true;
}

static bool
memory_allows(struct mn_engine *e, const struct mn_dispatch_task *t)
{
    return mn_plan_memory_allows(e, mn_plan_at(e->plan, (uint64_t)t->batch));
}

/* How many tasks should be on the board. */
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
mn_plan_pump(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    settle(e);
    uint32_t started = p->moved;
    p->moved = 0;
    if (p->by_piece) {
        return started + mn_pieces_pump(e);
    }
    uint64_t depth = board_depth(e), on = mn_plan_queued(e);
    bool more = false;
    int64_t ready = -1, in_hand = (int64_t)mn_a64_load_relaxed(&p->in_hand);
    p->held = false;
    while (on < depth) {
        if (ready < 0) {
            ready = mn_plan_ready(e);
        }
        struct mn_dispatch_view view = {.head_batch = (int64_t)p->head - in_hand,
                                        .ready_batches = ready + in_hand,
                                        .last_batch = (int64_t)p->horizon - 1};
        struct mn_dispatch_choice c;
        if (mn_dispatch_peek(&p->dispatch, &view, &c) != MN_OK) {
            break;
        }
        if (c.why == MN_DISPATCH_AHEAD && !mn_plan_starved(e, ready, on)) {
            break;
        }
        if (!memory_allows(e, &c.task)) {
            /* The head's own tasks are always let through: see policy_memory.h. */
            if (mn_dispatch_first(&p->dispatch, &c) != MN_OK || !memory_allows(e, &c.task)) {
                p->held = true;
                break;
            }
        }
        if (!start(e, &c)) {
            break;
        }
        on++;
        started++;
    }
    more = p->dispatch.count != 0;
    mn_a32_store_seqcst(&e->shm.ctl->low_water, more ? (uint32_t)(depth / 2 + 1) : 0);
    return started;
}

bool
mn_plan_in_hand(struct mn_plan *p, int more)
{
    uint64_t n = mn_a64_load_relaxed(&p->in_hand); /* ours */
    if (!p->in_order || (n == 0 && more < 0)) {
        return false;
    }
    mn_a64_store_relaxed(&p->in_hand, n + (uint64_t)(int64_t)more);
    return true;
}

void
mn_plan_taken(struct mn_plan *p, uint64_t sequence)
{
    struct mn_planned *q = mn_plan_at(p, sequence);
    if (q != NULL) {
        *place_of(p, sequence) = NULL;
        mn_pieces_forget(p, q);
        free_planned(q);
    }
    while (p->head < p->next && *place_of(p, p->head) == NULL) {
        p->head++;
        p->starved_ns = 0;
    }
}
