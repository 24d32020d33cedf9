/* mn_batches.c - see mn_batches.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"
#include "engine/mn_batches.h"
#include "engine/mn_engine_state.h"
#include "engine/mn_shared_costs.h"
#include "os/mn_thread.h"
#include "workers/mn_records.h"

/* ---- in flight -------------------------------------------------------------------------- */

void
mn_engine_unlock(struct mn_engine *e)
{
    struct mn_wakes due = mn_crew_take_wakes(&e->crew);
    due.engine |= mn_arena_room_came(&e->arena);
    mn_mutex_unlock(&e->mutex);
    mn_crew_wake(&e->crew, &due);
}

struct mn_batch *
mn_batch_find(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    struct mn_flight *f = &e->flight;
    struct mn_batch *b = block->ntasks != 0 ? f->by_task[mn_block_tasks(block)[0]] : f->last;
    while (b != NULL && b->planned.block_off != block_off) {
        b = b->prev; /* without tasks: made just now, for rows gathered from other batches */
    }
    return b;
}

static struct mn_block *
block_of(const struct mn_engine *e, const struct mn_batch *b)
{
    return mn_block_at(&e->shm, b->planned.block_off);
}

/* Adds the batch to the end of the list of batches in flight. */
static void
link_batch(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_flight *f = &e->flight;
    b->prev = f->last;
    if (f->last != NULL) {
        f->last->next = b;
    }
    else {
        f->first = b;
    }
    f->last = b;
    f->n++;
}

/* Removes the batch from the list of batches in flight. */
static void
unlink_batch(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_flight *f = &e->flight;
    if (b->prev != NULL) {
        b->prev->next = b->next;
    }
    else {
        f->first = b->next;
    }
    if (b->next != NULL) {
        b->next->prev = b->prev;
    }
    else {
        f->last = b->prev;
    }
    f->n--;
}

bool
mn_batch_idle(struct mn_engine *e, const struct mn_batch *b)
{
    struct mn_block *block = block_of(e, b);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        enum mn_task_status st = mn_word_status(mn_tasks_word(&e->tasks, tasks[i]));
        if (st == MN_TASK_QUEUED || st == MN_TASK_RUNNING) {
            return false;
        }
    }
    return true;
}

enum mn_block_status
mn_engine_poll(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    enum mn_block_status out = MN_BLOCK_DONE;
    bool waiting = false; /* for a collate task, which does not run once a part is lost */
    for (uint32_t i = 0; i < block->ntasks; i++) {
        /* seq_cst: the look after prepare_wait, see [T3] in mn_records.h */
        uint64_t word = mn_tasks_word(&e->tasks, tasks[i]);
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_LOST) {
            out = MN_BLOCK_LOST;
        }
        else if (st == MN_TASK_WAITING) {
            waiting = true;
        }
        else if (st != MN_TASK_DONE) {
            return MN_BLOCK_BUSY;
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
        const struct mn_result *r = &e->tasks.results[tasks[i]];
        uint64_t done = r->accepted ? r->done_ns : 0;
        last = done > last ? done : last;
    }
    return last;
}

/* ---- results, copied out and checked ---------------------------------------------------- */

/* ---- envelopes --------------------------------------------------------------------- */

bool
mn_envelope_part_look(const void *at, uint64_t len, const struct mn_envelope *head, uint64_t i,
                      struct mn_envelope_part *out)
{
    const char *parts = (const char *)at + sizeof(*head);
    if (i >= head->nparts) {
        return false;
    }
    memcpy(out, parts + i * sizeof(*out), sizeof(*out));
    bool big = out->bytes >= MN_FIELD_BIG; /* on pages of its own, which can be handed out */
    return out->at <= len && out->bytes <= len - out->at && (!big || out->at % MN_PAGE == 0);
}

bool
mn_envelope_look(const void *at, uint64_t len, struct mn_envelope *out)
{
    struct mn_envelope_part part;
    if (len < sizeof(*out)) {
        return false;
    }
    memcpy(out, at, sizeof(*out));
    bool sound = out->nparts <= (len - sizeof(*out)) / sizeof(part) && out->pickle_at <= len
                 && out->pickle_bytes <= len - out->pickle_at;
    for (uint64_t i = 0; sound && i < out->nparts; i++) {
        sound = mn_envelope_part_look(at, len, out, i, &part);
    }
    return sound;
}

