/* mn_engine.c - sizes, opening, the engine thread, closing; requests to single workers. See
 * mn_engine.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "engine/mn_autoscale.h"
#include "engine/mn_engine.h"
#include "engine/mn_engine_state.h"
#include "engine/mn_shared_costs.h"
#include "memory/mn_arena.h"
#include "os/mn_limits.h"
#include "os/mn_memfd.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"

/* ---- sizes: functions of the configuration and of the machine --------------------------- */

/* Descriptors: enough for 64 batches of 256 single-sample tasks, so that a slow sample does not
 * hold up the others of a large prefetch window. Beyond that, as many as the batches that the
 * caller expects in flight, and some spare ones for batches that are being made. All of this is
 * address space; what is never used costs nothing. */
#define TASKS_LEAST 16384u
#define TASKS_SPARE 2048u
#define TASKS_MOST (1u << 20)
/* The arena is a multiple of the memory limit, because free ranges lie scattered in it, and a batch
 * larger than the limit passes alone. Together with the input region it takes a quarter of the
 * remaining address space: the rest is for the program, other loaders and samples. */
#define ARENA_PER_LIMIT 4u
#define ARENA_LEAST (UINT64_C(4) << 30)
#define ARENA_MOST (UINT64_C(1) << 40)
#define ARENA_OF_LEFT 6u
/* The input region: a row takes 16 bytes and its index, so a quarter of the arena is plenty.
 * Offsets of layouts have 32 bits. */
#define INPUT_LEAST (UINT64_C(1) << 20)
#define INPUT_MOST (UINT64_C(2) << 30)

static uint32_t
tasks_for(const struct mn_engine_config *cfg)
{
    uint64_t n = (uint64_t)cfg->blocks + TASKS_SPARE;
    return n < TASKS_LEAST ? TASKS_LEAST : n < TASKS_MOST ? (uint32_t)n : TASKS_MOST;
}

/* Entries of a queue: several times the tasks that may be on it, so that stale entries rarely get
 * in the way. With static scheduling, everything in flight may be for one worker. */
static uint64_t
queue_entries(const struct mn_engine_config *cfg, uint32_t queue)
{
    uint64_t tasks = queue < MN_QUEUE_WORKER ? 2 * (uint64_t)tasks_for(cfg)
                     : cfg->window == 0    ? tasks_for(cfg)
                                           : MN_QUEUE_OWN_TASKS;
    uint64_t n = 2;
    while (n < 2 * tasks) {
        n *= 2;
    }
    return n;
}

/* Fills in the counts and offsets of all sections, for an arena of arena_bytes. Returns the size of
 * the mapping. */
static uint64_t
place_sections(struct mn_ctl *c, const struct mn_engine_config *cfg,
                         uint64_t arena_bytes)
{
    uint32_t workers = cfg->max_workers;
    uint64_t queues = MN_QUEUE_WORKER + workers;
    uint64_t off = MN_PAGE;
    c->nworkers = workers;
    c->ntasks = tasks_for(cfg);
    c->nqueues = (uint32_t)queues;
    c->workers_off = off;
    off = mn_page_round(off + workers * sizeof(struct mn_worker));
    c->tasks_off = off;
    off = mn_page_round(off + c->ntasks * sizeof(struct mn_task));
    c->queues_off = off;
    off = mn_page_round(off + queues * sizeof(struct mn_queue));
    off += (MN_QUEUE_WORKER * queue_entries(cfg, 0) + workers * queue_entries(cfg, MN_QUEUE_WORKER))
           * 8;
    off = mn_page_round(off);
    c->input_off = off;
    uint64_t quarter = mn_page_round(arena_bytes / 4);
    c->input_bytes = quarter < INPUT_LEAST ? INPUT_LEAST
                     : quarter < INPUT_MOST ? quarter
                                            : INPUT_MOST;
    off += c->input_bytes;
    c->arena_off = off;
    c->arena_bytes = arena_bytes;
    return off + arena_bytes;
}

/* Initializes the queues' rings, in a mapping whose sections were placed for the same
 * configuration. */
