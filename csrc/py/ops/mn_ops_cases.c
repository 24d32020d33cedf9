/* minato._ops.Cases: the samples of a dataset, and its capsule for C threads.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops.h"

#include <errno.h>
#include <string.h>

struct mn_ops_cases {
    PyObject_HEAD
    struct mn_cases *cases;
    PyObject *pipeline; /* cases borrows its struct mn_pipeline */
    Py_buffer epoch;    /* the number of the dataset's epoch, one uint64_t */
};

static struct mn_ops_cases *
self_of(PyObject *object)
{
    return (struct mn_ops_cases *)(void *)object;
}

static int
take_case(PyObject *item, struct mn_case *c)
{
    PyObject *image, *label;
    if (!PyArg_ParseTuple(item, "OO", &image, &label)) {
        return -1;
    }
    c->image = mn_ops_copy_path(image);
    c->label = c->image != NULL && label != Py_None ? mn_ops_copy_path(label) : NULL;
    return c->image == NULL || (label != Py_None && c->label == NULL) ? -1 : 0;
}

static struct mn_case *
take_list(PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list), done = 0;
    struct mn_case *cases = calloc((size_t)n + 1, sizeof(*cases));
    if (cases == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    while (done < n && take_case(PyList_GET_ITEM(list, done), &cases[done]) == 0) {
        done++;
    }
    if (done == n) {
        return cases;
    }
    for (Py_ssize_t i = 0; i <= done; i++) {
        free(cases[i].image);
        free(cases[i].label);
    }
    free(cases);
    return NULL;
}

/* Gets a writable C-contiguous buffer of exactly this many bytes. Returns 0 or -1 with an
 * exception. */
static int
memory_of(PyObject *array, uint64_t bytes, Py_buffer *buffer)
{
    if (PyObject_GetBuffer(array, buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE) < 0) {
        return -1;
    }
    if ((uint64_t)buffer->len != bytes) {
        PyErr_Format(PyExc_ValueError, "the output needs %llu bytes, got a buffer of %zd",
                     (unsigned long long)bytes, buffer->len);
        PyBuffer_Release(buffer);
        return -1;
    }
    return 0;
}

static PyObject *
new_cases(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    struct mn_ops_state *state = PyType_GetModuleState(type);
    PyObject *pipeline, *list, *epoch;
    long long repeat;
    int with_index, tail = 0, windows = 0;
    unsigned int keying;
    unsigned long long seed;
    MN_OPS_NEW_TEXT(text);
    if (!PyArg_ParseTuple(args, "O!O!LpIKO|ip", state->pipeline_type, &pipeline, &PyList_Type,
                          &list, &repeat, &with_index, &keying, &seed, &epoch, &tail,
                          &windows)) {
        return NULL;
    }
    PyObject *object = type->tp_alloc(type, 0);
    struct mn_case *cases = object != NULL ? take_list(list) : NULL;
    if (cases == NULL) {
        Py_XDECREF(object);
        return NULL;
    }
    struct mn_ops_cases *self = self_of(object);
    self->pipeline = Py_NewRef(pipeline);
    int rc = mn_cases_open(&self->cases,
                           ((struct mn_ops_pipeline *)(void *)pipeline)->pipeline, cases,
                           PyList_GET_SIZE(list), repeat, with_index != 0, tail,
                           windows != 0, &text);
    if (rc < 0) {
        Py_DECREF(object);
        return mn_ops_raise(rc, &text);
    }
    if (memory_of(epoch, sizeof(uint64_t), &self->epoch) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    self->cases->native.epoch = self->epoch.buf;
    self->cases->native.keying = keying;
    self->cases->native.seed = seed;
    return object;
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self_of(object)->pipeline);
    return 0;
}

static void
dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    mn_cases_close(self_of(object)->cases);
    if (self_of(object)->epoch.obj != NULL) {
        PyBuffer_Release(&self_of(object)->epoch);
    }
    Py_XDECREF(self_of(object)->pipeline);
    mn_free_object(object);
}

static int
run_into(const struct mn_native_pipeline *native, long long index, uint64_t hi, uint64_t lo,
         PyObject *outs)
{
    Py_buffer buffers[MN_NATIVE_FIELDS];
    void *memory[MN_NATIVE_FIELDS] = {NULL};
    MN_OPS_NEW_TEXT(text);
    int32_t taken = 0;
    int rc = 0;
    if (PyTuple_GET_SIZE(outs) != native->n_fields) {
        return MN_RAISE(PyExc_ValueError, "%d outputs are needed", (int)native->n_fields);
    }
    while (taken < native->n_fields
           && memory_of(PyTuple_GET_ITEM(outs, taken), native->fields[taken].bytes,
                            &buffers[taken]) == 0) {
        memory[taken] = buffers[taken].buf;
        taken++;
    }
    bool ready = taken == native->n_fields;
    if (ready) {
        rc = MN_WITHOUT_GIL(native->run(native->state, index, hi, lo, memory, text.chars,
                                        text.size));
    }
    for (int32_t i = 0; i < taken; i++) {
        PyBuffer_Release(&buffers[i]);
    }
    if (rc < 0) {
        mn_ops_raise(rc, &text);
    }
    return ready && rc == 0 ? 0 : -1;
}

PyDoc_STRVAR(read_doc, "read(index, key_hi, key_lo, outputs): makes a sample in place");

static PyObject *
read_sample(PyObject *object, PyObject *args)
{
    long long index;
    unsigned long long hi, lo;
    PyObject *outs;
    if (!PyArg_ParseTuple(args, "LKKO!", &index, &hi, &lo, &PyTuple_Type, &outs)
        || run_into(&self_of(object)->cases->native, index, hi, lo, outs) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(warm_doc, "warm(case): finds the boxes of this case now, if they are cached");

static PyObject *
warm(PyObject *object, PyObject *args)
{
    const struct mn_cases *cases = self_of(object)->cases;
    long long at;
    MN_OPS_NEW_TEXT(text);
    if (!PyArg_ParseTuple(args, "L", &at)) {
        return NULL;
    }
    if (at < 0 || at >= cases->n_cases) {
        return PyErr_Format(PyExc_IndexError, "no such case");
    }
    int rc = MN_WITHOUT_GIL(mn_cases_warm(cases, at, &text));
    return rc < 0 ? mn_ops_raise(rc, &text) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(native_doc, "native() -> capsule of struct mn_native_pipeline (minato/ops.h)");

static PyObject *
native(PyObject *object, PyObject *Py_UNUSED(args))
{
    return mn_ops_native_capsule(object, &self_of(object)->cases->native);
}

static PyMethodDef methods[] = {
    {"read", read_sample, METH_VARARGS, read_doc},
    {"warm", warm, METH_VARARGS, warm_doc},
    {"native", native, METH_NOARGS, native_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_cases},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Cases(pipeline, [(image, label), ...], repeat, with_index, keying, seed, epoch, "
                "tail=0, windows=False)"},
    {0, NULL},
};

PyType_Spec mn_ops_cases_spec = {"minato._ops.Cases", sizeof(struct mn_ops_cases), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC
                                     | Py_TPFLAGS_IMMUTABLETYPE, type_slots};
