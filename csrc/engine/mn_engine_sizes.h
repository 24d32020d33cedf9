/* mn_engine_sizes.h - the sizes of an engine: descriptors, queue entries, records, arena, and how
 * much of it may be used.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Functions of the configuration and of the machine.
 */
#ifndef MN_ENGINE_SIZES_H
#define MN_ENGINE_SIZES_H

#include <stdint.h>

#include "engine/mn_engine.h"
#include "workers/mn_records.h"

/* Returns the size of the arena: by default four times the memory limit, at least 4 GiB and at most
 * 1 TiB. Together with the input region it takes at most a quarter of the address space that
 * RLIMIT_AS leaves. */
uint64_t
mn_engine_arena_bytes(const struct mn_engine_config *cfg);

/* Returns how much of the arena may be used: the memory limit, but at most three quarters. */
uint64_t
mn_engine_memory_limit(const struct mn_engine_config *cfg, uint64_t arena_bytes);

/* Fills in the counts and offsets of all sections, for an arena of arena_bytes. Returns the size of
 * the mapping. */
uint64_t
mn_engine_place_sections(struct mn_ctl *c, const struct mn_engine_config *cfg,
                         uint64_t arena_bytes);

/* Initializes the queues' rings, in a mapping whose sections were placed for the same
 * configuration. */
void
mn_engine_init_queues(const struct mn_shm *shm, const struct mn_engine_config *cfg);

#endif
