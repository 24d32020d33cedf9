/* The dtypes and shapes that come out of a pipeline, before any sample is made.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "ops/mn_pipeline.h"

static void
set_patch(struct mn_volume_plan *plan, const struct mn_op *op)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        plan->shape[axis] = op->size[axis];
    }
}

static int
reshape(struct mn_volume_plan *plan, const struct mn_op *op, struct mn_text *text)
{
    if (plan->dtype == MN_DTYPE_NONE) {
        return 0;
    }
    return op->kind == MN_OP_PAD ? mn_op_pad_shape(op, plan->shape, text)
                                 : mn_op_resample_shape(op, plan->shape, text);
}

static void
pad_unknown(struct mn_volume_plan *plan, const struct mn_volume_plan *before,
            const struct mn_op *op)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        bool known = before->shape[axis] >= 0
                     || (op->kind == MN_OP_RESAMPLE && op->size[axis] > 0);
        if (!known) {
            plan->shape[axis] = -1;
        }
    }
}

static int
infer_reshape(struct mn_volume_plan *plan, const struct mn_op *op, struct mn_text *text)
{
    struct mn_volume_plan before = *plan;
    int rc = reshape(plan, op, text);
    pad_unknown(plan, &before, op);
    return rc;
}

static bool
is_known(const struct mn_volume_plan *plan)
{
    bool known = true;
    for (int axis = 0; plan->dtype != MN_DTYPE_NONE && axis < MN_VOLUME_DIMS; axis++) {
        known = known && plan->shape[axis] >= 0;
    }
    return known;
}

static void
to_volume(struct mn_op_volume *volume, const struct mn_volume_plan *plan)
{
    volume->dtype = plan->dtype;
    memcpy(volume->shape, plan->shape, sizeof(volume->shape));
}

static int
infer_user(struct mn_volume_plan *image, struct mn_volume_plan *label, const struct mn_op *op,
           uint32_t number, struct mn_text *text)
{
    struct mn_op_call in = {.size = sizeof(in), .number = number}, out;
    char words[400] = "";
    if (op->user->plan == NULL) {
        return 0;
    }
    if (!is_known(image) || !is_known(label)) {
        memset(image->shape, -1, sizeof(image->shape)); /* -1 in every byte is -1 */
        memset(label->shape, -1, sizeof(label->shape));
        return 0;
    }
    to_volume(&in.image, image);
    to_volume(&in.label, label);
    out = in;
    int rc = op->user->plan(op->user->state, &in, &out, words, sizeof(words));
    if (rc < 0) {
        return mn_fail(text, -rc, "operator %s: %s", op->user->name, words);
    }
    image->dtype = out.image.dtype;
    label->dtype = out.label.dtype;
    memcpy(image->shape, out.image.shape, sizeof(image->shape));
    memcpy(label->shape, out.label.shape, sizeof(label->shape));
    return 0;
}

static void
infer_dtype(struct mn_volume_plan *plan, int dtype)
{
    if (plan->dtype != MN_DTYPE_NONE && dtype != MN_DTYPE_NONE) {
        plan->dtype = dtype;
    }
}

static int
infer_op(const struct mn_op *op, uint32_t number, struct mn_volume_plan *image,
         struct mn_volume_plan *label, struct mn_text *text)
{
    int rc;
    switch (op->kind) {
    case MN_OP_RAND_BALANCED_CROP:
    case MN_OP_RAND_CROP:
        set_patch(image, op);
        set_patch(label, op);
        return 0;
    case MN_OP_READ_NPY:
    case MN_OP_CAST:
        infer_dtype(image, op->dtypes[0]);
        infer_dtype(label, op->dtypes[1]);
        return 0;
    case MN_OP_RAND_SCALE_INTENSITY:
    case MN_OP_RAND_GAUSSIAN_NOISE:
    case MN_OP_NORMALIZE:
        infer_dtype(image, MN_DTYPE_F32);
        return 0;
    case MN_OP_PAD:
    case MN_OP_RESAMPLE:
        if (op->kind == MN_OP_RESAMPLE) {
            infer_dtype(image, MN_DTYPE_F32);
        }
        rc = infer_reshape(image, op, text);
        return rc == 0 ? infer_reshape(label, op, text) : rc;
    case MN_OP_USER:
        return infer_user(image, label, op, number, text);
    default:
        return 0;
    }
}

int
mn_pipeline_infer(const struct mn_pipeline *pipeline, int tail, struct mn_volume_plan *image,
                  struct mn_volume_plan *label, struct mn_text *text)
{
    int rc = 0;
    for (int i = 0; rc == 0 && i < pipeline->n_ops - tail; i++) {
        rc = infer_op(&pipeline->ops[i], (uint32_t)i, image, label, text);
    }
    return rc;
}
