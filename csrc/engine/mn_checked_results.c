/* mn_checked_results.c - see mn_checked_results.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_checked_results.h"

#include <errno.h>
#include <string.h>

#include "engine/mn_engine_state.h"
#include "engine/mn_engine_parts.h"
#include "os/mn_clock.h"
#include "workers/mn_records.h"

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
    memcpy(to, mn_block_reports(mn_block_at(&e->shm, b->block_off)) + r->row0,
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
    if (r->flags > MN_FLAG_NO_ROOM || (refused && mn_crew_is_damaged(&e->crew, r->worker))) {
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
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
    const uint32_t *tasks = mn_block_tasks(block);
    for (uint32_t i = 0; i < block->ntasks && !b->accepted; i++) {
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
    enum mn_block_status status = mn_engine_poll(e, b->block_off);
    b->accepted = status != MN_BLOCK_BUSY;
    return status;
}

void
mn_batch_note_envelopes(struct mn_engine *e, struct mn_batch *b)
{
    struct mn_block *block = mn_block_at(&e->shm, b->block_off);
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

bool
mn_engine_in_rows(struct mn_engine *e, uint64_t block_off)
{
    struct mn_block *block = mn_block_at(&e->shm, block_off);
    const struct mn_batch *b = find(e, block_off);
    bool all = true;
    for (uint32_t i = 0; i < block->ntasks; i++) {
        const struct mn_result *r = &e->tasks.results[mn_block_tasks(block)[i]];
        all = all && r->accepted && r->flags == 0; /* no envelope, and none that found no memory */
    }
    for (uint32_t i = 0; i < block->nrows; i++) {
        all = all && b->reports[i].status == MN_ROW_WRITTEN;
    }
    return all;
}
