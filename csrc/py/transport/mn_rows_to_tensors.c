/* mn_rows_to_tensors.c - torch tensors made over the arena or copied out of it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Uses the DLPack C exchange interface of torch.Tensor if torch offers it, else the Python function
 * that bind_torch() received. minato._torch makes small copies, if it was built.
 */
#define NO_IMPORT_ARRAY

#include "engine/mn_engine_snapshot.h"
#include "py/module/mn_numpy.h"
#include "py/transport/mn_layout.h"

#include <stdlib.h>
#include <string.h>

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

/* The fallback. view is a bytes-like object, and is consumed. The result says which storage guards
 * the view's hold: none if there are no values, and the hold is released by then. */
static PyObject *
from_view(struct mn_state *st, PyObject *view, struct mn_dl_dtype dtype, int ndim,
          const int64_t *shape)
{
    PyObject *dims = mn_shape_tuple(ndim, shape);
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

/* Makes a new tensor over the hold's memory, and takes the hold over (also on failure). */
static PyObject *
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

/* Makes a new tensor in ordinary memory with a copy of data. */
static PyObject *
mn_tensor_copy(struct mn_state *st, const void *data, struct mn_dl_dtype dtype, int ndim,
               const int64_t *shape, uint64_t bytes)
{
    if (st->plain != NULL && bytes < MN_FIELD_BIG) { /* larger ones: see mn_hold_copy */
        return st->plain->copy(data, dtype, ndim, shape, bytes);
    }
    struct mn_hold *hold = mn_hold_copy(st, data, bytes);
    return hold != NULL ? mn_tensor_over(st, hold, dtype, ndim, shape, bytes) : NULL;
}

/* makes a finished block into the batch that default_collate would have made,
 * or one row of it into the sample that it was.
 */

struct decoder {
    struct mn_state *st;
    struct mn_layout *l;
    struct mn_engine *e;
    uint64_t block_off;
    struct mn_block *block;
    PyObject *objects; /* batch: list of lists; row: list */
    uint32_t object;   /* the next OBJECT leaf */
    uint32_t row;
    uint32_t nrows;    /* number of the block's rows in the batch */
    bool whole;        /* a batch, not a row */
    bool copy;
};

static const void *
field_at(const struct decoder *d, const struct mn_node *n)
{
    return mn_at(mn_engine_shm(d->e), mn_block_fields(d->block)[n->field]);
}

/* Makes the field of all rows as one tensor. */
static PyObject *
batch_field(struct decoder *d, const struct mn_node *n)
{
    uint64_t bytes = n->bytes * d->nrows;
    int64_t shape[MN_LAYOUT_MAX_DIMS + 1] = {d->nrows};
    memcpy(shape + 1, n->shape, (size_t)n->ndim * sizeof(*shape));
    if (d->copy || bytes < MN_FIELD_BIG) {
        return mn_tensor_copy(d->st, field_at(d, n), n->dtype, n->ndim + 1, shape, bytes);
    }
    struct mn_hold *hold = mn_hold_new(d->st, d->e, d->block_off,
                                       mn_block_fields(d->block)[n->field], bytes);
    if (hold == NULL) {
        return NULL;
    }
    return mn_tensor_over(d->st, hold, n->dtype, n->ndim + 1, shape, bytes);
}

static PyObject *
row_field(struct decoder *d, const struct mn_node *n)
{
    const char *src = (const char *)field_at(d, n) + n->bytes * d->row;
    if (n->kind == MN_NODE_TENSOR) {
        return mn_tensor_copy(d->st, src, n->dtype, n->ndim, n->shape, n->bytes);
    }
    if (n->kind == MN_NODE_ARRAY) {
        npy_intp dims[MN_LAYOUT_MAX_DIMS];
        for (int i = 0; i < n->ndim; i++) {
            dims[i] = (npy_intp)n->shape[i];
        }
        Py_INCREF(n->extra);
        PyObject *a = PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)n->extra, n->ndim,
                                           dims, NULL, NULL, 0, NULL);
        if (a != NULL && n->bytes != 0) {
            memcpy(PyArray_DATA((PyArrayObject *)a), src, n->bytes);
        }
        return a;
    }
    if (n->kind == MN_NODE_INT) {
        int64_t v;
        memcpy(&v, src, sizeof(v));
        return PyLong_FromLongLong(v);
    }
    if (n->kind == MN_NODE_BOOL) {
        return PyBool_FromLong(*src);
    }
    if (n->kind == MN_NODE_FLOAT) {
        double v;
        memcpy(&v, src, sizeof(v));
        return PyFloat_FromDouble(v);
    }
    PyArray_Descr *descr = PyArray_DescrFromTypeObject(n->extra);
    if (descr == NULL) {
        return NULL;
    }
    PyObject *s = PyArray_Scalar((void *)(uintptr_t)src, descr, NULL);
    Py_DECREF(descr);
    return s;
}

