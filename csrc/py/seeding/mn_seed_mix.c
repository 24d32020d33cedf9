/* Mixing of seeding keys and filling of state words; see mn_seed_mix.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/seeding/mn_seed_mix.h"

#include <string.h>

#define LANES 8

typedef uint32_t u32x8 __attribute__((vector_size(4 * LANES)));
typedef uint64_t u64x4 __attribute__((vector_size(4 * LANES)));

/* A bijection of 64 bits in which every input bit reaches every output bit. */
static inline uint64_t
mix64(uint64_t x)
{
    x ^= x >> 27;
    x *= 0x3c79ac492ba7b653u;
    x ^= x >> 33;
    x *= 0x1c69b3f74ac4ae35u;
    x ^= x >> 27;
    return x;
}

/* The added constants are the first fractional digits of pi, e and the golden ratio. Any constants
 * without structure would do; they keep zero inputs off the fixed point 0. */
struct mn_seed_key
mn_seed_key_make(uint64_t base_seed, uint64_t epoch, uint64_t position,
                 uint32_t domain)
{
    const uint64_t a = 0x243f6a8885a308d3u, b = 0xb7e151628aed2a6bu;
    struct mn_seed_key key;
#ifdef MN_BUG_SEED
    epoch = 0;
#endif
    key.lo = mix64(base_seed + a);
    key.hi = mix64(base_seed ^ b);
    key.lo = mix64((key.lo ^ epoch) + a);
    key.hi = mix64((key.hi + epoch) ^ b);
    key.lo = mix64((key.lo ^ position) + a);
    key.hi = mix64((key.hi + position) ^ b);
    key.lo = mix64((key.lo ^ domain) + a);
    key.hi = mix64((key.hi + domain) ^ b);
    return key;
}

uint64_t
mn_seed_place(struct mn_block *b, uint32_t row)
{
    if (b->seeded != MN_SEEDED_BY_INDEX || b->index_kind == MN_INDEX_PICKLE) {
        return b->position + row;
    }
    return MN_SEED_BY_INDEX + (uint64_t)((const int64_t *)mn_block_index(b))[row];
}

struct mn_seed_key
mn_seed_key_of_share(const struct mn_seed_share *share, uint64_t base_seed, uint64_t epoch,
                     uint64_t position, uint32_t domain)
{
    uint64_t block = domain == MN_SEED_SAMPLE ? share->block : 1;
    if (domain == MN_SEED_SET_EPOCH) {
        return mn_seed_key_make(base_seed, epoch, position, domain); /* the same on every rank */
    }
    if (share->world == 0) {
        base_seed ^= mix64(share->rank); /* mix64(0) is 0 */
    }
    else if (share->world > 1 && (position & MN_SEED_BY_INDEX) == 0) {
        position = (position / block * share->world + share->rank) * block + position % block;
    }
    return mn_seed_key_make(base_seed, epoch, position, domain);
}

struct mn_seed_stream
mn_seed_stream_make(struct mn_seed_key key, uint64_t number)
{
    const uint64_t golden = 0x9e3779b97f4a7c15u;
    uint64_t first = mix64(key.lo + (number + 1) * golden);
    uint64_t second = mix64((key.hi ^ first) + golden);
    struct mn_seed_stream s;
    s.k0 = (uint32_t)first;
    s.k1 = (uint32_t)(first >> 32);
    s.k2 = (uint32_t)second;
    s.k3 = (uint32_t)(second >> 32);
    s.seed = mix64((first + second) ^ golden) >> 1;
    return s;
}

/* The constants are those of mn_seed_mix.h. The stride is odd, so that counting is a bijection. */
static inline uint32_t
word_at(const struct mn_seed_stream *s, uint32_t i)
{
    uint32_t x = i * (s->k3 | 1u) + s->k0;
    x ^= x >> 16;
    x *= 0x21f0aaadu;
    x += s->k1;
    x ^= x >> 15;
    x *= 0x735a2d97u;
    x ^= x >> 15;
    return x ^ s->k2;
}

/* Compiler vectors rather than a plain loop, so that the speed does not depend on the optimisation
 * level of a build. A macro, because a function returning a vector has another calling convention
 * in each instruction set. */
#define EIGHT_WORDS(x, counter, s)  \
    do {                            \
        (x) = (counter);            \
        (x) ^= (x) >> 16;           \
        (x) *= 0x21f0aaadu;         \
        (x) += (s)->k1;             \
        (x) ^= (x) >> 15;           \
        (x) *= 0x735a2d97u;         \
        (x) ^= (x) >> 15;           \
        (x) ^= (s)->k2;             \
    } while (0)

/* Lane order for the wide form. Seen as four 64-bit numbers, the low halves are words 0 to 3 and
 * the high halves 4 to 7. So widening is a mask and a shift. (Converting the vector costs twice as
 * much with gcc 12.) */
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
#define HALVES {4, 0, 5, 1, 6, 2, 7, 3}
#else
#define HALVES {0, 4, 1, 5, 2, 6, 3, 7}
#endif

static inline __attribute__((always_inline)) void
fill_words(const struct mn_seed_stream *s, uint32_t *dst, size_t n)
{
    const uint32_t stride = s->k3 | 1u;
    u32x8 x, counter = (u32x8){0, 1, 2, 3, 4, 5, 6, 7} * stride + s->k0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        EIGHT_WORDS(x, counter, s);
        memcpy(dst + i, &x, sizeof x);
        counter += stride * LANES;
    }
    for (; i < n; i++) {
        dst[i] = word_at(s, (uint32_t)i);
    }
}

static inline __attribute__((always_inline)) void
fill_wide(const struct mn_seed_stream *s, uint64_t *dst, size_t n)
{
    const uint32_t stride = s->k3 | 1u;
    u32x8 x, counter = (u32x8)HALVES * stride + s->k0;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        EIGHT_WORDS(x, counter, s);
        u64x4 low = (u64x4)x & 0xffffffffu;
        u64x4 high = (u64x4)x >> 32;
        memcpy(dst + i, &low, sizeof low);
        memcpy(dst + i + LANES / 2, &high, sizeof high);
        counter += stride * LANES;
    }
    for (; i < n; i++) {
        dst[i] = word_at(s, (uint32_t)i);
    }
}

/* Both forms for one instruction set. */
#define VARIANT(name, attributes)                                                       \
    static attributes void words_##name(const struct mn_seed_stream *s, uint32_t *dst, size_t n) \
    {                                                                                   \
        fill_words(s, dst, n);                                                          \
    }                                                                                   \
    static attributes void wide_##name(const struct mn_seed_stream *s, uint64_t *dst, size_t n) \
    {                                                                                   \
        fill_wide(s, dst, n);                                                           \
    }                                                                                   \
    static const struct mn_seed_isa isa_##name = {words_##name, wide_##name};

VARIANT(baseline, )

/* Chosen by hand and not by target_clones: its resolver runs before a sanitizer's runtime is up,
 * and musl has no ifuncs. */
#if defined(__x86_64__) || defined(__i386__)

VARIANT(avx2, __attribute__((target("avx2"))))

const struct mn_seed_isa *
mn_seed_isa_pick(int vector)
{
    return vector && __builtin_cpu_supports("avx2") ? &isa_avx2 : &isa_baseline;
}

#else

const struct mn_seed_isa *
mn_seed_isa_pick(int vector)
{
    (void)vector;
    return &isa_baseline;
}

#endif
