/* Shared by the tests of run queues, engines and workers: blocks whose bytes can be checked.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every byte of a row follows from the row's position and the field's number, every byte of an
 * envelope from the position of the task's first row. So a reader knows the expected bytes, and
 * detects a row that was written twice, not at all or into another's place.
 */
#ifndef MN_RIG_H
#define MN_RIG_H

#include "base/mn_base.h"
#include "engine/mn_engine.h"
#include "engine/mn_engine_state.h"
#include "schedule/mn_plan_state.h"
#include "workers/mn_tasks_and_retries.h"
#include "mn_test.h"

#define RIG_FIELDS 3u
#define RIG_WORKERS 8u

/* One step of the engine thread, without that thread. */
static MN_UNUSED bool
rig_step(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    bool any = mn_engine_step(e);
    mn_engine_unlock(e);
    return any;
}

/* No record of a batch is left: all of their memory can be allocated at once. */
static MN_UNUSED void
rig_has_no_records(struct mn_engine *e)
{
    uint64_t off, bytes = e->shm.ctl->input_bytes;
    mn_mutex_lock(&e->mutex);
    CHECK_EQ(mn_arena_record(&e->arena, bytes, &off), 0);
    mn_arena_free_record(&e->arena, off, bytes);
    mn_mutex_unlock(&e->mutex);
}

/* Abandons a block. */
static MN_UNUSED void
rig_abandon(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    mn_batch_abandon(e, mn_batch_find(e, block_off));
    mn_engine_unlock(e);
}

static MN_UNUSED void
rig_fill(void *at, uint64_t bytes, uint64_t key)
{
    unsigned char *p = at;
    uint64_t state = key, i = 0;
    for (; i + 8 <= bytes; i += 8) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        memcpy(p + i, &state, 8);
    }
    for (; i < bytes; i++) {
        p[i] = (unsigned char)(key + i);
    }
}

static MN_UNUSED bool
rig_holds(const void *at, uint64_t bytes, uint64_t key)
{
    const unsigned char *p = at;
    uint64_t state = key, i = 0, word;
    for (; i + 8 <= bytes; i += 8) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        memcpy(&word, p + i, 8);
        if (word != state) {
            return false;
        }
    }
    for (; i < bytes; i++) {
        if (p[i] != (unsigned char)(key + i)) {
            return false;
        }
    }
    return true;
}

static MN_UNUSED uint64_t
rig_row_key(uint64_t position, uint32_t field)
{
    return position * 16 + field + 1;
}

static MN_UNUSED uint64_t
rig_env_key(uint64_t position)
{
    return ~position;
}

static MN_UNUSED bool
rig_envelope_holds(const struct mn_shm *shm, const struct mn_task *t, uint64_t position)
{
    const struct mn_envelope *env = mn_at(shm, t->env_off);
    return env->pickle_bytes == t->env_len - sizeof(*env)
           && rig_holds(env + 1, env->pickle_bytes, rig_env_key(position + t->row0));
}

/* The row bytes of the fields follow from the layout's number, so that both sides know them. */
static MN_UNUSED void
rig_row_bytes(uint32_t layout, uint64_t scale, uint64_t *row_bytes)
{
    uint64_t state = layout;
    for (uint32_t f = 0; f < RIG_FIELDS; f++) {
        row_bytes[f] = mn_test_random(&state) % (f == 0 ? 64 : scale) + 1;
    }
}

/* ---- the worker's side ---- */

struct rig_worker {
    struct mn_worker_side side;
    uint64_t scale;       /* of the fields, the same as the submitter's */
    uint64_t env_max;     /* longest envelope; 0: no envelopes */
    bool first_try_only;  /* envelopes only at a task's first try */
    mn_a32 *done_rows;    /* [positions] or NULL: how often each row was written */
    uint64_t nothing_fits; /* envelopes that were refused */
};

