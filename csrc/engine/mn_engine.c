/* mn_engine.c - opening, the engine thread, waiting, closing. See mn_engine.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_assert.h"
#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"
#include "engine/mn_scheduler.h"
#include "os/mn_clock.h"
#include "os/mn_cpu.h"
#include "os/mn_futex.h"
#include "os/mn_mem.h"
#include "os/mn_memfd.h"
#include "os/mn_proc.h"

/* Descriptors: 64 batches of 64 single-sample tasks, and beyond that as many as the batches
 * that the caller expects to be out, with some to spare for those that are being made. All of
 * this is address space; what is never used costs nothing. */
#define TASKS_LEAST 4096u
#define TASKS_SPARE 2048u
#define TASKS_MOST (1u << 20)
/* The input region: a row takes 16 bytes and its index, so that a quarter of the arena is
 * plenty. Offsets of layouts have 32 bits. */
#define INPUT_LEAST (UINT64_C(64) << 20)
#define INPUT_MOST (UINT64_C(2) << 30)
#define WATCH_NS (INT64_C(100) * 1000 * 1000) /* how late a lost zygote may be noticed */

static uint64_t
align_to(uint64_t n, uint64_t a)
{
    return (n + a - 1) / a * a;
}

static uint32_t
tasks_for(const struct mn_engine_config *cfg)
{
    uint64_t n = (uint64_t)cfg->blocks + TASKS_SPARE;
    return n < TASKS_LEAST ? TASKS_LEAST : n < TASKS_MOST ? (uint32_t)n : TASKS_MOST;
}

/* Entries of a lane: several times the tasks that may be on it, so that stale ones are rarely
 * in the way. With static scheduling all that is in flight may be for one worker. */
static uint64_t
lane_entries(const struct mn_engine_config *cfg, uint32_t lane)
{
    uint64_t tasks = lane < MN_LANE_WORKER ? 2 * (uint64_t)tasks_for(cfg)
                     : cfg->window == 0    ? tasks_for(cfg)
                                           : MN_LANE_OWN_TASKS;
    uint64_t n = 2;
    while (n < 2 * tasks) {
        n *= 2;
    }
    return n;
}

/* Places the sections; returns the mapping's size. */
static uint64_t
plan_sections(struct mn_ctl *c, const struct mn_engine_config *cfg, uint64_t arena_bytes)
{
    uint32_t workers = cfg->max_workers;
    uint64_t lanes = MN_LANE_WORKER + workers;
    uint64_t off = MN_PAGE;
    c->nworkers = workers;
    c->ntasks = tasks_for(cfg);
    c->nlanes = (uint32_t)lanes;
    c->workers_off = off;
    off = align_to(off + workers * sizeof(struct mn_worker), MN_PAGE);
    c->tasks_off = off;
    off = align_to(off + c->ntasks * sizeof(struct mn_task), MN_PAGE);
    c->lanes_off = off;
    off = align_to(off + lanes * sizeof(struct mn_lane), MN_PAGE);
    off += (MN_LANE_WORKER * lane_entries(cfg, 0) + workers * lane_entries(cfg, MN_LANE_WORKER))
           * 8;
    off = align_to(off, MN_PAGE);
    c->input_off = off;
    c->input_bytes = arena_bytes / 4 < INPUT_LEAST  ? INPUT_LEAST
                     : arena_bytes / 4 < INPUT_MOST ? align_to(arena_bytes / 4, MN_PAGE)
                                                    : INPUT_MOST;
    off += c->input_bytes;
    c->arena_off = off;
    c->arena_bytes = arena_bytes;
    return off + arena_bytes;
}

static void
init_lanes(struct mn_engine *e)
{
    struct mn_shm *shm = &e->shm;
    uint64_t at = align_to(shm->ctl->lanes_off + shm->ctl->nlanes * sizeof(struct mn_lane),
                           MN_PAGE);
    for (uint32_t i = 0; i < shm->ctl->nlanes; i++) {
        struct mn_lane *l = mn_lane_at(shm, i);
        uint64_t entries = lane_entries(&e->cfg, i);
        l->ring_off = at;
        l->mask = entries - 1;
        at += entries * 8;
    }
}

