/* The inner loops, compiled once for each instruction set.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One source (mn_kernels_body.h) is compiled for several instruction sets, one of which is chosen
 * at run time. All versions give the same bytes: each float operation is one IEEE operation, so the
 * choice is never visible. That means no contraction into fused multiply-adds, no reassociation,
 * and no library function but the exactly rounded square root. Tests compare the versions.
 *
 * Pointers to voxels need no alignment unless they are typed.
 */
#ifndef MN_KERNELS_H
#define MN_KERNELS_H

#include <stdint.h>

/* The identity of a draw: the sample's key and the operator's number in its pipeline. */
struct mn_key {
    uint64_t hi, lo;
    uint32_t number;
};

/* Normals come in groups of this many. Group g is made of Philox blocks 16 g to 16 g + 15 of stream
 * 1. Element 16 o + l of a group is output o of block l. */
#define MN_NORMALS_GROUP 64
#define MN_STREAM_NOISE 1u

/* Fractional bits of the weights of a resized photo. */
#define MN_WEIGHT_BITS 22
#define MN_WEIGHT_HALF (1 << (MN_WEIGHT_BITS - 1))

struct mn_kernels {
    const char *name;
    /* The first i in [from, n) with p[i] != 0, or n. */
    int64_t (*find_nonzero)(const uint8_t *p, int64_t from, int64_t n);
    /* The first i in [from, n) with p[i] != value, or n. */
    int64_t (*find_other)(const uint8_t *p, int64_t from, int64_t n, uint8_t value);
    /* dst[i] = src[n - 1 - i] for elements of 1 and 4 bytes. No overlap. */
    void (*reverse_1)(void *dst, const void *src, int64_t n);
    void (*reverse_4)(void *dst, const void *src, int64_t n);
    /* x = (float)((double)x * factor) */
    void (*scale)(float *x, int64_t n, double factor);
    /* x = (min(max(x, low), high) - mean) / std, NaN kept */
    void (*normalize)(float *x, int64_t n, float low, float high, float mean, float std);
    /* x[i] += mean + std * normal number first + i of the key */
    void (*add_noise)(float *x, int64_t n, int64_t first, const struct mn_key *key,
                      float mean, float std);
    /* out[x] = a[x] + (b[x] - a[x]) * t; out may be a or b */
    void (*mix)(float *out, const float *a, const float *b, float t, int64_t n);
    /* Pixels of 4 bytes: pixel x of n is the sum of 2 * pairs pixels of row from first[x] on,
     * times weights[x][...], each of which is stored four times. Results are rounded. The weights
     * of a pixel are not negative, and their sum is about 1 << MN_WEIGHT_BITS. */
    void (*resize_row)(uint8_t *out, const uint8_t *row, const uint32_t *first,
                       const int32_t *weights, int64_t pairs, int64_t n);
    /* The same for bytes of several rows: out[x] = sum of rows[i][x] * weights[i]. n is a multiple
     * of 16. */
    void (*mix_rows)(uint8_t *out, const uint8_t *const *rows, const int32_t *weights,
                     int64_t count, int64_t n);
};

/* Returns the kernels of a level, among those that this build and this processor have: 0 is the
 * plainest, which always exists. NULL past the last. */
const struct mn_kernels *
mn_kernels_get(int level);

/* Returns the best level. */
const struct mn_kernels *
mn_kernels_best(void);

#endif