static void
init_queues(const struct mn_shm *shm, const struct mn_engine_config *cfg)
{
    uint64_t at = mn_page_round(shm->ctl->queues_off + shm->ctl->nqueues * sizeof(struct mn_queue));
    for (uint32_t i = 0; i < shm->ctl->nqueues; i++) {
        struct mn_queue *l = mn_queue_at(shm, i);
        uint64_t entries = queue_entries(cfg, i);
        l->ring_off = at;
        l->mask = entries - 1;
        at += entries * 8;
    }
}

/* Returns the size of the arena: by default four times the memory limit, at least 4 GiB and at most
 * 1 TiB. Together with the input region it takes at most a quarter of the address space that
 * RLIMIT_AS leaves. */
static uint64_t
arena_bytes_for(const struct mn_engine_config *cfg)
{
    uint64_t bytes = cfg->arena_bytes;
    if (bytes == 0) {
        uint64_t used = cfg->memory_limit, left = mn_mem_address_space();
        bytes = used < ARENA_MOST / ARENA_PER_LIMIT ? used * ARENA_PER_LIMIT : ARENA_MOST;
        bytes = bytes > ARENA_LEAST ? bytes : ARENA_LEAST;
        bytes = bytes < left / ARENA_OF_LEFT ? bytes : left / ARENA_OF_LEFT;
    }
    return mn_page_round(bytes);
}

/* A limit on address space may make the arena small. Then prefetched batches must leave memory in
 * it for the head. */
static uint64_t
memory_limit_for(const struct mn_engine_config *cfg, uint64_t arena_bytes)
{
    uint64_t limit = cfg->memory_limit;
    uint64_t most = arena_bytes - arena_bytes / 4;
    return limit != 0 && limit < most ? limit : most;
}

/* ---- opening, the thread, closing ------------------------------------------------------- */

#define WATCH_NS (INT64_C(100) * 1000 * 1000) /* time until a lost zygote is noticed */

/* Maps the sparse file. Halves the arena until the system accepts it: ulimit -v, ulimit -f or the
 * overcommit policy may refuse. With less than a mebibyte no sample could be loaded. */
static int
map_arena(struct mn_engine *e)
{
    int rc = -ENOMEM;
    uint64_t bytes = arena_bytes_for(&e->cfg);
    for (; bytes >= UINT64_C(1) << 20; bytes = mn_page_round(bytes / 2)) {
        struct mn_ctl plan;
        memset(&plan, 0, sizeof(plan));
        uint64_t total = place_sections(&plan, &e->cfg, bytes);
        rc = mn_arena_map(&e->arena, &e->locks.provider, total);
        if (rc < 0) {
            continue;
        }
        e->shm.base = e->arena.base;
        e->shm.ctl = (struct mn_ctl *)(void *)e->shm.base;
        memcpy(e->shm.base, &plan, sizeof(plan));
        e->shm.ctl->total_bytes = total;
        return 0;
    }
    return rc;
}

static int
open_plan(struct mn_engine *e)
{
    const struct mn_engine_config *c = &e->cfg;
    struct mn_plan_config cfg = {.workers = c->workers,
                                 .max_workers = c->max_workers,
                                 .window = c->window,
                                 .batches = c->blocks,
                                 .own_tasks = MN_QUEUE_OWN_TASKS,
                                 .parts = MN_PARTS_MOST,
                                 .in_order = c->in_order,
                                 .group_neighbours = c->group_neighbours,
                                 .costs = c->costs != NULL ? &c->costs->costs : NULL,
                                 .forms = c->ready_batch != 0,
                                 .batch_bytes = sizeof(struct mn_batch)};
    mn_shared_costs_lock(c->costs);
    int rc = mn_plan_open(&e->plan, &cfg);
    mn_shared_costs_unlock(c->costs);
    if (rc == 0) {
        mn_plan_set_active(e->plan, e->active);
        rc = mn_worker_views_open(e);
    }
    if (rc == 0) {
        rc = mn_delivery_open(e);
    }
    return rc;
}

