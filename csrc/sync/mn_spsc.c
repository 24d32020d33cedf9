/* Size, initialisation and check of a ring; push and pop are inline in the header.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "sync/mn_spsc.h"

#include <stdbool.h>
#include <stdint.h>

static bool
mn_spsc_shape_ok(uint32_t capacity, uint32_t record)
{
    bool power = capacity != 0 && (capacity & (capacity - 1)) == 0;
    return power && capacity <= (1u << 31) && record != 0 && record <= (1u << 30);
}

/* Records start at multiples of 8, so that a cell may hold any fixed-width field. */
static uint32_t
mn_spsc_stride(uint32_t record)
{
    return (record + 7u) & ~7u;
}

uint64_t
mn_spsc_memsize(uint32_t capacity, uint32_t record)
{
    if (!mn_spsc_shape_ok(capacity, record)) {
        return 0;
    }
    uint64_t cells = (uint64_t)capacity * mn_spsc_stride(record);
    uint64_t bytes = sizeof(struct mn_spsc) + cells;
    return (bytes + MN_CACHELINE - 1) & ~(uint64_t)(MN_CACHELINE - 1);
}

int
mn_spsc_init(struct mn_spsc *ring, uint32_t capacity, uint32_t record)
{
    if (!mn_spsc_shape_ok(capacity, record) || (uintptr_t)ring % MN_CACHELINE != 0) {
        return -EINVAL;
    }
    memset(ring, 0, sizeof(*ring));
    ring->capacity = capacity;
    ring->record = record;
    ring->stride = mn_spsc_stride(record);
    ring->magic = MN_SPSC_MAGIC;
    return 0;
}

int
mn_spsc_check(const struct mn_spsc *ring, uint32_t capacity, uint32_t record)
{
    bool same = ring->magic == MN_SPSC_MAGIC && ring->capacity == capacity
                && ring->record == record && ring->stride == mn_spsc_stride(record);
    return same && mn_spsc_shape_ok(capacity, record) ? 0 : -EINVAL;
}
