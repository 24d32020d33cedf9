/* mn_engine_blocks.c - submitting, polling, keeping and retiring blocks. See mn_engine.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"

static uint64_t
align8(uint64_t n)
{
    return (n + 7) & ~UINT64_C(7);
}

struct mn_batch *
mn_batch_find(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    struct mn_batch *b = block->ntasks != 0 ? e->by_task[mn_block_tasks(block)[0]] : e->last;
    while (b != NULL && b->block_off != block_off) {
        b = b->prev; /* without tasks: made just now, for rows gathered from others */
    }
    return b;
}

int
mn_batch_own(struct mn_batch *b, uint64_t off, uint64_t bytes)
{
    if (bytes == 0) {
        return 0;
    }
    if (b->nranges == b->room) {
        uint32_t room = b->room != 0 ? 2 * b->room : 8;
        struct mn_range *more = realloc(b->ranges, room * sizeof(*more));
        if (more == NULL) {
            return -ENOMEM;
        }
        b->ranges = more;
        b->room = room;
    }
    b->ranges[b->nranges++] = (struct mn_range){off, bytes};
    return 0;
}

static void
batch_link(struct mn_engine *e, struct mn_batch *b)
{
    b->prev = e->last;
    if (e->last != NULL) {
        e->last->next = b;
    }
    else {
        e->batches = b;
    }
    e->last = b;
    e->inflight++;
}

static void
batch_unlink(struct mn_engine *e, struct mn_batch *b)
{
    if (b->prev != NULL) {
        b->prev->next = b->next;
    }
    else {
        e->batches = b->next;
    }
    if (b->next != NULL) {
        b->next->prev = b->prev;
    }
    else {
        e->last = b->prev;
    }
    e->inflight--;
}

void
mn_range_free(struct mn_extents *x, uint64_t off, uint64_t bytes)
{
    int rc = mn_extents_free(x, off, bytes);
    mn_assert(rc == 0 || rc == -ENOMEM);
    (void)rc;
}

void
mn_batch_drop(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    mn_batch_accept_envelopes(e, b);
    for (uint32_t i = 0; i < b->nranges; i++) {
        mn_range_free(e->arena, b->ranges[i].off, b->ranges[i].bytes);
    }
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        /* Relaxed: nobody else may touch a task that is in no worker's hands. */
        mn_a64_store_relaxed(&mn_task_at(&e->shm, tasks[i])->word, 0);
        e->by_task[tasks[i]] = NULL;
        e->free_tasks[e->nfree++] = tasks[i];
    }
    mn_range_free(e->input, b->block_off, block->bytes);
    batch_unlink(e, b);
    free(b->ranges);
    free(b);
    mn_engine_room(e);
}

bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        uint64_t word = mn_a64_load_acquire(&mn_task_at(&e->shm, tasks[i])->word); /* [T4] */
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_QUEUED || st == MN_TASK_RUNNING) {
            return false;
        }
    }
    return true;
}

/* ---- submit ------------------------------------------------------------------------ */

static uint64_t
block_bytes(const struct mn_submit *s, uint32_t ntasks, struct mn_block *b)
{
    uint64_t at = align8(sizeof(*b));
    at = align8(at + ntasks * sizeof(uint32_t));
    b->fields_at = (uint32_t)at;
    at += s->nfields * sizeof(uint64_t);
    b->reports_at = (uint32_t)at;
    at += s->nrows * sizeof(struct mn_report);
    b->index_at = (uint32_t)at;
    return align8(at + s->index_bytes);
}

/* Bytes of the arena that the rows need: large fields on pages of their own, the small ones
 * together. */
static uint64_t
fields_bytes(const struct mn_submit *s, uint64_t *small)
{
    uint64_t big = 0;
    *small = 0;
    for (uint32_t f = 0; f < s->nfields; f++) {
        uint64_t bytes = s->row_bytes[f] * s->nrows;
        if (bytes >= MN_FIELD_BIG) {
            big += mn_page_round(bytes);
        }
        else {
            *small += (bytes + MN_FIELD_ALIGN - 1) & ~(uint64_t)(MN_FIELD_ALIGN - 1);
        }
    }
    return big + mn_page_round(*small);
}

