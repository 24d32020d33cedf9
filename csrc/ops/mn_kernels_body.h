/* The inner loops themselves. mn_kernels.c includes this file once per instruction set, and defines
 * MN_K(name) to give each copy its own names. For that reason it has no include guard.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Written for the compiler's vectoriser: straight-line loops without branches. Two kinds need more
 * help. The lanes of normals are in mn_normals_body.h. Photos are resized MN_PIXELS pixels of 4
 * bytes at a time: MN_LANES 1 is plain C, otherwise MN_WIDEN(p) loads bytes as 32-bit numbers,
 * MN_PIXEL(v, i) is pixel i of them, and mn_store_pixel() writes one, because the vectorisers
 * convert bytes one by one. All of these operations are on integers, so the results are the same.
 */

#include "ops/mn_normals_body.h"

#if MN_LANES == 1

static void
MN_K(resize_row)(uint8_t *out, const uint8_t *row, const uint32_t *first,
                 const int32_t *weights, int64_t pairs, int64_t n)
{
    for (int64_t x = 0; x < n; x++) {
        int32_t sum[4] = {MN_WEIGHT_HALF, MN_WEIGHT_HALF, MN_WEIGHT_HALF, MN_WEIGHT_HALF};
        for (int64_t i = 0; i < 8 * pairs; i++) {
            sum[i % 4] += row[(int64_t)4 * first[x] + i] * *weights++;
        }
        for (int c = 0; c < 4; c++) {
            int32_t value = sum[c] >> MN_WEIGHT_BITS;
            out[4 * x + c] = (uint8_t)(value > 255 ? 255 : value);
        }
    }
}

static void
MN_K(mix_rows)(uint8_t *out, const uint8_t *const *rows, const int32_t *weights, int64_t count,
               int64_t n)
{
    for (int64_t x = 0; x < n; x++) {
        int32_t sum = MN_WEIGHT_HALF;
        for (int64_t i = 0; i < count; i++) {
            sum += rows[i][x] * weights[i];
        }
        sum >>= MN_WEIGHT_BITS;
        out[x] = (uint8_t)(sum > 255 ? 255 : sum);
    }
}

#else

typedef int32_t MN_K(sums) __attribute__((vector_size(16 * MN_PIXELS), may_alias, aligned(4)));

static inline __attribute__((always_inline)) void
MN_K(resize_steps)(uint8_t *out, const uint8_t *row, const uint32_t *first,
                   const int32_t *weights, const int64_t steps, int64_t n)
{
    for (int64_t x = 0; x < n; x++) {
        const uint8_t *bytes = row + (size_t)4 * first[x];
        MN_K(sums) sums = {0};
        for (int64_t i = 0; i < steps; i++) {
            sums += (MN_K(sums))MN_WIDEN(bytes) * *(const MN_K(sums) *)weights;
            bytes += 4 * MN_PIXELS;
            weights += 4 * MN_PIXELS;
        }
        mn_pixel sum = MN_PIXEL(sums, 0) + MN_WEIGHT_HALF;
#if MN_PIXELS == 2
        sum += MN_PIXEL(sums, 1);
#endif
        mn_store_pixel(out + 4 * x, sum >> MN_WEIGHT_BITS);
    }
}

static void
MN_K(resize_row)(uint8_t *out, const uint8_t *row, const uint32_t *first,
                 const int32_t *weights, int64_t pairs, int64_t n)
{
    switch (pairs) { /* a loop of fixed length has no branch */
    case 1:
        MN_K(resize_steps)(out, row, first, weights, 2 / MN_PIXELS, n);
        break;
    case 2:
        MN_K(resize_steps)(out, row, first, weights, 4 / MN_PIXELS, n);
        break;
    case 3:
        MN_K(resize_steps)(out, row, first, weights, 6 / MN_PIXELS, n);
        break;
    case 4:
        MN_K(resize_steps)(out, row, first, weights, 8 / MN_PIXELS, n);
        break;
    default:
        MN_K(resize_steps)(out, row, first, weights, pairs * 2 / MN_PIXELS, n);
    }
}

static void
MN_K(mix_rows)(uint8_t *out, const uint8_t *const *rows, const int32_t *weights, int64_t count,
               int64_t n)
{
    for (int64_t x = 0; x < n; x += 4 * MN_PIXELS) {
        MN_K(sums) sums = (MN_K(sums)){0} + MN_WEIGHT_HALF;
        for (int64_t i = 0; i < count; i++) {
            sums += (MN_K(sums))MN_WIDEN(rows[i] + x) * weights[i];
        }
        sums >>= MN_WEIGHT_BITS;
        mn_store_pixel(out + x, MN_PIXEL(sums, 0));
#if MN_PIXELS == 2
        mn_store_pixel(out + x + 4, MN_PIXEL(sums, 1));
#endif
    }
}

