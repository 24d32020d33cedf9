/* mn_state.c - finding the module's state, system errors, and lists. See mn_state.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

/* ---- results of minato._core with many fields: tuples whose items have names ---- */

static const PyStructSequence_Field task_fields[] = {
    {"kind", "enum mn_task_kind"},
    {"number", "of the batch in its epoch"},
    {"epoch", NULL},
    {"position", "of the batch's first sample in the order of the epoch"},
    {"base_seed", NULL},
    {"seeded", "whether each sample is: 1 by its position, 2 by its index"},
    {"row0", "first row of the batch that the task makes"},
    {"nrows", NULL},
    {"indices", "from the sampler, spare ones at the end; None where rows are made in C"},
    {"spares", "how many of the indices are spare"},
    {"extras", "(row, what, object) of samples that do not fit their rows, or None"},
    {NULL, NULL},
};

static const PyStructSequence_Field envelope_fields[] = {
    {"worker", "number of its sender"},
    {"row0", "first row of its task"},
    {"nrows", NULL},
    {"pickle", "bytes; None if the memory limit left no memory for it"},
    {"buffers", "of the pickle, out of band"},
    {NULL, NULL},
};

static const PyStructSequence_Field loss_fields[] = {
    {"worker", "number of the worker that died with it last"},
    {"pid", NULL},
    {"status", "its exit code, as in multiprocessing"},
    {"row0", "first row of the task"},
    {"nrows", NULL},
    {"row", "that the worker ran, by its own entry; 2**64 - 1: unknown"},
    {NULL, NULL},
};

static const PyStructSequence_Field span_fields[] = {
    {"worker", NULL},
    {"attempt", "0: the first"},
    {"kind", "enum mn_task_kind"},
    {"why", "it was started: 0 static scheduling, else enum mn_dispatch_why"},
    {"row0", NULL},
    {"nrows", NULL},
    {"done_ns", "its end, by the monotonic clock"},
    {"wall_ns", "how long it took"},
    {"cpu_ns", NULL},
    {"rows", "how long each of its rows took, one after another; 0 where that is not known"},
    {NULL, NULL},
};

static const PyStructSequence_Field decision_fields[] = {
    {"at_ns", "by the monotonic clock"},
    {"before", "workers"},
    {"after", "workers"},
    {"reason", "enum mn_scaler_reason; below 0: for one straggler"},
    {"text", "the reason for people"},
    {"occupancy", "of the batch queue, in permille"},
    {"cpu", "share in use, in permille"},
    {"wait", "share of task time that was waiting, in permille"},
    {"rate", "samples a second"},
    {NULL, NULL},
};

/* The fields, which are only read, and their number without the last, which ends the list. */
#define FIELDS(f) (PyStructSequence_Field *)(f), (int)(sizeof(f) / sizeof((f)[0])) - 1

int
mn_named_tuples_add_types(PyObject *module, struct mn_state *st)
{
    struct {
        PyTypeObject **to;
        PyStructSequence_Desc desc;
    } all[] = {
        {&st->task_type,
         {"minato._core.Task", "A task that Python must handle.",
          FIELDS(task_fields)}},
        {&st->envelope_type,
         {"minato._core.Envelope", "A message of a done task.", FIELDS(envelope_fields)}},
        {&st->loss_type,
         {"minato._core.Loss", "A task that is not retried any more.", FIELDS(loss_fields)}},
        {&st->span_type,
         {"minato._core.Span", "Where and when a done task ran.", FIELDS(span_fields)}},
        {&st->decision_type,
         {"minato._core.Decision", "A change of the number of workers.",
          FIELDS(decision_fields)}},
    };
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        *all[i].to = PyStructSequence_NewType(&all[i].desc);
        if (*all[i].to == NULL || PyModule_AddType(module, *all[i].to) < 0) {
            return -1;
        }
    }
    return 0;
}

PyObject *
mn_named_tuple(PyTypeObject *type, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    PyObject *values = Py_VaBuildValue(format, args);
    va_end(args);
    PyObject *made = values != NULL ? PyStructSequence_New(type) : NULL;
    for (Py_ssize_t i = 0; made != NULL && i < PyTuple_GET_SIZE(values); i++) {
        PyStructSequence_SetItem(made, i, Py_NewRef(PyTuple_GET_ITEM(values, i)));
    }
    Py_XDECREF(values);
    if (made != NULL && !PyObject_GC_IsTracked(made)) {
        PyObject_GC_Track(made); /* errors in it refer to frames that refer to it */
    }
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
    return mn_named_tuple(st->task_type, "(IKKKKiIININ)", t->kind, (unsigned long long)b->number,
                          (unsigned long long)b->epoch, (unsigned long long)b->position,
                          (unsigned long long)b->base_seed, (int)b->seeded, t->row0, t->nrows,
                          indices, b->spares, extras);
}

struct mn_state *
mn_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

struct mn_state *
mn_state_of_type(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
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
