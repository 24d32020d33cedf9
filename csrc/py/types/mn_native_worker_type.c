/* mn_native_worker_type.c - minato._core.NativeWorker: a thread's side of the loader's mapping.
 * SPDX-License-Identifier: Apache-2.0
 *
 * next() makes samples without the GIL (mn_native_worker.h). It returns for tasks that need Python:
 * an error, indices that are not machine integers, a batch that torch's rules make whole.
 */
#include "py/types/mn_index.h"
#include "py/types/mn_native_worker.h"
#include "py/module/mn_state.h"
#include "py/ops/mn_ops_raise.h"
#include "py/seeding/mn_seed.h"
#include "workers/mn_worker.h"

MN_STATIC_ASSERT(MN_NATIVE_TEXT == MN_OPS_TEXT, "the same error has the same words");

struct mn_native_object {
    PyObject_HEAD
    struct mn_worker_side side;
    struct mn_worker_clock clock;
    struct mn_native native;
    PyObject *segment; /* keeps the mapping alive */
    PyObject *capsule; /* keeps the pipeline alive */
    Py_buffer indices; /* of a subset; obj NULL: not a subset */
    uint32_t task;
    bool holding; /* `task` is RUNNING under us */
};

static const struct mn_native_pipeline *
pipeline_of(PyObject *capsule)
{
    const char *why = NULL;
    const struct mn_native_pipeline *p = PyCapsule_GetPointer(capsule, MN_NATIVE_CAPSULE);
    if (p != NULL && mn_native_check(p, &why) < 0) {
        PyErr_Format(PyExc_ValueError, "the native pipeline cannot be used: %s", why);
        p = NULL;
    }
    return p;
}

const char mn_native_info_doc[] =
    "native_info(capsule) -> (keying, [(kind, itemsize, shape), ...])\n\n"
    "Describes a capsule \"minato.native_pipeline.v1\": how its samples are keyed (0 by the "
    "epoch,\n"
    "1 by the loader's seeds) and their fields. ValueError for one that cannot be used.";

static PyObject *
field_tuple(const struct mn_native_field *f)
{
    PyObject *shape = PyTuple_New(f->ndim);
    for (int32_t axis = 0; shape != NULL && axis < f->ndim; axis++) {
        PyObject *length = PyLong_FromLongLong(f->shape[axis]);
        if (length == NULL) {
            Py_CLEAR(shape);
            break;
        }
        PyTuple_SET_ITEM(shape, axis, length);
    }
    return shape == NULL ? NULL : Py_BuildValue("(CiN)", f->kind, (int)f->itemsize, shape);
}

PyObject *
mn_native_info(PyObject *module, PyObject *capsule)
{
    (void)module;
    const struct mn_native_pipeline *p = pipeline_of(capsule);
    PyObject *list = p != NULL ? PyList_New(0) : NULL;
    for (int32_t i = 0; list != NULL && i < p->n_fields; i++) {
        mn_list_add(&list, field_tuple(&p->fields[i]));
    }
    return list == NULL ? NULL : Py_BuildValue("(IN)", p->keying, list);
}

static int
take_indices(struct mn_native_object *o, PyObject *indices)
{
    if (PyObject_GetBuffer(indices, &o->indices, PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    if (o->indices.itemsize != sizeof(int64_t)
        || (uintptr_t)o->indices.buf % sizeof(int64_t) != 0) {
        PyErr_SetString(PyExc_ValueError, "indices must be aligned and of 64 bits");
        return -1;
    }
    o->native.indices = o->indices.buf;
    o->native.n_indices = (int64_t)(o->indices.len / o->indices.itemsize);
    return 0;
}

static PyObject *
native_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "number", "capsule", "stream", "ranks", "indices", NULL};
    struct mn_state *st = mn_state_of_type(type);
    PyObject *segment, *capsule, *ranks, *indices = Py_None;
    unsigned int number;
    unsigned long long stream;
    struct mn_seed_share share;
    if (st == NULL
        || !PyArg_ParseTupleAndKeywords(args, kwargs, "O!IOKO|O", names, st->segment_type,
                                        &segment, &number, &capsule, &stream, &ranks, &indices)
        || mn_seed_share_parse(ranks, &share) < 0) {
        return NULL;
    }
    const struct mn_native_pipeline *p = pipeline_of(capsule);
    struct mn_native_object *o =
        p != NULL ? (struct mn_native_object *)type->tp_alloc(type, 0) : NULL;
    if (o == NULL) {
        return NULL;
    }
    struct mn_shm *shm = &((struct mn_segment *)segment)->shm;
    o->native = (struct mn_native){.pipeline = p, .share = share, .stream = stream};
    o->segment = Py_NewRef(segment);
    o->capsule = Py_NewRef(capsule);
    if (indices != Py_None && take_indices(o, indices) < 0) {
        Py_DECREF(o);
        return NULL;
    }
    if (number >= shm->ctl->nworkers || mn_worker_attach(&o->side, shm, number) < 0) {
        PyErr_SetString(PyExc_ValueError, "no such worker");
        Py_CLEAR(o);
    }
    return (PyObject *)o;
}