static int
open_parts(struct mn_engine *e)
{
    const struct mn_ctl *c = e->shm.ctl;
    struct mn_range records = {c->input_off, c->input_bytes}, rows = {c->arena_off, c->arena_bytes};
    e->arena.limit = memory_limit_for(&e->cfg, c->arena_bytes);
    int rc = mn_arena_open(&e->arena, &e->mutex, records, rows);
    if (rc == 0) {
        rc = mn_tasks_open(&e->tasks, &e->shm, e->cfg.max_retries);
    }
    if (rc == 0) {
        rc = mn_arena_leases_open(&e->leases, &e->shm, &e->arena);
    }
    if (rc == 0) {
        rc = mn_crew_open(&e->crew, &e->shm, e->cfg.respawn);
        e->watch = (struct mn_watch){.crew = &e->crew, .guard = &e->mutex};
    }
    if (rc == 0) {
        e->flight.by_task = calloc(c->ntasks, sizeof(struct mn_batch *));
        rc = e->flight.by_task == NULL ? -ENOMEM : 0;
    }
    if (rc == 0 && e->cfg.window != 0) {
        rc = open_plan(e);
    }
    return rc;
}

static void
destroy(struct mn_engine *e)
{
    if (e->lifeline_end >= 0) {
        (void)close(e->lifeline_end);
    }
    mn_lifeline_close(&e->lifeline);
    mn_plan_close(e->plan);
    mn_worker_views_close(e);
    if (e->delivery != NULL) {
        e->delivery->close(e);
    }
    mn_autoscale_close(e->autoscale);
    free(e->flight.by_task);
    mn_crew_close(&e->crew);
    if (e->shm.base != NULL) {
        mn_arena_leases_close(&e->leases);
        mn_tasks_close(&e->tasks);
    }
    mn_arena_close(&e->arena);
    mn_memory_file_close(&e->file);
    mn_pagelocks_fini(&e->locks);
    mn_mutex_fini(&e->mutex);
    free(e);
}

/* Writes what workers read from the mapping before they start. */
static void
publish_sizes(struct mn_engine *e)
{
    struct mn_ctl *c = e->shm.ctl;
    c->sizes = mn_sizes_word();
    c->trainer_pid = (uint32_t)getpid();
    bool spare = mn_cpu_count("") > (int)e->cfg.workers + 1; /* else spinning holds others up */
    c->spin_ns = spare ? MN_EVENT_SPIN_NS : 0;
    init_queues(&e->shm, &e->cfg);
    for (uint32_t w = 0; w < e->active; w++) {
        mn_crew_want(&e->crew, w);
    }
    mn_a64_store_relaxed(&c->opened_ns, mn_now_ns());
    mn_a64_store_relaxed(&c->limit_bytes, e->arena.limit);
    size_t n = e->cfg.title != NULL ? strlen(e->cfg.title) : 0, most = sizeof(c->title) - 1;
    if (n != 0) { /* it ends with a zero: the mapping is empty */
        memcpy(c->title, e->cfg.title, n < most ? n : most);
    }
    c->magic = MN_MAGIC;
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
    if (cfg->ready_batch != 0) { /* all that may wait for a slow sample of the first batch */
        uint32_t most = MN_PLAN_BATCH_TASKS;
        e->cfg.blocks = (cfg->ready_bound + 1 + cfg->window)
                        * (cfg->ready_batch < most ? cfg->ready_batch : most);
    }
    e->active = cfg->workers;
    if (cfg->min_workers == 0 || cfg->min_workers > cfg->workers) {
        e->cfg.min_workers = cfg->workers;
    }
    bool scheduled = e->cfg.min_workers < e->cfg.max_workers;
    if (cfg->saved_scheduler != NULL && scheduled) {
        e->active = mn_autoscale_bound(e, cfg->saved_scheduler->active);
    }
    mn_memory_file_init(&e->file);
    e->lifeline.fd = e->lifeline_end = -1;
    e->refs = 1;
    int rc = mn_mutex_init(&e->mutex);
    if (rc < 0) {
        free(e);
        return rc;
    }
    rc = mn_pagelocks_init(&e->locks, &e->file.provider);
    if (rc < 0) {
        mn_mutex_fini(&e->mutex);
        free(e);
        return rc;
    }
    rc = map_arena(e);
    if (rc == 0) {
        rc = mn_futex_wake(&e->shm.ctl->engine.word, 1); /* without futexes nothing here can wait */
        rc = rc < 0 ? rc : 0;
    }
    if (rc == 0) {
        rc = open_parts(e);
    }
    if (rc == 0 && cfg->processes) {
        rc = mn_lifeline_open(&e->lifeline, &e->lifeline_end);
    }
    if (rc == 0 && scheduled) {
        rc = mn_autoscale_open(&e->autoscale, e->cfg.max_workers, cfg->saved_scheduler);
    }
    if (rc < 0) {
        destroy(e);
        return rc;
    }
    (void)mn_memfd_dontdump(e->shm.base, e->shm.ctl->total_bytes); /* old kernels lack it */
    publish_sizes(e);
    e->cfg.saved_scheduler = NULL; /* both are the caller's */
    e->cfg.title = NULL;
    *out = e;
    return 0;
}