/* Returns one of the objects that travelled with a row. A worker says which ones these are, and may
 * have lost them. */
static PyObject *
beside_row(PyObject *row, uint32_t which)
{
    if (row == NULL || !PyList_Check(row) || which >= PyList_GET_SIZE(row)) {
        PyErr_SetString(PyExc_RuntimeError,
                        "an object that a DataLoader worker sent with a row is missing. Code in "
                        "the worker writes to memory where it must not");
        return NULL;
    }
    return PyList_GetItemRef(row, which);
}

/* Makes the OBJECT leaf of every row as a list or tuple; of one row as itself. */
static PyObject *
object_leaf(struct decoder *d, const struct mn_node *n)
{
    uint32_t which = d->object++;
    if (!d->whole) {
        return beside_row(d->objects, which);
    }
    PyObject *out = PyList_New(d->nrows);
    for (uint32_t r = 0; out != NULL && r < d->nrows; r++) {
        PyObject *row = PyList_GetItemRef(d->objects, r);
        PyObject *o = row != NULL ? beside_row(row, which) : NULL;
        Py_XDECREF(row);
        if (o == NULL) {
            Py_CLEAR(out);
            break;
        }
        PyList_SET_ITEM(out, r, o);
    }
    if (out != NULL && n->extra == Py_True) {
        Py_SETREF(out, PyList_AsTuple(out));
    }
    return out;
}

static PyObject *
decode_node(struct decoder *d, uint32_t at);

static PyObject *
decode_dict(struct decoder *d, uint32_t at)
{
    const struct mn_node *n = &d->l->nodes[at];
    PyObject *out = PyDict_New();
    uint32_t child = at + 1;
    for (uint32_t i = 0; out != NULL && i < n->children; i++) {
        PyObject *v = decode_node(d, child);
        if (v == NULL || PyDict_SetItem(out, PyTuple_GET_ITEM(n->extra, i), v) < 0) {
            Py_CLEAR(out);
        }
        Py_XDECREF(v);
        child = d->l->nodes[child].end;
    }
    return out;
}

/* Makes a sequence. A tuple becomes a list in a batch, as with default_collate. */
static PyObject *
decode_sequence(struct decoder *d, uint32_t at)
{
    const struct mn_node *n = &d->l->nodes[at];
    bool list = n->kind == MN_NODE_LIST || (d->whole && n->kind == MN_NODE_TUPLE);
    PyObject *out = list ? PyList_New(n->children) : PyTuple_New(n->children);
    uint32_t child = at + 1;
    for (uint32_t i = 0; out != NULL && i < n->children; i++) {
        PyObject *v = decode_node(d, child);
        if (v == NULL) {
            Py_CLEAR(out);
        }
        else if (list) {
            PyList_SET_ITEM(out, i, v);
        }
        else {
            PyTuple_SET_ITEM(out, i, v);
        }
        child = d->l->nodes[child].end;
    }
    if (out != NULL && n->kind == MN_NODE_NAMED) {
        PyObject *named = PyObject_Call(n->extra, out, NULL);
        Py_DECREF(out);
        return named;
    }
    return out;
}

static PyObject *
decode_node(struct decoder *d, uint32_t at)
{
    const struct mn_node *n = &d->l->nodes[at];
    switch (n->kind) {
    case MN_NODE_DICT:
        return decode_dict(d, at);
    case MN_NODE_LIST:
    case MN_NODE_TUPLE:
    case MN_NODE_NAMED:
        return decode_sequence(d, at);
    case MN_NODE_OBJECT:
        return object_leaf(d, n);
    default:
        return d->whole ? batch_field(d, n) : row_field(d, n);
    }
}

PyObject *
mn_layout_decode(struct mn_state *st, struct mn_layout *l, struct mn_engine *e,
                 uint64_t block_off, uint32_t nrows, PyObject *objects, bool copy)
{
    struct decoder d = {.st = st, .l = l, .e = e, .block_off = block_off, .objects = objects,
                        .nrows = nrows, .whole = true, .copy = copy};
    d.block = mn_block_at(mn_engine_shm(e), block_off);
    return decode_node(&d, 0);
}

PyObject *
mn_layout_row(struct mn_state *st, struct mn_layout *l, struct mn_engine *e,
              uint64_t block_off, uint32_t row, PyObject *objects)
{
    struct decoder d = {.st = st, .l = l, .e = e, .block_off = block_off, .objects = objects,
                        .row = row};
    d.block = mn_block_at(mn_engine_shm(e), block_off);
    return decode_node(&d, 0);
}
