/* mn_engine_sizes.h - how much of everything an engine has: descriptors, entries of queues,
 * records, arena, and how much of that may be used where nobody says.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Functions of the configuration and of what the machine has.
 */
#ifndef MN_ENGINE_SIZES_H
#define MN_ENGINE_SIZES_H

#include <stdint.h>

#include "engine/mn_engine_config.h"
#include "workers/mn_records.h"

/* Of the arena; by default four times the memory limit, at least 4 GiB and at most 1 TiB, and with
 * the input region no more than a quarter of the address space that RLIMIT_AS leaves. */
uint64_t
mn_engine_arena_bytes(const struct mn_engine_config *cfg);

/* How much of it may be used; by default half of the memory that is available. (The loader says
 * more exactly what its default is: ../minato/_memory_limit.py.) */
uint64_t
mn_engine_memory_limit(const struct mn_engine_config *cfg, uint64_t arena_bytes);

/* Counts and offsets of all sections, for an arena of so many bytes. Returns the mapping's. */
uint64_t
mn_engine_place_sections(struct mn_ctl *c, const struct mn_engine_config *cfg,
                         uint64_t arena_bytes);

/* The queues' rings, in a mapping whose sections were placed for the same configuration. */
void
mn_engine_init_queues(const struct mn_shm *shm, const struct mn_engine_config *cfg);

#endif
