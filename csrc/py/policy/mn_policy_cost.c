/* PolicyCost: the cost model, and the slow timeout learned from it, as a Python object.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include "schedule/policy_cost.h"
#include "schedule/policy_slow.h"

struct cost_object {
    PyObject_HEAD
    struct mn_cost model;
    struct mn_slow slow;
    void *cells;
};

static struct cost_object *
cost_of(PyObject *self)
{
    return (struct cost_object *)self;
}

static PyObject *
cost_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n", NULL};
    long long n = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|L:PolicyCost", names, &n)) {
        return NULL;
    }
    if (n < 0 || n > PY_SSIZE_T_MAX / (long long)sizeof(struct mn_cost_cell)) {
        PyErr_SetString(PyExc_ValueError, "n must be a number of samples");
        return NULL;
    }
    struct cost_object *self = (struct cost_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->cells = n > 0 ? PyMem_Malloc(mn_cost_bytes(n)) : NULL;
    if (n > 0 && self->cells == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    (void)mn_cost_init(&self->model, self->cells, n);
    mn_slow_init(&self->slow);
    return (PyObject *)self;
}

static void
cost_dealloc(PyObject *self)
{
    PyMem_Free(cost_of(self)->cells);
    mn_policy_dealloc(self);
}

static PyObject *
cost_observe(PyObject *self, PyObject *args)
{
    long long index, wall;
    if (!PyArg_ParseTuple(args, "LL:observe", &index, &wall)) {
        return NULL;
    }
    mn_cost_observe(&cost_of(self)->model, index, wall);
    Py_RETURN_NONE;
}

static PyObject *
cost_wall(PyObject *self, PyObject *arg)
{
    long long index = PyLong_AsLongLong(arg);
    if (index == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromLongLong(mn_cost_wall(&cost_of(self)->model, index));
}

static PyObject *
cost_knows(PyObject *self, PyObject *arg)
{
    long long index = PyLong_AsLongLong(arg);
    if (index == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyBool_FromLong(mn_cost_knows(&cost_of(self)->model, index));
}

static PyObject *
cost_quantile(PyObject *self, PyObject *arg)
{
    int permille = (int)PyLong_AsLong(arg);
    if (permille == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromLongLong(mn_histogram_quantile(&cost_of(self)->model.wall, permille));
}

static PyObject *
cost_above(PyObject *self, PyObject *arg)
{
    long long value = PyLong_AsLongLong(arg);
    if (value == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromLong(mn_histogram_above(&cost_of(self)->model.wall, value));
}

static PyObject *
cost_weight(PyObject *self, PyObject *arg)
{
    long long value = PyLong_AsLongLong(arg);
    if (value == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyLong_FromLong(mn_histogram_weight(&cost_of(self)->model.wall, value));
}

static int
append(PyObject *list, int64_t value)
{
    PyObject *item = PyLong_FromLongLong(value);
    if (item == NULL) {
        return -1;
    }
    int rc = PyList_Append(list, item);
    Py_DECREF(item);
    return rc;
}

static PyObject *
cost_save(PyObject *self, PyObject *unused)
{
    (void)unused;
    enum { SOME = 256 };
    int64_t part[2][SOME];
    int64_t cursor = 0;
    PyObject *lists[2] = {PyList_New(0), PyList_New(0)};
    if (lists[0] == NULL || lists[1] == NULL) {
        goto fail;
    }
    for (;;) {
        int64_t n = mn_cost_save(&cost_of(self)->model, &cursor, SOME, part[0], part[1]);
        if (n == 0) {
            break;
        }
        for (int64_t i = 0; i < n; i++) {
            for (int k = 0; k < 2; k++) {
                if (append(lists[k], part[k][i]) < 0) {
                    goto fail;
                }
            }
        }
    }
    return Py_BuildValue("(NN)", lists[0], lists[1]);
fail:
    for (int k = 0; k < 2; k++) {
        Py_XDECREF(lists[k]);
    }
    return NULL;
}

/* Reads item i of both lists as numbers. Returns 0 or -1. */
static int
pair_at(PyObject *const lists[2], Py_ssize_t i, int64_t out[2])
{
    for (int k = 0; k < 2; k++) {
        /* A conversion may run Python code, which may shorten a list. */
        if (i >= PyList_GET_SIZE(lists[k])) {
            PyErr_SetString(PyExc_ValueError, "the two lists differ in length");
            return -1;
        }
        out[k] = PyLong_AsLongLong(PyList_GET_ITEM(lists[k], i));
        if (out[k] == -1 && PyErr_Occurred()) {
            return -1;
        }
    }
    return 0;
}

