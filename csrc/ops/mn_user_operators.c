/* Operators of users, through the public interface.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "ops/mn_pipeline.h"

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

/* Returns the work's memory, which may be written; NULL if there is no volume. */
static void *
data_of(const struct mn_view *view)
{
    return view->dtype == MN_DTYPE_NONE ? NULL : (void *)(uintptr_t)view->base;
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
    void *memory = NULL;
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
    int rc = mn_work_alloc(work, (size_t)bytes, &memory);
    if (rc == 0) {
        mn_view_of_block(view, volume->dtype, memory, volume->shape);
        view->writable = true;
        memcpy(volume->strides, view->strides, sizeof(volume->strides));
        volume->data = memory;
    }
    return rc;
}

static int
run_planned(struct mn_work *work, const struct mn_operator *user, struct mn_op_call *in)
{
    struct mn_op_call out = *in;
    struct mn_view image, label;
    char words[MESSAGE] = "";
    in->image.data = in->label.data = out.image.data = out.label.data = NULL;
    int rc = user->plan(user->state, in, &out, words, sizeof(words));
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
    in->image.data = data_of(&work->image);
    in->label.data = data_of(&work->label);
    rc = user->run(user->state, in, &out, words, sizeof(words));
    if (rc < 0) {
        return fail_user(work, user, rc, words);
    }
    work->image = image;
    work->label = label;
    return 0;
}

int
mn_op_user(struct mn_work *work, const struct mn_op *op, uint32_t number)
{
    const struct mn_operator *user = op->user;
    char words[MESSAGE] = "";
    int rc = mn_work_settle_own(work, &work->image);
    if (rc == 0) {
        rc = mn_work_settle_own(work, &work->label);
    }
    if (rc < 0) {
        return rc;
    }
    struct mn_op_call call = {.size = sizeof(call), .number = number,
                              .key_hi = work->key_hi, .key_lo = work->key_lo};
    describe(&call.image, &work->image);
    describe(&call.label, &work->label);
    if (user->plan != NULL) {
        return run_planned(work, user, &call);
    }
    call.image.data = data_of(&work->image);
    call.label.data = data_of(&work->label);
    rc = user->run(user->state, &call, &call, words, sizeof(words));
    return rc < 0 ? fail_user(work, user, rc, words) : 0;
}
