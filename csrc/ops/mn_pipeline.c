/* Running a pipeline's operators on a sample: crops, padding, resampling, users', and arithmetic.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_pipeline.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Static_assert(sizeof(struct mn_step) == 8 * MN_STEP_WORDS, "steps are whole words");
_Static_assert(MN_DTYPE_F64 < 16, "a cast has four bits for a dtype");

/* Returns whether an operator needs nothing but a voxel, its place and random numbers. */
static bool
is_step(const struct mn_op *op)
{
    switch (op->kind) {
    case MN_OP_RAND_FLIP:
    case MN_OP_CAST:
    case MN_OP_RAND_SCALE_INTENSITY:
    case MN_OP_RAND_GAUSSIAN_NOISE:
    case MN_OP_NORMALIZE:
        return true;
    default:
        return false;
    }
}

static double
uniform(const struct mn_key *key, uint32_t draw)
{
    return mn_draw_uniform(key->hi, key->lo, key->number, draw);
}

static void
draw_flip(struct mn_step *step, const struct mn_op *op, const struct mn_key *key)
{
    step->kind = MN_STEP_FLIP;
    for (uint32_t axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        if (uniform(key, axis - 1) < op->per_axis[axis]) {
            step->axes |= (uint8_t)(1u << axis);
        }
    }
}

static void
draw_scale(struct mn_step *step, const struct mn_op *op, const struct mn_key *key)
{
    if (uniform(key, 0) < op->p) {
        double u = uniform(key, 1);
        step->kind = MN_STEP_SCALE;
        step->factor = op->values[2] + (op->values[0] + (op->values[1] - op->values[0]) * u);
    }
}

static void
draw_noise(struct mn_step *step, const struct mn_op *op, const struct mn_key *key)
{
    if (uniform(key, 0) < op->p) {
        step->kind = MN_STEP_NOISE;
        step->number = (uint16_t)key->number;
        step->std = (float)(op->values[0] * uniform(key, 1));
        step->mean = (float)op->values[1];
    }
}

/* Returns what such an operator does to the sample of this key. */
static struct mn_step
step_of(const struct mn_op *op, const struct mn_key *key)
{
    /* An operator that is not applied to this sample still makes a cast, because arithmetic makes
     * the image float32. */
    struct mn_step step = {.kind = MN_STEP_CAST, .dtypes = MN_DTYPE_F32};
    switch (op->kind) {
    case MN_OP_RAND_FLIP:
        draw_flip(&step, op, key);
        break;
    case MN_OP_CAST:
        step.dtypes = (uint8_t)(op->dtypes[0] | op->dtypes[1] << 4);
        break;
    case MN_OP_RAND_SCALE_INTENSITY:
        draw_scale(&step, op, key);
        break;
    case MN_OP_RAND_GAUSSIAN_NOISE:
        draw_noise(&step, op, key);
        break;
    default:
        step.kind = MN_STEP_NORMALIZE;
        step.low = (float)op->values[0];
        step.high = (float)op->values[1];
        step.mean = (float)op->values[2];
        step.std = (float)op->values[3];
        break;
    }
    return step;
}

int
mn_pipeline_tail_most(const struct mn_pipeline *pipeline)
{
    int from = pipeline->n_ops;
    while (from > 0 && is_step(&pipeline->ops[from - 1])) {
        from--;
    }
    return pipeline->n_ops - from;
}

void
mn_pipeline_recipe(const struct mn_pipeline *pipeline, int tail, uint64_t key_hi,
                   uint64_t key_lo, void *recipe)
{
    unsigned char *at = recipe; /* the field may be unaligned */
    const uint64_t key[2] = {key_hi, key_lo};
    memcpy(at, key, sizeof(key));
    at += sizeof(key);
    for (int i = pipeline->n_ops - tail; i < pipeline->n_ops; i++) {
        struct mn_key mine = {key_hi, key_lo, (uint32_t)i};
        struct mn_step step = step_of(&pipeline->ops[i], &mine);
        memcpy(at, &step, sizeof(step));
        at += sizeof(step);
    }
}

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

static int
crop(struct mn_work *work, const struct mn_op *op, uint32_t number)
{
    struct mn_key key = mn_work_key(work, number);
    int rc = check_sizes(work, op);
    return rc == 0 ? random_window(work, op, &key) : rc;
}

static int
balanced_crop(struct mn_work *work, const struct mn_op *op, uint32_t number)
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

