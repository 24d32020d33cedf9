/* The versions of the inner loops for x86-64; part of mn_kernels.c, included only there.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Architectures without such a file run the plain version, which their compilers vectorise, except
 * for the normals.
 */
#include <immintrin.h>

#define MN_K_SUFFIX sse2
#define MN_K_NAME "sse2"
#define MN_LANES 4
#define MN_SQRT(v) ((mn_f32_sse2)_mm_sqrt_ps((__m128)(v)))
#define MN_MUL_EVEN(a, b) ((mn_u64_sse2)_mm_mul_epu32((__m128i)(a), (__m128i)(b)))
#include "ops/mn_normals_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN

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
#include "ops/mn_normals_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
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
#include "ops/mn_normals_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
