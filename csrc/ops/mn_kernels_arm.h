/* The version of the inner loops for AArch64, where every processor has these vectors; part of
 * mn_kernels.c, included only there.
 * SPDX-License-Identifier: Apache-2.0
 */
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
