/* The operations that are left to do on the voxels of one sample: as numbers, and on a voxel.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Each operator that needs nothing but a voxel, its place and random numbers (flip, cast, scale,
 * noise, normalize) becomes one step. Its draws are made, and what is left is arithmetic. A
 * pipeline that is to end on a device leaves its last operators as a recipe with the sample, and
 * cuda/mn_finish.cu does the rest there. Otherwise mn_pipeline.c does it, by the same steps.
 *
 * A recipe is MN_RECIPE_WORDS(steps) words of 64 bits: the sample's key, high half first, then the
 * steps, in the byte order of the machine. Its reader may trust it for the values of voxels, but
 * for nothing else: no memory address may depend on its contents.
 */
#ifndef MN_RECIPE_H
#define MN_RECIPE_H

#include <stdint.h>

enum mn_step_kind {
    MN_STEP_FLIP = 1,
    MN_STEP_CAST,
    MN_STEP_SCALE,
    MN_STEP_NORMALIZE,
    MN_STEP_NOISE
};

struct mn_step {
    uint32_t kind;    /* enum mn_step_kind */
    uint16_t number;  /* noise: the operator's place in its pipeline */
    uint8_t axes;     /* flip: bit a is set for axis a, 1 to 3 */
    uint8_t dtypes;   /* cast: the image's, and from bit 4 on the label's; 0: unchanged */
    double factor;    /* scale */
    float low, high;  /* normalize */
    float mean, std;  /* normalize, noise */
};

#define MN_STEP_WORDS 4
#define MN_RECIPE_WORDS(steps) (2 + MN_STEP_WORDS * (int64_t)(steps))

/* A window for a reader that has the case. It holds the case's number, and where in it the crop
 * begins on axes 1 to 3, as 64-bit words. */
#define MN_WINDOW_WORDS 4

/* The dtype that a cast gives the image (0) or the label (1). */
#define MN_STEP_DTYPE(step, which) ((step)->dtypes >> (4 * (which)) & 15)

/* ---- input of the kernel that finishes one volume of each sample of a batch on a device ----
 *
 * Processors fill it in (../minato/device/provider.py), and devices read it (cuda/mn_finish.cu).
 * So its only pointers are to memory of the device, and its layout is the same for both.
 *
 * The unfinished voxels lie in `source`, sample after sample. Or they are a window of a whole case
 * that stays on the device. Then each sample has a window, and `cases` say where the cases are. A
 * window that makes no sense is still read within its case.
 */

#define MN_FINISH_THREADS 256u /* of a block */

/* A volume that stays on the device, C contiguous. */
struct mn_resident {
    const unsigned char *voxels;
    int64_t shape[3]; /* depth, height, width: at least a window's; the job has the channels */
};

struct mn_finish {
    const unsigned char *source; /* volumes, C contiguous, one after the other; NULL: use windows */
    unsigned char *target;       /* the same voxels, finished; must not overlap source */
    const uint64_t *recipes;     /* MN_RECIPE_WORDS(steps) words for each sample */
    const int64_t *windows;      /* MN_WINDOW_WORDS words for each sample */
    const struct mn_resident *cases;
    uint32_t n_cases;
    uint32_t samples, steps;
    uint32_t voxels;                /* per sample: channels * depth * height * width */
    uint32_t depth, height, width;
    int32_t from, to; /* enum mn_dtype of source and target */
    int32_t which;    /* 0: the image, 1: the label */
};

/* ---- the operations on one voxel: the same for processors and for CUDA devices ----
 *
 * Processors loop over these (mn_pipeline_sample.c, mn_kernels.c), and in cuda/mn_finish.cu each
 * thread has a voxel. So the bytes are the same on all of them, provided that each operation
 * is one IEEE operation. mn_kernels.h says how that is ensured on processors. For devices, setup.py
 * passes -fmad=false to nvcc. The exception is the bit pattern of NaN that an operation gives:
 * devices have only one.
 */

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

#endif /* MN_RECIPE_H */
