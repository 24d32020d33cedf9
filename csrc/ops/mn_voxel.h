/* The operations on one voxel: the same for processors and for CUDA devices.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Included by mn_view.c and mn_kernels.c, which loop over these, and by cuda/mn_finish.cu, where
 * each thread has a voxel. So the bytes are the same on all of them, provided that each operation
 * is one IEEE operation. mn_kernels.h says how that is ensured on processors. For devices, setup.py
 * passes -fmad=false to nvcc. The exception is the bit pattern of NaN that an operation gives:
 * devices have only one.
 */
#ifndef MN_VOXEL_H
#define MN_VOXEL_H

#include <stdint.h>

#if defined(__CUDACC__)
#define MN_VOXEL static __device__ __forceinline__
#else
#define MN_VOXEL static inline __attribute__((always_inline))
#endif

MN_VOXEL uint8_t
mn_u8_of_float(double v)
{
    return v >= 255.0 ? 255 : v > 0.0 ? (uint8_t)v : 0; /* a NaN fails both comparisons */
}

MN_VOXEL uint8_t
mn_u8_of_int(int32_t v)
{
    return v > 255 ? 255 : v > 0 ? (uint8_t)v : 0;
}

MN_VOXEL float
mn_scaled(float v, double factor)
{
    return (float)((double)v * factor);
}

/* A NaN stays a NaN. */
MN_VOXEL float
mn_normalized(float v, float low, float high, float mean, float std)
{
    v = v < low ? low : v;
    v = v > high ? high : v;
    return (v - mean) / std;
}

MN_VOXEL float
mn_noisy(float v, float mean, float std, float normal)
{
    return v + (mean + std * normal);
}

#endif