/* Sends an envelope, whose length follows from its task's first row. Returns 0, or MN_CLOSED. */
static MN_UNUSED int
rig_envelope(struct rig_worker *w, struct mn_task *t, const struct mn_block *b)
{
    uint64_t state = b->position + t->row0, off;
    uint64_t pick = mn_test_random(&state);
    uint64_t len = pick % 3 == 0 ? pick % w->env_max + 1 : pick % 9000 + 1;
    len += sizeof(struct mn_envelope);
    int rc = mn_worker_lease(&w->side, len, &off);
    if (rc == MN_CLOSED) {
        return rc;
    }
    if (rc == 0) {
        struct mn_envelope *env = mn_at(&w->side.shm, off);
        *env = (struct mn_envelope){0, sizeof(*env), len - sizeof(*env)};
        rig_fill(env + 1, len - sizeof(*env), rig_env_key(b->position + t->row0));
        t->env_off = off;
        t->env_len = len;
        t->flags = MN_FLAG_ENVELOPE;
    }
    else {
        CHECK_EQ(rc, -ENOMEM);
        t->flags = MN_FLAG_NO_ROOM;
        w->nothing_fits++;
    }
    return 0;
}

/* Checks that the collating worker sees all that the parts have left, whole. */
static MN_UNUSED void
rig_collate(struct rig_worker *w, struct mn_task *t, struct mn_block *b)
{
    uint32_t rows = 0;
    for (uint32_t i = 0; i + 1 < b->ntasks; i++) {
        const struct mn_task *part = mn_task_at(&w->side.shm, mn_block_tasks(b)[i]);
        CHECK_EQ(mn_word_status(mn_a64_load_relaxed(&part->word)), MN_TASK_DONE);
        CHECK_EQ(part->row0, rows);
        rows += part->nrows;
        CHECK(!(part->flags & MN_FLAG_ENVELOPE)
              || rig_envelope_holds(&w->side.shm, part, b->position));
    }
    CHECK_EQ(rows, b->nrows);
    for (uint32_t row = 0; row < rows; row++) {
        CHECK_EQ(mn_block_reports(b)[row].status, MN_ROW_WRITTEN);
    }
    t->cpu_ns = b->number + 1; /* for rig_check */
}

/* Runs a claimed task. Returns 0, or MN_CLOSED if the engine stopped meanwhile. */
static MN_UNUSED int
rig_run(struct rig_worker *w, uint32_t task)
{
    struct mn_task *t = mn_task_at(&w->side.shm, task);
    struct mn_block *b = mn_block_at(&w->side.shm, t->block_off);
    if (t->kind == MN_KIND_COLLATE) {
        rig_collate(w, t, b);
        CHECK_EQ(mn_worker_done(&w->side, task), MN_NO_TASK);
        return 0;
    }
    const int64_t *index = mn_block_index(b);
    uint64_t row_bytes[RIG_FIELDS];
    uint32_t attempt = mn_word_attempt(mn_a64_load_relaxed(&t->word));
    rig_row_bytes(b->layout, w->scale, row_bytes);
    for (uint32_t row = t->row0; row < t->row0 + t->nrows; row++) {
        uint64_t position = (uint64_t)index[row];
        CHECK_EQ(position, b->position + row);
        for (uint32_t f = 0; f < b->nfields; f++) {
            rig_fill((char *)mn_at(&w->side.shm, mn_block_fields(b)[f]) + row * row_bytes[f],
                     row_bytes[f], rig_row_key(position, f));
        }
        mn_block_reports(b)[row].status = MN_ROW_WRITTEN;
        mn_block_reports(b)[row].wall_ns = position;
        if (w->done_rows != NULL) {
            mn_a32_add_relaxed(&w->done_rows[position], 1);
        }
    }
    t->wall_ns = 1000;
    t->cpu_ns = 0;
    bool envelope = w->env_max != 0 && (b->position + t->row0) % 3 == 0;
    if (envelope && !(w->first_try_only && attempt > 0)
        && rig_envelope(w, t, b) == MN_CLOSED) {
        return MN_CLOSED;
    }
    uint32_t collate = mn_worker_done(&w->side, task);
    return collate != MN_NO_TASK ? rig_run(w, collate) : 0;
}

