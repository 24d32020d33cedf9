/* PolicyReady and PolicyWorkers as Python objects.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include <limits.h>

#include "base/mn_error.h"
#include "schedule/policy_ready.h"
#include "schedule/policy_workers.h"

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
    mn_policy_dealloc(self);
}

static PyObject *
ready_end(PyObject *self, PyObject *arg)
{
    long long total = PyLong_AsLongLong(arg);
    if (total == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (mn_ready_end(&ready_of(self)->r, total) < 0) {
        PyErr_SetString(PyExc_ValueError, "more samples than that were marked");
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
                                        : "position is not within reach");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
ready_form(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct ready_object *r = ready_of(self);
    int64_t n;
    if (mn_ready_form(&r->r, r->out, &n) == MN_EMPTY) {
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
    {"form", ready_form, METH_NOARGS,
     "form() -> positions of the next batch, ascending; None: wait; []: the end"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ready_getset[] = {
    {"horizon", ready_horizon, NULL, "positions from here on may not start yet", NULL},
    {"displaced_max", ready_displaced_max, NULL, "largest displacement, batches", NULL},
    {"displaced_sum", ready_displaced_sum, NULL, "sum of displacements, batches", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(ready_doc,
"PolicyReady(batch, bound)\n--\n\n"
"Batches from whichever samples are ready first; none moves by more than bound batches.");

static PyType_Slot ready_slots[] = {
    {Py_tp_doc, (void *)ready_doc},
    {Py_tp_new, ready_new},
    {Py_tp_dealloc, ready_dealloc},
    {Py_tp_methods, ready_methods},
    {Py_tp_getset, ready_getset},
    {0, NULL},
};

static PyType_Spec ready_spec = {
    .name = "minato._core.PolicyReady",
    .basicsize = sizeof(struct ready_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = ready_slots,
};

/* -- PolicyWorkers ------------------------------------------------------------------ */

struct workers_object {
    PyObject_HEAD
    struct mn_workers w;
};

static PyObject *
workers_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":PolicyWorkers", names)) {
        return NULL;
    }
    struct workers_object *self = (struct workers_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        mn_workers_init(&self->w);
    }
    return (PyObject *)self;
}

static PyObject *
workers_update(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"workers", "min_workers", "max_workers", "occupancy", "cpu",
                            "cores",   "wait",        "backlog",     "rate",      "speed",
                            "busy",    "room",        "taken", NULL};
    int workers, least, most, occupancy, cpu, cores, wait, busy = 0, room = INT_MAX;
    long long backlog, rate, speed = -1, taken = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiiiiiiLL|LiiL:update", names, &workers,
                                     &least, &most, &occupancy, &cpu, &cores, &wait,
                                     &backlog, &rate, &speed, &busy, &room,
                                     &taken)) {
        return NULL;
    }
    if (least < 1 || most < least) {
        PyErr_SetString(PyExc_ValueError, "need 1 <= min_workers <= max_workers");
        return NULL;
    }
    struct mn_workers_input in = {.workers = workers, .min_workers = least,
                                  .max_workers = most, .occupancy_permille = occupancy,
                                  .cpu_permille = cpu, .cores_milli = cores,
                                  .wait_permille = wait, .busy_permille = busy,
                                  .room = room, .backlog = backlog, .rate_milli = rate,
                                  .taken_milli = taken < 0 ? rate : taken,
                                  .speed_milli = speed < 0 ? rate : speed};
    struct mn_workers_decision d =
        mn_workers_update(&((struct workers_object *)self)->w, &in);
    return Py_BuildValue("(iis)", (int)d.target, (int)d.reason, d.text);
}

static PyMethodDef workers_methods[] = {
    {"update", (PyCFunction)(void (*)(void))workers_update, METH_VARARGS | METH_KEYWORDS,
     "update(workers, min_workers, max_workers, occupancy, cpu, cores, wait, backlog,\n"
     "rate, speed=rate, busy=0, room=any, taken=rate) -> (target, reason, text). Shares in\n"
     "permille; cores, rate, speed and taken in thousandths."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(workers_doc,
"PolicyWorkers()\n--\n\nHow many workers there should be; one update an interval.");

static PyType_Slot workers_slots[] = {
    {Py_tp_doc, (void *)workers_doc},
    {Py_tp_new, workers_new},
    {Py_tp_dealloc, mn_policy_dealloc},
    {Py_tp_methods, workers_methods},
    {0, NULL},
};

static PyType_Spec workers_spec = {
    .name = "minato._core.PolicyWorkers",
    .basicsize = sizeof(struct workers_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = workers_slots,
};

int
mn_policy_add_deciders(PyObject *module)
{
    if (mn_policy_add_type(module, &ready_spec) < 0) {
        return -1;
    }
    return mn_policy_add_type(module, &workers_spec);
}
