/* mn_index.c - see mn_index.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/types/mn_index.h"

#include "py/module/mn_critical_section.h"

/* Does the same as as_int64() for a list that no other code changes meanwhile. */
static PyObject *
list_as_int64(PyObject *indices)
{
    Py_ssize_t n = PyList_GET_SIZE(indices);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int64_t));
    if (bytes == NULL) {
        return NULL;
    }
    int64_t *v = (int64_t *)(void *)PyBytes_AS_STRING(bytes);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *o = PyList_GET_ITEM(indices, i);
        int overflow = 1;
        if (PyLong_CheckExact(o)) {
            v[i] = PyLong_AsLongLongAndOverflow(o, &overflow);
        }
        if (overflow != 0) {
            Py_DECREF(bytes);
            return NULL;
        }
    }
    return bytes;
}

/* Returns a list of exact ints as the bytes of machine integers; NULL without an exception for
 * anything else. */
static PyObject *
as_int64(PyObject *indices)
{
    PyObject *bytes = NULL;
    if (PyList_CheckExact(indices)) {
        Py_BEGIN_CRITICAL_SECTION(indices);
        bytes = list_as_int64(indices);
        Py_END_CRITICAL_SECTION();
    }
    return bytes;
}

/* Checks the result of dumps. Returns NULL with an exception if it is neither bytes nor (n, bytes)
 * with n machine integers. Takes the reference. */
static PyObject *
dumped(PyObject *given, uint32_t *kind, uint32_t *nrows)
{
    unsigned int n = 0;
    PyObject *owned = given;
    if (given != NULL && PyTuple_CheckExact(given)) {
        owned = PyArg_ParseTuple(given, "IS", &n, &owned) ? Py_NewRef(owned) : NULL;
        Py_DECREF(given);
        *kind = MN_INDEX_NUMBERED;
        *nrows = n;
    }
    if (owned != NULL
        && (!PyBytes_Check(owned) || PyBytes_GET_SIZE(owned) / (Py_ssize_t)sizeof(int64_t) < n)) {
        PyErr_SetString(PyExc_TypeError, "dumps must return bytes, or a number of them first");
        Py_CLEAR(owned);
    }
    return owned;
}

PyObject *
mn_fill_index(uint32_t *kind, const void **index, uint64_t *bytes, uint32_t *nrows,
              PyObject *indices, PyObject *dumps)
{
    PyObject *owned = as_int64(indices);
    *kind = MN_INDEX_INT64;
    if (owned != NULL) {
        *nrows = (uint32_t)(PyBytes_GET_SIZE(owned) / (Py_ssize_t)sizeof(int64_t));
    }
    else if (!PyErr_Occurred()) {
        *kind = MN_INDEX_PICKLE;
        owned = dumped(PyObject_CallOneArg(dumps, indices), kind, nrows);
    }
    if (owned != NULL) {
        *index = PyBytes_AS_STRING(owned);
        *bytes = (uint64_t)PyBytes_GET_SIZE(owned);
    }
    return owned;
}

uint32_t
mn_as_uint32(PyObject *number)
{
    unsigned long v = PyLong_AsUnsignedLong(number);
    if (v > UINT32_MAX && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_OverflowError, "a number is too large");
    }
    return (uint32_t)v;
}

int
mn_split_spares(uint32_t *nrows, uint32_t spares)
{
    if (spares > *nrows) {
        PyErr_SetString(PyExc_ValueError, "there are fewer indices than spares");
        return 0;
    }
    *nrows -= spares;
    return 1;
}

PyObject *
mn_index_pickle(struct mn_block *b)
{
    size_t at = b->index_kind == MN_INDEX_NUMBERED
                    ? ((size_t)b->nrows + b->spares) * sizeof(int64_t)
                    : 0;
    return PyBytes_FromStringAndSize((const char *)mn_block_index(b) + at,
                                     (Py_ssize_t)(b->index_bytes - at));
}

PyObject *
mn_index_list(struct mn_block *b)
{
    uint32_t n = b->nrows + b->spares;
    PyObject *list = PyList_New(n);
    const int64_t *v = mn_block_index(b);
    for (uint32_t i = 0; list != NULL && i < n; i++) {
        PyObject *index = PyLong_FromLongLong(v[i]);
        if (index == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, index);
    }
    return list;
}
