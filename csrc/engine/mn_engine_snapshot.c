/* mn_engine_snapshot.c - see mn_engine_snapshot.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine_snapshot.h"

#include <string.h>

#include "engine/mn_engine_state.h"

const struct mn_shm *
mn_engine_shm(const struct mn_engine *e)
{
    return &e->shm;
}

uint64_t
mn_engine_mapped(const struct mn_engine *e)
{
    return e->arena.total_bytes;
}

int
mn_engine_fd(const struct mn_engine *e)
{
    return e->file.fd;
}

int
mn_engine_lifeline_end(const struct mn_engine *e)
{
    return e->lifeline_end;
}

bool
mn_engine_is_balanced(const struct mn_engine *e)
{
    return e->plan != NULL;
}

bool
mn_engine_is_stopped(const struct mn_engine *e)
{
    return mn_a32_load_acquire(&e->shm.ctl->stop) != 0;
}

/* ---- memory -------------------------------------------------------------------------- */

struct mn_memory_snapshot
mn_engine_memory(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    struct mn_memory_snapshot m = {.used = mn_arena_used(&e->arena),
                                   .kept = e->arena.kept_bytes,
                                   .warm = mn_arena_warm(&e->arena),
                                   .reclaimed = e->arena.trimmed_bytes,
                                   .limit = e->arena.limit,
                                   .envelope_bytes = e->flight.mean_envelope_bytes,
                                   .in_flight = e->flight.n};
    mn_mutex_unlock(&e->mutex);
    return m;
}

/* Needs the mutex. */
static bool
may_retain(const struct mn_engine *e, uint64_t bytes)
{
    return !mn_arena_exceeds(&e->arena, 0) && e->arena.kept_bytes + bytes <= e->arena.limit / 2;
}

bool
mn_engine_may_retain(struct mn_engine *e, uint64_t bytes)
{
    mn_mutex_lock(&e->mutex);
    bool may = may_retain(e, bytes);
    mn_mutex_unlock(&e->mutex);
    return may;
}

struct mn_pagelocks *
mn_engine_pagelocks(struct mn_engine *e)
{
    return &e->locks;
}

/* ---- workers ------------------------------------------------------------------------- */

struct mn_health
mn_engine_health(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    struct mn_health h = {.zygote_lost = mn_a32_load_relaxed(&e->crew.lost) != 0,
                          .zygote_hung = e->crew.hung,
                          .deaths = e->crew.ndeaths,
                          .crash_loop = mn_crew_crash_loop(&e->crew),
                          .live = mn_crew_live(&e->crew),
                          .retries = e->tasks.retries,
                          .last = e->crew.death};
    mn_mutex_unlock(&e->mutex);
    return h;
}

bool
mn_engine_autoscale(struct mn_engine *e, struct mn_autoscale_log *out)
{
    const struct mn_autoscale *s = e->autoscale;
    if (s == NULL) {
        return false;
    }
    mn_mutex_lock(&e->mutex);
    out->active = e->active;
    out->low = e->cfg.min_workers;
    out->high = e->cfg.max_workers;
    out->stragglers = s->stragglers;
    out->saved = mn_autoscale_save(e);
    out->n = s->nlog < MN_AUTOSCALE_LOG ? s->nlog : MN_AUTOSCALE_LOG;
    for (uint32_t i = 0; i < out->n; i++) {
        out->last[i] = s->log[(s->nlog - out->n + i) % MN_AUTOSCALE_LOG];
    }
    mn_mutex_unlock(&e->mutex);
    return true;
}

/* ---- batches ------------------------------------------------------------------------- */

/* Returns the batch whose block was made at this offset with this serial number; NULL if it is not
 * in flight, or abandoned. Needs the mutex. */
static const struct mn_batch *
in_flight(struct mn_engine *e, uint64_t block_off, uint32_t serial)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    bool sound = block->ntasks == 0 || mn_block_tasks(block)[0] < e->shm.ctl->ntasks;
    const struct mn_batch *b = sound ? mn_batch_find(e, block_off) : NULL;
    return b != NULL && b->planned.state != MN_BATCH_ABANDONED && block->serial == serial ? b
                                                                                          : NULL;
}