/* ---- finished tasks ---------------------------------------------------------------- */

/* Copies the reports on the rows. No reported time may be longer than the machine's uptime. */
static enum mn_damage
read_reports(struct mn_engine *e, struct mn_batch *b, const struct mn_result *r)
{
    if (r->kind == MN_KIND_COLLATE) {
        return MN_SOUND; /* its rows were reported by the parts */
    }
    struct mn_report *to = b->reports + r->row0;
    memcpy(to, mn_block_reports(block_of(e, b)) + r->row0,
           r->nrows * sizeof(*to));
    bool sound = true;
    for (uint32_t i = 0; i < r->nrows; i++) {
        bool known = to[i].status <= MN_ROW_ENVELOPE && to[i].wall_ns <= r->done_ns;
        bool there = r->flags != 0 || to[i].status == MN_ROW_WRITTEN;
        sound = sound && known && there;
    }
    if (!sound) {
        memset(to, 0, r->nrows * sizeof(*to));
    }
    return sound ? MN_SOUND : MN_DAMAGE_REPORTS;
}

/* Adds an envelope to the ranges that the batch frees. */
static enum mn_damage
read_envelope(struct mn_engine *e, struct mn_batch *b, struct mn_result *r)
{
    uint64_t pages = mn_page_round(r->env_len);
    if (r->env_off % MN_PAGE != 0 || r->env_len == 0 || pages < r->env_len) {
        return MN_DAMAGE_ENVELOPE;
    }
    int rc = mn_ranges_add(&b->ranges, r->env_off, pages);
    if (rc == 0) {
        rc = mn_arena_leases_take(&e->leases, r->worker, r->env_off, pages);
        b->ranges.n -= rc != 0;
    }
    if (rc == -EINVAL) {
        return MN_DAMAGE_ENVELOPE;
    }
    if (rc < 0) { /* no memory to record it: the worker continues to owe it */
        r->flags = MN_FLAG_NO_ROOM;
        return MN_SOUND;
    }
    if (!mn_envelope_look(mn_at(&e->shm, r->env_off), r->env_len, &r->envelope)) {
        return MN_DAMAGE_PARTS; /* damage inside its own envelope, which is freed with the batch */
    }
    return MN_SOUND;
}

/* Reads the record of a DONE task, once. Its worker has declared before that it is finished with
 * it. */
static enum mn_damage
accept_task(struct mn_engine *e, struct mn_batch *b, uint32_t task, uint64_t word)
{
    struct mn_result *r = &e->tasks.results[task];
    struct mn_task *t = mn_task_at(&e->shm, task);
    if (r->accepted) {
        return MN_SOUND;
    }
    r->worker = mn_word_worker(word);
    r->flags = t->flags;
    r->env_off = t->env_off;
    r->env_len = t->env_len;
    r->wall_ns = t->wall_ns;
    r->cpu_ns = t->cpu_ns;
    r->done_ns = t->done_ns;
    if (r->done_ns > mn_now_ns() || r->wall_ns > r->done_ns || r->cpu_ns > INT64_MAX) {
        return MN_DAMAGE_TIMES;
    }
    bool refused = r->flags == MN_FLAG_NO_ROOM;
    if (r->flags > MN_FLAG_NO_ROOM
        || (refused && e->crew.members[r->worker].damage != MN_SOUND)) {
        return MN_DAMAGE_ENVELOPE;
    }
    enum mn_damage damage = read_reports(e, b, r);
    if (damage == MN_SOUND && r->flags == MN_FLAG_ENVELOPE) {
        damage = read_envelope(e, b, r);
    }
    r->accepted = damage == MN_SOUND;
    return damage;
}

/* Ends the worker that wrote a damaged record, unless it is dead: then this is its sweep. */
static void
reject(struct mn_engine *e, uint32_t task, uint64_t word, enum mn_damage damage)
{
    uint32_t worker = mn_word_worker(word);
    mn_tasks_reject(&e->tasks, task, word);
    if (mn_a32_load_acquire(&mn_worker_at(&e->shm, worker)->state) != MN_WORKER_EXITED) {
        mn_crew_damaged(&e->crew, worker, damage);
    }
}

