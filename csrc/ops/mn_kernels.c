/* The inner loops for each instruction set, and the choice among them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The pragmas keep the promise of mn_kernels.h for all build flags: no fused multiply-add (which
 * AArch64 and AVX-512 would use). With GCC they also allow a square root that does not set errno;
 * setting it would keep the loop from being vectorised.
 */
#include "ops/mn_kernels.h"

#include <string.h>

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("O3", "fp-contract=off", "no-math-errno", "no-trapping-math")
#endif

/* Included after the pragmas, so that they apply to it, too. */
#include "ops/mn_recipe.h"

#define MN_JOIN_(a, b) mn_##a##_##b
#define MN_JOIN(a, b) MN_JOIN_(a, b)
#define MN_K(name) MN_JOIN(name, MN_K_SUFFIX)

#if defined(__x86_64__) || defined(__aarch64__)
#define MN_K_TWINS 1
#endif

/* The plain version: the reference for the others, and the fallback where there are none. */
#if defined(__GNUC__) && !defined(__clang__) && defined(MN_K_TWINS)
#pragma GCC push_options
#pragma GCC optimize("no-tree-vectorize")
#endif
#define MN_K_SUFFIX plain
#define MN_K_NAME "plain"
#define MN_LANES 1
#define MN_SQRT(v) __builtin_sqrtf(v)
#include "ops/mn_kernels_body.h"
#if defined(__GNUC__) && !defined(__clang__) && defined(MN_K_TWINS)
#pragma GCC pop_options
#endif

/* The four 32-bit numbers of a pixel that is being resized. */
typedef int32_t mn_pixel __attribute__((vector_size(16), may_alias));

/* Other architectures run the plain version, which their compilers vectorise, except for the
 * normals. */
#if defined(__x86_64__)
#include <immintrin.h>

static inline __m128i
mn_widen_sse2(const uint8_t *bytes)
{
    int32_t four;
    memcpy(&four, bytes, 4);
    __m128i zero = _mm_setzero_si128();
    return _mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero);
}

static inline void
mn_store_pixel(uint8_t *out, mn_pixel sums)
{
    __m128i words = _mm_packs_epi32((__m128i)sums, (__m128i)sums);
    int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    memcpy(out, &four, 4);
}

#define MN_K_SUFFIX sse2
#define MN_K_NAME "sse2"
#define MN_LANES 4
#define MN_SQRT(v) ((mn_f32_sse2)_mm_sqrt_ps((__m128)(v)))
#define MN_MUL_EVEN(a, b) ((mn_u64_sse2)_mm_mul_epu32((__m128i)(a), (__m128i)(b)))
#define MN_PIXELS 1
#define MN_WIDEN(p) mn_widen_sse2(p)
#define MN_PIXEL(v, i) ((mn_pixel)(v))
#include "ops/mn_kernels_body.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define MN_K_SUFFIX avx2
#define MN_K_NAME "avx2"
#define MN_LANES 8
#define MN_SQRT(v) ((mn_f32_avx2)_mm256_sqrt_ps((__m256)(v)))
#define MN_MUL_EVEN(a, b) ((mn_u64_avx2)_mm256_mul_epu32((__m256i)(a), (__m256i)(b)))
#define MN_PIXELS 2
#define MN_WIDEN(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define MN_PIXEL(v, i) ((mn_pixel)_mm256_extracti128_si256((__m256i)(v), i))
#include "ops/mn_kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                           \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,prefer-vector-width=512")
#endif
#define MN_K_SUFFIX avx512
#define MN_K_NAME "avx512"
#define MN_LANES 16
#define MN_SQRT(v) ((mn_f32_avx512)_mm512_sqrt_ps((__m512)(v)))
#define MN_MUL_EVEN(a, b) ((mn_u64_avx512)_mm512_mul_epu32((__m512i)(a), (__m512i)(b)))
#define MN_PIXELS 2
#define MN_WIDEN(p) _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
#define MN_PIXEL(v, i) ((mn_pixel)_mm256_extracti128_si256((__m256i)(v), i))
#include "ops/mn_kernels_body.h"
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#elif defined(__aarch64__) /* where every processor has these vectors */
#include <arm_neon.h>

static inline int32x4_t
mn_widen_neon(const uint8_t *bytes)
{
    uint32_t four;
    memcpy(&four, bytes, 4);
    uint16x8_t wide = vmovl_u8(vcreate_u8(four));
    return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}

static inline void
mn_store_pixel(uint8_t *out, mn_pixel sums)
{
    uint16x4_t half = vmovn_u32((uint32x4_t)sums);
    uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vmovn_u16(vcombine_u16(half, half))), 0);
    memcpy(out, &four, 4);
}

#define MN_K_SUFFIX neon
#define MN_K_NAME "neon"
#define MN_LANES 4
#define MN_SQRT(v) ((mn_f32_neon)vsqrtq_f32((float32x4_t)(v)))
#define MN_MUL_EVEN(a, b)                                                               \
    ((mn_u64_neon)vmull_u32(vmovn_u64((uint64x2_t)(a)), vmovn_u64((uint64x2_t)(b))))
#define MN_PIXELS 1
#define MN_WIDEN(p) mn_widen_neon(p)
#define MN_PIXEL(v, i) ((mn_pixel)(v))
#include "ops/mn_kernels_body.h"

#endif

const struct mn_kernels *
mn_kernels_get(int level)
{
    switch (level) {
    case 0:
        return &mn_kernels_plain;
#if defined(__x86_64__)
    case 1:
        return &mn_kernels_sse2;
    case 2:
        return __builtin_cpu_supports("avx2") ? &mn_kernels_avx2 : NULL;
    case 3:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
                       && __builtin_cpu_supports("avx512vl")
                       && __builtin_cpu_supports("avx512dq")
                   ? &mn_kernels_avx512
                   : NULL;
#elif defined(__aarch64__)
    case 1:
        return &mn_kernels_neon;
#endif
    default:
        return NULL;
    }
}

const struct mn_kernels *
mn_kernels_best(void)
{
    const struct mn_kernels *best = mn_kernels_get(0);
    for (int level = 1; mn_kernels_get(level) != NULL; level++) {
        best = mn_kernels_get(level);
    }
    return best;
}
