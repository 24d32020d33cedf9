/* mn_engine_sizes.c - see mn_engine_sizes.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine_sizes.h"

#include "memory/mn_arena.h"
#include "os/mn_limits.h"

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
#define INPUT_LEAST (UINT64_C(64) << 20)
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

uint64_t
mn_engine_place_sections(struct mn_ctl *c, const struct mn_engine_config *cfg,
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

void
mn_engine_init_queues(const struct mn_shm *shm, const struct mn_engine_config *cfg)
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

uint64_t
mn_engine_arena_bytes(const struct mn_engine_config *cfg)
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
uint64_t
mn_engine_memory_limit(const struct mn_engine_config *cfg, uint64_t arena_bytes)
{
    uint64_t limit = cfg->memory_limit;
    uint64_t most = arena_bytes - arena_bytes / 4;
    return limit != 0 && limit < most ? limit : most;
}
