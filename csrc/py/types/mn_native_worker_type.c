/* mn_native_worker_type.c - the part of a Worker that makes samples by a pipeline in C.
 * SPDX-License-Identifier: Apache-2.0
 *
 * next() makes samples without the GIL (mn_native_worker.h). It returns for tasks that need Python:
 * an error, indices that are not machine integers, a batch that torch's rules make whole.
 */
#include "py/types/mn_native_worker.h"
#include "py/module/mn_state.h"
#include "py/ops/mn_ops_raise.h"
#include "py/seeding/mn_seed.h"
#include "workers/mn_tasks_and_retries.h"

MN_STATIC_ASSERT(MN_NATIVE_TEXT == MN_OPS_TEXT, "the same error has the same words");

struct mn_native_part {
    struct mn_native native;
    PyObject *capsule; /* keeps the pipeline alive */
    Py_buffer indices; /* of a subset; obj NULL: not a subset */
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

static const char info_doc[] =
    "native_info(capsule) -> (keying, [(kind, itemsize, shape), ...])\n\n"
    "Describes a capsule \"minato.native_pipeline.v1\": how its samples are keyed (0 by the "
    "epoch,\n"
    "1 by the loader's seeds) and their fields. ValueError for one that cannot be used.";

static PyObject *
native_info(PyObject *Py_UNUSED(module), PyObject *capsule)
{
    const struct mn_native_pipeline *p = pipeline_of(capsule);
    PyObject *list = p != NULL ? PyList_New(0) : NULL;
    for (int32_t i = 0; list != NULL && i < p->n_fields; i++) {
        const struct mn_native_field *f = &p->fields[i];
        mn_list_add(&list, Py_BuildValue("(CiN)", f->kind, (int)f->itemsize,
                                         mn_shape_tuple(f->ndim, f->shape)));
    }
    return list == NULL ? NULL : Py_BuildValue("(IN)", p->keying, list);
}

PyMethodDef mn_native_functions[] = {
    {"native_info", native_info, METH_O, info_doc},
    {NULL, NULL, 0, NULL},
};

static int
take_indices(struct mn_native_part *o, PyObject *indices)
{
    if (PyObject_GetBuffer(indices, &o->indices, PyBUF_C_CONTIGUOUS) < 0) {
        return -1;
    }
    if (o->indices.itemsize != sizeof(int64_t)
        || (uintptr_t)o->indices.buf % sizeof(int64_t) != 0) {
        return MN_RAISE(PyExc_ValueError, "indices must be aligned and of 64 bits");
    }
    o->native.indices = o->indices.buf;
    o->native.n_indices = (int64_t)(o->indices.len / o->indices.itemsize);
    return 0;
}

void
mn_native_close(struct mn_native_part *o)
{
    if (o != NULL) {
        Py_XDECREF(o->capsule);
        if (o->indices.obj != NULL) {
            PyBuffer_Release(&o->indices);
        }
        PyMem_Free(o);
    }
}

struct mn_native_part *
mn_native_open(PyObject *parts)
{
    PyObject *capsule, *ranks, *indices;
    unsigned long long stream;
    struct mn_seed_share share;
    if (!PyArg_ParseTuple(parts, "OKOO:native", &capsule, &stream, &ranks, &indices)
        || mn_seed_share_parse(ranks, &share) < 0) {
        return NULL;
    }
    const struct mn_native_pipeline *p = pipeline_of(capsule);
    struct mn_native_part *o = p != NULL ? PyMem_Calloc(1, sizeof(*o)) : NULL;
    if (o == NULL) {
        return PyErr_Occurred() ? NULL : (void *)PyErr_NoMemory();
    }
    o->native = (struct mn_native){.pipeline = p, .share = share, .stream = stream};
    o->capsule = Py_NewRef(capsule);
    if (indices != Py_None && take_indices(o, indices) < 0) {
        mn_native_close(o);
        return NULL;
    }
    return o;
}

PyObject *
mn_sent_indices(struct mn_block *b)
{
    const int64_t *v = mn_block_index(b);
    uint32_t n = b->nrows + b->spares;
    if (b->index_kind != MN_INDEX_INT64) {
        size_t at = b->index_kind == MN_INDEX_NUMBERED ? n * sizeof(*v) : 0;
        return PyBytes_FromStringAndSize((const char *)v + at, (Py_ssize_t)(b->index_bytes - at));
    }
    PyObject *list = PyList_New(n);
    for (uint32_t i = 0; list != NULL && i < n; i++) {
        PyObject *index = PyLong_FromLongLong(v[i]);
        if (index == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, index);
    }
    return list;
}

/* Returns the error of a row in the form of extras; NULL with an exception. */
static PyObject *
extras_of(const struct mn_native_failure *failure)
{
    mn_ops_raise_chars(failure->rc, failure->text);
    PyObject *error = mn_fetch_error();
    return error != NULL
               ? Py_BuildValue("[(IiN)]", failure->row, (int)MN_EXTRA_ERROR, error)
               : NULL;
}

PyObject *
mn_native_next(struct mn_state *st, struct mn_native_part *o, struct mn_worker_side *side,
               struct mn_worker_clock *clock, uint32_t *task)
{
    struct mn_native_failure failure;
    enum mn_native_event event = MN_WITHOUT_GIL(mn_native_serve(&o->native, side, clock, task,
                                                                &failure));
    if (event == MN_NATIVE_STOP) {
        Py_RETURN_FALSE;
    }
    const struct mn_task *t = &side->held;
    struct mn_block *b = mn_block_at(&side->shm, t->block_off);
    PyObject *extras =
        event == MN_NATIVE_FAILED ? extras_of(&failure) : Py_NewRef(Py_None);
    return extras != NULL ? mn_task_tuple(st, t, b, mn_sent_indices(b), extras) : NULL;
}