void
mn_batch_accept_some(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_block *block = block_of(e, b);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks && b->planned.state < MN_BATCH_DONE; i++) {
        uint64_t word = mn_tasks_word(&e->tasks, tasks[i]);
        bool done = mn_word_status(word) == MN_TASK_DONE;
        enum mn_damage damage = done ? accept_task(e, b, tasks[i], word) : MN_SOUND;
        if (damage != MN_SOUND) {
            reject(e, tasks[i], word, damage);
        }
    }
}

enum mn_block_status
mn_batch_accept(struct mn_engine *e, struct mn_batch *b)
{
    mn_batch_accept_some(e, b);
    enum mn_block_status status = mn_engine_poll(e, b->planned.block_off);
    if (status != MN_BLOCK_BUSY && b->planned.state < MN_BATCH_DONE) {
        if (e->plan != NULL && mn_plan_at(e->plan, b->planned.sequence) == &b->planned) {
            mn_plan_done(e->plan, &b->planned);
        }
        b->planned.state = MN_BATCH_DONE;
    }
    return status;
}

void
mn_batch_note_envelopes(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_block *block = block_of(e, b);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        uint64_t word = mn_tasks_word(&e->tasks, tasks[i]);
        if (mn_word_status(word) == MN_TASK_DONE) {
            (void)accept_task(e, b, tasks[i], word); /* damage is ignored: not read again */
        }
    }
}

/* ---- for the caller that was given the batch ---------------------------------------- */

/* Never NULL: the block of a batch that the caller was given lives until the caller ends it. */
static struct mn_batch *
find(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex); /* only for the list: the batch is the caller's */
    struct mn_batch *b = mn_batch_find(e, block_off);
    mn_mutex_unlock(&e->mutex);
    return b;
}

enum mn_block_status
mn_engine_settle(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    struct mn_batch *b = mn_batch_find(e, block_off);
    enum mn_block_status status = mn_engine_poll(e, block_off);
    if (b != NULL && status != MN_BLOCK_BUSY) {
        status = mn_batch_accept(e, b);
    }
    mn_engine_unlock(e);
    return status;
}

const struct mn_report *
mn_engine_read_reports(struct mn_engine *e, uint64_t block_off)
{
    return find(e, block_off)->reports;
}

/* ---- blocks: made, retained, ended ------------------------------------------------------ */

static uint64_t
align8(uint64_t n)
{
    return (n + 7) & ~UINT64_C(7);
}

void
mn_batch_drop(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_block *block = block_of(e, b);
    mn_batch_note_envelopes(e, b);
    mn_arena_free_ranges(&e->arena, &b->ranges);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        e->flight.by_task[tasks[i]] = NULL;
        mn_tasks_give(&e->tasks, tasks[i]);
    }
    mn_arena_free_record(&e->arena, b->planned.block_off, block->bytes);
    unlink_batch(e, b);
    mn_ranges_fini(&b->ranges);
    free(b->reports);
    b->reports = NULL;
    b->planned.block_off = 0;
    mn_planned_let_go(&b->planned);
}

/* ---- submit ------------------------------------------------------------------------ */

static uint64_t
block_bytes(const struct mn_plan_batch *s, const struct mn_form *form, uint32_t ntasks,
            struct mn_block *b)
{
    uint64_t at = align8(sizeof(*b));
    at = align8(at + ntasks * sizeof(uint32_t));
    b->fields_at = (uint32_t)at;
    at += form->nfields * sizeof(uint64_t);
    b->reports_at = (uint32_t)at;
    at += s->nrows * sizeof(struct mn_report);
    b->index_at = (uint32_t)at;
    return align8(at + s->index_bytes);
}

/* Returns the arena bytes that the rows need. Large fields lie on pages of their own, small ones
 * together. */