static void
engine_main(void *arg)
{
    struct mn_engine *e = arg;
    struct mn_event *event = &e->shm.ctl->engine;
    for (;;) {
        mn_event_prepare_wait(event);
        if (e->autoscale != NULL) {
            mn_autoscale_read_facts(e, mn_now_ns());
        }
        mn_watch_look(&e->watch, mn_now_ns());
        mn_mutex_lock(&e->mutex);
        bool closing = e->closing;
        /* First, because it unlocks the mutex, and no due wake-up waits for it. */
        bool busy = !closing && mn_arena_trim(&e->arena, mn_now_ns());
        busy |= mn_engine_step(e);
        if (e->autoscale != NULL && !closing) {
            mn_autoscale_tick(e, mn_now_ns());
        }
        int64_t nap = e->autoscale != NULL ? mn_autoscale_nap(e) : WATCH_NS;
        nap = e->plan != NULL ? mn_plan_nap(e->plan, mn_now_ns(), nap) : nap;
        mn_engine_unlock(e);
        if (closing || busy) {
            mn_event_cancel_wait(event);
            if (closing) {
                return;
            }
            continue;
        }
        (void)mn_event_commit_wait(event, nap); /* look again after every return */
    }
}

int
mn_engine_start(struct mn_engine *e, int zygote_pidfd, int zygote_cmd)
{
    if (e->thread.owner != 0) {
        mn_mutex_lock(&e->mutex);
        mn_crew_replace_executor(&e->crew);
        mn_engine_unlock(e);
        return 0;
    }
    e->crew.zygote = zygote_pidfd;
    e->crew.command = zygote_cmd;
    /* Forked and spawned processes have their mapping by now, and holes are punched through the
     * mapping. Closing the file saves a descriptor for as long as the loader lives. */
    mn_memory_file_close(&e->file);
    MN_FAULT("engine.start");
    return mn_thread_start(&e->thread, "minato-engine", engine_main, e);
}

void
mn_engine_stop(struct mn_engine *e)
{
    struct mn_ctl *c = e->shm.ctl;
    mn_a32_store_seqcst(&c->stop, 1);
    MN_FAULT("engine.stop");
    mn_crew_notify_all(&e->crew);
}

void
mn_engine_dismiss(struct mn_engine *e)
{
    mn_a32_store_seqcst(&e->shm.ctl->dismissed, 1);
    mn_crew_notify_all(&e->crew);
}

void
mn_engine_wake_waiters(struct mn_engine *e)
{
    mn_event_notify_always(&e->shm.ctl->trainer);
}

/* Makes no wake-ups: every thread that they would concern is gone, or is woken by a thread that is
 * still here. */
static void
unref_and_unlock(struct mn_engine *e)
{
    bool last = --e->refs == 0;
    mn_mutex_unlock(&e->mutex);
    if (last) {
        destroy(e);
    }
}