/* Runs tasks until the engine stops. */
static MN_UNUSED void
rig_work(struct rig_worker *w)
{
    uint32_t task;
    mn_a32_store_release(&w->side.me->state, MN_WORKER_READY);
    for (;;) {
        int rc = mn_worker_claim(&w->side, INT64_C(20000000000), &task);
        if (rc == MN_CLOSED || (rc == MN_OK && rig_run(w, task) == MN_CLOSED)) {
            return;
        }
    }
}

/* ---- the trainer's side ---- */

struct rig_block {
    uint64_t off, number, position;
    uint32_t nrows;
    uint64_t sequence; /* balanced: place in the order of delivery */
};

/* A range that the test retains, as a program retains batches. */
struct rig_range {
    uint64_t off, bytes, sum;
};

struct rig {
    struct mn_engine *e;
    uint64_t scale, env_max;
    uint64_t number, position; /* of the next batch */
    struct mn_form form;
    uint64_t row_bytes[2][RIG_FIELDS]; /* of the last two forms */
    bool first_try_only;
    bool parts; /* batches are made in parts, which one more task collates */
};

/* Sets the layout of rows from now on; 0: none, samples travel in envelopes. */
static MN_UNUSED void
rig_form(struct rig *r, uint32_t layout)
{
    memcpy(r->row_bytes[1], r->row_bytes[0], sizeof(r->row_bytes[0]));
    rig_row_bytes(layout, r->scale, r->row_bytes[0]);
    r->form = (struct mn_form){.kind = layout != 0 ? MN_KIND_ROWS : MN_KIND_SAMPLES,
                               .layout = layout,
                               .nfields = layout != 0 ? RIG_FIELDS : 0,
                               .row_bytes = r->row_bytes[0]};
    if (r->e->plan != NULL) {
        mn_engine_set_form(r->e, &r->form);
    }
}

static MN_UNUSED int64_t *
rig_index(const struct rig *r, uint32_t nrows)
{
    int64_t *index = calloc((size_t)nrows + 1, sizeof(*index));
    CHECK(index != NULL);
    for (uint32_t i = 0; i < nrows; i++) {
        index[i] = (int64_t)(r->position + i);
    }
    return index;
}

/* Static: returns 0 and the block, or the error of mn_engine_submit(). */
static MN_UNUSED int
rig_submit(struct rig *r, uint32_t nrows, uint32_t queue, struct rig_block *out)
{
    int64_t *index = rig_index(r, nrows);
    struct mn_plan_batch b = {.number = r->number,
                              .position = r->position,
                              .nrows = nrows,
                              .index_kind = MN_INDEX_INT64,
                              .index = index,
                              .index_bytes = nrows * sizeof(*index)};
    *out = (struct rig_block){0, r->number, r->position, nrows, 0};
    int rc = mn_engine_submit(r->e, &b, &r->form, queue, &out->off);
    free(index);
    if (rc == 0) {
        r->number++;
        r->position += nrows;
    }
    return rc;
}

/* Balanced: returns the result of mn_engine_plan(). */
static MN_UNUSED int
rig_plan_more(struct rig *r, uint32_t nrows, struct rig_block *out)
{
    int64_t *index = rig_index(r, nrows);
    struct mn_plan_batch b = {.sequence = r->e->plan->view.order.next,
                              .number = r->number,
                              .position = r->position,
                              .nrows = nrows,
                              .whole = r->parts,
                              .splits = r->parts,
                              .index_kind = MN_INDEX_INT64,
                              .index = index,
                              .index_bytes = nrows * sizeof(*index)};
    *out = (struct rig_block){0, b.number, b.position, nrows, b.sequence};
    if (r->e->plan->cfg.costs == NULL) { /* else the costs decide */
        mn_mutex_lock(&r->e->mutex);
        r->e->plan->pace.split = r->parts;
        mn_mutex_unlock(&r->e->mutex);
    }
    int rc = mn_engine_plan(r->e, &b);
    free(index);
    if (rc == MN_OK) {
        r->number++;
        r->position += nrows;
    }
    return rc;
}