static uint64_t
fields_bytes(uint32_t nrows, const struct mn_form *form, uint64_t *small)
{
    uint64_t big = 0;
    *small = 0;
    for (uint32_t f = 0; f < form->nfields; f++) {
        uint64_t bytes = form->row_bytes[f] * nrows;
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
    int rc = mn_arena_alloc(&e->arena, bytes, off);
    if (rc == 0) {
        rc = mn_ranges_add(&b->ranges, *off, mn_page_round(bytes));
        if (rc < 0) {
            mn_arena_free(&e->arena, *off, mn_page_round(bytes));
        }
    }
    return rc;
}

static int
take_fields(struct mn_engine *e, struct mn_batch *b, const struct mn_form *form,
            uint64_t *field_off)
{
    uint32_t nrows = b->planned.batch.nrows;
    uint64_t small, small_off = 0;
    uint64_t need = fields_bytes(nrows, form, &small);
    if (need == 0) {
        return 0;
    }
    /* Balanced scheduling enforces the limit in the plan. The plan lets the head through in any
     * case, because no memory comes back before the head is delivered. */
    if (e->plan == NULL && mn_arena_exceeds(&e->arena, need) && e->flight.n != 0) {
        return -ENOMEM;
    }
    int rc = small != 0 ? take_range(e, b, small, &small_off) : 0;
    for (uint32_t f = 0; f < form->nfields && rc == 0; f++) {
        uint64_t bytes = form->row_bytes[f] * nrows;
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
fill_block(struct mn_engine *e, struct mn_block *b, const struct mn_plan_batch *s,
           const struct mn_form *form, uint32_t ntasks)
{
    b->number = s->number;
    b->epoch = s->epoch;
    b->position = s->position;
    b->base_seed = s->base_seed;
    b->nrows = s->nrows;
    b->spares = s->spares;
    b->ntasks = ntasks;
    b->nfields = form->nfields;
    b->layout = form->layout;
    b->index_kind = s->index_kind;
    b->seeded = s->seeded;
    b->apart = e->cfg.ready_batch != 0;
    b->user_epoch = s->user_epoch;
    b->index_bytes = s->index_bytes;
    b->serial = ++e->flight.serial;
    memset(mn_block_reports(b), 0, s->nrows * sizeof(struct mn_report));
    if (s->index_bytes != 0) {
        memcpy(mn_block_index(b), s->index, s->index_bytes);
    }
}

static int
refuse(struct mn_engine *e, enum mn_refusal_why why, uint64_t need, uint64_t all)
{
    e->refusal = (struct mn_refusal){why, need, all};
    return why == MN_REFUSED_TASKS ? -EAGAIN : -ENOMEM;
}

static int
alloc_block(struct mn_engine *e, struct mn_batch *b, const struct mn_form *form, uint32_t ntasks,
            uint64_t *block_off)
{
    const struct mn_plan_batch *s = &b->planned.batch;
    struct mn_block plan;
    memset(&plan, 0, sizeof(plan));
    uint64_t bytes = block_bytes(s, form, ntasks, &plan);
    if (ntasks > e->tasks.nfree) {
        return refuse(e, MN_REFUSED_TASKS, ntasks, e->shm.ctl->ntasks);
    }
    int rc = mn_arena_record(&e->arena, bytes, block_off);
    if (rc < 0) {
        return refuse(e, MN_REFUSED_RECORDS, bytes, e->shm.ctl->input_bytes);
    }
    struct mn_block *block = mn_block_at(&e->shm, *block_off);
    plan.bytes = bytes;
    *block = plan;
    rc = take_fields(e, b, form, mn_block_fields(block));
    if (rc < 0) {
        mn_arena_free_ranges(&e->arena, &b->ranges);
        mn_arena_free_record(&e->arena, *block_off, bytes);
        return refuse(e, MN_REFUSED_ROWS, fields_bytes(s->nrows, form, &bytes),
                      e->shm.ctl->arena_bytes);
    }
    fill_block(e, block, s, form, ntasks);
    return 0;
}

int
mn_batch_make(struct mn_engine *e, struct mn_batch *b, const struct mn_form *form,
              const uint32_t *row0, uint32_t ntasks)
{
    uint32_t nrows = b->planned.batch.nrows, total = ntasks + (form->kind == MN_KIND_PART);
    size_t bytes = (nrows + (size_t)1) * sizeof(*b->reports);
    uint64_t block_off;
    b->reports = calloc(1, bytes);
    int rc = b->reports != NULL ? alloc_block(e, b, form, total, &block_off)
                                : refuse(e, MN_REFUSED_PRIVATE, bytes, 0);
    if (rc < 0) {
        mn_ranges_fini(&b->ranges);
        free(b->reports);
        b->reports = NULL;
        return rc;
    }
    uint32_t *tasks = mn_block_tasks(mn_block_at(&e->shm, block_off));
    for (uint32_t i = 0; i < total; i++) {
        tasks[i] = i < ntasks ? mn_tasks_take(&e->tasks, block_off, form->kind, row0[i],
                                              row0[i + 1] - row0[i])
                              : mn_tasks_take_collate(&e->tasks, block_off, nrows);
        e->flight.by_task[tasks[i]] = b;
    }
    b->planned.block_off = block_off;
    b->planned.holders++;
    link_batch(e, b);
    return 0;
}

/* Makes a batch that is not planned, and its block. Returns NULL if one of them cannot be made. */
static struct mn_batch *
make_unplanned(struct mn_engine *e, const struct mn_plan_batch *s, const struct mn_form *form,
               const uint32_t *row0, uint32_t ntasks)
{
    struct mn_batch *b = calloc(1, sizeof(*b));
    if (b == NULL) {
        return NULL;
    }
    b->planned.batch = *s;
    b->planned.sequence = s->sequence;
    b->planned.state = ntasks != 0 ? MN_BATCH_QUEUED : MN_BATCH_DONE;
    b->learned = ntasks == 0; /* nothing is made of it */
    if (mn_batch_make(e, b, form, row0, ntasks) < 0) {
        free(b);
        return NULL;
    }
    b->planned.batch.index = NULL; /* the caller's */
    return b;
}

/* Returns whether memory suffices for its rows and for the awaited results of earlier batches
 * without rows: those come first. The size of their results is unknown; they are taken to need as
 * much as its rows. */
static bool
leaves_room(struct mn_engine *e, uint32_t nrows, const struct mn_form *form)
{
    uint64_t small, rows = fields_bytes(nrows, form, &small), need = rows;
    for (const struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        bool waits = b->planned.state != MN_BATCH_ABANDONED && b->ranges.n == 0;
        need += waits && mn_engine_poll(e, b->planned.block_off) == MN_BLOCK_BUSY ? rows : 0;
    }
    return !mn_arena_exceeds(&e->arena, need);
}

int
mn_engine_submit(struct mn_engine *e, const struct mn_plan_batch *batch,
                 const struct mn_form *form, uint32_t queue, uint64_t *block_off)
{
    uint32_t rows[2] = {0, batch->nrows};
    struct mn_plan_batch own = *batch;
    struct mn_form without = *form;
    bool may_go_without = form->kind == MN_KIND_BATCH && form->nfields != 0;
    struct mn_batch *b = NULL;
    mn_assert(queue >= MN_QUEUE_WORKER);
    mn_mutex_lock(&e->mutex);
    own.sequence = e->flight.submitted++; /* only compared: a batch that fails leaves a gap */
    e->refusal.why = MN_REFUSED_NOT;
    if (!may_go_without || leaves_room(e, batch->nrows, form)) {
        b = make_unplanned(e, &own, form, rows, 1);
    }
    if (b == NULL && may_go_without) {
        without.nfields = without.layout = 0;
        b = make_unplanned(e, &own, &without, rows, 1);
    }
    if (b == NULL && mn_arena_no_lent(&e->arena)) { /* lent memory came back: try again */
        b = make_unplanned(e, &own, &without, rows, 1);
    }
    int rc = b != NULL ? 0 : e->refusal.why == MN_REFUSED_TASKS ? -EAGAIN : -ENOMEM;
    if (rc == 0) {
        *block_off = b->planned.block_off;
        rc = mn_tasks_publish(&e->tasks, mn_block_tasks(block_of(e, b))[0], queue);
        if (rc != MN_OK) { /* the queue is full: the caller tries again */
            mn_batch_drop(e, b);
            rc = -EAGAIN;
        }
    }
    mn_engine_unlock(e);
    if (rc == 0) {
        mn_event_notify(&mn_worker_at(&e->shm, queue - MN_QUEUE_WORKER)->event);
    }
    return rc;
}

int
mn_engine_gather_block(struct mn_engine *e, uint32_t nrows, const struct mn_form *form,
                       uint64_t *block_off)
{
    uint32_t none = 0;
    struct mn_plan_batch own = {.nrows = nrows, .sequence = UINT64_MAX};
    mn_mutex_lock(&e->mutex);
    (void)mn_arena_no_lent(&e->arena);
    uint64_t limit = e->arena.limit;
    e->arena.limit = UINT64_MAX; /* for rows that exist already: they move, and are freed */
    const struct mn_batch *b = make_unplanned(e, &own, form, &none, 0);
    e->arena.limit = limit;
    *block_off = b != NULL ? b->planned.block_off : 0;
    mn_engine_unlock(e);
    return b != NULL ? 0 : -ENOMEM;
}

int
mn_engine_post(struct mn_engine *e, const void *bytes, uint64_t n, uint64_t *off)
{
    mn_mutex_lock(&e->mutex);
    int rc = mn_arena_record(&e->arena, n + sizeof(n), off);
    if (rc == 0 && *off > UINT32_MAX) { /* blocks store this offset in 32 bits */
        mn_arena_free_record(&e->arena, *off, n + sizeof(n));
        rc = -ENOMEM;
    }
    mn_engine_unlock(e);
    if (rc == 0) {
        memcpy(mn_at(&e->shm, *off), &n, sizeof(n));
        memcpy(mn_at(&e->shm, *off + sizeof(n)), bytes, n);
    }
    return rc;
}

/* ---- reading ----------------------------------------------------------------------- */

int
mn_engine_retain(struct mn_engine *e, uint64_t block_off, uint64_t off, uint64_t bytes)
{
    bytes = mn_page_round(bytes);
    mn_mutex_lock(&e->mutex);
    int rc = -EINVAL;
    struct mn_batch *b = e->closing ? NULL : mn_batch_find(e, block_off);
    if (b != NULL) {
        mn_batch_note_envelopes(e, b);
        rc = mn_arena_retain(&e->arena, &b->ranges, off, bytes);
        e->refs += rc == 0;
    }
    mn_engine_unlock(e);
    return rc;
}

/* ---- what finished batches teach --------------------------------------------------------- */

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
    const float *hint = batch->planned.batch.hint;
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

/* Adds the memory that the batch used outside of its rows to the running mean, which sets the
 * budget of later batches. */
static void
learn_envelopes(struct mn_engine *e, struct mn_block *block)
{
    const uint32_t *tasks = mn_block_tasks(block);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *r = &e->tasks.results[tasks[i]];
        bytes += r->accepted && r->flags == MN_FLAG_ENVELOPE ? r->env_len : 0;
    }
    uint64_t mean = e->flight.mean_envelope_bytes;
    e->flight.mean_envelope_bytes = mean == 0 ? bytes : (3 * mean + bytes) / 4;
}

void
mn_batch_learn(struct mn_engine *e, struct mn_batch *batch)
{
    struct mn_block *b = block_of(e, batch);
    if (batch->learned) {
        return;
    }
    batch->learned = true;
    learn_envelopes(e, b);
    if (e->plan == NULL || e->cfg.costs == NULL || b->nrows == 0) {
        return;
    }
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
mn_batches_learn_waiting(struct mn_engine *e)
{
    for (struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (b->planned.state != MN_BATCH_ABANDONED
            && mn_engine_poll(e, b->planned.block_off) == MN_BLOCK_DONE
            && mn_batch_accept(e, b) == MN_BLOCK_DONE) {
            mn_batch_learn(e, b);
        }
    }
}

void
mn_batch_retire(struct mn_engine *e, struct mn_batch *b)
{
    mn_batch_learn(e, b);
    mn_batch_drop(e, b);
}

void
mn_batch_abandon(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_block *block = block_of(e, b);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks; i++) {
        mn_tasks_abandon(&e->tasks, tasks[i]);
    }
    b->planned.state = MN_BATCH_ABANDONED; /* dropped when no worker runs its tasks any more */
    if (mn_batch_idle(e, b)) {
        mn_batch_drop(e, b);
    }
}
