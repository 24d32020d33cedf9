/* Views of volumes, and storing them.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_view.h"

#include <errno.h>
#include <string.h>

#include "base/mn_attr.h"
#include "minato/ops.h"
#include "ops/mn_npy.h"
#include "ops/mn_voxel.h"

/* ---- One row of voxels from any supported dtype to another ---- */

/* memcpy, because the source may be unaligned. */
#define MN_CONVERT(name, S, T, how)                                                     \
    static void name(void *dst, const char *src, int64_t stride, int64_t n)             \
    {                                                                                   \
        T *to = dst;                                                                    \
        for (int64_t i = 0; i < n; i++) {                                               \
            S v;                                                                        \
            memcpy(&v, src + i * stride, sizeof(v));                                    \
            to[i] = how(v);                                                             \
        }                                                                               \
    }

MN_CONVERT(f32_from_u8, uint8_t, float, (float))
MN_CONVERT(f32_from_i16, int16_t, float, (float))
MN_CONVERT(f32_from_u16, uint16_t, float, (float))
MN_CONVERT(f32_from_i32, int32_t, float, (float))
MN_CONVERT(f32_from_f64, double, float, (float))
MN_CONVERT(u8_from_i16, int16_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_u16, uint16_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_i32, int32_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_f32, float, uint8_t, mn_u8_of_float)
MN_CONVERT(u8_from_f64, double, uint8_t, mn_u8_of_float)

typedef void converter(void *dst, const char *src, int64_t stride, int64_t n);

static converter *const to_f32[] = {
    [MN_DTYPE_U8] = f32_from_u8,   [MN_DTYPE_I16] = f32_from_i16, [MN_DTYPE_U16] = f32_from_u16,
    [MN_DTYPE_I32] = f32_from_i32, [MN_DTYPE_F64] = f32_from_f64,
};
static converter *const to_u8[] = {
    [MN_DTYPE_I16] = u8_from_i16, [MN_DTYPE_U16] = u8_from_u16, [MN_DTYPE_I32] = u8_from_i32,
    [MN_DTYPE_F32] = u8_from_f32, [MN_DTYPE_F64] = u8_from_f64,
};

static void
same_dtype(const struct mn_kernels *kernels, char *dst, const char *src, int64_t item,
           int64_t stride, int64_t n)
{
    if (stride == item) {
        memcpy(dst, src, (size_t)(n * item));
    }
    else if (stride == -item && item == 4) {
        kernels->reverse_4(dst, src + (n - 1) * stride, n);
    }
    else if (stride == -item && item == 1) {
        kernels->reverse_1(dst, src + (n - 1) * stride, n);
    }
    else {
        for (int64_t i = 0; i < n; i++) {
            memcpy(dst + i * item, src + i * stride, (size_t)item);
        }
    }
}

/* Converts n voxels of dtype `from`, `stride` bytes apart, to adjacent ones of dtype `to`, which is
 * `from`, uint8 or float32. dst is aligned for `to`; src need not be. */
static void
mn_convert_row(const struct mn_kernels *kernels, void *dst, int to, const void *src,
               int from, int64_t stride, int64_t n)
{
    if (from == to) {
        same_dtype(kernels, dst, src, (int64_t)mn_dtype_size(from), stride, n);
    }
    else {
        (to == MN_DTYPE_F32 ? to_f32 : to_u8)[from](dst, src, stride, n);
    }
}

/* If more unwanted bytes than this lie between two wanted rows, the rows are read one by one. It is
 * about what a pread of cached pages copies in the time of one more call. A direct read goes to the
 * device each time, so it tolerates more. */
#define GAP_CACHED 4096
#define GAP_DIRECT 65536

/* Planes between two checks of whether a mapped file's pages had to be waited for. The check is a
 * system call of some 200 ns, a plane of the usual patch takes some 7 us. */
#define LOOK_EVERY 8

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

int
mn_view_check(const int64_t *shape, struct mn_text *text)
{
    int64_t bytes = sizeof(double);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        if (shape[axis] > 0 && __builtin_mul_overflow(bytes, shape[axis], &bytes)) {
            return mn_fail(text, EINVAL, "the volume would need more than 2^63 bytes");
        }
    }
    return 0;
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

/* The rows of one plane: `at` is the first voxel of the first row. */
struct rows {
    const unsigned char *at;
    int64_t stride; /* between rows */
};

static int64_t
magnitude(int64_t a)
{
    return a < 0 ? -a : a;
}

/* A range of bytes of a file. */
struct span {
    int64_t low, length;
};

/* Returns the range from the first to the last voxel (in the file) of the `count` rows from the row
 * at `off`. */
