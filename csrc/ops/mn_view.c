/* Views of volumes, and storing them.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_view.h"

#include <string.h>

#include "ops/mn_convert.h"

/* Unwanted bytes between two wanted rows from which on the rows are read one by one: about
 * what a pread of cached pages copies in the time that one more call takes. A direct read
 * goes to the device each time, so it tolerates more. */
#define GAP_CACHED 4096
#define GAP_DIRECT 65536

void
mn_strides_of(int64_t *strides, const int64_t *shape, size_t itemsize)
{
    int64_t stride = (int64_t)itemsize;
    for (int axis = MN_VOLUME_DIMS - 1; axis >= 0; axis--) {
        strides[axis] = stride;
        stride *= shape[axis];
    }
}

void
mn_view_of_memory(struct mn_view *view, int dtype, const void *base, const int64_t *shape,
                  const int64_t *strides)
{
    view->source = view->dtype = dtype;
    view->file = NULL;
    view->base = base;
    view->first_off = 0;
    view->writable = false;
    view->n_points = 0;
    memcpy(view->shape, shape, sizeof(view->shape));
    memcpy(view->strides, strides, sizeof(view->strides));
}

void
mn_view_of_block(struct mn_view *view, int dtype, const void *base, const int64_t *shape)
{
    int64_t strides[MN_VOLUME_DIMS];
    mn_strides_of(strides, shape, mn_dtype_size(dtype));
    mn_view_of_memory(view, dtype, base, shape, strides);
}

void
mn_view_of_file(struct mn_view *view, const struct mn_npy_file *file)
{
    mn_view_of_block(view, file->npy.dtype, NULL, file->npy.shape);
    view->file = file;
    view->first_off = (int64_t)file->npy.data_off;
}

size_t
mn_view_bytes(const struct mn_view *view)
{
    size_t bytes = mn_dtype_size(view->dtype);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        bytes *= (size_t)view->shape[axis];
    }
    return bytes;
}

static void
move_start(struct mn_view *view, int64_t bytes)
{
    if (view->file != NULL) {
        view->first_off += bytes;
    }
    else {
        view->base += bytes;
    }
}

void
mn_view_window(struct mn_view *view, const int64_t *start, const int64_t *size)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        move_start(view, start[axis] * view->strides[axis]);
        view->shape[axis] = size[axis];
    }
}

void
mn_view_flip(struct mn_view *view, int axis)
{
    move_start(view, (view->shape[axis] - 1) * view->strides[axis]);
    view->strides[axis] = -view->strides[axis];
}

int
mn_view_is_placed(const struct mn_view *view)
{
    for (int i = 0; i < view->n_points; i++) {
        if (view->points[i].kind == MN_POINT_NOISE) {
            return 1;
        }
    }
    return 0;
}

/* The rows of one plane: `at` is the first voxel of the first row. */
struct rows {
    const unsigned char *at;
    int64_t stride; /* between rows */
};

static int64_t
least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t
magnitude(int64_t a)
{
    return a < 0 ? -a : a;
}

/* Reads `count` rows from the row at `off` on, in one piece. */
static int
read_rows(const struct mn_view *view, int64_t off, int64_t count, struct rows *rows,
          struct mn_reader *reader)
{
    int64_t down = (count - 1) * view->strides[2];
    int64_t across = (view->shape[3] - 1) * view->strides[3];
    int64_t low = off + least(down, 0) + least(across, 0);
    int64_t length = magnitude(down) + magnitude(across)
                     + (int64_t)mn_dtype_size(view->source);
    const unsigned char *bytes = NULL;
    int rc = mn_npy_read(view->file, &reader->buffer, (uint64_t)low, (size_t)length, &bytes,
                         &reader->bytes_read, reader->text);
    if (rc == 0) {
        rows->at = bytes + (off - low);
        rows->stride = view->strides[2];
    }
    return rc;
}

static void
convert_rows(const struct mn_view *view, const struct rows *rows, int64_t count,
             unsigned char *to, int64_t to_stride, struct mn_reader *reader)
{
    for (int64_t y = 0; y < count; y++) {
        mn_convert_row(reader->kernels, to + y * to_stride, view->dtype,
                       rows->at + y * rows->stride, view->source, view->strides[3],
                       view->shape[3]);
    }
}

/* Rows that are read at once: all, or one where too much lies between them. */
static int64_t
rows_at_once(const struct mn_view *view)
{
    int64_t wanted = view->shape[3] * (int64_t)mn_dtype_size(view->source);
    int64_t gap = magnitude(view->strides[2]) - wanted;
    return gap > (view->file->direct ? GAP_DIRECT : GAP_CACHED) ? 1 : view->shape[2];
}

static int
store_plane(const struct mn_view *view, int64_t place, unsigned char *to,
            int64_t to_stride, struct mn_reader *reader)
{
    struct rows rows = {.stride = view->strides[2]};
    if (view->file == NULL) {
        rows.at = view->base + place;
        convert_rows(view, &rows, view->shape[2], to, to_stride, reader);
        return 0;
    }
    int64_t count = rows_at_once(view);
    for (int64_t y = 0; y < view->shape[2]; y += count) {
        int64_t off = view->first_off + place + y * view->strides[2];
        int rc = read_rows(view, off, count, &rows, reader);
        if (rc < 0) {
            return rc;
        }
        convert_rows(view, &rows, count, to + y * to_stride, to_stride, reader);
    }
    return 0;
}

/* The pending arithmetic on n adjacent voxels, the first being voxel `first` in C order. */
static void
apply_points(const struct mn_view *view, float *x, int64_t n, int64_t first,
             const struct mn_kernels *kernels)
{
    for (int i = 0; i < view->n_points; i++) {
        const struct mn_point *p = &view->points[i];
        switch (p->kind) {
        case MN_POINT_SCALE:
            kernels->scale(x, n, p->factor);
            break;
        case MN_POINT_NORMALIZE:
            kernels->normalize(x, n, p->low, p->high, p->mean, p->std);
            break;
        case MN_POINT_NOISE:
            kernels->add_noise(x, n, first, &p->key, p->mean, p->std);
            break;
        }
    }
}

static void
finish_plane(const struct mn_view *view, int64_t plane, unsigned char *to,
             int64_t to_stride, const struct mn_kernels *kernels)
{
    int64_t width = view->shape[3], height = view->shape[2];
    int64_t first = plane * height * width;
    if (view->n_points == 0) {
        return;
    }
    if (to_stride == width * (int64_t)sizeof(float)) {
        apply_points(view, (float *)(void *)to, height * width, first, kernels);
        return;
    }
    for (int64_t y = 0; y < height; y++) {
        apply_points(view, (float *)(void *)(to + y * to_stride), width, first + y * width,
                     kernels);
    }
}

int
mn_view_store(const struct mn_view *view, void *to, const int64_t *strides,
              struct mn_reader *reader)
{
    for (int64_t c = 0; c < view->shape[0]; c++) {
        for (int64_t z = 0; z < view->shape[1]; z++) {
            int64_t place = c * view->strides[0] + z * view->strides[1];
            unsigned char *plane = (unsigned char *)to + c * strides[0] + z * strides[1];
            int rc = store_plane(view, place, plane, strides[2], reader);
            if (rc < 0) {
                return rc;
            }
            finish_plane(view, c * view->shape[1] + z, plane, strides[2], reader->kernels);
        }
    }
    return 0;
}
