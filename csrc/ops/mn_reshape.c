/* Padding and resampling: operators that make volumes of another size.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "ops/mn_pipeline.h"

/* ---- The crops of the MLPerf 3D U-Net reference ----
 *
 * The reference draws a position with randrange(n). That never gives the last valid start n (nor
 * the last way to split the slack of a box) unless n is 0. Here all of 0..n are equally likely;
 * with op->flag false the reference's range is used.
 */

#define DRAW_FOREGROUND 0
#define DRAW_CLASS 1
#define DRAW_COMPONENT 2
#define DRAW_AXIS 2 /* plus the axis, 1 to 3 */

static uint64_t
draw_below(const struct mn_key *key, uint32_t draw, uint64_t bound)
{
    return mn_draw_below(key->hi, key->lo, key->number, draw, bound);
}

/* Draws uniformly from the steps 0..last, or 0..last-1 as in the reference. */
static int64_t
draw_step(const struct mn_op *op, const struct mn_key *key, int axis, int64_t last)
{
    uint64_t bound = (uint64_t)last + (op->flag || last == 0 ? 1 : 0);
    return (int64_t)draw_below(key, (uint32_t)(DRAW_AXIS + axis), bound);
}

static int
check_sizes(const struct mn_work *work, const struct mn_op *op)
{
    const struct mn_view *image = &work->image, *label = &work->label;
    const char *name = work->files[0].path != NULL ? work->files[0].path : "the volume";
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        if (label->dtype != MN_DTYPE_NONE && label->shape[axis] != image->shape[axis]) {
            return mn_fail(work->reader.text, EINVAL,
                           "%s: image and label differ on axis %d: %lld and %lld voxels",
                           name, axis, (long long)image->shape[axis],
                           (long long)label->shape[axis]);
        }
        if (image->shape[axis] < op->size[axis]) {
            return mn_fail(work->reader.text, EINVAL,
                           "%s: axis %d has %lld voxels, fewer than the patch's %lld; pad "
                           "it first",
                           name, axis, (long long)image->shape[axis],
                           (long long)op->size[axis]);
        }
    }
    return 0;
}

static int
take_window(struct mn_work *work, const struct mn_op *op, const int64_t *start)
{
    int rc = mn_work_settle_places(work, &work->image);
    if (rc == 0 && work->label.dtype != MN_DTYPE_NONE) {
        rc = mn_work_settle_places(work, &work->label);
        if (rc == 0) {
            mn_view_window(&work->label, start, op->size);
        }
    }
    if (rc == 0) {
        mn_view_window(&work->image, start, op->size);
    }
    return rc;
}

static int
random_window(struct mn_work *work, const struct mn_op *op, const struct mn_key *key)
{
    int64_t start[MN_VOLUME_DIMS] = {0};
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        start[axis] = draw_step(op, key, axis, work->image.shape[axis] - op->size[axis]);
    }
    return take_window(work, op, start);
}

/* Per axis: if the patch is longer than the box, its slack is split at random between the sides. A
 * shorter patch lies at random inside the box. Then it is pushed back into the volume. */
static int
window_at_box(struct mn_work *work, const struct mn_op *op, const struct mn_key *key,
              const struct mn_box *box)
{
    int64_t start[MN_VOLUME_DIMS] = {0};
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        int64_t low = box->low[axis - 1], high = box->high[axis - 1];
        int64_t slack = op->size[axis] - (high - low);
        int64_t step = draw_step(op, key, axis, slack < 0 ? -slack : slack);
        int64_t at = slack < 0 ? low + step : low - step;
        int64_t last = work->image.shape[axis] - op->size[axis];
        start[axis] = at < 0 ? 0 : at > last ? last : at;
    }
    return take_window(work, op, start);
}

int
mn_op_crop(struct mn_work *work, const struct mn_op *op, uint32_t number)
{
    struct mn_key key = mn_work_key(work, number);
    int rc = check_sizes(work, op);
    return rc == 0 ? random_window(work, op, &key) : rc;
}

