/* The crops of the MLPerf 3D U-Net reference.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The reference draws a position with randrange(n). That never gives the last valid start n (nor
 * the last way to split the slack of a box) unless n is 0. Here all of 0..n are equally likely;
 * with op->flag false the reference's range is used.
 */
#include <errno.h>

#include "ops/mn_pipeline.h"

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

/* Pending operations are done for the window alone, except those that depend on a voxel's place. */
static int
prepare_window(struct mn_work *work, struct mn_view *view)
{
    return mn_view_must_settle(view) ? mn_work_settle(work, view) : 0;
}

static int
take_window(struct mn_work *work, const struct mn_op *op, const int64_t *start)
{
    int rc = prepare_window(work, &work->image);
    if (rc == 0 && work->label.dtype != MN_DTYPE_NONE) {
        rc = prepare_window(work, &work->label);
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