/* ---- Padding ---- */

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

static int
pad(struct mn_work *work, const struct mn_op *op)
{
    int rc = pad_view(work, &work->image, op, op->values[0]);
    if (rc == 0 && work->label.dtype != MN_DTYPE_NONE) {
        rc = pad_view(work, &work->label, op, op->values[1]);
    }
    return rc;
}

/* ---- Resampling ---- */

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

static int
resample(struct mn_work *work, const struct mn_op *op)
{
    int rc = resample_view(work, &work->image, op, true);
    if (rc == 0 && work->label.dtype != MN_DTYPE_NONE) {
        rc = resample_view(work, &work->label, op, false);
    }
    return rc;
}

/* ---- Operators of users, through the public interface ---- */

#define MESSAGE 400 /* bytes for an operator's own message, within mn_text's usual 512 */

static void
describe(struct mn_op_volume *volume, const struct mn_view *view)
{
    memset(volume, 0, sizeof(*volume));
    volume->dtype = view->dtype;
    if (view->dtype != MN_DTYPE_NONE) {
        memcpy(volume->shape, view->shape, sizeof(volume->shape));
        mn_strides_of(volume->strides, view->shape, mn_dtype_size(view->dtype));
    }
}

static int
fail_user(struct mn_work *work, const struct mn_operator *user, int rc, const char *words)
{
    return mn_fail(work->reader.text, rc < 0 ? -rc : EINVAL, "operator %s: %s", user->name,
                   words[0] != '\0' ? words : "failed without a message");
}

/* Makes the volume that the operator's plan asked for. */
static int
make_output(struct mn_work *work, const struct mn_operator *user,
            struct mn_op_volume *volume, struct mn_view *view)
{
    int64_t bytes = (int64_t)mn_dtype_size(volume->dtype);
    if (volume->dtype == MN_DTYPE_NONE) {
        view->source = view->dtype = MN_DTYPE_NONE;
        return 0;
    }
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        if (bytes <= 0 || volume->shape[axis] <= 0
            || __builtin_mul_overflow(bytes, volume->shape[axis], &bytes)) {
            return fail_user(work, user, -EINVAL, "planned an impossible dtype or shape");
        }
    }
    int rc = mn_work_volume(work, view, volume->dtype, volume->shape);
    if (rc == 0) {
        memcpy(volume->strides, view->strides, sizeof(volume->strides));
        volume->data = mn_view_data(view);
    }
    return rc;
}

static int
run_user(struct mn_work *work, const struct mn_op *op, uint32_t number)
{
    const struct mn_operator *user = op->user;
    char words[MESSAGE] = "";
    int rc = mn_work_settle(work, &work->image, true);
    if (rc == 0) {
        rc = mn_work_settle(work, &work->label, true);
    }
    if (rc < 0) {
        return rc;
    }
    struct mn_op_call in = {.size = sizeof(in), .number = number,
                            .key_hi = work->key_hi, .key_lo = work->key_lo};
    describe(&in.image, &work->image);
    describe(&in.label, &work->label);
    struct mn_op_call out = in;
    struct mn_view image = work->image, label = work->label;
    if (user->plan != NULL) {
        rc = user->plan(user->state, &in, &out, words, sizeof(words));
        if (rc < 0) {
            return fail_user(work, user, rc, words);
        }
        rc = make_output(work, user, &out.image, &image);
        if (rc == 0) {
            rc = make_output(work, user, &out.label, &label);
        }
        if (rc < 0) {
            return rc;
        }
    }
    in.image.data = mn_view_data(&work->image);
    in.label.data = mn_view_data(&work->label);
    rc = user->run(user->state, &in, user->plan != NULL ? &out : &in, words, sizeof(words));
    if (rc < 0) {
        return fail_user(work, user, rc, words);
    }
    work->image = image;
    work->label = label;
    return 0;
}

static uint64_t
physical_bytes(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (uint64_t)pages * (uint64_t)size : (uint64_t)1 << 32;
}

int
mn_pipeline_open(struct mn_pipeline **pipeline, const struct mn_op *ops, int n_ops,
                 const struct mn_kernels *kernels, struct mn_text *text)
{
    size_t bytes = sizeof(struct mn_pipeline) + (size_t)n_ops * sizeof(struct mn_op);
    struct mn_pipeline *p = calloc(1, bytes);
    if (p == NULL) {
        return mn_fail_memory(text, bytes);
    }
    p->kernels = kernels != NULL ? kernels : mn_kernels_best();
    p->n_ops = n_ops;
    if (n_ops > 0) {
        memcpy(p->ops, ops, (size_t)n_ops * sizeof(struct mn_op));
    }
    p->maps.most_bytes = physical_bytes();
    *pipeline = p;
    return 0;
}