/* Maps the sparse file, halving the arena until the system takes it. */
static int
map_arena(struct mn_engine *e)
{
    uint64_t bytes = e->cfg.arena_bytes;
    if (bytes == 0) {
        bytes = mn_mem_total() * 4;
        if (bytes == 0 || bytes > UINT64_C(1) << 40) { /* 0: nobody knows */
            bytes = UINT64_C(1) << 40;
        }
    }
    int rc = -ENOMEM;
    for (bytes = align_to(bytes, MN_PAGE); bytes >= UINT64_C(1) << 20;
         bytes = align_to(bytes / 2, MN_PAGE)) {
        struct mn_ctl plan;
        memset(&plan, 0, sizeof(plan));
        uint64_t total = plan_sections(&plan, &e->cfg, bytes);
        int fd = mn_memfd_create("minato", total);
        if (fd < 0) {
            rc = fd;
            continue;
        }
        void *base;
        rc = mn_memfd_map(fd, total, &base);
        if (rc < 0) {
            close(fd);
            continue;
        }
        e->fd = fd;
        e->total_bytes = total;
        e->shm.base = base;
        e->shm.ctl = base;
        memcpy(base, &plan, sizeof(plan));
        e->shm.ctl->total_bytes = total;
        return 0;
    }
    return rc;
}

static int
alloc_private(struct mn_engine *e)
{
    const struct mn_ctl *c = e->shm.ctl;
    e->free_tasks = calloc(c->ntasks, sizeof(uint32_t));
    e->gens = calloc(c->ntasks, sizeof(uint32_t));
    e->lost = calloc(c->ntasks, sizeof(*e->lost));
    e->results = calloc(c->ntasks, sizeof(*e->results));
    e->by_task = calloc(c->ntasks, sizeof(*e->by_task));
    e->heads = calloc(c->nlanes, sizeof(*e->heads));
    e->leases = calloc(c->nworkers, sizeof(*e->leases));
    if (!e->free_tasks || !e->gens || !e->lost || !e->results || !e->by_task || !e->heads
        || !e->leases) {
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < c->ntasks; i++) {
        e->free_tasks[i] = c->ntasks - 1 - i;
    }
    e->nfree = c->ntasks;
    int rc = mn_extents_open(&e->input, c->input_off, c->input_bytes, 64);
    if (rc == 0) {
        rc = mn_extents_open(&e->arena, c->arena_off, c->arena_bytes, MN_PAGE);
    }
    return rc;
}

static void
destroy(struct mn_engine *e)
{
    mn_plan_close(e->plan);
    mn_scheduler_close(e->scheduler);
    mn_extents_close(e->input);
    mn_extents_close(e->arena);
    free(e->free_tasks);
    free(e->gens);
    free(e->lost);
    free(e->results);
    free(e->by_task);
    free(e->heads);
    for (uint32_t w = 0; e->leases != NULL && w < e->cfg.max_workers; w++) {
        free(e->leases[w].owed);
    }
    free(e->leases);
    if (e->shm.base != NULL) {
        mn_memfd_unmap(e->shm.base, e->total_bytes);
    }
    if (e->fd >= 0) {
        close(e->fd);
    }
    mn_mutex_fini(&e->mutex);
    free(e);
}