int
mn_op_balanced_crop(struct mn_work *work, const struct mn_op *op, uint32_t number)
{
    struct mn_key key = mn_work_key(work, number);
    const struct mn_boxes *boxes = NULL;
    int rc = check_sizes(work, op);
    if (rc < 0) {
        return rc;
    }
    if (work->label.dtype == MN_DTYPE_NONE) {
        return mn_fail(work->reader.text, EINVAL, "a balanced crop needs a label");
    }
    if (mn_draw_uniform(key.hi, key.lo, number, DRAW_FOREGROUND) >= op->p) {
        return random_window(work, op, &key);
    }
    rc = mn_work_boxes(work, op->keep_boxes, &boxes);
    if (rc < 0) {
        return rc;
    }
    if (boxes->n_classes == 0) {
        return random_window(work, op, &key);
    }
    const struct mn_class_boxes *chosen =
        &boxes->classes[draw_below(&key, DRAW_CLASS, (uint64_t)boxes->n_classes)];
    const struct mn_box *box =
        &chosen->boxes[draw_below(&key, DRAW_COMPONENT, chosen->n_boxes)];
    return window_at_box(work, op, &key, box);
}

/* -- Padding --------------------------------------------------------------------------- */

int
mn_op_pad_shape(const struct mn_op *op, int64_t *shape, struct mn_text *text)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        if (shape[axis] >= 0 && shape[axis] < op->size[axis]) {
            shape[axis] = op->size[axis];
        }
    }
    return mn_view_check(shape, text);
}

/* Repeats `item` bytes at `from` over `count` places of `to`. */
static void
repeat(unsigned char *to, const unsigned char *from, size_t item, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        memcpy(to + (size_t)i * item, from, item);
    }
}

/* Fills the parts of an axis before and after its middle with the middle's first and last slice, or
 * with `fill` voxels. `item`: bytes of a slice. */
static void
extend(unsigned char *start, int64_t before, int64_t middle, int64_t after, size_t item,
       const unsigned char *fill, size_t voxel)
{
    unsigned char *first = start + (size_t)before * item;
    unsigned char *end = first + (size_t)middle * item;
    if (fill != NULL) {
        repeat(start, fill, voxel, before * (int64_t)(item / voxel));
        repeat(end, fill, voxel, after * (int64_t)(item / voxel));
        return;
    }
    repeat(start, first, item, before);
    repeat(end, end - item, item, after);
}

/* Extends the stored middle over rows, then planes, then the channel's volume. */
static void
extend_all(const struct mn_view *whole, const int64_t *before, const int64_t *middle,
           const unsigned char *fill)
{
    const int64_t *shape = whole->shape, *strides = whole->strides;
    size_t voxel = (size_t)strides[3];
    int64_t after[MN_VOLUME_DIMS];
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        after[axis] = shape[axis] - before[axis] - middle[axis];
    }
    for (int64_t c = 0; c < shape[0]; c++) {
        unsigned char *channel = mn_view_data(whole) + c * strides[0];
        for (int64_t z = before[1]; z < before[1] + middle[1]; z++) {
            unsigned char *plane = channel + z * strides[1];
            for (int64_t y = before[2]; y < before[2] + middle[2]; y++) {
                extend(plane + y * strides[2], before[3], middle[3], after[3], voxel, fill,
                       voxel);
            }
            extend(plane, before[2], middle[2], after[2], (size_t)strides[2], fill, voxel);
        }
        extend(channel, before[1], middle[1], after[1], (size_t)strides[1], fill, voxel);
    }
}

static void
fill_voxel(unsigned char *fill, int dtype, double value)
{
    float as_float = (float)value;
    if (dtype == MN_DTYPE_U8) {
        fill[0] = value >= 255 ? 255 : value > 0 ? (unsigned char)value : 0;
    }
    else {
        memcpy(fill, &as_float, sizeof(as_float));
    }
}

