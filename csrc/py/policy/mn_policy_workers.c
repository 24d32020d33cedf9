/* PolicyWorkers as a Python object.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include <limits.h>

#include "schedule/policy_workers.h"

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
    .name = "minato._policy.PolicyWorkers",
    .basicsize = sizeof(struct workers_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = workers_slots,
};

int
mn_policy_add_workers(PyObject *module)
{
    return mn_policy_add_type(module, &workers_spec);
}
