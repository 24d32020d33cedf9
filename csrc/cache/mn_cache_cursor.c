/* See mn_cache_cursor.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_cursor.h"

#include <stdbool.h>
#include <string.h>

#include "cache/mn_cache_checksum.h"
#include "cache/mn_cache_data.h"
#include "cache/mn_cache_log.h"

enum place { NO_ENTRY, BEGUN, WHOLE };

/* What is at a place in the cursor's segment. head: of an entry. */
static enum place
look(const struct mn_cache_map *map, const struct mn_cache_cursor *c, uint64_t off,
     struct mn_cache_head *head)
{
    const uint64_t most = map->shape.segment_bytes;
    if (off > most - sizeof(struct mn_cache_entry)) {
        return NO_ENTRY;
    }
    uint64_t seal;
    if (!mn_cache_data_head(map, c->segment * most + off, head, &seal) /* [K11] */
        || head->generation != c->generation || head->bytes > most
        || off + mn_cache_payload_off(head->bytes) + head->bytes > most) {
        return NO_ENTRY;
    }
    if (seal == mn_cache_seal(map->shape.salt, head)) {
        return WHOLE;
    }
    return seal == mn_cache_seal_begun(map->shape.salt, head) ? BEGUN : NO_ENTRY;
}

static bool
is_here(const struct mn_cache_map *map, const struct mn_cache_cursor *c)
{
    return c->generation != 0
           && mn_a64_load_acquire(&map->segments[c->segment].generation) == c->generation;
}

/* The lowest generation above one, and its segment. UINT64_MAX: there is none. */
static uint64_t
lowest_above(const struct mn_cache_map *map, uint64_t generation, uint64_t *segment)
{
    uint64_t lowest = UINT64_MAX;
    for (uint64_t i = 0; i < map->shape.nsegments; i++) {
        uint64_t here = mn_a64_load_acquire(&map->segments[i].generation);
        if (here > generation && here < lowest) {
            lowest = here;
            *segment = i;
        }
    }
    return lowest;
}

/* Goes to the oldest segment behind the cursor's. False: there is none.
 *
 * A scan may miss a segment that is made meanwhile, and meet one that is made after that. The
 * second scan finds the missed one. */
static bool
go_on(const struct mn_cache_map *map, struct mn_cache_cursor *c)
{
    uint64_t segment = 0, next = lowest_above(map, c->generation, &segment);
    if (next == UINT64_MAX) {
        return false;
    }
    next = lowest_above(map, c->generation, &segment);
    if (next == UINT64_MAX) {
        return false; /* recycled meanwhile: the next call looks again */
    }
    c->generation = next;
    c->oldest = next < c->oldest ? next : c->oldest; /* it was made after the call had begun */
    c->segment = segment;
    c->off = c->npending = 0;
    return true;
}

/* Notes an entry that is being written. */
static void
note(struct mn_cache_cursor *c, uint64_t off)
{
    if (c->npending == MN_CACHE_PENDING) {
        c->npending--;
        memmove(c->pending, c->pending + 1, c->npending * sizeof(*c->pending));
    }
    c->pending[c->npending++] = off;
}

/* Reports noted entries that are whole by now. */
static uint64_t
settle(const struct mn_cache_map *map, struct mn_cache_cursor *c, struct mn_cache_stored *out,
       uint64_t most)
{
    struct mn_cache_head head;
    uint64_t n = 0, left = 0;
    for (uint64_t i = 0; i < c->npending; i++) {
        if (n < most && look(map, c, c->pending[i], &head) == WHOLE) {
            out[n++] = (struct mn_cache_stored){head.digest[0], head.generation};
        }
        else {
            c->pending[left++] = c->pending[i];
        }
    }
    c->npending = left;
    return n;
}

/* Whether the log has left the cursor's segment, and there is nothing to wait for in it. A later
 * segment shows that the cursor's one has been the current one before. */
static bool
is_over(const struct mn_cache_file *file, const struct mn_cache_cursor *c)
{
    uint64_t segment;
    return lowest_above(&file->map, c->generation, &segment) != UINT64_MAX
           && mn_a64_load_seqcst(&file->map.header->current) != c->segment + 1 /* [K14] */
           && !mn_cache_log_is_reserved(file, c->segment);
}

uint64_t
mn_cache_cursor_next(const struct mn_cache_file *file, struct mn_cache_cursor *c,
                     struct mn_cache_stored *out, uint64_t most)
{
    const struct mn_cache_map *map = &file->map;
    struct mn_cache_head head;
    uint64_t n = 0, segment;
    if (c->salt != map->shape.salt || c->segment >= map->shape.nsegments
        || c->npending > MN_CACHE_PENDING) {
        *c = (struct mn_cache_cursor){.salt = map->shape.salt};
    }
    c->oldest = lowest_above(map, 0, &segment);
    for (;;) {
        if (!is_here(map, c)) {
            if (!go_on(map, c)) {
                return n;
            }
            continue;
        }
        bool over = is_over(file, c); /* before the places are looked at */
        uint64_t fill = mn_a64_load_acquire(&map->segments[c->segment].fill);
        n += settle(map, c, out + n, most - n);
        while (n < most && c->off < fill) {
            enum place place = look(map, c, c->off, &head);
            if (place == NO_ENTRY) {
                break;
            }
            if (place == BEGUN) {
                note(c, c->off);
            }
            else {
                out[n++] = (struct mn_cache_stored){head.digest[0], head.generation};
            }
            c->off += mn_cache_payload_off(head.bytes) + head.bytes;
        }
        if (n == most || !over || !go_on(map, c)) {
            return n;
        }
    }
}