int
mn_engine_open(struct mn_engine **out, const struct mn_engine_config *cfg)
{
    struct mn_engine *e = calloc(1, sizeof(*e));
    if (e == NULL) {
        return -ENOMEM;
    }
    e->cfg = *cfg;
    if (e->cfg.max_workers < cfg->workers) {
        e->cfg.max_workers = cfg->workers;
    }
    e->active = cfg->workers;
    if (cfg->min_workers == 0 || cfg->min_workers > cfg->workers) {
        e->cfg.min_workers = cfg->workers;
    }
    bool scheduled = e->cfg.min_workers < e->cfg.max_workers;
    if (cfg->keep != NULL && scheduled) {
        e->active = mn_scheduler_bound(e, cfg->keep->active);
    }
    e->cfg.keep = NULL; /* the caller's */
    e->fd = e->zygote_pidfd = e->zygote_cmd = -1;
    e->refs = 1;
    int rc = mn_mutex_init(&e->mutex);
    if (rc < 0) {
        free(e);
        return rc;
    }
    rc = map_arena(e);
    if (rc == 0) {
        rc = mn_futex_wake(&e->shm.ctl->engine.word, 1); /* without, nothing here can wait */
        rc = rc < 0 ? rc : 0;
    }
    if (rc == 0) {
        rc = alloc_private(e);
    }
    if (rc == 0 && cfg->window != 0) {
        rc = mn_plan_open(&e->plan, cfg, e->shm.ctl->ntasks);
    }
    if (rc == 0 && scheduled) {
        rc = mn_scheduler_open(&e->scheduler, cfg->keep);
    }
    if (rc < 0) {
        destroy(e);
        return rc;
    }
    (void)mn_memfd_dontdump(e->shm.base, e->total_bytes); /* advice: old kernels lack it */
    struct mn_ctl *c = e->shm.ctl;
    c->sizes = mn_sizes_word();
    c->trainer_pid = (uint32_t)getpid();
    (void)mn_proc_start_time(getpid(), &c->trainer_start);
    c->spin_ns = mn_cpu_count() > (int)cfg->workers + 1 ? 30000 : 0;
    init_lanes(e);
    for (uint32_t w = 0; w < e->active; w++) {
        mn_a32_store_relaxed(&mn_worker_at(&e->shm, w)->state, MN_WORKER_WANTED);
    }
    mn_a64_store_relaxed(&c->opened_ns, mn_now_ns());
    c->magic = MN_MAGIC;
    e->limit = cfg->memory_limit != 0 ? cfg->memory_limit : mn_mem_available() / 2;
    /* The arena may be smaller, under a limit on address space. What is made ahead must leave
     * room in it for the batch that is delivered next. */
    uint64_t most = c->arena_bytes - c->arena_bytes / 4;
    e->limit = e->limit < most ? e->limit : most;
    mn_a64_store_relaxed(&c->limit_bytes, e->limit);
    /* Small enough that idle workers do not eat a small limit, large enough that a worker
     * with envelopes of a few kilobytes asks once in hundreds of batches. */
    e->lease_bytes = mn_page_round(e->limit / 16 / e->cfg.max_workers);
    if (e->lease_bytes > UINT64_C(4) << 20) {
        e->lease_bytes = UINT64_C(4) << 20;
    }
    if (e->lease_bytes < 16 * MN_PAGE) {
        e->lease_bytes = 16 * MN_PAGE;
    }
    *out = e;
    return 0;
}

static void
engine_main(void *arg)
{
    struct mn_engine *e = arg;
    struct mn_bell *bell = &e->shm.ctl->engine;
    for (;;) {
        mn_bell_announce(bell);
        if (e->scheduler != NULL) {
            mn_scheduler_look(e, mn_now_ns());
        }
        mn_mutex_lock(&e->mutex);
        bool closing = e->closing;
        bool busy = mn_engine_step(e);
        busy |= !closing && mn_engine_reclaim(e, mn_now_ns());
        if (e->scheduler != NULL && !closing) {
            mn_scheduler_tick(e, mn_now_ns());
        }
        int64_t nap = e->scheduler != NULL ? mn_scheduler_nap(e) : WATCH_NS;
        nap = e->plan != NULL ? mn_plan_nap(e->plan, nap) : nap;
        mn_mutex_unlock(&e->mutex);
        if (closing || busy) {
            mn_bell_retract(bell);
            if (closing) {
                return;
            }
            continue;
        }
        (void)mn_bell_sleep(bell, nap); /* every return means: look again */
    }
}

int
mn_engine_start(struct mn_engine *e, int zygote_pidfd, int zygote_cmd)
{
    e->zygote_pidfd = zygote_pidfd;
    e->zygote_cmd = zygote_cmd;
    /* Forked and spawned processes have their mapping by now, and holes are punched through
     * the mapping: one descriptor less for as long as the loader lives. */
    close(e->fd);
    e->fd = -1;
    int rc = mn_thread_start(&e->thread, "minato-engine", engine_main, e);
    e->thread_running = rc == 0;
    return rc;
}

/* Whatever a worker waits for. */
static void
ring_all(struct mn_engine *e)
{
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        mn_bell_ring(&mn_worker_at(&e->shm, w)->bell);
        mn_bell_ring(&mn_worker_at(&e->shm, w)->room);
    }
}

void
mn_engine_stop(struct mn_engine *e)
{
    struct mn_ctl *c = e->shm.ctl;
    mn_a32_store_seqcst(&c->stop, 1);
    ring_all(e);
}

void
mn_engine_dismiss(struct mn_engine *e)
{
    mn_a32_store_seqcst(&e->shm.ctl->dismissed, 1);
    ring_all(e);
}

