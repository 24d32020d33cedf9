/* The version of the inner loops for AArch64, where every processor has these vectors; part of
 * mn_kernels.c, included only there.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <arm_neon.h>

#define MN_K_SUFFIX neon
#define MN_K_NAME "neon"
#define MN_LANES 4
#define MN_SQRT(v) ((mn_f32_neon)vsqrtq_f32((float32x4_t)(v)))
#define MN_MUL_EVEN(a, b)                                                               \
    ((mn_u64_neon)vmull_u32(vmovn_u64((uint64x2_t)(a)), vmovn_u64((uint64x2_t)(b))))
#include "ops/mn_normals_body.h"
#include "ops/mn_kernels_body.h"
#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
