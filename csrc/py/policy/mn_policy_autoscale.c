/* PolicyAutoscale as a Python object.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include <limits.h>

#include "schedule/policy_autoscale.h"

struct autoscale_object {
    PyObject_HEAD
    struct mn_scaler w;
};

static PyObject *
autoscale_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":PolicyAutoscale", names)) {
        return NULL;
    }
    struct autoscale_object *self = (struct autoscale_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        mn_scaler_init(&self->w);
    }
    return (PyObject *)self;
}

static PyObject *
autoscale_update(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"workers", "min_workers", "max_workers", "occupancy", "cpu",
                            "cores",   "wait",        "backlog",     "rate",      "speed",
                            "busy",    "fitting",        "taken", NULL};
    int workers, least, most, occupancy, cpu, cores, wait, busy = 0, fitting = INT_MAX;
    long long backlog, rate, speed = -1, taken = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiiiiiiLL|LiiL:update", names, &workers,
                                     &least, &most, &occupancy, &cpu, &cores, &wait,
                                     &backlog, &rate, &speed, &busy, &fitting,
                                     &taken)) {
        return NULL;
    }
    if (least < 1 || most < least) {
        PyErr_SetString(PyExc_ValueError, "need 1 <= min_workers <= max_workers");
        return NULL;
    }
    struct mn_scaler_input in = {.workers = workers, .min_workers = least,
                                 .max_workers = most, .occupancy_permille = occupancy,
                                 .cpu_permille = cpu, .cores_milli = cores,
                                 .wait_permille = wait, .busy_permille = busy,
                                 .fitting = fitting, .backlog = backlog, .rate_milli = rate,
                                 .taken_milli = taken < 0 ? rate : taken,
                                 .speed_milli = speed < 0 ? rate : speed};
    struct mn_scaler_decision d =
        mn_scaler_update(&((struct autoscale_object *)self)->w, &in);
    return Py_BuildValue("(iis)", (int)d.target, (int)d.reason, d.text);
}

static PyMethodDef autoscale_methods[] = {
    {"update", (PyCFunction)(void (*)(void))autoscale_update, METH_VARARGS | METH_KEYWORDS,
     "update(workers, min_workers, max_workers, occupancy, cpu, cores, wait, backlog,\n"
     "rate, speed=rate, busy=0, fitting=any, taken=rate) -> (target, reason, text). Shares in\n"
     "permille; cores, rate, speed and taken in thousandths."},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(autoscale_doc,
"PolicyAutoscale()\n--\n\nHow many workers there should be; one update an interval.");

static PyType_Slot autoscale_slots[] = {
    {Py_tp_doc, (void *)autoscale_doc},
    {Py_tp_new, autoscale_new},
    {Py_tp_dealloc, mn_policy_dealloc},
    {Py_tp_methods, autoscale_methods},
    {0, NULL},
};

static PyType_Spec autoscale_spec = {
    .name = "minato._policy.PolicyAutoscale",
    .basicsize = sizeof(struct autoscale_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = autoscale_slots,
};

int
mn_policy_add_autoscale(PyObject *module)
{
    return mn_policy_add_type(module, &autoscale_spec);
}