static void
free_work(struct mn_work *work)
{
    if (work != NULL) {
        mn_work_clear(work);
        free(work->reader.buffer.bytes);
        free(work);
    }
}

void
mn_pipeline_close(struct mn_pipeline *pipeline)
{
    if (pipeline == NULL) {
        return;
    }
    for (int i = 0; i < MN_POOL; i++) {
        free_work((struct mn_work *)(uintptr_t)mn_a64_xchg_acqrel(&pipeline->pool[i], 0));
    }
    mn_filecache_fini(&pipeline->cache);
    mn_maps_fini(&pipeline->maps);
    free(pipeline);
}

int
mn_work_begin(struct mn_pipeline *pipeline, struct mn_work **work, struct mn_text *text)
{
    struct mn_work *w = NULL;
    for (int i = 0; i < MN_POOL && w == NULL; i++) {
        if (mn_a64_load_relaxed(&pipeline->pool[i]) != 0) { /* a hint: the exchange decides */
            /* Acquire: pairs with the release in mn_work_end. */
            w = (struct mn_work *)(uintptr_t)mn_a64_xchg_acqrel(&pipeline->pool[i], 0);
        }
    }
    if (w == NULL) {
        w = calloc(1, sizeof(*w));
        if (w == NULL) {
            return mn_fail_memory(text, sizeof(*w));
        }
        w->files[0].fd = w->files[1].fd = -1;
        w->reader.kernels = pipeline->kernels;
        w->cache = &pipeline->cache;
        w->maps = &pipeline->maps;
    }
    w->reader.text = text;
    *work = w;
    return 0;
}

void
mn_work_end(struct mn_pipeline *pipeline, struct mn_work *work)
{
    mn_a64_add_relaxed(&pipeline->bytes_read, work->reader.count.bytes);
    mn_a64_add_relaxed(&pipeline->bytes_touched, work->reader.count.touched);
    mn_a64_add_relaxed(&pipeline->files_mapped, work->files_mapped);
    mn_a64_add_relaxed(&pipeline->scans, work->scans);
    mn_a64_add_relaxed(&pipeline->headers_parsed, work->headers_parsed);
    work->reader.count = (struct mn_npy_count){0};
    work->scans = work->headers_parsed = work->files_mapped = 0;
    mn_work_clear(work);
    work->reader.text = NULL;
    for (int i = 0; i < MN_POOL; i++) {
        uint64_t empty = 0;
        /* Release: the work is complete for the thread that takes it out. */
        if (mn_a64_cas_acqrel(&pipeline->pool[i], &empty, (uint64_t)(uintptr_t)work)) {
            return;
        }
    }
    free_work(work);
}

/* -- Operators that are only recorded -------------------------------------------------- */

static int
flip(struct mn_work *work, int axes)
{
    if (axes == 0) {
        return 0;
    }
    int rc = mn_work_settle_places(work, &work->image);
    if (rc < 0) {
        return rc;
    }
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        if ((axes >> axis & 1) != 0) {
            mn_view_flip(&work->image, axis);
            if (work->label.dtype != MN_DTYPE_NONE) {
                mn_view_flip(&work->label, axis);
            }
        }
    }
    return 0;
}

/* Two casts, or a cast after arithmetic, are two steps: the first is done at once. */
static int
cast(struct mn_work *work, struct mn_view *view, int dtype)
{
    if (dtype == MN_DTYPE_NONE || view->dtype == MN_DTYPE_NONE || view->dtype == dtype) {
        return 0;
    }
    int rc = 0;
    if (view->n_points > 0 || view->dtype != view->source) {
        rc = mn_work_settle(work, view, false);
    }
    view->dtype = dtype;
    return rc;
}

/* Arithmetic makes the image float32. */
static int
note_point(struct mn_work *work, const struct mn_point *point)
{
    int rc = cast(work, &work->image, MN_DTYPE_F32);
    if (rc == 0 && work->image.n_points == MN_POINTS_MAX) {
        rc = mn_work_settle(work, &work->image, false);
    }
    if (rc == 0) {
        work->image.points[work->image.n_points++] = *point;
    }
    return rc;
}