static void
native_dealloc(PyObject *self)
{
    struct mn_native_object *o = (struct mn_native_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(o->segment);
    Py_XDECREF(o->capsule);
    if (o->indices.obj != NULL) {
        PyBuffer_Release(&o->indices);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* Returns the indices as the sampler gave them, those of spare samples at the end: bytes of pickle,
 * or a list of int. */
static PyObject *
indices_of(struct mn_block *b)
{
    return b->index_kind == MN_INDEX_INT64 ? mn_index_list(b) : mn_index_pickle(b);
}

/* Returns the error of a row in the form of extras; NULL with an exception. */
static PyObject *
extras_of(const struct mn_native_failure *failure)
{
    PyObject *type, *error, *trace;
    mn_ops_raise_chars(failure->rc, failure->text);
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    return error != NULL
               ? Py_BuildValue("[(IiN)]", failure->row, (int)MN_EXTRA_ERROR, error)
               : NULL;
}

/* Describes what Python must do about the claimed task. */
static PyObject *
hand_over(struct mn_native_object *o, const struct mn_native_failure *failure)
{
    struct mn_state *st = mn_state_of_type(Py_TYPE(o));
    const struct mn_task *t = &o->side.held;
    struct mn_block *b = mn_block_at(&o->side.shm, t->block_off);
    PyObject *extras = failure != NULL ? extras_of(failure) : Py_NewRef(Py_None);
    if (st == NULL || extras == NULL) {
        Py_XDECREF(extras);
        return NULL;
    }
    return mn_task_tuple(st, t, b, indices_of(b), extras);
}

PyDoc_STRVAR(next_doc,
"next() -> Task | False\n\n"
"Makes samples until a task needs Python, to be answered with finish(). indices: bytes of\n"
"pickle or a list of int; extras: a sample's error. False when the loader stops.");

static PyObject *
native_next(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_native_object *o = (struct mn_native_object *)self;
    struct mn_native_failure failure;
    enum mn_native_event event;
    Py_BEGIN_ALLOW_THREADS
    event = mn_native_serve(&o->native, &o->side, &o->clock, &o->task, &failure);
    Py_END_ALLOW_THREADS
    if (event == MN_NATIVE_STOP) {
        Py_RETURN_FALSE;
    }
    o->holding = true;
    return hand_over(o, event == MN_NATIVE_FAILED ? &failure : NULL);
}

PyDoc_STRVAR(finish_doc,
"finish(pickle, buffers) -> bool\n\n"
"Sends the result of the task that next() returned: a pickle (bytes) and its buffers out\n"
"of band (C-contiguous). False if the loader stopped meanwhile.");

static PyObject *
native_finish(PyObject *self, PyObject *args)
{
    struct mn_native_object *o = (struct mn_native_object *)self;
    const char *pickle;
    Py_ssize_t bytes;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "y#O!", &pickle, &bytes, &PyList_Type, &list)) {
        return NULL;
    }
    if (!o->holding) {
        PyErr_SetString(PyExc_RuntimeError, "no task to finish");
        return NULL;
    }
    int rc = mn_envelope_send(&o->side, o->task, pickle, bytes, list);
    if (rc < 0) {
        return NULL;
    }
    if (rc == 0) {
        o->holding = false;
        mn_worker_account(&o->side, &o->clock, o->task);
        (void)mn_worker_done(&o->side, o->task);
    }
    return PyBool_FromLong(rc == 0);
}

PyDoc_STRVAR(mark_doc,
"mark(row): this row of the current task has just been fetched; teaches its cost.");

static PyObject *
native_mark(PyObject *self, PyObject *arg)
{
    struct mn_native_object *o = (struct mn_native_object *)self;
    unsigned long row = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const struct mn_task *t = o->holding ? &o->side.held : NULL;
    if (t != NULL && row >= t->row0 && row < t->row0 + t->nrows) {
        struct mn_report *r = mn_block_reports(mn_block_at(&o->side.shm, t->block_off));
        r[row].wall_ns = mn_worker_lap(&o->clock);
        r[row].status = MN_ROW_ENVELOPE;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(die_doc,
"die(status): this thread ends by an error of its own; its current task is lost with it.");

static PyObject *
native_die(PyObject *self, PyObject *args)
{
    struct mn_native_object *o = (struct mn_native_object *)self;
    int status;
    if (!PyArg_ParseTuple(args, "i", &status)) {
        return NULL;
    }
    mn_entry_die(&o->side, status);
    Py_RETURN_NONE;
}

static PyMethodDef native_methods[] = {
    {"next", native_next, METH_NOARGS, next_doc},
    {"finish", native_finish, METH_VARARGS, finish_doc},
    {"mark", native_mark, METH_O, mark_doc},
    {"die", native_die, METH_VARARGS, die_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot native_slots[] = {
    {Py_tp_new, native_new},
    {Py_tp_dealloc, native_dealloc},
    {Py_tp_methods, native_methods},
    {Py_tp_doc, PyDoc_STR("NativeWorker(segment, number, capsule, stream, ranks, indices=None): "
                          "a thread's side of the loader's mapping. stream: of the seeds of "
                          "samples. ranks: as Seeder.share() takes them. indices: a subset's, "
                          "int64.")},
    {0, NULL},
};

PyType_Spec mn_native_spec = {
    .name = "minato._core.NativeWorker",
    .basicsize = sizeof(struct mn_native_object),
    /* No GC: a segment, a capsule and an array of integers cannot refer back to it. */
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = native_slots,
};
