/* A volume as it will be: where its voxels are, and what is still to happen to them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Crops and flips only change where a view starts and its strides; casts and voxel-wise
 *   arithmetic are only noted. mn_view_store does it all in one pass, plane by plane, from
 *   memory or from the file, so that a plane is still in cache when its arithmetic is done
 *   and only the rows that are wanted are read.
 *
 * Who owns what
 *   A view borrows its memory or file from the work (mn_pipeline_sample.h) of one sample. Pending
 *   noise is indexed by a voxel's place in C order, so windows and flips after noise first
 *   store the view into memory of the work (mn_work_settle).
 */
#ifndef MN_VIEW_H
#define MN_VIEW_H

#include <stdbool.h>

#include "ops/mn_kernels.h"
#include "ops/mn_npy.h"

/* Voxel-wise arithmetic noted in a view; more than these are stored first. */
#define MN_POINTS_MAX 8

enum mn_point_kind { MN_POINT_SCALE, MN_POINT_NORMALIZE, MN_POINT_NOISE };

struct mn_point {
    enum mn_point_kind kind;
    double factor;               /* scale */
    float low, high, mean, std;  /* normalize; mean and std: noise */
    struct mn_key key;           /* noise */
};

struct mn_view {
    int source;  /* dtype of the voxels where they are; MN_DTYPE_NONE: no volume */
    int dtype;   /* dtype they will have: source, MN_DTYPE_U8 or MN_DTYPE_F32 */
    const struct mn_npy_file *file; /* NULL: in memory */
    const unsigned char *base;      /* memory: the first voxel */
    int64_t first_off;              /* file: of the first voxel */
    int64_t shape[MN_VOLUME_DIMS];
    int64_t strides[MN_VOLUME_DIMS]; /* bytes; negative along flipped axes */
    bool writable;                   /* the memory belongs to the work alone */
    int n_points;
    struct mn_point points[MN_POINTS_MAX]; /* only with dtype float32 */
};

/* What storing needs besides the view. */
struct mn_reader {
    const struct mn_kernels *kernels;
    struct mn_npy_buffer buffer; /* for the file's bytes */
    struct mn_npy_count count;
    uint64_t waited; /* of mn_map_waited */
    struct mn_text *text;
};

/* The whole of an open file whose header has been read. */
void
mn_view_of_file(struct mn_view *view, const struct mn_npy_file *file);

/* Any strided memory. */
void
mn_view_of_memory(struct mn_view *view, int dtype, const void *base, const int64_t *shape,
                  const int64_t *strides);

/* C-contiguous memory. */
void
mn_view_of_block(struct mn_view *view, int dtype, const void *base, const int64_t *shape);

/* Fails where a volume of this shape cannot be addressed, whatever its dtype becomes. An axis of
 * -1 is not known yet. */
int
mn_view_check(const int64_t *shape, struct mn_text *text);

/* Bytes of the voxels that will be. The shape of a view never overflows this: it was checked.
 * That it exists says nothing, because axes may be of stride 0 and files may have holes. */
size_t
mn_view_bytes(const struct mn_view *view);

/* C-contiguous strides of a shape. */
void
mn_strides_of(int64_t *strides, const int64_t *shape, size_t itemsize);

/* Keeps shape[axis] voxels from start[axis], axes 1 to 3. The caller has checked. */
void
mn_view_window(struct mn_view *view, const int64_t *start, const int64_t *size);

void
mn_view_flip(struct mn_view *view, int axis);

/* Whether what is pending must be done before a window or a flip: noise belongs to the place that
 * a voxel has now. */
int
mn_view_must_settle(const struct mn_view *view);

/* Writes the voxels to `to`, with these strides for the axes; the last one is contiguous.
 * `to` must not overlap the source. */
int
mn_view_store(const struct mn_view *view, void *to, const int64_t *strides,
              struct mn_reader *reader);

#endif /* MN_VIEW_H */
