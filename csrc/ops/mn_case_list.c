/* The samples of a dataset.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_pipeline.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static void
free_list(struct mn_case *list, int64_t n_cases)
{
    for (int64_t i = 0; i < n_cases; i++) {
        free(list[i].image);
        free(list[i].label);
    }
    free(list);
}

void
mn_cases_close(struct mn_cases *cases)
{
    if (cases != NULL) {
        free_list(cases->cases, cases->n_cases);
        free(cases);
    }
}

static const char *
where(const struct mn_cases *cases, int64_t index)
{
    return cases->cases[index % cases->n_cases].image;
}

/* Checks that the result has the dtype and shape that the fields promise. */
static int
check_field(const struct mn_cases *cases, int64_t index, int field,
            const struct mn_view *view, struct mn_text *text)
{
    const struct mn_native_field *f = &cases->native.fields[field];
    if (mn_view_bytes(view) == f->bytes
        && memcmp(view->shape, f->shape, sizeof(view->shape)) == 0) {
        return 0;
    }
    return mn_fail(text, EINVAL,
                   "%s: the sample's shape %lld x %lld x %lld x %lld is not that of the "
                   "first case",
                   where(cases, index), (long long)view->shape[0],
                   (long long)view->shape[1], (long long)view->shape[2],
                   (long long)view->shape[3]);
}

/* Stores the volumes of a sample. Returns the number of fields they make up. */
static int
store_volumes(const struct mn_cases *cases, struct mn_work *work, int64_t index, void **out)
{
    int rc = check_field(cases, index, 0, &work->image, work->reader.text);
    if (rc == 0) {
        rc = mn_work_store(work, &work->image, out[0]);
    }
    if (rc == 0 && cases->has_label) {
        rc = check_field(cases, index, 1, &work->label, work->reader.text);
    }
    if (rc == 0 && cases->has_label) {
        rc = mn_work_store(work, &work->label, out[1]);
    }
    return rc < 0 ? rc : 1 + cases->has_label;
}

/* Stores the sample's window. The start of its only crop follows from the view's offset in the
 * file. */
static int
store_window(const struct mn_cases *cases, const struct mn_view *image, int64_t index, void *out)
{
    int64_t window[MN_WINDOW_WORDS] = {index % cases->n_cases};
    int64_t bytes = image->first_off - (int64_t)image->file->npy.data_off;
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        window[axis] = bytes / image->strides[axis];
        bytes %= image->strides[axis];
    }
    memcpy(out, window, sizeof(window));
    return 1;
}

static int
make_sample(const struct mn_cases *cases, struct mn_work *work, int64_t index,
            uint64_t key_hi, uint64_t key_lo, void **out)
{
    const struct mn_case *c = &cases->cases[index % cases->n_cases];
    struct mn_source source = {.image_path = c->image, .label_path = c->label};
    int field = 0;
    int rc = mn_pipeline_apply(cases->pipeline, work, cases->tail, &source, key_hi, key_lo);
    if (rc == 0 && (work->label.dtype != MN_DTYPE_NONE) != cases->has_label) {
        rc = mn_fail(work->reader.text, EINVAL, "%s: the sample has %s label, unlike the first",
                     where(cases, index), cases->has_label ? "no" : "a");
    }
    if (rc == 0) {
        field = cases->windows ? store_window(cases, &work->image, index, out[0])
                               : store_volumes(cases, work, index, out);
        rc = field < 0 ? field : 0;
    }
    if (rc == 0 && (cases->tail > 0 || cases->windows)) {
        mn_pipeline_recipe(cases->pipeline, cases->tail, key_hi, key_lo, out[field++]);
    }
    if (rc == 0 && cases->with_index) {
        memcpy(out[field], &index, sizeof(index));
    }
    return rc;
}

static int
run_native(void *state, int64_t index, uint64_t key_hi, uint64_t key_lo, void **out,
           char *err, size_t errlen)
{
    struct mn_cases *cases = state;
    struct mn_text text = {err, errlen};
    struct mn_work *work = NULL;
    if (index < 0 || index >= cases->native.length) {
        return mn_fail(&text, ERANGE, "sample %lld is not among the %lld of the dataset",
                       (long long)index, (long long)cases->native.length);
    }
    int rc = mn_work_begin(cases->pipeline, &work, &text);
    if (rc == 0) {
        rc = make_sample(cases, work, index, key_hi, key_lo, out);
        mn_work_end(cases->pipeline, work);
    }
    return rc;
}

