/* mn_tensor.c - torch tensors made over the arena or copied out of it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Uses the DLPack C exchange interface of torch.Tensor if torch offers it, else the Python function
 * that bind_torch() received. minato._torch makes small copies, if it was built.
 */
#include <stdlib.h>

#include "py/module/mn_state.h"

struct over {
    struct mn_dl_managed managed;
    struct mn_hold *hold;
    int64_t dims[]; /* shape, then strides */
};

static void
over_delete(struct mn_dl_managed *m)
{
    struct over *o = (struct over *)m;
#ifdef MN_BUG_TENSOR
    free(o);
    mn_hold_release(o->hold);
#else
    mn_hold_release(o->hold);
    free(o);
#endif
}

static PyObject *
shape_tuple(int ndim, const int64_t *shape)
{
    PyObject *t = PyTuple_New(ndim);
    for (int i = 0; t != NULL && i < ndim; i++) {
        PyObject *n = PyLong_FromLongLong(shape[i]);
        if (n == NULL) {
            Py_CLEAR(t);
            break;
        }
        PyTuple_SET_ITEM(t, i, n);
    }
    return t;
}

/* The fallback. view is a bytes-like object, and is consumed. The result says which storage guards
 * the view's hold: none if there are no values, and the hold is released by then. */
static PyObject *
from_view(struct mn_state *st, PyObject *view, struct mn_dl_dtype dtype, int ndim,
          const int64_t *shape)
{
    PyObject *dims = shape_tuple(ndim, shape);
    PyObject *t = NULL;
    if (dims != NULL && st->from_view != NULL) {
        t = PyObject_CallFunction(st->from_view, "OiiO", view, (int)dtype.code,
                                  (int)dtype.bits, dims);
    }
    Py_XDECREF(dims);
    Py_DECREF(view);
    return t;
}

/* Consumes hold. It is released here if there is no memory for `over`, else by over_delete. torch
 * calls that when the tensor's storage is freed, and also if it cannot make the tensor. */
static PyObject *
over_dlpack(struct mn_state *st, struct mn_hold *hold, struct mn_dl_dtype dtype, int ndim,
            const int64_t *shape)
{
    struct over *o = calloc(1, sizeof(*o) + 2 * (size_t)ndim * sizeof(int64_t));
    if (o == NULL) {
        mn_hold_release(hold);
        return PyErr_NoMemory();
    }
    o->hold = hold;
    int64_t stride = 1;
    for (int i = ndim - 1; i >= 0; i--) {
        o->dims[i] = shape[i];
        o->dims[ndim + i] = stride;
        stride *= shape[i] > 1 ? shape[i] : 1; /* as in torch when an axis is empty */
    }
    o->managed.version = (struct mn_dl_version){1, 0};
    o->managed.deleter = over_delete;
    o->managed.tensor = (struct mn_dl_tensor){
        .data = mn_hold_data(hold),
        .device_type = MN_DL_CPU,
        .ndim = ndim,
        .dtype = dtype,
        .shape = o->dims,
        .strides = o->dims + ndim,
    };
    void *t = NULL;
    if (st->dlpack->object_from_managed(&o->managed, &t) != 0) {
        return NULL; /* o is freed: see mn_dlpack.h */
    }
    return t;
}

PyObject *
mn_tensor_over(struct mn_state *st, struct mn_hold *hold, struct mn_dl_dtype dtype, int ndim,
               const int64_t *shape, uint64_t bytes)
{
    if (st->dlpack == NULL) {
        PyObject *view = mn_arena_view_new(st, hold, bytes);
        return view != NULL ? from_view(st, view, dtype, ndim, shape) : NULL;
    }
    PyObject *t = over_dlpack(st, hold, dtype, ndim, shape);
    if (t != NULL && mn_hold_guard(st, hold, t) < 0) {
        Py_CLEAR(t);
    }
    return t;
}

PyObject *
mn_tensor_copy(struct mn_state *st, const void *data, struct mn_dl_dtype dtype, int ndim,
               const int64_t *shape, uint64_t bytes)
{
    if (st->plain != NULL && bytes < MN_FIELD_BIG) { /* larger ones: see mn_hold_copy */
        return st->plain->copy(data, dtype, ndim, shape, bytes);
    }
    struct mn_hold *hold = mn_hold_copy(st, data, bytes);
    return hold != NULL ? mn_tensor_over(st, hold, dtype, ndim, shape, bytes) : NULL;
}
