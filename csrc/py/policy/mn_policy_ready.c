/* PolicyReady: which samples make the next batch, with batching="ready". See mn_policy.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include <limits.h>

#include "base/mn_error.h"
#include "schedule/policy_ready.h"

struct ready_object {
    PyObject_HEAD
    struct mn_ready r;
    void *memory;
    int64_t *out; /* [batch] */
};

static struct ready_object *
ready_of(PyObject *self)
{
    return (struct ready_object *)self;
}

static PyObject *
ready_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batch", "bound", NULL};
    long long batch, bound;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "LL:PolicyReady", names, &batch,
                                     &bound)) {
        return NULL;
    }
    size_t bytes = mn_ready_bytes(batch, bound);
    if (bytes == 0) {
        PyErr_SetString(PyExc_ValueError, "batch must be positive, bound not negative");
        return NULL;
    }
    struct ready_object *self = (struct ready_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->memory = PyMem_Malloc(bytes);
    self->out = PyMem_New(int64_t, (size_t)batch);
    if (self->memory == NULL || self->out == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    (void)mn_ready_init(&self->r, self->memory, batch, bound);
    return (PyObject *)self;
}

static void
ready_dealloc(PyObject *self)
{
    PyMem_Free(ready_of(self)->memory);
    PyMem_Free(ready_of(self)->out);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
ready_end(PyObject *self, PyObject *arg)
{
    long long total = PyLong_AsLongLong(arg);
    if (total == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (mn_ready_end(&ready_of(self)->r, total) < 0) {
        PyErr_SetString(PyExc_ValueError, "total is smaller than the number of samples marked");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
ready_mark(PyObject *self, PyObject *args)
{
    long long position;
    int slow;
    if (!PyArg_ParseTuple(args, "Lp:mark", &position, &slow)) {
        return NULL;
    }
    int rc = mn_ready_mark(&ready_of(self)->r, position, slow != 0);
    if (rc < 0) {
        PyErr_SetString(PyExc_ValueError,
                        rc == -EALREADY ? "position was marked before"
                                        : "position is past the horizon, or was delivered");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
ready_form(PyObject *self, PyObject *args)
{
    struct ready_object *r = ready_of(self);
    int64_t n;
    int mix = 1;
    if (!PyArg_ParseTuple(args, "|p:form", &mix)) {
        return NULL;
    }
    if (mn_ready_form(&r->r, mix != 0, r->out, &n) == MN_EMPTY) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New(n);
    for (int64_t i = 0; list != NULL && i < n; i++) {
        PyObject *item = PyLong_FromLongLong(r->out[i]);
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

static PyObject *
ready_could_mix(PyObject *self, PyObject *unused)
{
    (void)unused;
    return PyBool_FromLong(mn_ready_could_mix(&ready_of(self)->r));
}

static PyObject *
ready_horizon(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(mn_ready_horizon(&ready_of(self)->r));
}

static PyObject *
ready_displaced_max(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(ready_of(self)->r.displaced_max);
}

static PyObject *
ready_displaced_sum(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(ready_of(self)->r.displaced_sum);
}

static PyMethodDef ready_methods[] = {
    {"end", ready_end, METH_O, "end(total, /): the epoch has this many samples"},
    {"mark", ready_mark, METH_VARARGS, "mark(position, slow, /): a sample is ready"},
    {"form", ready_form, METH_VARARGS,
     "form(mix=True, /) -> positions of the next batch, ascending; None: wait; []: the end"},
    {"could_mix", ready_could_mix, METH_NOARGS, "could_mix() -> whether form(True) gives one"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ready_getset[] = {
    {"horizon", ready_horizon, NULL, "positions from here on may not start yet", NULL},
    {"displaced_max", ready_displaced_max, NULL, "largest displacement, batches", NULL},
    {"displaced_sum", ready_displaced_sum, NULL, "sum of displacements, batches", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(ready_doc,
"PolicyReady(batch, bound)\n"
"--\n\n"
"Batches of the samples that are ready first; none moves by more than bound batches.");

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, (void *)ready_doc},
    {Py_tp_new, ready_new},
    {Py_tp_dealloc, ready_dealloc},
    {Py_tp_methods, ready_methods},
    {Py_tp_getset, ready_getset},
    {0, NULL},
};

static PyType_Spec ready_spec = {
    .name = "minato._policy.PolicyReady",
    .basicsize = sizeof(struct ready_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ready_slots,
};

int
mn_policy_add_ready(PyObject *module)
{
    return mn_policy_add_type(module, &ready_spec);
}
