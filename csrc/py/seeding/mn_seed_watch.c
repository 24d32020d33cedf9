/* See mn_seed_watch.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/seeding/mn_seed_watch.h"

#include <stdbool.h>
#include <string.h>

#include "py/module/mn_critical_section.h"

/* After a walk that found nothing, a number of samples pass before the next walk. The number
 * doubles each time, up to this: attributes of changing types must not cost a walk per sample. */
#define PAUSE_MOST 4096u

static bool
is_one_of(PyObject *types, PyTypeObject *type)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++) {
        if (PyTuple_GET_ITEM(types, i) == (PyObject *)type) {
            return true;
        }
    }
    return false;
}

/* Its type is no part of Python's interface in C. It has its size as lists have. */
static bool
is_deque(PyTypeObject *type)
{
    return type->tp_itemsize == 0 && strcmp(type->tp_name, "collections.deque") == 0;
}

/* Adds the prints of one of the dicts; see mn_seed_watch_prints(). */
static void
add_prints(const struct mn_seed_watch *w, PyObject *dict, uint64_t *types, uint64_t *lengths)
{
    PyObject *value;
    Py_ssize_t place = 0;
    /* counted, because the call that finds no entry takes as long as one that does */
    for (Py_ssize_t left = PyDict_GET_SIZE(dict);
         left > 0 && PyDict_Next(dict, &place, NULL, &value); left--) {
        PyTypeObject *type = Py_TYPE(value);
        if (value == Py_None || type == &PyLong_Type || type == &PyFloat_Type
            || type == &PyUnicode_Type) {
            continue; /* values that cannot contain a generator come and go */
        }
        uint64_t one = (uint64_t)(uintptr_t)type;
        if (is_one_of(w->types, type)) {
            one += (uint64_t)(uintptr_t)value;
        }
        /* sums, whose parts the processor computes in parallel */
        *types += one * UINT64_C(0x9E3779B97F4A7C15);
        *lengths += type == &PyDict_Type   ? (uint64_t)PyDict_GET_SIZE(value)
                    : type == &PyList_Type ? (uint64_t)PyList_GET_SIZE(value)
                    : type == &PySet_Type  ? (uint64_t)PySet_GET_SIZE(value)
                    : is_deque(type)       ? (uint64_t)Py_SIZE(value)
                                           : 0;
    }
}

void
mn_seed_watch_prints(const struct mn_seed_watch *w, uint64_t prints[MN_SEED_CHANGES])
{
    uint64_t types = 0, lengths = 0, counts = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w->dicts); i++) {
        PyObject *dict = PyTuple_GET_ITEM(w->dicts, i);
        Py_BEGIN_CRITICAL_SECTION(dict);
        add_prints(w, dict, &types, &lengths);
        Py_END_CRITICAL_SECTION();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w->counted); i++) {
        uint64_t one = (uint64_t)PyDict_GET_SIZE(PyTuple_GET_ITEM(w->counted, i));
        counts += one * (2 * (uint64_t)i + 1);
    }
    prints[MN_SEED_TYPES] = types;
    prints[MN_SEED_LENGTHS] = lengths;
    prints[MN_SEED_COUNTS] = counts;
}

void
mn_seed_watch_note(struct mn_seed_watch *w)
{
    uint64_t prints[MN_SEED_CHANGES];
    mn_seed_watch_prints(w, prints);
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        w->changes[i].print = prints[i];
    }
}

/* Returns NULL with an exception. */
static PyObject *
tuple_of_dicts(PyObject *dicts)
{
    PyObject *tuple = PySequence_Tuple(dicts);
    for (Py_ssize_t i = 0; tuple != NULL && i < PyTuple_GET_SIZE(tuple); i++) {
        if (!PyDict_Check(PyTuple_GET_ITEM(tuple, i))) {
            PyErr_SetString(PyExc_TypeError, "the watched objects must be dicts");
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

int
mn_seed_watch_set(struct mn_seed_watch *w, PyObject *dicts, PyObject *counted, PyObject *types)
{
    PyObject *near = tuple_of_dicts(dicts), *far = NULL, *kinds = NULL;
    if (near == NULL || (far = tuple_of_dicts(counted)) == NULL
        || (kinds = PySequence_Tuple(types)) == NULL) {
        Py_XDECREF(near);
        Py_XDECREF(far);
        return -1;
    }
    Py_XSETREF(w->types, kinds);
    Py_XSETREF(w->counted, far);
    Py_XSETREF(w->dicts, near);
    mn_seed_watch_note(w);
    return 0;
}

unsigned
mn_seed_watch_changes(struct mn_seed_watch *w)
{
    uint64_t prints[MN_SEED_CHANGES];
    unsigned changed = 0;
    mn_seed_watch_prints(w, prints);
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        struct mn_seed_change *c = &w->changes[i];
        if (c->pause > 0) {
            c->pause--;
        }
        else if (c->print != prints[i]) {
            changed |= 1u << i;
        }
    }
    return changed;
}

void
mn_seed_watch_pause(struct mn_seed_watch *w, unsigned changed)
{
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        struct mn_seed_change *c = &w->changes[i];
        if (changed & 1u << i) {
            c->pause = c->wait > 0 ? c->wait : 1;
            c->wait = c->pause < PAUSE_MOST ? 2 * c->pause : PAUSE_MOST;
        }
    }
}