void
mn_engine_close(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    e->closing = true;
    mn_engine_unlock(e);
    if (e->thread.owner != 0) {
        (void)mn_a32_add_seqcst(&e->shm.ctl->fence_word, 1); /* closing, before the notification */
        mn_event_notify(&e->shm.ctl->engine);
        (void)mn_thread_join(&e->thread);
    }
    MN_FAULT("engine.close");
    mn_lifeline_close(&e->lifeline);
    mn_mutex_lock(&e->mutex);
    while (e->flight.first != NULL) {
        mn_batch_drop(e, e->flight.first);
    }
    /* Memory that the caller retains stays. All other memory goes back to the system now, because a
     * process forked meanwhile may have the mapping, too, and may live on. */
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        mn_arena_leases_forget(&e->leases, w);
    }
    mn_arena_discard_free(&e->arena);
    unref_and_unlock(e);
}

void
mn_engine_pin(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    e->refs++;
    mn_engine_unlock(e);
}

void
mn_engine_unpin(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    unref_and_unlock(e);
}

/* Frees a range that was handed out. The mapping lives until the last of them is freed. */

void
mn_engine_release(struct mn_engine *e, uint64_t off, uint64_t bytes)
{
    bytes = mn_page_round(bytes);
    mn_mutex_lock(&e->mutex);
    if (e->closing) { /* the engine thread is gone; the range keeps the mapping alive */
        mn_mutex_unlock(&e->mutex);
        mn_arena_discard(&e->arena, off, bytes);
        mn_mutex_lock(&e->mutex);
    }
    mn_arena_release(&e->arena, off, bytes);
    if (e->arena.room_came) { /* notify while the range still keeps the engine alive */
        mn_engine_unlock(e);
        mn_mutex_lock(&e->mutex);
    }
    unref_and_unlock(e);
}

/* ---- requests of the program to single workers ------------------------------------------ */

void
mn_engine_ask_to_exit(struct mn_engine *e, uint32_t worker, enum mn_exit_request how)
{
    if (worker < e->shm.ctl->nworkers) {
        mn_mutex_lock(&e->mutex);
        mn_crew_retire(&e->crew, worker);
        mn_crew_ask_to_exit(&e->crew, worker, how);
        mn_mutex_unlock(&e->mutex);
        mn_event_notify(&mn_worker_at(&e->shm, worker)->event);
    }
}

bool
mn_engine_end_late(struct mn_engine *e, uint32_t worker, uint64_t number, uint64_t row, bool end)
{
    if (worker >= e->shm.ctl->nworkers) {
        return false;
    }
    mn_mutex_lock(&e->mutex);
    const struct mn_worker *k = mn_worker_at(&e->shm, worker);
    uint32_t task;
    uint64_t since_ns;
    bool late = mn_worker_at_work(k, e->shm.ctl->ntasks, &task, &since_ns)
                && e->flight.by_task[task] != NULL && mn_a64_load_relaxed(&k->row) == row
                && e->flight.by_task[task]->planned.batch.number == number;
    uint64_t word = late ? mn_tasks_word(&e->tasks, task) : 0;
    late = late && mn_word_status(word) == MN_TASK_RUNNING && mn_word_worker(word) == worker;
    if (late) {
        mn_crew_late(&e->crew, worker, word, end);
    }
    mn_engine_unlock(e);
    return late;
}

int
mn_engine_kill_worker(struct mn_engine *e, uint32_t worker, int sig, bool retire)
{
    if (worker >= e->shm.ctl->nworkers) {
        return -EINVAL;
    }
    mn_mutex_lock(&e->mutex);
    if (retire) {
        mn_crew_retire(&e->crew, worker);
    }
    uint32_t pid = mn_crew_pid(&e->crew, worker);
    mn_mutex_unlock(&e->mutex);
    return mn_proc_kill((pid_t)pid, sig);
}

int
mn_engine_move_to(struct mn_engine *e, int32_t workers)
{
    if (e->autoscale == NULL) {
        return -EINVAL;
    }
    mn_mutex_lock(&e->mutex);
    mn_autoscale_move(e, workers);
    mn_engine_unlock(e);
    return 0;
}