void
mn_engine_close(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    e->closing = true;
    mn_mutex_unlock(&e->mutex);
    if (e->thread_running) {
        (void)mn_a32_add_seqcst(&e->shm.ctl->epoch_word, 1); /* orders closing, then ring */
        mn_bell_ring(&e->shm.ctl->engine);
        (void)mn_thread_join(&e->thread);
        e->thread_running = false;
    }
    mn_mutex_lock(&e->mutex);
    while (e->batches != NULL) {
        mn_batch_drop(e, e->batches);
    }
    /* What the caller still holds stays; everything else goes back to the system now: a
     * process forked in between has the mapping, too, and may live on. */
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        mn_lease_forget(e, w);
    }
    mn_engine_punch_free(e);
    bool last = --e->refs == 0;
    mn_mutex_unlock(&e->mutex);
    if (last) {
        destroy(e);
    }
}

void
mn_engine_pin(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    e->refs++;
    mn_mutex_unlock(&e->mutex);
}

void
mn_engine_unpin(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    bool last = --e->refs == 0;
    mn_mutex_unlock(&e->mutex);
    if (last) {
        destroy(e);
    }
}

/* Handed-out ranges: the mapping lives until the last of them is back. */

void
mn_engine_release(struct mn_engine *e, uint64_t off, uint64_t bytes)
{
    mn_mutex_lock(&e->mutex);
    if (e->closing) { /* nobody else will; the range keeps the mapping until it is free */
        mn_mutex_unlock(&e->mutex);
        (void)mn_memfd_punch_mapped(e->shm.base + off, mn_page_round(bytes));
        mn_mutex_lock(&e->mutex);
    }
    mn_range_free(e->arena, off, mn_page_round(bytes));
    e->kept_bytes -= mn_page_round(bytes);
    mn_engine_room(e);
    bool last = --e->refs == 0;
    mn_mutex_unlock(&e->mutex);
    if (last) {
        destroy(e);
    }
}

int
mn_engine_gather_block(struct mn_engine *e, const struct mn_submit *s, uint64_t *block_off)
{
    uint32_t none = 0;
    mn_mutex_lock(&e->mutex);
    (void)mn_engine_no_lent(e);
    uint64_t limit = e->limit;
    e->limit = UINT64_MAX; /* rows that are there already: they move, and their room is freed */
    struct mn_submit own = *s;
    own.sequence = UINT64_MAX;
    int rc = mn_batch_make(e, &own, &none, 0, block_off);
    e->limit = limit;
    mn_mutex_unlock(&e->mutex);
    return rc;
}

/* ---- waiting ----------------------------------------------------------------------- */

bool
mn_engine_has_done(struct mn_engine *e, uint64_t wanted)
{
    if (wanted != MN_WANT_ANY) {
        return wanted > MN_WANT_CHANGE && mn_engine_poll(e, wanted) != MN_BLOCK_BUSY;
    }
    if (e->plan != NULL) {
        return mn_plan_any_done(e);
    }
    bool done = false;
    for (struct mn_batch *b = e->batches; b != NULL && !done; b = b->next) {
        done = !b->abandoned && !b->detached && mn_engine_poll(e, b->block_off) != MN_BLOCK_BUSY;
    }
    return done;
}

static bool
anything_done(struct mn_engine *e, uint64_t wanted)
{
    if (wanted != MN_WANT_ANY) {
        return mn_engine_has_done(e, wanted);
    }
    mn_mutex_lock(&e->mutex);
    bool done = mn_engine_has_done(e, wanted);
    mn_mutex_unlock(&e->mutex);
    return done;
}

/* What the user's thread must look at before it sleeps again. */
static bool
trouble(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    bool bad = e->zygote_lost || (e->plan == NULL && e->ndeaths != 0)
               || mn_engine_live(e) == 0 || mn_a32_load_acquire(&e->shm.ctl->stop) != 0;
    mn_mutex_unlock(&e->mutex);
    return bad;
}

