/* Resizing of photos by antialiased bilinear interpolation, in the integers of Pillow.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The results are those of Pillow's Image.resize(size, BILINEAR) on an RGB image, bit for bit: each
 * axis is one pass with coefficients of 22 fractional bits, and the result of a pass is rounded to
 * 8 bits. The order of the passes matters for the last bit, so the caller chooses it.
 *
 * Rows are read when they are needed, and a row that no later result needs is overwritten. A pixel
 * of a row has 4 bytes, the last of which is not used. A result is planar: red, green, blue.
 */
#ifndef MN_RESIZE_H
#define MN_RESIZE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/mn_kernels.h"

/* One axis: `size` pixels become `to` pixels, of which results from..from+n-1 are wanted. */
struct mn_axis {
    uint32_t size, to, from, n;
    /* Computed by mn_resize_plan(). */
    uint32_t begin, end; /* source pixels that are needed */
    uint32_t most;       /* coefficients of each result, an even number; the last may be 0 */
    uint32_t *first;     /* [n]: the first source pixel of a result, counted from begin */
    uint32_t *used;      /* [n]: number of source pixels of a result */
    int32_t *weights;    /* [n][most][copies] */
};

struct mn_resize {
    /* Set by the caller. */
    struct mn_axis across, down;
    bool down_first;   /* whether the vertical pass is the first */
    bool flip;         /* whether left and right are exchanged in the end */
    const void *table; /* [3][256]: what each value of each colour becomes */
    size_t item;       /* bytes of an entry: 1, 2 or 4 */
    void *out;         /* [3][down.n][across.n] entries */
    /* Computed. */
    void *memory;
    const uint8_t **rows;
};

/* Computes which source pixels are needed. Returns 0 or -ENOMEM. Call mn_resize_fini() either
 * way. */
int
mn_resize_plan(struct mn_resize *resize);

/* Reads the rows from down.begin on with `read`, and writes the result. A row has `width` pixels,
 * and pixel across.begin is its pixel number `shift`. Returns 0 or -ENOMEM. `read` may leave by
 * longjmp. */
int
mn_resize_run(struct mn_resize *resize, const struct mn_kernels *kernels, uint32_t width,
              uint32_t shift, void (*read)(void *from, uint8_t *row), void *from);

void
mn_resize_fini(struct mn_resize *resize);

#endif
