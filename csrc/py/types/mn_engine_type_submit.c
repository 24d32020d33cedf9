/* mn_engine_type_submit.c - the methods of Engine for static scheduling, and layouts for workers.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine_snapshot.h"
#include "py/types/mn_engine_object.h"
#include "py/types/mn_index.h"

/* ---- layouts that workers can read ------------------------------------------------------ */

/* A posted layout. There are one or two of them. */
struct mn_posted {
    struct mn_posted *next;
    PyObject *layout;
    uint32_t at;
};

uint32_t
mn_engine_posted(PyObject *self, PyObject *layout)
{
    const struct mn_posted *p = ((struct mn_engine_object *)self)->posted;
    while (p != NULL && p->layout != layout) {
        p = p->next;
    }
    return p != NULL ? p->at : 0;
}

void
mn_engine_forget_posted(PyObject *self)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    while (o->posted != NULL) {
        struct mn_posted *p = o->posted;
        o->posted = p->next;
        Py_DECREF(p->layout);
        PyMem_Free(p);
    }
}

const char mn_engine_post_doc[] =
    "post(layout, description): bytes from which workers open the layout. Call it once for each\n"
    "layout, before set_form() or submit() uses it; a second call does nothing.";

PyObject *
mn_engine_py_post(PyObject *self, PyObject *args)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    struct mn_engine *e = mn_engine_get(self);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    PyObject *layout;
    const char *bytes;
    Py_ssize_t n;
    if (e == NULL || st == NULL
        || !PyArg_ParseTuple(args, "O!y#", st->layout_type, &layout, &bytes, &n)) {
        return NULL;
    }
    if (mn_engine_posted(self, layout) != 0) {
        Py_RETURN_NONE;
    }
    struct mn_posted *p = PyMem_Malloc(sizeof(*p));
    if (p == NULL) {
        return PyErr_NoMemory();
    }
    uint64_t at = 0;
    int rc = mn_engine_post(e, bytes, (uint64_t)n, &at);
    if (mn_raise_errno(rc, "no memory for a layout") < 0) {
        PyMem_Free(p);
        return NULL;
    }
    *p = (struct mn_posted){o->posted, Py_NewRef(layout), (uint32_t)at};
    o->posted = p;
    Py_RETURN_NONE;
}

/* ---- batches of one worker -------------------------------------------------------------- */

static PyObject *
no_room(const struct mn_memory_snapshot *m)
{
    PyErr_Format(PyExc_MemoryError,
                 "a batch does not fit into the memory that loader and workers share: %llu bytes "
                 "are in use, the program retains %llu of them, memory_limit is %llu. Release "
                 "batches that are no longer needed, or raise memory_limit",
                 (unsigned long long)m->used, (unsigned long long)m->kept,
                 (unsigned long long)m->limit);
    return NULL;
}

/* Fills in the epoch and the worker's queue. Returns false with an exception. */
static bool
fill(PyObject *self, struct mn_submit *s, const struct mn_epoch *epoch, unsigned long worker)
{
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return false;
    }
    if (worker >= mn_engine_shm(e)->ctl->nworkers) {
        PyErr_SetString(PyExc_ValueError, "no such worker");
        return false;
    }
    s->queue = MN_QUEUE_WORKER + (uint32_t)worker;
    s->epoch = epoch->number;
    s->base_seed = epoch->base_seed;
    s->user_epoch = epoch->user_epoch;
    s->seeded = epoch->seeded;
    return true;
}

static PyObject *
submit(PyObject *self, const struct mn_submit *s)
{
    mn_pending_reclaim(mn_state_of_type(Py_TYPE(self)));
    struct mn_engine *e = mn_engine_get(self); /* dumps may have closed it */
    uint64_t off;
    if (e == NULL) {
        return NULL;
    }
    if (mn_engine_submit(e, s, &off) == 0) {
        return mn_block_new(self, MN_UNPLANNED, off, NULL);
    }
    struct mn_memory_snapshot memory = mn_engine_memory(e);
    if (memory.in_flight != 0) {
        Py_RETURN_NONE;
    }
    return no_room(&memory);
}

const char mn_engine_submit_doc[] =
    "submit(epoch, worker, number, indices, layout, spares) -> Block | None\n\n"
    "Static scheduling: publishes a batch to a worker's queue. layout, which must have been\n"
    "posted: how the worker may place its samples, if there is memory for them now (see form());\n"
    "None: it may not. The last spares of the indices are of other samples, which replace one\n"
    "that fails. Returns None if there is no memory now and a batch is in flight. Raises\n"
    "MemoryError if it could never be placed.";

/* Fills in the rows in which the batch's samples may be placed. Returns false with an exception. */
static bool
fill_rows(PyObject *self, struct mn_submit *s, PyObject *layout, PyObject *indices)
{
    s->nrows = 1; /* without a layout it is not used, except for counting spares */
    if (layout == Py_None) {
        return true;
    }
    Py_ssize_t n = PyObject_Size(indices);
    s->layout = mn_engine_posted(self, layout);
    if (s->layout == 0 && n >= 0) {
        PyErr_SetString(PyExc_ValueError, "the layout was not posted");
    }
    if (n < 0 || s->layout == 0) {
        return false;
    }
    s->nfields = mn_layout_nfields((struct mn_layout *)layout);
    s->row_bytes = mn_layout_row_bytes((struct mn_layout *)layout);
    s->nrows = (uint32_t)n;
    return mn_split_spares(&s->nrows, s->spares);
}

PyObject *
mn_engine_py_submit(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 6) {
        PyErr_SetString(PyExc_TypeError, "submit() takes six arguments");
        return NULL;
    }
    const struct mn_epoch *epoch = mn_epoch_of(self, args[0]);
    if (epoch == NULL) {
        return NULL;
    }
    PyObject *indices = args[3], *layout = args[4];
    struct mn_submit s = {.kind = MN_KIND_BATCH};
    unsigned long worker = PyLong_AsUnsignedLong(args[1]);
    s.number = PyLong_AsUnsignedLongLong(args[2]);
    s.spares = mn_as_uint32(args[5]);
    if (PyErr_Occurred() || !fill(self, &s, epoch, worker)
        || !fill_rows(self, &s, layout, indices)) {
        return NULL;
    }
    uint32_t nrows = s.nrows;
    PyObject *owned = mn_fill_index(&s.index_kind, &s.index, &s.index_bytes, &nrows, indices,
                                    epoch->dumps);
    bool counted = owned != NULL && s.index_kind != MN_INDEX_PICKLE;
    if (owned == NULL || (counted && !mn_split_spares(&nrows, s.spares))) {
        Py_XDECREF(owned);
        return NULL;
    }
    s.nrows = nrows;
    PyObject *block = submit(self, &s);
    Py_DECREF(owned);
    return block;
}

PyObject *
mn_engine_py_resume(PyObject *self, PyObject *args)
{
    struct mn_submit s = {.kind = MN_KIND_RESUME, .index_kind = MN_INDEX_INT64, .index = ""};
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    struct mn_epoch *epoch;
    unsigned int worker;
    if (st == NULL || !PyArg_ParseTuple(args, "O!I", st->epoch_type, &epoch, &worker)
        || !fill(self, &s, epoch, worker)) {
        return NULL;
    }
    return submit(self, &s);
}