int
mn_engine_wait(struct mn_engine *e, uint64_t block_off, int64_t timeout_ns)
{
    struct mn_ctl *c = e->shm.ctl;
    if (anything_done(e, block_off)) {
        return 0;
    }
    if (c->spin_ns != 0) {
        uint64_t until = mn_now_ns() + c->spin_ns;
        do {
            for (int i = 0; i < 50; i++) {
                mn_cpu_pause();
            }
            if (anything_done(e, block_off)) {
                return 0;
            }
        } while (mn_now_ns() < until);
    }
    mn_a64_store_seqcst(&c->wanted, block_off);
    mn_bell_announce(&c->trainer);
    mn_mutex_lock(&e->mutex);
    mn_engine_room(e); /* who waits for room may have to go on now */
    mn_mutex_unlock(&e->mutex);
    int rc = 0;
    if (anything_done(e, block_off) || trouble(e)) {
        mn_bell_retract(&c->trainer);
    }
    else {
        rc = mn_bell_sleep(&c->trainer, timeout_ns);
    }
    mn_a64_store_relaxed(&c->wanted, MN_WANT_NONE); /* a late ring is spurious, no more */
    return rc;
}

/* One look under the mutex: gives a batch, or says what to wait for, and after how long more
 * may have to be planned (lasts) or that it has to be now (dry). ahead: of the caller's
 * need, so that the batch before it is ready, too, and none is missed. */
static bool
look(struct mn_engine *e, bool first, bool ahead, uint64_t *sequence, uint64_t *block_off,
     uint64_t *want, int64_t *lasts, bool *dry)
{
    mn_mutex_lock(&e->mutex);
    bool got = mn_plan_pick(e, sequence, block_off);
    bool seen = e->scheduler != NULL && first && (got || !ahead);
    if (seen && !mn_plan_begins(e->plan)) { /* dry by nature */
        const struct mn_plan *p = e->plan;
        int64_t before = (int64_t)mn_a64_load_relaxed(&p->in_hand) + ahead;
        mn_scheduler_saw(e, mn_plan_ready(e) + before, p->dispatch.rates.window);
    }
    mn_a64_store_relaxed(&e->shm.ctl->used_bytes, mn_extents_used(e->arena)); /* for people */
    uint32_t n = got ? 0 : mn_plan_pump(e);
    uint64_t head = e->plan->in_order ? mn_plan_block(e->plan, e->plan->head) : 0;
    *want = head != 0 ? head : e->plan->in_order ? MN_WANT_CHANGE : MN_WANT_ANY;
    e->held += got && e->plan->held;
    *dry = !got && mn_plan_dry(e);
    *lasts = mn_plan_lasts(e->plan, e->active);
    mn_mutex_unlock(&e->mutex);
    if (n != 0) {
        mn_engine_ring_workers(e, n);
    }
    return got;
}

/* The head has not started: every finished task may change that, and one may have slipped in
 * between the look and the sleep. */
#define CHANGE_NS (INT64_C(5) * 1000 * 1000)

static int
next(struct mn_engine *e, int64_t timeout_ns, uint64_t *sequence, uint64_t *block_off)
{
    uint64_t since = e->spanned ? mn_now_ns() : e->counted_ns, want;
    int64_t left = timeout_ns;
    int64_t lasts;
    bool dry, ahead = timeout_ns == 0;
    for (bool first = true;; first = false) {
        if (look(e, first, ahead, sequence, block_off, &want, &lasts, &dry)) {
            return MN_OK;
        }
        if (trouble(e)) {
            return MN_CLOSED;
        }
        if (dry) {
            return MN_EMPTY;
        }
        if (ahead) {
            return -ETIMEDOUT;
        }
        int64_t nap = want == MN_WANT_CHANGE || lasts < CHANGE_NS ? CHANGE_NS : lasts;
        bool brief = left < 0 ? nap != INT64_MAX : nap < left;
        int rc = mn_engine_wait(e, want, brief ? nap : left);
        if (rc < 0 && !(brief && rc == -ETIMEDOUT)) {
            return rc;
        }
        if (timeout_ns >= 0) {
            int64_t gone = (int64_t)(mn_now_ns() - since);
            left = gone < timeout_ns ? timeout_ns - gone : 0;
        }
    }
}

int
mn_engine_next(struct mn_engine *e, int64_t timeout_ns, uint64_t *sequence,
               uint64_t *block_off)
{
    bool spanned = e->spanned;
    if (!spanned) {
        mn_engine_asked(e);
    }
    int rc = next(e, timeout_ns, sequence, block_off);
    if (!spanned) {
        mn_engine_given(e, rc == MN_OK);
    }
    return rc;
}