static MN_UNUSED int
rig_plan(struct rig *r, uint32_t nrows, struct rig_block *out)
{
    int rc = rig_plan_more(r, nrows, out);
    mn_engine_plan_end(r->e); /* no test must be asked for more */
    return rc;
}

/* Checks every byte of a done block. */
static MN_UNUSED void
rig_check(const struct rig *r, const struct rig_block *b)
{
    struct mn_block *block = mn_block_at(&r->e->shm, b->off);
    uint64_t row_bytes[RIG_FIELDS];
    rig_row_bytes(block->layout, r->scale, row_bytes);
    CHECK_EQ(block->number, b->number);
    for (uint32_t row = 0; row < b->nrows; row++) {
        CHECK_EQ(mn_block_reports(block)[row].status, MN_ROW_WRITTEN);
        CHECK_EQ(mn_block_reports(block)[row].wall_ns, b->position + row);
        for (uint32_t f = 0; f < block->nfields; f++) {
            const char *at = mn_at(&r->e->shm, mn_block_fields(block)[f]);
            CHECK(rig_holds(at + row * row_bytes[f], row_bytes[f],
                            rig_row_key(b->position + row, f)));
        }
    }
    uint64_t rows = 0;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_task *t = mn_task_at(&r->e->shm, mn_block_tasks(block)[i]);
        if (t->kind == MN_KIND_COLLATE) {
            CHECK(r->parts && i > 0 && i + 1 == block->ntasks);
            CHECK_EQ(t->cpu_ns, block->number + 1);
            break;
        }
        CHECK_EQ(t->row0, rows);
        rows += t->nrows;
        if (t->flags & MN_FLAG_ENVELOPE) {
            CHECK(rig_envelope_holds(&r->e->shm, t, b->position));
        }
        else if (!r->first_try_only && r->env_max != 0 && (b->position + t->row0) % 3 == 0) {
            CHECK(t->flags == MN_FLAG_NO_ROOM);
        }
    }
    CHECK_EQ(rows, b->nrows);
}

/* Returns a checksum of a retained range. FNV over words: any change of a word changes it. */
static MN_UNUSED uint64_t
rig_sum(const struct rig *r, const struct rig_range *range)
{
    const char *at = mn_at(&r->e->shm, range->off);
    uint64_t sum = UINT64_C(0xcbf29ce484222325), word;
    for (uint64_t i = 0; i + 8 <= range->bytes; i += 8) {
        memcpy(&word, at + i, 8);
        sum = (sum ^ word) * UINT64_C(0x100000001b3);
    }
    return sum;
}

/* Retains a range of a done block: its first big field or its first envelope. */
static MN_UNUSED bool
rig_retain(const struct rig *r, const struct rig_block *b, struct rig_range *out)
{
    struct mn_block *block = mn_block_at(&r->e->shm, b->off);
    uint64_t row_bytes[RIG_FIELDS];
    rig_row_bytes(block->layout, r->scale, row_bytes);
    out->bytes = 0;
    for (uint32_t f = 0; f < block->nfields && out->bytes == 0; f++) {
        if (row_bytes[f] * b->nrows >= MN_FIELD_BIG) {
            out->off = mn_block_fields(block)[f];
            out->bytes = row_bytes[f] * b->nrows;
        }
    }
    for (uint32_t i = 0; i < block->ntasks && out->bytes == 0; i++) {
        const struct mn_task *t = mn_task_at(&r->e->shm, mn_block_tasks(block)[i]);
        if (t->flags & MN_FLAG_ENVELOPE) {
            out->off = t->env_off;
            out->bytes = t->env_len;
        }
    }
    if (out->bytes == 0) {
        return false;
    }
    CHECK_EQ(mn_engine_retain(r->e, b->off, out->off, out->bytes), 0);
    out->sum = rig_sum(r, out);
    return true;
}

#endif
