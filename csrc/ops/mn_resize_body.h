/* The inner loops of resizing photos, MN_PIXELS pixels of 4 bytes at a time. mn_kernels.c includes
 * this file once per instruction set, before mn_kernels_body.h. For that reason it has no include
 * guard.
 * SPDX-License-Identifier: Apache-2.0
 *
 * MN_LANES 1 is plain C. Otherwise MN_WIDEN(p) loads bytes as 32-bit numbers, MN_PIXEL(v, i) is
 * pixel i of them, and mn_store_pixel() writes one, because the vectorisers convert bytes one by
 * one. All operations are on integers, so the results are the same.
 */

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