static int
take_range(struct mn_engine *e, struct mn_batch *b, uint64_t bytes, uint64_t *off)
{
    int rc = mn_extents_alloc(e->arena, bytes, off);
    if (rc == 0) {
        rc = mn_batch_own(b, *off, mn_page_round(bytes));
        if (rc < 0) {
            mn_range_free(e->arena, *off, mn_page_round(bytes));
        }
    }
    /* What is lent comes back in a moment, and may be what is missing. */
    return rc == -ENOMEM && mn_extents_lent(e->arena) != 0 ? -EAGAIN : rc;
}

static int
take_fields(struct mn_engine *e, struct mn_batch *b, const struct mn_submit *s,
            uint64_t *field_off)
{
    uint64_t small, small_off = 0;
    uint64_t need = fields_bytes(s, &small);
    if (need == 0) {
        return 0;
    }
    /* With a plan the limit is its business: it lets the head through in any case, because
     * nothing comes back before the head is delivered. */
    if (e->plan == NULL && mn_extents_used(e->arena) + need > e->limit && e->inflight != 0) {
        return -ENOMEM;
    }
    int rc = small != 0 ? take_range(e, b, small, &small_off) : 0;
    for (uint32_t f = 0; f < s->nfields && rc == 0; f++) {
        uint64_t bytes = s->row_bytes[f] * s->nrows;
        if (bytes >= MN_FIELD_BIG) {
            rc = take_range(e, b, bytes, &field_off[f]);
        }
        else {
            field_off[f] = small_off;
            small_off += (bytes + MN_FIELD_ALIGN - 1) & ~(uint64_t)(MN_FIELD_ALIGN - 1);
        }
    }
    return rc;
}

static void
fill_block(struct mn_block *b, const struct mn_submit *s, uint32_t ntasks)
{
    b->number = s->number;
    b->epoch = s->epoch;
    b->position = s->position;
    b->base_seed = s->base_seed;
    b->nrows = s->nrows;
    b->ntasks = ntasks;
    b->nfields = s->nfields;
    b->layout = s->layout;
    b->index_kind = s->index_kind;
    b->seeded = s->seeded;
    b->user_epoch = s->user_epoch;
    b->index_bytes = s->index_bytes;
    memset(mn_block_reports(b), 0, s->nrows * sizeof(struct mn_report));
    if (s->index_bytes != 0) {
        memcpy(mn_block_index(b), s->index, s->index_bytes);
    }
}

static void
fill_task(struct mn_task *t, uint64_t block_off, const struct mn_submit *s, uint32_t row0,
          uint32_t nrows)
{
    t->block_off = block_off;
    t->row0 = row0;
    t->nrows = nrows;
    t->kind = s->kind;
    t->flags = t->why = 0;
    t->env_off = t->env_len = 0;
}

/* What the trainer wrote is its own to know: the descriptor is where others write, too. */
static void
note_task(struct mn_engine *e, uint32_t task, const struct mn_task *t)
{
    struct mn_result *r = &e->results[task];
    r->row0 = t->row0;
    r->nrows = t->nrows;
    r->kind = t->kind;
    r->flags = 0;
    r->accepted = false;
}

/* Whether there may be something on a lane. */
static bool
waits_on(const struct mn_engine *e, uint32_t lane)
{
    const struct mn_lane *l = mn_lane_at(&e->shm, lane);
    return mn_a64_load_acquire(&l->hint) != mn_a64_load_seqcst(&l->tail);
}

/* Wakes a sleeping worker; true if it slept. Others may sleep there, too: the dead, and threads
 * that wait to be wanted. */
static bool
ring_worker(const struct mn_engine *e, uint32_t w)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    return mn_a32_load_seqcst(&k->state) == MN_WORKER_READY && mn_bell_ring(&k->bell);
}

void
mn_engine_ring_workers(struct mn_engine *e, uint32_t n)
{
    uint32_t workers = e->shm.ctl->nworkers;
    for (uint32_t w = 0; w < workers && n != 0; w++) { /* what only they may take comes first */
        n -= waits_on(e, MN_LANE_WORKER + w) && ring_worker(e, w);
    }
    bool shared = waits_on(e, MN_LANE_EXPRESS) || waits_on(e, MN_LANE_NORMAL);
    for (uint32_t w = 0; w < workers && shared && n != 0; w++) {
        n -= ring_worker(e, w);
    }
}

static int
refuse(struct mn_engine *e, enum mn_refusal_why why, uint64_t need, uint64_t all)
{
    e->refusal = (struct mn_refusal){why, need, all};
    return why == MN_REFUSED_TASKS ? -EAGAIN : -ENOMEM;
}