static int
run_step(struct mn_work *work, const struct mn_op *op, const struct mn_key *key)
{
    const struct mn_step step = step_of(op, key);
    struct mn_point point = {.factor = step.factor, .low = step.low, .high = step.high,
                             .mean = step.mean, .std = step.std, .key = *key};
    int rc;
    switch ((enum mn_step_kind)step.kind) {
    case MN_STEP_FLIP:
        return flip(work, step.axes);
    case MN_STEP_CAST:
        rc = cast(work, &work->image, MN_STEP_DTYPE(&step, 0));
        return rc == 0 ? cast(work, &work->label, MN_STEP_DTYPE(&step, 1)) : rc;
    case MN_STEP_SCALE:
        point.kind = MN_POINT_SCALE;
        break;
    case MN_STEP_NORMALIZE:
        point.kind = MN_POINT_NORMALIZE;
        break;
    case MN_STEP_NOISE:
        point.kind = MN_POINT_NOISE;
        break;
    }
    return note_point(work, &point);
}

static int
read_npy(struct mn_work *work, const struct mn_op *op, const struct mn_source *source)
{
    int rc = mn_work_open(work, 0, source->image_path, op->flag, op->dtypes[0]);
    if (rc == 0 && source->label_path != NULL) {
        rc = mn_work_open(work, 1, source->label_path, op->flag, op->dtypes[1]);
    }
    return rc;
}

static int
run_op(struct mn_work *work, const struct mn_op *op, uint32_t number,
       const struct mn_source *source)
{
    struct mn_key key = mn_work_key(work, number);
    int rc;
    if (is_step(op)) {
        return run_step(work, op, &key);
    }
    switch (op->kind) {
    case MN_OP_READ_NPY:
        return read_npy(work, op, source);
    case MN_OP_RAND_BALANCED_CROP:
        return balanced_crop(work, op, number);
    case MN_OP_RAND_CROP:
        return crop(work, op, number);
    case MN_OP_PAD:
        return pad(work, op);
    case MN_OP_RESAMPLE:
        rc = cast(work, &work->image, MN_DTYPE_F32);
        return rc == 0 ? resample(work, op) : rc;
    case MN_OP_USER:
        return run_user(work, op, number);
    default:
        return mn_fail(work->reader.text, EINVAL, "unknown operator %d", (int)op->kind);
    }
}

static int
bind_array(struct mn_view *view, const struct mn_op_volume *volume, struct mn_text *text)
{
    if (volume->dtype == MN_DTYPE_NONE) {
        return 0;
    }
    mn_view_of_memory(view, volume->dtype, volume->data, volume->shape, volume->strides);
    return mn_view_check(volume->shape, text);
}

/* Checks that a pipeline which reads files is given paths, and any other arrays. */
static int
check_source(const struct mn_pipeline *pipeline, const struct mn_source *source,
             struct mn_text *text)
{
    bool reads = pipeline->n_ops > 0 && pipeline->ops[0].kind == MN_OP_READ_NPY;
    if (reads && source->image_path == NULL) {
        return mn_fail(text, EINVAL, "a pipeline with ReadNpy takes paths, not arrays");
    }
    if (!reads && source->image_path != NULL) {
        return mn_fail(text, EINVAL, "a pipeline without ReadNpy takes arrays, not paths");
    }
    return 0;
}

int
mn_pipeline_apply(struct mn_pipeline *pipeline, struct mn_work *work, int tail,
                  const struct mn_source *source, uint64_t key_hi, uint64_t key_lo)
{
    int rc = check_source(pipeline, source, work->reader.text);
    mn_a64_add_relaxed(&pipeline->samples, 1);
    work->key_hi = key_hi;
    work->key_lo = key_lo;
    if (rc == 0 && source->image_path == NULL) {
        rc = bind_array(&work->image, &source->image, work->reader.text);
        rc = rc == 0 ? bind_array(&work->label, &source->label, work->reader.text) : rc;
    }
    for (int i = 0; rc == 0 && i < pipeline->n_ops - tail; i++) {
        rc = run_op(work, &pipeline->ops[i], (uint32_t)i, source);
    }
    return rc;
}

int
mn_work_store(struct mn_work *work, const struct mn_view *view, void *to)
{
    int64_t strides[MN_VOLUME_DIMS];
    mn_strides_of(strides, view->shape, mn_dtype_size(view->dtype));
    return mn_view_store(view, to, strides, &work->reader);
}
