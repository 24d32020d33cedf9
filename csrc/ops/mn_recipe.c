/* The draws of the operators that are steps.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_recipe.h"

#include <string.h>

#include "ops/mn_pipeline.h"

_Static_assert(sizeof(struct mn_step) == 8 * MN_STEP_WORDS, "steps are whole words");
_Static_assert(MN_DTYPE_F64 < 16, "a cast has four bits for a dtype");

bool
mn_op_is_step(const struct mn_op *op)
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

struct mn_step
mn_op_step(const struct mn_op *op, const struct mn_key *key)
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
    while (from > 0 && mn_op_is_step(&pipeline->ops[from - 1])) {
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
        struct mn_step step = mn_op_step(&pipeline->ops[i], &mine);
        memcpy(at, &step, sizeof(step));
        at += sizeof(step);
    }
}
