/* One row of voxels from any supported dtype to another.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_convert.h"

#include <string.h>

#include "minato/ops.h"
#include "ops/mn_npy.h"
#include "ops/mn_voxel.h"

/* memcpy, because the source may be unaligned. */
#define MN_CONVERT(name, S, T, how)                                                     \
    static void name(T *dst, const char *src, int64_t stride, int64_t n)                \
    {                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                               \
            S v;                                                                        \
            memcpy(&v, src + i * stride, sizeof(v));                                    \
            dst[i] = how(v);                                                            \
        }                                                                               \
    }

MN_CONVERT(f32_from_u8, uint8_t, float, (float))
MN_CONVERT(f32_from_i16, int16_t, float, (float))
MN_CONVERT(f32_from_u16, uint16_t, float, (float))
MN_CONVERT(f32_from_i32, int32_t, float, (float))
MN_CONVERT(f32_from_f32, float, float, (float))
MN_CONVERT(f32_from_f64, double, float, (float))
MN_CONVERT(u8_from_u8, uint8_t, uint8_t, (uint8_t))
MN_CONVERT(u8_from_i16, int16_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_u16, uint16_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_i32, int32_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_f32, float, uint8_t, mn_u8_of_float)
MN_CONVERT(u8_from_f64, double, uint8_t, mn_u8_of_float)

static void
to_f32(float *dst, const char *src, int from, int64_t stride, int64_t n)
{
    switch (from) {
    case MN_DTYPE_U8:
        f32_from_u8(dst, src, stride, n);
        break;
    case MN_DTYPE_I16:
        f32_from_i16(dst, src, stride, n);
        break;
    case MN_DTYPE_U16:
        f32_from_u16(dst, src, stride, n);
        break;
    case MN_DTYPE_I32:
        f32_from_i32(dst, src, stride, n);
        break;
    case MN_DTYPE_F32:
        f32_from_f32(dst, src, stride, n);
        break;
    default:
        f32_from_f64(dst, src, stride, n);
        break;
    }
}

static void
to_u8(uint8_t *dst, const char *src, int from, int64_t stride, int64_t n)
{
    switch (from) {
    case MN_DTYPE_U8:
        u8_from_u8(dst, src, stride, n);
        break;
    case MN_DTYPE_I16:
        u8_from_i16(dst, src, stride, n);
        break;
    case MN_DTYPE_U16:
        u8_from_u16(dst, src, stride, n);
        break;
    case MN_DTYPE_I32:
        u8_from_i32(dst, src, stride, n);
        break;
    case MN_DTYPE_F32:
        u8_from_f32(dst, src, stride, n);
        break;
    default:
        u8_from_f64(dst, src, stride, n);
        break;
    }
}

static void
same_dtype(const struct mn_kernels *kernels, char *dst, const char *src, int64_t item,
           int64_t stride, int64_t n)
{
    if (stride == item) {
        memcpy(dst, src, (size_t)(n * item));
    }
    else if (stride == -item && item == 4) {
        kernels->reverse_4(dst, src + (n - 1) * stride, n);
    }
    else if (stride == -item && item == 1) {
        kernels->reverse_1(dst, src + (n - 1) * stride, n);
    }
    else {
        for (int64_t i = 0; i < n; i++) {
            memcpy(dst + i * item, src + i * stride, (size_t)item);
        }
    }
}

void
mn_convert_row(const struct mn_kernels *kernels, void *dst, int to, const void *src,
               int from, int64_t stride, int64_t n)
{
    if (from == to) {
        same_dtype(kernels, dst, src, (int64_t)mn_dtype_size(from), stride, n);
    }
    else if (to == MN_DTYPE_F32) {
        to_f32(dst, src, from, stride, n);
    }
    else {
        to_u8(dst, src, from, stride, n);
    }
}
