/* Running a pipeline's operators on a sample.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_pipeline.h"

#include <errno.h>
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
mn_op_user(struct mn_work *work, const struct mn_op *op, uint32_t number)
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
        return mn_op_balanced_crop(work, op, number);
    case MN_OP_RAND_CROP:
        return mn_op_crop(work, op, number);
    case MN_OP_PAD:
        return mn_op_pad(work, op);
    case MN_OP_RESAMPLE:
        rc = cast(work, &work->image, MN_DTYPE_F32);
        return rc == 0 ? mn_op_resample(work, op) : rc;
    case MN_OP_USER:
        return mn_op_user(work, op, number);
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