static int
pad_view(struct mn_work *work, struct mn_view *view, const struct mn_op *op, double value)
{
    int64_t shape[MN_VOLUME_DIMS], before[MN_VOLUME_DIMS] = {0};
    unsigned char fill[sizeof(float)];
    struct mn_view padded;
    memcpy(shape, view->shape, sizeof(shape));
    int rc = mn_op_pad_shape(op, shape, work->reader.text);
    if (rc < 0 || memcmp(shape, view->shape, sizeof(shape)) == 0) {
        return rc;
    }
    if (op->flag && view->dtype != MN_DTYPE_U8 && view->dtype != MN_DTYPE_F32) {
        return mn_fail(work->reader.text, EINVAL,
                       "padding with a constant needs float32 or uint8, found %s; put a "
                       "Cast before it",
                       mn_dtype_name(view->dtype));
    }
    rc = mn_work_volume(work, &padded, view->dtype, shape);
    if (rc < 0) {
        return rc;
    }
    unsigned char *middle = mn_view_data(&padded);
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        before[axis] = (shape[axis] - view->shape[axis]) / 2;
        middle += before[axis] * padded.strides[axis];
    }
    rc = mn_view_store(view, middle, padded.strides, &work->reader);
    if (rc == 0) {
        fill_voxel(fill, view->dtype, value);
        extend_all(&padded, before, view->shape, op->flag ? fill : NULL);
        *view = padded;
    }
    return rc;
}

int
mn_op_pad(struct mn_work *work, const struct mn_op *op)
{
    int rc = pad_view(work, &work->image, op, op->values[0]);
    if (rc == 0 && work->label.dtype != MN_DTYPE_NONE) {
        rc = pad_view(work, &work->label, op, op->values[1]);
    }
    return rc;
}

/* -- Resampling ------------------------------------------------------------------------ */

int
mn_op_resample_shape(const struct mn_op *op, int64_t *shape, struct mn_text *text)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        if (op->size[axis] > 0) {
            shape[axis] = op->size[axis];
        }
        else if (shape[axis] >= 0) {
            double size = op->per_axis[axis] * (double)shape[axis];
            if (!(size >= 1 && size < 0x1p31)) {
                return mn_fail(text, EINVAL, "resampling axis %d of %lld voxels would give %g "
                                             "voxels", axis,
                               (long long)shape[axis], size);
            }
            shape[axis] = (int64_t)size;
        }
    }
    return mn_view_check(shape, text);
}

/* Returns where output voxel i of an axis lies in the input, ends aligned with ends. */
static int64_t
place(int64_t i, int64_t in, int64_t out, float *between)
{
    double at = out > 1 ? (double)i * (double)(in - 1) / (double)(out - 1) : 0.0;
    int64_t low = (int64_t)at;
    low = low < in - 1 ? low : in - 1;
    *between = (float)(at - (double)low);
    return low;
}

/* Does the same for nearest neighbours, as torch's interpolate(mode="nearest") computes it. */
static int64_t
nearest(int64_t i, int64_t in, int64_t out)
{
    int64_t at = (int64_t)floorf((float)i * ((float)in / (float)out));
    return at < in - 1 ? at : in - 1;
}

struct linear_row {
    float *low, *high; /* rows of the input's width */
    float *between;    /* for each output column */
    int64_t *column;
};

static int
linear_tables(struct mn_work *work, struct linear_row *row, int64_t in, int64_t out)
{
    void *memory = NULL;
    size_t bytes = (size_t)out * (sizeof(int64_t) + sizeof(float))
                   + 2 * (size_t)in * sizeof(float);
    int rc = mn_work_alloc(work, bytes, &memory);
    if (rc < 0) {
        return rc;
    }
    row->column = memory;
    row->between = (float *)(row->column + out);
    row->low = row->between + out;
    row->high = row->low + in;
    for (int64_t x = 0; x < out; x++) {
        row->column[x] = place(x, in, out, &row->between[x]);
    }
    return 0;
}