/* ---- The dtypes and shapes that come out of a pipeline, before any sample is made ---- */

/* The properties of a volume that are known before it exists. */
struct plan {
    int dtype; /* MN_DTYPE_NONE: no volume; -1: not known */
    int64_t shape[MN_VOLUME_DIMS]; /* -1: not known */
};

static void
set_patch(struct plan *plan, const struct mn_op *op)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        plan->shape[axis] = op->size[axis];
    }
}

static int
infer_reshape(struct plan *plan, const struct mn_op *op, struct mn_text *text)
{
    if (plan->dtype == MN_DTYPE_NONE) {
        return 0;
    }
    return op->kind == MN_OP_PAD ? mn_op_pad_shape(op, plan->shape, text)
                                 : mn_op_resample_shape(op, plan->shape, text);
}

static bool
is_known(const struct plan *plan)
{
    bool known = true;
    for (int axis = 0; plan->dtype != MN_DTYPE_NONE && axis < MN_VOLUME_DIMS; axis++) {
        known = known && plan->shape[axis] >= 0;
    }
    return known;
}

static void
to_volume(struct mn_op_volume *volume, const struct plan *plan)
{
    volume->dtype = plan->dtype;
    memcpy(volume->shape, plan->shape, sizeof(volume->shape));
}

static int
infer_user(struct plan *image, struct plan *label, const struct mn_op *op,
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
infer_dtype(struct plan *plan, int dtype)
{
    if (plan->dtype != MN_DTYPE_NONE && dtype != MN_DTYPE_NONE) {
        plan->dtype = dtype;
    }
}

static int
infer_op(const struct mn_op *op, uint32_t number, struct plan *image,
         struct plan *label, struct mn_text *text)
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

/* Computes what is known of the output from what is known of the input, before the last `tail`
 * operators. */
static int
infer(const struct mn_pipeline *pipeline, int tail, struct plan *image, struct plan *label,
      struct mn_text *text)
{
    int rc = 0;
    for (int i = 0; rc == 0 && i < pipeline->n_ops - tail; i++) {
        rc = infer_op(&pipeline->ops[i], (uint32_t)i, image, label, text);
    }
    return rc;
}

static int
add_field(struct mn_cases *cases, const struct plan *plan, const char *name,
          struct mn_text *text)
{
    struct mn_native_field *f = &cases->native.fields[cases->native.n_fields++];
    f->itemsize = (uint8_t)mn_dtype_size(plan->dtype);
    f->kind = plan->dtype == MN_DTYPE_F32 || plan->dtype == MN_DTYPE_F64   ? 'f'
              : plan->dtype == MN_DTYPE_I16 || plan->dtype == MN_DTYPE_I32 ? 'i'
                                                                           : 'u';
    f->ndim = MN_VOLUME_DIMS;
    f->bytes = f->itemsize;
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        if (plan->shape[axis] < 0) {
            return mn_fail(text, EINVAL,
                           "axis %d of the %s depends on the case; end the pipeline with "
                           "a crop, or with Resample to a fixed size",
                           axis, name);
        }
        f->shape[axis] = plan->shape[axis];
        f->bytes *= (uint64_t)plan->shape[axis];
    }
    return 0;
}

static void
add_words(struct mn_cases *cases, int64_t words)
{
    cases->native.fields[cases->native.n_fields++] = (struct mn_native_field){
        .kind = 'i', .itemsize = 8, .ndim = 1, .shape = {words}, .bytes = 8 * (uint64_t)words};
}

/* Returns whether a sample is a window of its files, followed only by arithmetic. */
static bool
crops_files(const struct mn_cases *cases)
{
    const struct mn_pipeline *pipeline = cases->pipeline;
    return pipeline->n_ops - cases->tail == 2
           && (pipeline->ops[1].kind == MN_OP_RAND_BALANCED_CROP
               || pipeline->ops[1].kind == MN_OP_RAND_CROP);
}

/* Computes what ReadNpy knows of every case: the channels. The rest differs from case to case. */
static int
plan_file(const struct mn_cases *cases, const char *path, int dtype, struct plan *plan,
          struct mn_text *text)
{
    struct mn_work *work = NULL;
    memset(plan, 0, sizeof(*plan));
    if (path == NULL) {
        return 0;
    }
    int rc = mn_work_begin(cases->pipeline, &work, text);
    if (rc < 0) {
        return rc;
    }
    rc = mn_work_open(work, 0, path, cases->pipeline->ops[0].flag, dtype);
    plan->dtype = dtype;
    memset(plan->shape, -1, sizeof(plan->shape));
    plan->shape[0] = work->image.shape[0];
    mn_work_end(cases->pipeline, work);
    return rc;
}

