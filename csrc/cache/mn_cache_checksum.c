/* See mn_cache_checksum.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_checksum.h"

#include <string.h>

#define A UINT64_C(0x9e3779b97f4a7c15)
#define B UINT64_C(0xc2b2ae3d27d4eb4f)
#define LANES 4

static inline uint64_t
rotated(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

/* One multiplication, as they take most of the time. Another word always makes another lane. */
static inline uint64_t
mixed(uint64_t lane, uint64_t word)
{
    return rotated((lane ^ word) * A, 31);
}

static inline uint64_t
finished(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint64_t
mn_cache_checksum(uint64_t salt, const void *data, uint64_t bytes)
{
    const unsigned char *at = data;
    uint64_t lanes[LANES] = {salt + A + B, salt + B, salt, salt - A};
    uint64_t words[LANES], left = bytes;
    for (; left >= sizeof(words); left -= sizeof(words), at += sizeof(words)) {
        memcpy(words, at, sizeof(words));
        for (int i = 0; i < LANES; i++) {
            lanes[i] = mixed(lanes[i], words[i]);
        }
    }
    uint64_t sum = bytes;
    for (int i = 0; i < LANES; i++) {
        sum = mixed(sum, lanes[i]);
    }
    for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), at += sizeof(uint64_t)) {
        memcpy(words, at, sizeof(uint64_t));
        sum = mixed(sum, words[0]);
    }
    for (; left > 0; left--, at++) {
        sum = mixed(sum, *at + UINT64_C(256));
    }
    return finished(sum);
}

uint64_t
mn_cache_seal(uint64_t salt, const struct mn_cache_head *head)
{
    uint64_t seal = mn_cache_checksum(salt, head, sizeof(*head));
    return seal != 0 ? seal : 1;
}

uint64_t
mn_cache_seal_begun(uint64_t salt, const struct mn_cache_head *head)
{
    struct mn_cache_head begun = *head;
    begun.sums = 0;
    return mn_cache_seal(salt, &begun) ^ 2;
}