#endif

static int64_t
MN_K(find_nonzero)(const uint8_t *p, int64_t from, int64_t n)
{
    int64_t i = from;
    for (; i + 128 <= n; i += 128) {
        uint64_t w[16], any = 0;
        memcpy(w, p + i, sizeof(w));
        for (int k = 0; k < 16; k++) {
            any |= w[k];
        }
        if (any != 0) {
            break;
        }
    }
    for (; i + 8 <= n; i += 8) {
        uint64_t w;
        memcpy(&w, p + i, sizeof(w));
        if (w != 0) {
            break;
        }
    }
    while (i < n && p[i] == 0) {
        i++;
    }
    return i;
}

static int64_t
MN_K(find_other)(const uint8_t *p, int64_t from, int64_t n, uint8_t value)
{
    const uint64_t same = 0x0101010101010101u * (uint64_t)value;
    int64_t i = from;
    for (; i + 8 <= n; i += 8) {
        uint64_t w;
        memcpy(&w, p + i, sizeof(w));
        if (w != same) {
            break;
        }
    }
    while (i < n && p[i] == value) {
        i++;
    }
    return i;
}

static void
MN_K(reverse_1)(void *restrict dst, const void *restrict src, int64_t n)
{
    uint8_t *restrict to = dst;
    const uint8_t *restrict from = src;
    for (int64_t i = 0; i < n; i++) {
        to[i] = from[n - 1 - i];
    }
}

static void
MN_K(reverse_4)(void *restrict dst, const void *restrict src, int64_t n)
{
    char *restrict to = dst;
    const char *restrict from = src;
    for (int64_t i = 0; i < n; i++) {
        uint32_t w; /* through memcpy, because neither side need be aligned */
        memcpy(&w, from + 4 * (n - 1 - i), 4);
        memcpy(to + 4 * i, &w, 4);
    }
}

static void
MN_K(scale)(float *x, int64_t n, double factor)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = mn_scaled(x[i], factor);
    }
}

static void
MN_K(normalize)(float *x, int64_t n, float low, float high, float mean, float std)
{
    for (int64_t i = 0; i < n; i++) {
        x[i] = mn_normalized(x[i], low, high, mean, std);
    }
}

static void
MN_K(mix)(float *out, const float *a, const float *b, float t, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        out[i] = a[i] + (b[i] - a[i]) * t;
    }
}

/* Makes one group of MN_NORMALS_GROUP normals (mn_kernels.h). */
static void
MN_K(normals_group)(float *out, uint32_t group, const struct mn_key *key)
{
    uint32_t block[16];
    for (uint32_t b = 0; b < 16; b++) {
        block[b] = group * 16 + b;
    }
    for (int b = 0; b < 16; b += MN_LANES) {
        MN_K(normals_of)(block + b, key, out + b, 16);
    }
}

static void
MN_K(add_noise)(float *x, int64_t n, int64_t first, const struct mn_key *key, float mean,
                float std)
{
    float group[MN_NORMALS_GROUP];
    while (n > 0) {
        int64_t skip = first % MN_NORMALS_GROUP, take = MN_NORMALS_GROUP - skip;
        take = take < n ? take : n;
        MN_K(normals_group)(group, (uint32_t)(first / MN_NORMALS_GROUP), key);
        for (int64_t i = 0; i < take; i++) {
            x[i] = mn_noisy(x[i], mean, std, group[skip + i]);
        }
        x += take;
        first += take;
        n -= take;
    }
}

static const struct mn_kernels MN_K(kernels) = {
    .name = MN_K_NAME,
    .find_nonzero = MN_K(find_nonzero),
    .find_other = MN_K(find_other),
    .reverse_1 = MN_K(reverse_1),
    .reverse_4 = MN_K(reverse_4),
    .scale = MN_K(scale),
    .normalize = MN_K(normalize),
    .add_noise = MN_K(add_noise),
    .mix = MN_K(mix),
    .resize_row = MN_K(resize_row),
    .mix_rows = MN_K(mix_rows),
};

#undef MN_K_SUFFIX
#undef MN_K_NAME
#undef MN_LANES
#undef MN_SQRT
#undef MN_MUL_EVEN
#undef MN_PIXELS
#undef MN_WIDEN
#undef MN_PIXEL