static int
plan_fields(struct mn_cases *cases, struct mn_text *text)
{
    const struct mn_op *read = &cases->pipeline->ops[0];
    struct plan image, label;
    if (cases->pipeline->n_ops == 0 || read->kind != MN_OP_READ_NPY) {
        return mn_fail(text, EINVAL, "the pipeline of a dataset must begin with ReadNpy");
    }
    int rc = plan_file(cases, cases->cases[0].image, read->dtypes[0], &image, text);
    if (rc == 0) {
        rc = plan_file(cases, cases->cases[0].label, read->dtypes[1], &label, text);
    }
    if (rc == 0) {
        rc = infer(cases->pipeline, cases->tail, &image, &label, text);
    }
    cases->has_label = rc == 0 && label.dtype != MN_DTYPE_NONE;
    if (rc == 0 && cases->windows) {
        add_words(cases, MN_WINDOW_WORDS);
    }
    else if (rc == 0) {
        rc = add_field(cases, &image, "image", text);
        if (rc == 0 && cases->has_label) {
            rc = add_field(cases, &label, "label", text);
        }
    }
    if (rc == 0 && (cases->tail > 0 || cases->windows)) {
        add_words(cases, MN_RECIPE_WORDS(cases->tail));
    }
    if (rc == 0 && cases->with_index) {
        cases->native.fields[cases->native.n_fields++] =
            (struct mn_native_field){.kind = 'i', .itemsize = 8, .bytes = 8};
    }
    return rc;
}

int
mn_cases_open(struct mn_cases **cases, struct mn_pipeline *pipeline, struct mn_case *list,
              int64_t n_cases, int64_t repeat, bool with_index, int tail, bool windows,
              struct mn_text *text)
{
    struct mn_cases *c = calloc(1, sizeof(*c));
    int64_t length;
    if (c == NULL) {
        free_list(list, n_cases);
        return mn_fail_memory(text, sizeof(*c));
    }
    c->pipeline = pipeline;
    c->n_cases = n_cases;
    c->cases = list;
    c->with_index = with_index;
    c->tail = tail;
    c->windows = windows;
    c->native = (struct mn_native_pipeline){
        .abi = MN_OPS_ABI, .size = sizeof(c->native), .state = c, .run = run_native};
    int rc;
    if (n_cases < 1 || repeat < 1 || __builtin_mul_overflow(n_cases, repeat, &length)) {
        rc = mn_fail(text, EINVAL, "a dataset needs at least one case and one repeat");
    }
    else if (tail < 0 || tail > mn_pipeline_tail_most(pipeline)) {
        rc = mn_fail(text, EINVAL, "the last %d operators are not all steps (flip, cast, scale, "
                                   "noise or normalize)", tail);
    }
    else if (windows && !crops_files(c)) {
        rc = mn_fail(text, EINVAL, "the pipeline must be ReadNpy, a crop and steps");
    }
    else {
        c->native.length = length;
        rc = plan_fields(c, text);
    }
    if (rc < 0) {
        mn_cases_close(c);
        return rc;
    }
    *cases = c;
    return 0;
}

int
mn_cases_warm(const struct mn_cases *cases, int64_t at, struct mn_text *text)
{
    const struct mn_pipeline *pipeline = cases->pipeline;
    const struct mn_op *read = &pipeline->ops[0];
    const struct mn_boxes *boxes = NULL;
    struct mn_work *work = NULL;
    bool wanted = pipeline->n_ops > 1 && pipeline->ops[1].kind == MN_OP_RAND_BALANCED_CROP
                  && pipeline->ops[1].keep_boxes;
    if (!wanted || cases->cases[at].label == NULL) {
        return 0;
    }
    int rc = mn_work_begin(cases->pipeline, &work, text);
    if (rc < 0) {
        return rc;
    }
    rc = mn_work_open(work, 1, cases->cases[at].label, read->flag, read->dtypes[1]);
    if (rc == 0) {
        rc = mn_work_boxes(work, true, &boxes);
    }
    mn_work_end(cases->pipeline, work);
    return rc;
}
