/* The kernel that finishes samples on a device: each thread handles a voxel.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A step changes a voxel's value or, for a flip, its place. So a thread first goes back over all
 * flips, from the place in the target to the one in the source. It reads there and then applies the
 * steps forwards, with the voxel's place at each step, because noise depends on the place. The
 * operations are those of ops/mn_recipe.h and ops/mn_normals_body.h. Memory accesses stay within
 * the sample's own volume, whatever a recipe contains.
 */
#include <string.h>

#include "minato/ops.h"
#include "ops/mn_kernels.h"
#include "ops/mn_recipe.h"

#define MN_K(name) mn_##name##_device
#define MN_LANES 1
#if defined(__CUDACC__)
#define MN_SQRT(v) __fsqrt_rn(v)
#else
#define MN_SQRT(v) __builtin_sqrtf(v)
#endif
#include "ops/mn_normals_body.h"

/* A voxel between source and target. */
struct mn_voxel {
    int dtype; /* MN_DTYPE_NONE: unchanged, at its place in the source */
    float f;   /* MN_DTYPE_F32 */
    uint8_t u; /* MN_DTYPE_U8 */
};

template <typename T>
MN_VOXEL T
load(const unsigned char *at)
{
    return *(const T *)(const void *)at;
}

MN_VOXEL uint32_t
size_of(int dtype)
{
    switch (dtype) {
    case MN_DTYPE_U8:
        return 1;
    case MN_DTYPE_I16:
    case MN_DTYPE_U16:
        return 2;
    case MN_DTYPE_F64:
        return 8;
    default:
        return 4;
    }
}

MN_VOXEL float
as_f32(const unsigned char *at, int from)
{
    switch (from) {
    case MN_DTYPE_U8:
        return (float)load<uint8_t>(at);
    case MN_DTYPE_I16:
        return (float)load<int16_t>(at);
    case MN_DTYPE_U16:
        return (float)load<uint16_t>(at);
    case MN_DTYPE_I32:
        return (float)load<int32_t>(at);
    case MN_DTYPE_F32:
        return load<float>(at);
    default:
        return (float)load<double>(at);
    }
}

MN_VOXEL uint8_t
as_u8(const unsigned char *at, int from)
{
    switch (from) {
    case MN_DTYPE_U8:
        return load<uint8_t>(at);
    case MN_DTYPE_I16:
        return mn_u8_of_int(load<int16_t>(at));
    case MN_DTYPE_U16:
        return mn_u8_of_int(load<uint16_t>(at));
    case MN_DTYPE_I32:
        return mn_u8_of_int(load<int32_t>(at));
    case MN_DTYPE_F32:
        return mn_u8_of_float(load<float>(at));
    default:
        return mn_u8_of_float(load<double>(at));
    }
}

MN_VOXEL void
cast(struct mn_voxel *v, int dtype, const unsigned char *at, int from)
{
    if (dtype == MN_DTYPE_F32 && v->dtype != MN_DTYPE_F32) {
        v->f = v->dtype == MN_DTYPE_U8 ? (float)v->u : as_f32(at, from);
        v->dtype = MN_DTYPE_F32;
    }
    else if (dtype == MN_DTYPE_U8 && v->dtype != MN_DTYPE_U8) {
        v->u = v->dtype == MN_DTYPE_F32 ? mn_u8_of_float(v->f) : as_u8(at, from);
        v->dtype = MN_DTYPE_U8;
    }
}

/* Returns the place to which a place in C order moves when these axes are flipped. */
MN_VOXEL uint32_t
flipped(const struct mn_finish *job, uint32_t i, uint32_t axes)
{
    if (axes == 0) {
        return i;
    }
    uint32_t x = i % job->width, row = i / job->width;
    uint32_t y = row % job->height, plane = row / job->height;
    uint32_t z = plane % job->depth, channel = plane / job->depth;
    x = (axes & 8) != 0 ? job->width - 1 - x : x;
    y = (axes & 4) != 0 ? job->height - 1 - y : y;
    z = (axes & 2) != 0 ? job->depth - 1 - z : z;
    return ((channel * job->depth + z) * job->height + y) * job->width + x;
}

MN_VOXEL int64_t
within(int64_t v, int64_t last)
{
    return v < 0 ? 0 : v > last ? last : v;
}