bool
mn_engine_has_block(struct mn_engine *e, uint64_t block_off, uint32_t serial)
{
    mn_mutex_lock(&e->mutex);
    bool has = in_flight(e, block_off, serial) != NULL;
    mn_mutex_unlock(&e->mutex);
    return has;
}

static bool
all_in_rows(const struct mn_engine *e, const struct mn_batch *b, struct mn_block *block)
{
    bool all = true;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *r = &e->tasks.results[mn_block_tasks(block)[i]];
        all = all && r->accepted && r->flags == 0; /* no envelope, and none that found no memory */
    }
    for (uint32_t i = 0; i < block->nrows && block->ntasks != 0; i++) {
        all = all && b->reports[i].status == MN_ROW_WRITTEN;
    }
    return all && (block->ntasks == 0 || block->layout != 0); /* 0 tasks: the trainer wrote them */
}

bool
mn_engine_read(struct mn_engine *e, uint64_t block_off, uint32_t serial, uint64_t row_bytes,
               struct mn_reading *out)
{
    mn_mutex_lock(&e->mutex);
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const struct mn_batch *b = in_flight(e, block_off, serial);
    e->refs += b != NULL;
    out->copy = b != NULL && !may_retain(e, row_bytes * block->nrows);
    mn_mutex_unlock(&e->mutex);
    if (b != NULL) { /* it is the caller's */
        out->status = mn_engine_poll(e, block_off);
        out->in_rows = all_in_rows(e, b, block);
    }
    return b != NULL;
}

const struct mn_result *
mn_engine_result(const struct mn_engine *e, uint64_t block_off, uint32_t i)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    return i < block->ntasks ? &e->tasks.results[mn_block_tasks(block)[i]] : NULL;
}

bool
mn_engine_loss(const struct mn_engine *e, uint64_t block_off, uint32_t i, struct mn_loss *out)
{
    uint32_t task = mn_block_tasks(mn_block_at(&e->shm, block_off))[i];
    uint64_t word = mn_tasks_word(&e->tasks, task);
    const struct mn_result *r = &e->tasks.results[task];
    *out = (struct mn_loss){e->tasks.lost[task], r->row0, r->nrows};
    return mn_word_status(word) == MN_TASK_LOST;
}

struct mn_progress
mn_engine_progress(struct mn_engine *e)
{
    const struct mn_plan *p = e->plan;
    mn_mutex_lock(&e->mutex);
    struct mn_progress out = {.waits = e->waits, .held = e->held};
    if (p != NULL) {
        const struct mn_plan_view *v = mn_plan_view(p);
        out.helped = v->helped;
        out.together = v->by_piece;
        memcpy(out.starts, v->starts, sizeof(out.starts));
        for (uint64_t n = v->order.head; n < v->order.next; n++) {
            uint64_t off = mn_plan_block(p, n);
            out.planned += off == 0;
            out.ready += off != 0 && mn_engine_poll(e, off) != MN_BLOCK_BUSY;
        }
        if (e->cfg.ready_batch != 0) { /* what has ended has left the plan */
            out.ready = (uint64_t)e->delivery->ready(e);
            out.displaced_max = mn_delivery_displaced(e, &out.displaced_sum);
        }
    }
    mn_mutex_unlock(&e->mutex);
    return out;
}

void
mn_engine_note_failed(struct mn_engine *e, uint64_t samples)
{
    mn_a64_store_relaxed(&e->shm.ctl->failed, samples);
}

struct mn_refusal
mn_engine_refused(struct mn_engine *e, uint64_t sequence)
{
    mn_mutex_lock(&e->mutex);
    const struct mn_planned *q = mn_plan_at(e->plan, sequence);
    struct mn_refusal r = q != NULL ? q->refusal : mn_delivery_refusal(e, sequence);
    mn_mutex_unlock(&e->mutex);
    return r;
}