static PyObject *
cost_load(PyObject *self, PyObject *args)
{
    PyObject *lists[2];
    if (!PyArg_ParseTuple(args, "O!O!:load", &PyList_Type, &lists[0], &PyList_Type,
                          &lists[1])) {
        return NULL;
    }
    if (PyList_GET_SIZE(lists[0]) != PyList_GET_SIZE(lists[1])) {
        PyErr_SetString(PyExc_ValueError, "the two lists differ in length");
        return NULL;
    }
    int64_t taken = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[0]); i++) {
        int64_t v[2];
        if (pair_at(lists, i, v) < 0) {
            return NULL;
        }
        taken += mn_cost_load(&cost_of(self)->model, 1, &v[0], &v[1]);
    }
    return PyLong_FromLongLong(taken);
}

static PyObject *
timeout_value(const struct mn_slow *s)
{
    if (s->timeout_ns == MN_SLOW_NEVER) {
        Py_RETURN_NONE;
    }
    return PyLong_FromLongLong(s->timeout_ns);
}

static PyObject *
cost_learn_timeout(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct cost_object *c = cost_of(self);
    (void)mn_slow_update(&c->slow, &c->model.wall);
    return timeout_value(&c->slow);
}

static PyObject *
cost_is_slow(PyObject *self, PyObject *arg)
{
    long long running = PyLong_AsLongLong(arg);
    if (running == -1 && PyErr_Occurred()) {
        return NULL;
    }
    return PyBool_FromLong(running > cost_of(self)->slow.timeout_ns);
}

static PyObject *
get_timeout(PyObject *self, void *unused)
{
    (void)unused;
    return timeout_value(&cost_of(self)->slow);
}

static PyObject *
get_tail(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(cost_of(self)->slow.tail);
}

static PyObject *
get_mean(PyObject *self, void *unused)
{
    (void)unused;
    return PyFloat_FromDouble(cost_of(self)->model.mean_wall_ns);
}

static PyObject *
get_known(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(cost_of(self)->model.known);
}

static PyObject *
get_samples(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLongLong(cost_of(self)->model.samples);
}

static PyMethodDef cost_methods[] = {
    {"observe", cost_observe, METH_VARARGS, "observe(index, wall_ns, /)"},
    {"wall", cost_wall, METH_O, "wall(index, /) -> predicted wall time in ns"},
    {"knows", cost_knows, METH_O, "knows(index, /) -> was it observed or hinted?"},
    {"quantile", cost_quantile, METH_O, "quantile(permille, /) -> wall time in ns"},
    {"above", cost_above, METH_O, "above(ns, /) -> share of samples, in permille"},
    {"weight", cost_weight, METH_O, "weight(ns, /) -> their share of all time, in permille"},
    {"save", cost_save, METH_NOARGS, "save() -> (indices, wall_ns), lists"},
    {"load", cost_load, METH_VARARGS, "load(indices, wall_ns, /) -> taken"},
    {"learn_timeout", cost_learn_timeout, METH_NOARGS,
     "learn_timeout() -> the slow timeout in ns, or None"},
    {"is_slow", cost_is_slow, METH_O, "is_slow(running_ns, /) -> past the timeout?"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef cost_getset[] = {
    {"timeout", get_timeout, NULL, "the slow timeout in use, ns, or None", NULL},
    {"tail", get_tail, NULL, "True while a heavy tail is seen", NULL},
    {"mean", get_mean, NULL, "running mean of the wall time, ns", NULL},
    {"known", get_known, NULL, "indices observed", NULL},
    {"samples", get_samples, NULL, "observations in all", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(cost_doc,
"PolicyCost(n=0)\n--\n\n"
"Running cost of each of n indices, the distribution of all costs (quantiles within\n"
"1/32 of the sample of that rank), and the slow timeout learned from it.");

static PyType_Slot cost_slots[] = {
    {Py_tp_doc, (void *)cost_doc},
    {Py_tp_new, cost_new},
    {Py_tp_dealloc, cost_dealloc},
    {Py_tp_methods, cost_methods},
    {Py_tp_getset, cost_getset},
    {0, NULL},
};

static PyType_Spec cost_spec = {
    .name = "minato._policy.PolicyCost",
    .basicsize = sizeof(struct cost_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = cost_slots,
};

int
mn_policy_add_cost(PyObject *module)
{
    return mn_policy_add_type(module, &cost_spec);
}
