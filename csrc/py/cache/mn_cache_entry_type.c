/* mn_cache_entry_type.c - Entry: what find() has found, to be copied out.
 * SPDX-License-Identifier: Apache-2.0
 *
 * On a disk a copy may wait, and may fail: OSError.
 *
 * An entry may be recycled at any time. So each copy is checked after it is made. The method
 * returns None or False if the bytes may be another entry's. The caller then has a miss.
 */
#include "py/cache/mn_cache_module.h"

#include <errno.h>
#include <stdbool.h>
#include <string.h>

/* Copies of this size and more release the GIL: below, taking it again costs more. */
#define LARGE (256u * 1024u)
#define DIMS_MAX 64

static struct mn_cache_found *
found_of(PyObject *self)
{
    return &((struct mn_cache_entry_object *)self)->found;
}

static void
entry_dealloc(PyObject *self)
{
    Py_CLEAR(((struct mn_cache_entry_object *)self)->store);
    mn_free_object(self);
}

/* Of a copy's result: 0, or -1 with an exception. */
static int
raised(int rc)
{
    if (rc == -EINVAL) {
        PyErr_SetString(PyExc_ValueError, "the entry is not that long");
    }
    else if (rc != 0) {
        errno = -rc;
        (void)PyErr_SetFromErrno(PyExc_OSError);
    }
    return rc == 0 ? 0 : -1;
}

/* 0, or -1 with an exception. */
static int
copied(const struct mn_cache_found *found, uint64_t off, void *to, uint64_t bytes)
{
    bool long_one = bytes >= LARGE || found->map->data == NULL;
    return raised(long_one ? MN_WITHOUT_GIL(mn_cache_copy(found, off, to, bytes))
                           : mn_cache_copy(found, off, to, bytes));
}

PyDoc_STRVAR(describe_doc,
"describe() -> bytes | None\n\n"
"The description that was stored, or None where the entry is gone.");

static PyObject *
describe(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const struct mn_cache_found *found = found_of(self);
    PyObject *text = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)found->described);
    if (text == NULL || copied(found, 0, PyBytes_AS_STRING(text), found->described) < 0) {
        Py_XDECREF(text);
        return NULL;
    }
    if (!mn_cache_found_still(found)) {
        Py_DECREF(text);
        Py_RETURN_NONE;
    }
    return text;
}

/* Where parts come from: an entry, or a buffer. */
struct source {
    const struct mn_cache_found *found; /* NULL: the buffer */
    const Py_buffer *buffer;
    uint64_t off;
};

static int
from_source(const struct source *source, void *to, uint64_t bytes)
{
    if (source->found != NULL) {
        return copied(source->found, source->off, to, bytes);
    }
    if (bytes != (uint64_t)source->buffer->len) {
        return MN_RAISE(PyExc_ValueError, "a part has another length than its target");
    }
    memcpy(to, source->buffer->buf, bytes);
    return 0;
}

/* Copies one part to where a target says. Bytes that are made for it go to `made`. */
static int
copy_part(const struct source *source, PyObject *target, uint64_t *n, PyObject *made)
{
    unsigned long long address, bytes;
    int rc = -1;
    if (PyLong_CheckExact(target)) {
        bytes = PyLong_AsUnsignedLongLong(target);
        if (PyErr_Occurred() != NULL || bytes > PY_SSIZE_T_MAX) {
            return MN_RAISE(PyExc_ValueError, "no part is that long");
        }
        PyObject *object = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
        if (object != NULL && from_source(source, PyBytes_AS_STRING(object), bytes) == 0) {
            rc = PyList_Append(made, object);
        }
        Py_XDECREF(object);
    }
    else if (PyTuple_CheckExact(target)) { /* address and bytes of what the caller keeps */
        if (!PyArg_ParseTuple(target, "KK", &address, &bytes)) {
            return -1;
        }
        rc = from_source(source, (void *)(uintptr_t)address, bytes);
    }
    else {
        Py_buffer view;
        if (PyObject_GetBuffer(target, &view, PyBUF_WRITABLE | PyBUF_ANY_CONTIGUOUS) < 0) {
            return -1;
        }
        bytes = (unsigned long long)view.len;
        rc = from_source(source, view.buf, bytes);
        PyBuffer_Release(&view);
    }
    *n = bytes;
    return rc;
}

PyDoc_STRVAR(copy_doc,
"copy(targets) -> list of bytes | None\n\n"
"Copies the parts in the order in which they were stored, each to its target: a writable\n"
"buffer, an (address, bytes) of memory that the caller keeps, or a number of bytes, for\n"
"which a bytes object is made. None where the entry is gone: the targets hold anything.");

static PyObject *
copy(PyObject *self, PyObject *targets)
{
    const struct mn_cache_found *found = found_of(self);
    struct source source = {.found = found, .off = mn_cache_padded(found->described)};
    PyObject *made = PyList_New(0);
    PyObject *all = made == NULL ? NULL : PySequence_Tuple(targets);
    bool ok = all != NULL;
    for (Py_ssize_t i = 0; ok && i < PyTuple_GET_SIZE(all); i++) {
        uint64_t bytes = 0;
        ok = copy_part(&source, PyTuple_GET_ITEM(all, i), &bytes, made) == 0;
        source.off += mn_cache_padded(bytes);
    }
    Py_XDECREF(all);
    if (!ok) {
        Py_XDECREF(made);
        return NULL;
    }
    if (!mn_cache_found_still(found)) {
        Py_DECREF(made);
        Py_RETURN_NONE;
    }
    return made;
}