/* Makes one output row: mixes four input rows by depth and height, then along the width. */
static void
linear_one_row(const struct mn_view *from, const unsigned char *channel, int64_t z, float tz,
               int64_t y, float ty, struct linear_row *row, float *to, int64_t out,
               const struct mn_kernels *kernels)
{
    int64_t in = from->shape[3];
    int64_t down = y + 1 < from->shape[2] ? from->strides[2] : 0;
    int64_t back = z + 1 < from->shape[1] ? from->strides[1] : 0;
    const unsigned char *at = channel + z * from->strides[1] + y * from->strides[2];
    kernels->mix(row->low, (const float *)(const void *)at,
                 (const float *)(const void *)(at + down), ty, in);
    kernels->mix(row->high, (const float *)(const void *)(at + back),
                 (const float *)(const void *)(at + back + down), ty, in);
    kernels->mix(row->low, row->low, row->high, tz, in);
    for (int64_t x = 0; x < out; x++) {
        int64_t left = row->column[x], right = left + (left + 1 < in);
        to[x] = row->low[left] + (row->low[right] - row->low[left]) * row->between[x];
    }
}

static int
resample_linear(struct mn_work *work, const struct mn_view *from, const struct mn_view *to)
{
    struct linear_row row;
    const int64_t *in = from->shape, *out = to->shape;
    int rc = linear_tables(work, &row, in[3], out[3]);
    for (int64_t plane = 0; rc == 0 && plane < out[0] * out[1]; plane++) {
        int64_t c = plane / out[1];
        float tz, ty;
        int64_t z = place(plane % out[1], in[1], out[1], &tz);
        for (int64_t y = 0; y < out[2]; y++) {
            unsigned char *at = mn_view_data(to) + plane * to->strides[1] + y * to->strides[2];
            int64_t from_y = place(y, in[2], out[2], &ty);
            linear_one_row(from, from->base + c * from->strides[0], z, tz, from_y, ty, &row,
                           (float *)(void *)at, out[3], work->reader.kernels);
        }
    }
    return rc;
}

static int
resample_nearest(struct mn_work *work, const struct mn_view *from, const struct mn_view *to)
{
    const int64_t *in = from->shape, *out = to->shape;
    size_t voxel = (size_t)from->strides[3];
    void *memory = NULL;
    int rc = mn_work_alloc(work, (size_t)out[3] * sizeof(int64_t), &memory);
    int64_t *column = memory;
    for (int64_t x = 0; rc == 0 && x < out[3]; x++) {
        column[x] = nearest(x, in[3], out[3]) * from->strides[3];
    }
    for (int64_t plane = 0; rc == 0 && plane < out[0] * out[1]; plane++) {
        int64_t c = plane / out[1], z = nearest(plane % out[1], in[1], out[1]);
        for (int64_t y = 0; y < out[2]; y++) {
            const unsigned char *row = from->base + c * from->strides[0]
                                       + z * from->strides[1]
                                       + nearest(y, in[2], out[2]) * from->strides[2];
            unsigned char *at = mn_view_data(to) + plane * to->strides[1] + y * to->strides[2];
            for (int64_t x = 0; x < out[3]; x++) {
                memcpy(at + (size_t)x * voxel, row + column[x], voxel);
            }
        }
    }
    return rc;
}

static int
resample_view(struct mn_work *work, struct mn_view *view, const struct mn_op *op,
              bool linear)
{
    int64_t shape[MN_VOLUME_DIMS];
    struct mn_view result;
    memcpy(shape, view->shape, sizeof(shape));
    int rc = mn_op_resample_shape(op, shape, work->reader.text);
    if (rc < 0 || memcmp(shape, view->shape, sizeof(shape)) == 0) {
        return rc;
    }
    rc = mn_work_settle(work, view, false);
    if (rc == 0) {
        rc = mn_work_volume(work, &result, view->dtype, shape);
    }
    if (rc == 0) {
        rc = linear ? resample_linear(work, view, &result)
                    : resample_nearest(work, view, &result);
    }
    if (rc == 0) {
        *view = result;
    }
    return rc;
}

int
mn_op_resample(struct mn_work *work, const struct mn_op *op)
{
    int rc = resample_view(work, &work->image, op, true);
    if (rc == 0 && work->label.dtype != MN_DTYPE_NONE) {
        rc = resample_view(work, &work->label, op, false);
    }
    return rc;
}
