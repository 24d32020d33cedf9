/* A ring of fixed-size records from one producer to one consumer.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Messages between two threads that may be in different processes, through memory that
 *   is given, without locks or system calls. Waiting is not its business: the producer
 *   rings a bell after a push (mn_bell_ring_released, as the push is release only).
 *
 * Actors and owners
 *   tail, head_seen   the producer writes; tail is read by the consumer.
 *   head, tail_seen   the consumer writes; head is read by the producer.
 *   capacity, record, magic   constant after init.
 *   records           cell i belongs to the consumer while head <= i < tail, else to the
 *                     producer.
 *   The *_seen words are each side's memory of the other's index: the peer's cache line is
 *   read only when the ring looks full (or empty), not for every record.
 *
 * Invariants
 *   0 <= tail - head <= capacity; head_seen <= head; tail_seen <= tail (all modulo 2^32).
 *   A stale *_seen only makes the ring look fuller (emptier) than it is.
 *
 * Order pairs
 *   [R1] -> [R2]  push stores tail with release after it copied the record in; pop loads
 *         tail with acquire before it copies the record out: the record is whole.
 *   [R3] -> [R4]  pop stores head with release after it copied the record out; push loads
 *         head with acquire before it writes the cell again: no record is overwritten
 *         while it is read.
 *   Each side reads its own index relaxed: nobody else writes it.
 *
 * Wrap and ABA
 *   Indexes run freely over 2^32 and are masked to a cell; capacity is a power of two of at
 *   most 2^31, so it divides 2^32 and tail - head is right across the wrap. For an index to
 *   be mistaken for itself one turn later its owner would have to move 2^32 records while
 *   the other side holds it back to at most capacity.
 *
 * What a crash leaves behind
 *   Producer killed in push: the record is in the ring or it is not; a half-written cell is
 *   outside [head, tail) and will be written again. Consumer killed in pop: the record is
 *   still in the ring or it is taken; killed between the copy and R3, a successor sees it
 *   again. All state is in the ring, so a successor of either side just goes on, once the
 *   death is confirmed. There is nothing to unlock.
 *
 *   mn_spsc_init once, before either side; mn_spsc_check by a process that attaches.
 *   producer: mn_spsc_push      consumer: mn_spsc_pop
 */
#ifndef MN_SPSC_H
#define MN_SPSC_H

#include <stdint.h>
#include <string.h>

#include "base/mn_atomic.h"
#include "base/mn_attr.h"
#include "base/mn_error.h"

#define MN_SPSC_MAGIC 0x4d535001u /* changes with the layout below */

struct mn_spsc {
    uint32_t magic;
    uint32_t capacity; /* records, a power of two */
    uint32_t record;   /* bytes in a record */
    uint32_t stride;   /* bytes from a record to the next, a multiple of 8 */
    char pad0[MN_CACHELINE - 4 * sizeof(uint32_t)];

    mn_a32 tail; /* producer's line */
    uint32_t head_seen;
    char pad1[MN_CACHELINE - 2 * sizeof(uint32_t)];

    mn_a32 head; /* consumer's line */
    uint32_t tail_seen;
    char pad2[MN_CACHELINE - 2 * sizeof(uint32_t)];
    /* records follow */
};

MN_STATIC_ASSERT(sizeof(struct mn_spsc) == 3 * MN_CACHELINE, "layout shared by processes");

/* Bytes that a ring needs, a multiple of the cache line; 0 when capacity is not a power of
 * two in [1, 2^31] or record is 0 or above 2^30. */
uint64_t
mn_spsc_memsize(uint32_t capacity, uint32_t record);

/* Makes an empty ring in memsize bytes of memory aligned to a cache line. 0 or -EINVAL. */
int
mn_spsc_init(struct mn_spsc *ring, uint32_t capacity, uint32_t record);

/* 0 if this memory holds a ring of that shape in this layout, else -EINVAL. */
int
mn_spsc_check(const struct mn_spsc *ring, uint32_t capacity, uint32_t record);

static inline unsigned char *
mn_spsc_cell(struct mn_spsc *ring, uint32_t index)
{
    uint64_t cell = index & (ring->capacity - 1);
    return (unsigned char *)(ring + 1) + cell * ring->stride;
}

/* Producer: copies one record in. MN_OK or MN_FULL. */
static inline int
mn_spsc_push(struct mn_spsc *ring, const void *record)
{
    uint32_t tail = mn_a32_load_relaxed(&ring->tail); /* our own */
    if (tail - ring->head_seen >= ring->capacity) {
        ring->head_seen = mn_a32_load_acquire(&ring->head); /* [R4] */
        if (tail - ring->head_seen >= ring->capacity) {
            return MN_FULL;
        }
    }
    memcpy(mn_spsc_cell(ring, tail), record, ring->record);
    mn_a32_store_release(&ring->tail, tail + 1); /* [R1] */
    return MN_OK;
}

/* Consumer: copies the oldest record out. MN_OK or MN_EMPTY. */
static inline int
mn_spsc_pop(struct mn_spsc *ring, void *record)
{
    uint32_t head = mn_a32_load_relaxed(&ring->head); /* our own */
    if (head == ring->tail_seen) {
        ring->tail_seen = mn_a32_load_acquire(&ring->tail); /* [R2] */
        if (head == ring->tail_seen) {
            return MN_EMPTY;
        }
    }
    memcpy(record, mn_spsc_cell(ring, head), ring->record);
    mn_a32_store_release(&ring->head, head + 1); /* [R3] */
    return MN_OK;
}

/* Records in the ring, exact for neither side while the other moves: a lower bound for the
 * consumer, an upper bound for the producer. */
static inline uint32_t
mn_spsc_count(const struct mn_spsc *ring)
{
    uint32_t head = mn_a32_load_acquire(&ring->head);
    return mn_a32_load_acquire(&ring->tail) - head;
}

#endif /* MN_SPSC_H */