static struct span
span_of(const struct mn_view *view, int64_t off, int64_t count)
{
    int64_t down = (count - 1) * view->strides[2];
    int64_t across = (view->shape[3] - 1) * view->strides[3];
    return (struct span){off + mn_min_i64(down, 0) + mn_min_i64(across, 0),
                         magnitude(down) + magnitude(across)
                             + (int64_t)mn_dtype_size(view->source)};
}

/* Reads `count` rows from the row at `off` on, in one piece. */
static int
read_rows(const struct mn_view *view, int64_t off, int64_t count, struct rows *rows,
          struct mn_reader *reader)
{
    struct span band = span_of(view, off, count);
    const unsigned char *bytes = NULL;
    int rc = mn_npy_read(view->file, &reader->buffer, (uint64_t)band.low,
                         (size_t)band.length, &bytes,
                         &reader->count, reader->text);
    if (rc == 0) {
        rows->at = bytes + (off - band.low);
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

/* Returns how many rows to read at once: all, or one if too much lies between them. */
static int64_t
rows_at_once(const struct mn_view *view)
{
    int64_t wanted = view->shape[3] * (int64_t)mn_dtype_size(view->source);
    int64_t gap = magnitude(view->strides[2]) - wanted;
    return gap > (view->file->direct ? GAP_DIRECT : GAP_CACHED) ? 1 : view->shape[2];
}

/* Returns the rows of a plane in the mapping. */
static const unsigned char *
mapped_rows(const struct mn_view *view, int64_t place, struct mn_reader *reader)
{
    struct span band = span_of(view, view->first_off + place, view->shape[2]);
    int64_t wanted = view->shape[3] * (int64_t)mn_dtype_size(view->source);
    mn_npy_count(&reader->count, (uint64_t)band.low, (uint64_t)wanted,
                 (uint64_t)magnitude(view->strides[2]), (uint64_t)view->shape[2]);
    return view->file->map->guard.bytes + view->first_off + place;
}

/* Asks for planes of a channel together, so that storage is waited for once and not once per page
 * or plane. */
static void
ask_ahead(const struct mn_view *view, int64_t place, int64_t planes)
{
    for (int64_t z = 0; z < planes; z++) {
        int64_t off = view->first_off + place + z * view->strides[1];
        struct span band = span_of(view, off, view->shape[2]);
        mn_npy_ahead(view->file, (uint64_t)band.low, (uint64_t)band.length);
    }
}

/* Asks for mapped planes once reading has had to wait. Reads by calls do not show whether they wait
 * (network file systems refuse to say), and asking costs little compared to a call. So it asks at
 * once there, unless rows are read one by one because of the gaps between them. Returns whether to
 * check again. */
static bool
look_ahead(const struct mn_view *view, int64_t place, int64_t z, struct mn_reader *reader)
{
    int64_t planes = view->shape[1] - z;
    if (view->file->map != NULL) {
        if (z % LOOK_EVERY != 1 || !mn_map_waited(&reader->waited)) {
            return true;
        }
    } else if (view->file->direct || rows_at_once(view) < view->shape[2]) {
        return false;
    }
    ask_ahead(view, place, planes);
    return false;
}

static int
store_plane(const struct mn_view *view, int64_t place, unsigned char *to,
            int64_t to_stride, struct mn_reader *reader)
{
    struct rows rows = {.stride = view->strides[2]};
    if (view->file == NULL || view->file->map != NULL) {
        rows.at = view->file == NULL ? view->base + place : mapped_rows(view, place, reader);
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

/* Does the pending arithmetic on n adjacent voxels, the first being voxel `first` in C order. */
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

static int
store_channel(const struct mn_view *view, int64_t c, unsigned char *to,
              const int64_t *strides, struct mn_reader *reader)
{
    bool watch = view->file != NULL;
    for (int64_t z = 0; z < view->shape[1]; z++) {
        int64_t place = c * view->strides[0] + z * view->strides[1];
        unsigned char *plane = to + z * strides[1];
        watch = watch && look_ahead(view, place, z, reader);
        int rc = store_plane(view, place, plane, strides[2], reader);
        if (rc < 0) {
            return rc;
        }
        finish_plane(view, c * view->shape[1] + z, plane, strides[2], reader->kernels);
    }
    return 0;
}

int
mn_view_store(const struct mn_view *view, void *to, const int64_t *strides,
              struct mn_reader *reader)
{
    int rc = 0;
    if (view->file != NULL) {
        mn_npy_begin(view->file);
        (void)mn_map_waited(&reader->waited);
    }
    for (int64_t c = 0; rc == 0 && c < view->shape[0]; c++) {
        rc = store_channel(view, c, (unsigned char *)to + c * strides[0], strides, reader);
    }
    return view->file != NULL ? mn_npy_end(view->file, rc, reader->text) : rc;
}