/* Returns where a sample's source has the voxel of place i. */
MN_VOXEL const unsigned char *
source_of(const struct mn_finish *job, uint32_t sample, uint32_t i)
{
    if (job->source != NULL) {
        return job->source + ((uint64_t)sample * job->voxels + i) * size_of(job->from);
    }
    const int64_t *window = job->windows + (uint64_t)MN_WINDOW_WORDS * sample;
    const struct mn_resident *c = &job->cases[within(window[0], (int64_t)job->n_cases - 1)];
    uint32_t row = i / job->width, plane = row / job->height, channel = plane / job->depth;
    int64_t z = within(window[1], c->shape[0] - job->depth) + plane % job->depth;
    int64_t y = within(window[2], c->shape[1] - job->height) + row % job->height;
    int64_t x = within(window[3], c->shape[2] - job->width) + i % job->width;
    int64_t place = ((channel * c->shape[0] + z) * c->shape[1] + y) * c->shape[2] + x;
    return c->voxels + place * size_of(job->from);
}

/* Returns normal number i of a key: element 16 o + b of a group is output o of block b. */
MN_VOXEL float
normal(uint32_t i, const struct mn_key *key)
{
    uint32_t element = i % MN_NORMALS_GROUP, output = element / 16;
    uint32_t block = i / MN_NORMALS_GROUP * 16 + element % 16;
    float four[4];
    mn_normals_of_device(&block, key, four, 1);
    float low = output == 0 ? four[0] : four[1], high = output == 2 ? four[2] : four[3];
    return output < 2 ? low : high;
}

MN_VOXEL void
arithmetic(struct mn_voxel *v, const struct mn_step *step, const uint64_t *recipe, uint32_t i)
{
    struct mn_key key = {recipe[0], recipe[1], step->number};
    switch (step->kind) {
    case MN_STEP_SCALE:
        v->f = mn_scaled(v->f, step->factor);
        break;
    case MN_STEP_NORMALIZE:
        v->f = mn_normalized(v->f, step->low, step->high, step->mean, step->std);
        break;
    case MN_STEP_NOISE:
        v->f = mn_noisy(v->f, step->mean, step->std, normal(i, &key));
        break;
    default:
        break;
    }
}

/* Dtypes other than these two are the source's own, whose bytes stay unchanged. */
MN_VOXEL void
put(const struct mn_finish *job, struct mn_voxel *v, const unsigned char *at,
    unsigned char *to)
{
    cast(v, job->to, at, job->from);
    if (job->to == MN_DTYPE_F32) {
        *(float *)(void *)to = v->f;
    }
    else if (job->to == MN_DTYPE_U8) {
        *to = v->u;
    }
    else {
        memcpy(to, at, size_of(job->to));
    }
}

/* Finishes voxel i of a sample. */
MN_VOXEL void
finish(const struct mn_finish *job, uint32_t sample, uint32_t i)
{
    const uint64_t *recipe = job->recipes + MN_RECIPE_WORDS(job->steps) * sample;
    const struct mn_step *steps = (const struct mn_step *)(const void *)(recipe + 2);
    struct mn_voxel v = {MN_DTYPE_NONE, 0.0f, 0};
    uint32_t ahead = 0; /* flips that are still to come */
    for (uint32_t k = 0; k < job->steps; k++) {
        ahead ^= steps[k].kind == MN_STEP_FLIP ? steps[k].axes : 0u;
    }
    const unsigned char *at = source_of(job, sample, flipped(job, i, ahead));
    for (uint32_t k = 0; k < job->steps; k++) {
        const struct mn_step *step = &steps[k];
        if (step->kind == MN_STEP_FLIP) {
            ahead ^= step->axes;
        }
        else if (step->kind == MN_STEP_CAST) {
            cast(&v, MN_STEP_DTYPE(step, job->which), at, job->from);
        }
        else if (job->which == 0) {
            cast(&v, MN_DTYPE_F32, at, job->from);
            arithmetic(&v, step, recipe, flipped(job, i, ahead));
        }
    }
    uint64_t place = (uint64_t)sample * job->voxels + i;
    put(job, &v, at, job->target + place * size_of(job->to));
}

extern "C" __global__ void
__launch_bounds__(MN_FINISH_THREADS)
mn_finish_kernel(const struct mn_finish job)
{
    for (uint32_t sample = blockIdx.y; sample < job.samples; sample += gridDim.y) {
        uint64_t stride = (uint64_t)gridDim.x * blockDim.x;
        for (uint64_t i = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; i < job.voxels;
             i += stride) {
            finish(&job, sample, (uint32_t)i);
        }
    }
}
