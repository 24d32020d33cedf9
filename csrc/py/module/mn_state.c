/* mn_state.c - named tuples, records of workers, system errors, and lists. See mn_state.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

int
mn_find_records(struct mn_state *st)
{
    if (st->epoch_type != NULL) {
        return 0;
    }
    const struct {
        const char *name;
        PyTypeObject **to;
    } all[] = {{"Task", &st->task_type},
               {"Envelope", &st->envelope_type},
               {"Loss", &st->loss_type},
               {"Span", &st->span_type},
               {"Decision", &st->decision_type},
               {"Epoch", &st->epoch_type}};
    PyObject *records = PyImport_ImportModule("minato._records");
    int rc = records == NULL ? -1 : 0;
    for (size_t i = 0; rc == 0 && i < sizeof(all) / sizeof(all[0]); i++) {
        PyObject *type = PyObject_GetAttrString(records, all[i].name);
        rc = type == NULL ? -1 : 0;
        Py_XSETREF(*all[i].to, (PyTypeObject *)type);
    }
    Py_XDECREF(records);
    return rc;
}

PyObject *
mn_named_tuple(PyTypeObject *type, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    PyObject *values = Py_VaBuildValue(format, args);
    va_end(args);
    PyObject *made = values != NULL ? PyTuple_Type.tp_new(type, values, NULL) : NULL;
    Py_XDECREF(values);
    return made;
}

PyObject *
mn_task_tuple(const struct mn_state *st, const struct mn_task *t, const struct mn_block *b,
              PyObject *indices, PyObject *extras)
{
    if (indices == NULL || extras == NULL) {
        Py_XDECREF(indices);
        Py_XDECREF(extras);
        return NULL;
    }
    return mn_named_tuple(st->task_type, "((IKKKKiIININ))", t->kind, (unsigned long long)b->number,
                          (unsigned long long)b->epoch, (unsigned long long)b->position,
                          (unsigned long long)b->base_seed, (int)b->seeded, t->row0, t->nrows,
                          indices, b->spares, extras);
}

PyObject *
mn_fetch_error(void)
{
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL) {
        PyException_SetTraceback(error, trace);
    }
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error;
}

PyObject *
mn_worker_dict(struct mn_worker *k, PyObject *running)
{
#define COUNT(name) (unsigned long long)mn_a64_load_relaxed(&k->name)
    return Py_BuildValue(
        "{sI sI sI si sN sK sK sK sK sK s(KKK)}", "state",
        mn_a32_load_acquire(&k->state), /* [S2] */
        "pid", mn_worker_pid(k), "starts", mn_worker_starts(k), "status",
        (int32_t)mn_a32_load_relaxed(&k->exit_status), "running", running, "since_ns",
        COUNT(since_ns), "tasks", COUNT(tasks_done), "rows", COUNT(rows_done), "busy_ns",
        COUNT(busy_ns), "cpu_ns", COUNT(cpu_ns), "init_states",
        (unsigned long long)k->init_states[0], (unsigned long long)k->init_states[1],
        (unsigned long long)k->init_states[2]);
}

int
mn_raise_errno(int rc, const char *what)
{
    if (rc >= 0) {
        return 0;
    }
    if (rc == -ENOMEM) {
        PyErr_Format(PyExc_MemoryError, "%s: out of memory", what);
    }
    else {
        PyObject *text = PyUnicode_FromFormat("%s: %s", what, strerror(-rc));
        PyObject *args = text == NULL ? NULL : Py_BuildValue("(iN)", -rc, text);
        if (args != NULL) {
            PyErr_SetObject(PyExc_OSError, args); /* becomes the subclass of that errno */
            Py_DECREF(args);
        }
    }
    return -1;
}

void
mn_list_add(PyObject **list, PyObject *item)
{
    if (item == NULL || PyList_Append(*list, item) < 0) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}

PyObject *
mn_shape_tuple(int ndim, const int64_t *shape)
{
    PyObject *list = PyList_New(0);
    for (int i = 0; list != NULL && i < ndim; i++) {
        mn_list_add(&list, PyLong_FromLongLong(shape[i]));
    }
    PyObject *tuple = list != NULL ? PyList_AsTuple(list) : NULL;
    Py_XDECREF(list);
    return tuple;
}
