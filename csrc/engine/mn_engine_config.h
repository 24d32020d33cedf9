/* mn_engine_config.h - what an engine is opened with.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_CONFIG_H
#define MN_ENGINE_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

struct mn_shared_costs;
struct mn_autoscale_keep;

struct mn_engine_config {
    uint32_t workers;       /* to begin with */
    uint32_t min_workers;   /* below max_workers: the scheduler moves between the two; 0: fixed */
    uint32_t max_workers;   /* entries of the worker table */
    /* A sample in flight for longer is a straggler; 0: learned, < 0: never. */
    int64_t straggler_ns;
    uint32_t max_retries;
    bool respawn;           /* dead workers are replaced */
    uint64_t arena_bytes;   /* 0: as mn_engine_sizes.h says; halved until it maps */
    uint64_t memory_limit;  /* 0: half of what is available */
    uint32_t window;        /* balanced: batches in the steady window; 0: static */
    uint32_t blocks;        /* batches begun and not freed, as far as many are to be expected */
    bool in_order;
    struct mn_shared_costs *costs; /* balanced: outlives the engine */
    uint32_t ready_batch;   /* 0: what is planned is delivered. Else batches of so many samples */
    uint32_t ready_bound;   /* are formed of what is ready; none moves by more than so many */
    bool ready_mixes;       /* of several, where that is of use; else as they were planned */
    bool keeps;             /* workers may keep what they have opened: neighbours are kept
                             * together where that was measured to be cheaper */
    const struct mn_autoscale_keep *keep; /* of the last iterator's scheduler, or NULL */
};

#endif
