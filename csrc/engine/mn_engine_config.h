/* mn_engine_config.h - the configuration of an engine.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_CONFIG_H
#define MN_ENGINE_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

struct mn_shared_costs;
struct mn_autoscale_saved;

struct mn_engine_config {
    uint32_t workers;       /* at the start */
    uint32_t min_workers;   /* below max_workers: the scheduler moves between the two; 0: fixed */
    uint32_t max_workers;   /* entries of the worker table */
    /* A sample that runs for longer is a straggler; 0: learned, < 0: never. */
    int64_t straggler_ns;
    uint32_t max_retries;
    bool respawn;           /* replace dead workers */
    uint64_t arena_bytes;   /* 0: see mn_engine_sizes.h; halved until it maps */
    uint64_t memory_limit;  /* 0: half of the available memory */
    uint32_t window;        /* balanced: steady prefetch window, in batches; 0: static */
    uint32_t blocks;        /* expected number of batches in flight */
    bool in_order;
    struct mn_shared_costs *costs; /* balanced: must outlive the engine */
    uint32_t ready_batch;   /* 0: deliver batches as planned. Else form batches of this many */
    uint32_t ready_bound;   /* ready samples; none moves by more than this many batches */
    bool ready_mixes;       /* mix samples of several planned batches where that helps */
    /* Workers may keep files open between samples: make neighbours in one worker where measurements
     * show that to be cheaper. */
    bool group_neighbours;
    const struct mn_autoscale_saved *saved_scheduler; /* the last iterator's scheduler, or NULL */
};

#endif