static int
make_block(struct mn_engine *e, const struct mn_submit *s, struct mn_batch *b,
           uint32_t ntasks)
{
    struct mn_block plan;
    memset(&plan, 0, sizeof(plan));
    uint64_t bytes = block_bytes(s, ntasks, &plan);
    if (ntasks > e->nfree) {
        return refuse(e, MN_REFUSED_TASKS, ntasks, e->shm.ctl->ntasks);
    }
    int rc = mn_extents_alloc(e->input, bytes, &b->block_off);
    if (rc < 0) {
        return refuse(e, MN_REFUSED_RECORDS, bytes, e->shm.ctl->input_bytes);
    }
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    plan.bytes = bytes;
    *block = plan;
    rc = take_fields(e, b, s, mn_block_fields(block));
    if (rc < 0) {
        for (uint32_t i = 0; i < b->nranges; i++) {
            mn_range_free(e->arena, b->ranges[i].off, b->ranges[i].bytes);
        }
        mn_range_free(e->input, b->block_off, bytes);
        return refuse(e, MN_REFUSED_ROWS, fields_bytes(s, &bytes), e->shm.ctl->arena_bytes);
    }
    fill_block(block, s, ntasks);
    return 0;
}

int
mn_batch_make(struct mn_engine *e, const struct mn_submit *s, const uint32_t *row0,
              uint32_t ntasks, uint64_t *block_off)
{
    size_t bytes = sizeof(struct mn_batch) + s->nrows * sizeof(struct mn_report);
    struct mn_batch *b = calloc(1, bytes);
    if (b == NULL) {
        return refuse(e, MN_REFUSED_PRIVATE, bytes, 0);
    }
    uint32_t total = ntasks + (s->kind == MN_KIND_PART);
    int rc = make_block(e, s, b, total);
    if (rc < 0) {
        free(b->ranges);
        free(b);
        return rc;
    }
    uint32_t *tasks = mn_block_tasks(mn_block_at(&e->shm, b->block_off));
    for (uint32_t i = 0; i < total; i++) {
        tasks[i] = e->free_tasks[--e->nfree];
        e->by_task[tasks[i]] = b;
        struct mn_task *t = mn_task_at(&e->shm, tasks[i]);
        /* Relaxed: on no lane, and no part is on one, so no worker looks at it. */
        if (i == ntasks) {
            fill_task(t, b->block_off, s, 0, s->nrows);
            t->kind = MN_KIND_COLLATE;
            t->lane = UINT32_MAX;
            note_task(e, tasks[i], t);
            mn_a64_store_relaxed(&t->word,
                                 mn_task_word(++e->gens[tasks[i]], 0, 0, MN_TASK_WAITING));
            break;
        }
        fill_task(t, b->block_off, s, row0[i], row0[i + 1] - row0[i]);
        note_task(e, tasks[i], t);
        mn_a64_store_relaxed(&t->word, mn_task_word(0, 0, 0, MN_TASK_PLANNED));
    }
    b->sequence = s->sequence;
    batch_link(e, b);
    *block_off = b->block_off;
    return 0;
}

int
mn_engine_submit(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off)
{
    uint32_t rows[2] = {0, s->nrows};
    struct mn_submit own = *s;
    mn_mutex_lock(&e->mutex);
    own.sequence = e->submitted++;
    int rc = mn_batch_make(e, &own, rows, 1, block_off);
    if (rc < 0 && mn_engine_no_lent(e)) {
        rc = mn_batch_make(e, &own, rows, 1, block_off);
    }
    if (rc == 0) {
        uint32_t task = mn_block_tasks(mn_block_at(&e->shm, *block_off))[0];
        rc = mn_board_publish(&e->shm, &e->heads[s->lane], s->lane, task, ++e->gens[task], 0);
        if (rc != MN_OK) { /* the lane is full: it comes back when its worker has taken some */
            mn_batch_drop(e, mn_batch_find(e, *block_off));
            rc = -EAGAIN;
        }
    }
    mn_mutex_unlock(&e->mutex);
    if (rc == 0) {
        mn_bell_ring(&mn_worker_at(&e->shm, s->lane - MN_LANE_WORKER)->bell);
    }
    return rc;
}

