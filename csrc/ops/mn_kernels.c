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
#include "ops/mn_voxel.h"

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
#include "ops/mn_normals_body.h"
#include "ops/mn_resize_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#if defined(__GNUC__) && !defined(__clang__) && defined(MN_K_TWINS)
#pragma GCC pop_options
#endif

/* The four 32-bit numbers of a pixel that is being resized. */
typedef int32_t mn_pixel __attribute__((vector_size(16), may_alias));

#if defined(__x86_64__)
#include "ops/mn_kernels_x86.h"
#elif defined(__aarch64__)
#include "ops/mn_kernels_arm.h"
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
