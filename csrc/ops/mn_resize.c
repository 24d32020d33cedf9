/* Resizing of photos by antialiased bilinear interpolation.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_resize.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Bytes of a row are a multiple of this, which the kernels use as the size of a block. */
#define ROW_BLOCK 64u

/* The source pixels of one result, with the roundings of Pillow (Resample.c, bilinear filter). */
struct window {
    double center, scale; /* scale: source pixels for each pixel that counts, at least 1 */
    uint32_t first, used;
};

static struct window
window_of(const struct mn_axis *axis, uint32_t result)
{
    double scale = (double)axis->size / axis->to;
    struct window w = {.center = (result + 0.5) * scale, .scale = scale < 1.0 ? 1.0 : scale};
    int64_t low = (int64_t)(w.center - w.scale + 0.5), high = (int64_t)(w.center + w.scale + 0.5);
    low = low < 0 ? 0 : low;
    high = high > axis->size ? axis->size : high;
    w.first = (uint32_t)low;
    w.used = (uint32_t)(high - low);
    return w;
}

static double
weight_of(const struct window *w, uint32_t i)
{
    double at = ((double)w->first + i - w->center + 0.5) * (1.0 / w->scale);
    at = at < 0.0 ? -at : at;
    return at < 1.0 ? 1.0 - at : 0.0;
}

/* `copies`: how often each weight is stored. */
static int
plan_axis(struct mn_axis *axis, uint32_t copies)
{
    axis->begin = window_of(axis, axis->from).first;
    for (uint32_t x = 0; x < axis->n; x++) {
        struct window w = window_of(axis, axis->from + x);
        axis->most = w.used > axis->most ? w.used : axis->most;
        axis->end = w.first + w.used;
    }
    axis->most += axis->most % 2;
    axis->first = calloc(axis->n, 2 * sizeof(*axis->first));
    axis->weights = calloc((size_t)axis->n * axis->most, copies * sizeof(*axis->weights));
    if (axis->first == NULL || axis->weights == NULL) {
        return -ENOMEM;
    }
    axis->used = axis->first + axis->n;
    for (uint32_t x = 0; x < axis->n; x++) {
        struct window w = window_of(axis, axis->from + x);
        int32_t *weights = axis->weights + (size_t)x * axis->most * copies;
        double sum = 0.0;
        for (uint32_t i = 0; i < w.used; i++) {
            sum += weight_of(&w, i);
        }
        for (uint32_t i = 0; i < w.used * copies; i++) {
            double weight = weight_of(&w, i / copies) / sum;
            weights[i] = (int32_t)(0.5 + weight * (1 << MN_WEIGHT_BITS));
        }
        axis->first[x] = w.first - axis->begin;
        axis->used[x] = w.used;
    }
    return 0;
}

int
mn_resize_plan(struct mn_resize *resize)
{
    int rc = plan_axis(&resize->across, 4);
    return rc != 0 ? rc : plan_axis(&resize->down, 1);
}

#define SPREAD(type)                                                                    \
    do {                                                                                \
        const type *table = (const type *)resize->table + (size_t)256 * colour;         \
        type *out = (type *)resize->out + ((size_t)colour * resize->down.n + y) * n;    \
        for (uint32_t x = 0; x < n; x++) {                                              \
            out[resize->flip ? n - 1 - x : x] = table[row[4 * x + colour]];             \
        }                                                                               \
    } while (0)

/* Writes row y of the result. */
static void
spread(const struct mn_resize *resize, uint32_t y, const uint8_t *row)
{
    uint32_t n = resize->across.n;
    for (uint32_t colour = 0; colour < 3; colour++) {
        if (resize->item == 4) {
            SPREAD(uint32_t);
        }
        else if (resize->item == 2) {
            SPREAD(uint16_t);
        }
        else {
            SPREAD(uint8_t);
        }
    }
}

static size_t
row_bytes(uint32_t pixels)
{
    return ((size_t)pixels * 4 + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
}

int
mn_resize_run(struct mn_resize *resize, const struct mn_kernels *kernels, uint32_t width,
              uint32_t shift, void (*read)(void *from, uint8_t *row), void *from)
{
    const struct mn_axis *across = &resize->across, *down = &resize->down;
    /* The horizontal pass reads up to across->most pixels more than there are. */
    size_t wide = row_bytes(width + across->most), narrow = row_bytes(across->n);
    size_t kept = resize->down_first ? wide : narrow;
    resize->memory = calloc(1, kept * down->most + wide + narrow);
    resize->rows = calloc(down->most, sizeof(*resize->rows));
    if (resize->memory == NULL || resize->rows == NULL) {
        return -ENOMEM;
    }
    uint8_t *ring = resize->memory, *line = ring + kept * down->most, *result = line + wide;
    uint32_t have = 0; /* rows read */
    for (uint32_t y = 0; y < down->n; y++) {
        for (; have < down->first[y] + down->used[y]; have++) {
            uint8_t *row = ring + kept * (have % down->most);
            if (resize->down_first) {
                read(from, row);
                continue;
            }
            read(from, line);
            kernels->resize_row(row, line + (size_t)4 * shift, across->first, across->weights,
                                across->most / 2, across->n);
        }
        for (uint32_t i = 0; i < down->used[y]; i++) {
            resize->rows[i] = ring + kept * ((down->first[y] + i) % down->most);
        }
        kernels->mix_rows(resize->down_first ? line : result, resize->rows,
                          down->weights + (size_t)y * down->most, down->used[y],
                          (int64_t)(resize->down_first ? row_bytes(width) : narrow));
        if (resize->down_first) {
            kernels->resize_row(result, line + (size_t)4 * shift, across->first,
                                across->weights, across->most / 2, across->n);
        }
        spread(resize, y, result);
    }
    return 0;
}

void
mn_resize_fini(struct mn_resize *resize)
{
    free(resize->across.first);
    free(resize->across.weights);
    free(resize->down.first);
    free(resize->down.weights);
    free(resize->rows);
    free(resize->memory);
}