/* A part that is a bytes object is taken and not copied where bytes are to be made. */
static int
fill_part(const struct source *source, PyObject *part, PyObject *target, PyObject *made)
{
    uint64_t bytes;
    if (target == Py_None) {
        return 0;
    }
    if (PyLong_CheckExact(target) && PyBytes_CheckExact(part)
        && PyLong_AsSsize_t(target) == PyBytes_GET_SIZE(part)) {
        return PyList_Append(made, part);
    }
    return PyErr_Occurred() != NULL ? -1 : copy_part(source, target, &bytes, made);
}

static const char fill_doc[] =
    "fill(parts, targets) -> list of bytes\n\n"
    "What Entry.copy() does, but from a tuple of contiguous buffers to a list of targets. A part\n"
    "whose target is None is left out, and one that is bytes may be returned itself.";

static PyObject *
fill(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *parts, *targets, *made = PyList_New(0);
    if (made == NULL
        || !PyArg_ParseTuple(args, "O!O!", &PyTuple_Type, &parts, &PyList_Type, &targets)) {
        Py_XDECREF(made);
        return NULL;
    }
    Py_ssize_t n = PyTuple_GET_SIZE(parts);
    bool ok = n == PyList_GET_SIZE(targets);
    if (!ok) {
        PyErr_SetString(PyExc_ValueError, "each part has one target");
    }
    for (Py_ssize_t i = 0; ok && i < n; i++) {
        Py_buffer view;
        ok = PyObject_GetBuffer(PyTuple_GET_ITEM(parts, i), &view, PyBUF_ANY_CONTIGUOUS) == 0;
        if (ok) {
            struct source source = {.buffer = &view};
            ok = fill_part(&source, PyTuple_GET_ITEM(parts, i), PyList_GET_ITEM(targets, i), made)
                 == 0;
            PyBuffer_Release(&view);
        }
    }
    if (!ok) {
        Py_CLEAR(made);
    }
    return made;
}

static int
numbers(PyObject *from, uint64_t *to, int n)
{
    if (!PyTuple_Check(from) || PyTuple_GET_SIZE(from) != n) {
        return MN_RAISE(PyExc_ValueError, "a box has a number for each dimension");
    }
    for (int i = 0; i < n; i++) {
        to[i] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(from, i));
        if (PyErr_Occurred() != NULL) {
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(box_doc,
"box(address, itemsize, shape, start, count) -> bool\n\n"
"Copies a box of the first part, an array in C order, to memory that the caller keeps.\n"
"False where the entry is gone.");

static PyObject *
box(PyObject *self, PyObject *args)
{
    const struct mn_cache_found *found = found_of(self);
    unsigned long long address, itemsize;
    PyObject *shape, *start, *count;
    uint64_t dims[3][DIMS_MAX];
    if (!PyArg_ParseTuple(args, "KKO!OO", &address, &itemsize, &PyTuple_Type, &shape, &start,
                          &count)) {
        return NULL;
    }
    Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    if (ndim > DIMS_MAX || numbers(shape, dims[0], (int)ndim) < 0
        || numbers(start, dims[1], (int)ndim) < 0 || numbers(count, dims[2], (int)ndim) < 0) {
        if (PyErr_Occurred() == NULL) {
            PyErr_SetString(PyExc_ValueError, "too many dimensions");
        }
        return NULL;
    }
    for (Py_ssize_t d = 0; d < ndim; d++) {
        if (dims[1][d] > dims[0][d] || dims[2][d] > dims[0][d] - dims[1][d]) {
            return PyErr_Format(PyExc_ValueError, "the box leaves the array");
        }
    }
    struct mn_cache_box inner = {(int)ndim, itemsize, dims[0], dims[1], dims[2]};
    int rc = MN_WITHOUT_GIL(mn_cache_copy_box(found, mn_cache_padded(found->described), &inner,
                                              (void *)(uintptr_t)address));
    if (raised(rc) < 0) {
        return NULL;
    }
    return PyBool_FromLong(mn_cache_found_still(found));
}

PyDoc_STRVAR(verify_doc,
"verify() -> bool\n\n"
"Whether every checksum of the entry is right. If not, it is out of the cache from now on.");

static PyObject *
verify(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_cache_entry_object *entry = (struct mn_cache_entry_object *)self;
    bool whole = MN_WITHOUT_GIL(mn_cache_check(mn_cache_of_store(entry->store), &entry->found));
    return PyBool_FromLong(whole);
}

static PyMethodDef entry_methods[] = {
    {"verify", verify, METH_NOARGS, verify_doc},
    {"describe", describe, METH_NOARGS, describe_doc},
    {"copy", copy, METH_O, copy_doc},
    {"box", box, METH_VARARGS, box_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot entry_slots[] = {
    {Py_tp_dealloc, entry_dealloc},
    {Py_tp_methods, entry_methods},
    {Py_tp_doc, PyDoc_STR("An entry of the cache, as long as it is there.")},
    {0, NULL},
};

PyType_Spec mn_cache_entry_spec = {"minato._cache.Entry", sizeof(struct mn_cache_entry_object), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION
                                       | Py_TPFLAGS_IMMUTABLETYPE, entry_slots};

PyMethodDef mn_cache_entry_functions[] = {
    {"fill", fill, METH_VARARGS, fill_doc},
    {NULL, NULL, 0, NULL},
};