int
mn_engine_post(struct mn_engine *e, const void *bytes, uint64_t n, uint64_t *off)
{
    mn_mutex_lock(&e->mutex);
    int rc = mn_extents_alloc(e->input, n + sizeof(n), off);
    if (rc == 0 && *off > UINT32_MAX) { /* blocks name it in 32 bits */
        mn_range_free(e->input, *off, n + sizeof(n));
        rc = -ENOMEM;
    }
    mn_mutex_unlock(&e->mutex);
    if (rc == 0) {
        memcpy(mn_at(&e->shm, *off), &n, sizeof(n));
        memcpy(mn_at(&e->shm, *off + sizeof(n)), bytes, n);
    }
    return rc;
}

/* ---- reading ----------------------------------------------------------------------- */

enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    enum mn_block_status out = MN_BLOCK_DONE;
    bool waiting = false; /* a collate task, which does not run once a part is lost */
    for (uint32_t i = 0; i < block->ntasks; i++) {
        /* seq_cst: the look after the announce, see [T3] in mn_message.h */
        uint64_t word = mn_a64_load_seqcst(&mn_task_at(&e->shm, tasks[i])->word); /* [T4] */
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_LOST) {
            out = MN_BLOCK_LOST;
        }
        else if (st == MN_TASK_WAITING) {
            waiting = true;
        }
        else if (st == MN_TASK_QUEUED || st == MN_TASK_PLANNED
                 || (st == MN_TASK_RUNNING
                     && mn_word_worker(word) < e->shm.ctl->nworkers)) {
            return MN_BLOCK_BUSY; /* of what makes no sense nobody has to wait for the end */
        }
    }
    return waiting && out == MN_BLOCK_DONE ? MN_BLOCK_BUSY : out;
}

uint64_t
mn_engine_done_ns(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    uint64_t last = 0;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *r = &e->results[tasks[i]];
        uint64_t done = r->accepted ? r->done_ns : 0;
        last = done > last ? done : last;
    }
    return last;
}

int
mn_engine_keep(struct mn_engine *e, uint64_t block_off, uint64_t off, uint64_t bytes)
{
    bytes = mn_page_round(bytes);
    mn_mutex_lock(&e->mutex);
    int rc = -EINVAL;
    struct mn_batch *b = e->closing ? NULL : mn_batch_find(e, block_off);
    if (b != NULL) {
        mn_batch_accept_envelopes(e, b);
    }
    for (uint32_t i = 0; b != NULL && i < b->nranges; i++) {
        struct mn_range r = b->ranges[i];
        if (off < r.off || off + bytes > r.off + r.bytes) {
            continue;
        }
        /* Freeing in parts needs a node of the allocator for each part. */
        rc = mn_extents_reserve(e->arena, 2);
        if (rc == 0) {
            rc = mn_batch_own(b, off + bytes, r.off + r.bytes - off - bytes);
        }
        if (rc == 0) {
            b->ranges[i].bytes = off - r.off;
            if (b->ranges[i].bytes == 0) {
                b->ranges[i] = b->ranges[--b->nranges];
            }
            e->kept_bytes += bytes;
            e->refs++;
        }
        break;
    }
    mn_mutex_unlock(&e->mutex);
    return rc;
}

/* Learns what results outside of rows take, for the budget of those to come. */
static void
learn_envelopes(struct mn_engine *e, struct mn_block *block)
{
    const uint32_t *tasks = mn_block_tasks(block);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *r = &e->results[tasks[i]];
        bytes += r->accepted && r->flags == MN_FLAG_ENVELOPE ? r->env_len : 0;
    }
    e->mean_envelope_bytes = (3 * e->mean_envelope_bytes + bytes) / 4;
}

void
mn_batch_retire(struct mn_engine *e, uint64_t block_off)
{
    struct mn_batch *b = mn_batch_find(e, block_off);
    mn_assert(b != NULL);
    mn_plan_learn(e, b);
    learn_envelopes(e, mn_block_at(&e->shm, block_off));
    mn_batch_drop(e, b);
}

void
mn_engine_retire(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    mn_batch_retire(e, block_off);
    mn_mutex_unlock(&e->mutex);
}

void
mn_batch_abandon(struct mn_engine *e, uint64_t block_off)
{
    struct mn_batch *b = mn_batch_find(e, block_off);
    mn_assert(b != NULL);
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        (void)mn_board_cancel(&e->shm, tasks[i]);
    }
    if (mn_batch_idle(e, b)) {
        mn_batch_drop(e, b);
    }
    else {
        b->abandoned = true; /* the engine drops it when its last worker is through */
    }
}

void
mn_engine_abandon(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    mn_batch_abandon(e, block_off);
    mn_mutex_unlock(&e->mutex);
}
