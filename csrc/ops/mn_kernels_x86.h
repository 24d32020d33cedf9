/* The versions of the inner loops for x86-64; part of mn_kernels.c, included only there.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Architectures without such a file run the plain version, which their compilers vectorise, except
 * for the normals.
 */
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
#include "ops/mn_normals_body.h"
#include "ops/mn_resize_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
#undef MN_PIXELS
#undef MN_WIDEN
#undef MN_PIXEL

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
#include "ops/mn_normals_body.h"
#include "ops/mn_resize_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
#undef MN_PIXELS
#undef MN_WIDEN
#undef MN_PIXEL
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
#include "ops/mn_normals_body.h"
#include "ops/mn_resize_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
#undef MN_PIXELS
#undef MN_WIDEN
#undef MN_PIXEL
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
