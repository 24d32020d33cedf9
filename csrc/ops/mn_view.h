/* A volume in the making: where its voxels are, and which operations are pending.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Crops and flips only change where a view starts and its strides; casts and voxel-wise
 *   arithmetic are only noted. mn_view_store does it all in one pass, plane by plane, from
 *   memory or from the file. So a plane is still in cache when its arithmetic is done, and
 *   only the wanted rows are read.
 *
 * Ownership
 *   A view borrows its memory or file from the work (mn_pipeline_sample.h) of one sample. Pending
 *   noise is indexed by a voxel's place in C order. So windows and flips after noise first store
 *   the view into memory of the work (mn_work_settle).
 */
#ifndef MN_VIEW_H
#define MN_VIEW_H

#include <stdbool.h>
#include <stdint.h>

#include "ops/mn_kernels.h"
#include "ops/mn_npy.h"

/* ---- One row of voxels from any supported dtype to another ----
 *
 * To float32: C's conversion (nearest, ties to even). To uint8: truncation toward zero, as
 * NumPy does for what fits. Values outside 0..255 become 0 or 255 and NaN becomes 0, where NumPy's
 * result depends on the machine.
 */

/* Voxel-wise arithmetic pending in a view; beyond this number the view is stored first. */
#define MN_POINTS_MAX 8

enum mn_point_kind { MN_POINT_SCALE, MN_POINT_NORMALIZE, MN_POINT_NOISE };

struct mn_point {
    enum mn_point_kind kind;
    double factor;               /* scale */
    float low, high, mean, std;  /* normalize; mean and std: noise */
    struct mn_key key;           /* noise */
};

struct mn_view {
    int source;  /* dtype of the stored voxels; MN_DTYPE_NONE: no volume */
    int dtype;   /* dtype of the result: source, MN_DTYPE_U8 or MN_DTYPE_F32 */
    const struct mn_npy_file *file; /* NULL: in memory */
    const unsigned char *base;      /* memory: the first voxel */
    int64_t first_off;              /* file: of the first voxel */
    int64_t shape[MN_VOLUME_DIMS];
    int64_t strides[MN_VOLUME_DIMS]; /* bytes; negative along flipped axes */
    bool writable;                   /* the memory belongs to the work alone */
    int n_points;
    struct mn_point points[MN_POINTS_MAX]; /* only with dtype float32 */
};

/* State that storing needs in addition to the view. */
struct mn_reader {
    const struct mn_kernels *kernels;
    struct mn_npy_buffer buffer; /* for the file's bytes */
    struct mn_npy_count count;
    uint64_t waited; /* for mn_map_waited */
    struct mn_text *text;
};

/* Makes a view of any strided memory. */
void
mn_view_of_memory(struct mn_view *view, int dtype, const void *base, const int64_t *shape,
                  const int64_t *strides);

/* Makes a view of C-contiguous memory. */
void
mn_view_of_block(struct mn_view *view, int dtype, const void *base, const int64_t *shape);

/* Returns the voxels of a writable view; NULL if there is no volume. */
static inline unsigned char *
mn_view_data(const struct mn_view *view)
{
    return view->dtype == MN_DTYPE_NONE ? NULL : (unsigned char *)(uintptr_t)view->base;
}

/* Fails if a volume of this shape cannot be addressed with any dtype. An axis of -1 is not known
 * yet. */
int
mn_view_check(const int64_t *shape, struct mn_text *text);

/* Returns the bytes of the resulting voxels. This never overflows for a view's shape, which was
 * checked. A view's existence alone proves nothing, because axes may have stride 0 and files may
 * have holes. */
size_t
mn_view_bytes(const struct mn_view *view);

/* Computes the C-contiguous strides of a shape. */
void
mn_strides_of(int64_t *strides, const int64_t *shape, size_t itemsize);

/* Narrows the view to shape[axis] voxels from start[axis], axes 1 to 3. The caller has checked
 * them. */
void
mn_view_window(struct mn_view *view, const int64_t *start, const int64_t *size);

/* Reverses the view along an axis, 1 to 3. */
void
mn_view_flip(struct mn_view *view, int axis);

/* Writes the voxels to `to`, with these strides for the axes; the last axis is contiguous. `to`
 * must not overlap the source. */
int
mn_view_store(const struct mn_view *view, void *to, const int64_t *strides,
              struct mn_reader *reader);

#endif
