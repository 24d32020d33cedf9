/* mn_engine_type_plan.c - the methods of Engine for static and for balanced scheduling.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_base.h"
#include "py/types/mn_engine_object.h"

#include <errno.h>
#include <string.h>

/* ---- the sampler's indices for a batch, on their way to workers ------------------------- */

/* Does the same as as_int64() for a list that no other code changes meanwhile. */
static PyObject *
list_as_int64(PyObject *indices)
{
    Py_ssize_t n = PyList_GET_SIZE(indices);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * (Py_ssize_t)sizeof(int64_t));
    if (bytes == NULL) {
        return NULL;
    }
    int64_t *v = (int64_t *)(void *)PyBytes_AS_STRING(bytes);
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *o = PyList_GET_ITEM(indices, i);
        int overflow = 1;
        if (PyLong_CheckExact(o)) {
            v[i] = PyLong_AsLongLongAndOverflow(o, &overflow);
        }
        if (overflow != 0) {
            Py_DECREF(bytes);
            return NULL;
        }
    }
    return bytes;
}

/* Returns a list of exact ints as the bytes of machine integers; NULL without an exception for
 * anything else. */
static PyObject *
as_int64(PyObject *indices)
{
    PyObject *bytes = NULL;
    if (PyList_CheckExact(indices)) {
        Py_BEGIN_CRITICAL_SECTION(indices);
        bytes = list_as_int64(indices);
        Py_END_CRITICAL_SECTION();
    }
    return bytes;
}

/* Checks the result of dumps. Returns NULL with an exception if it is neither bytes nor (n, bytes)
 * with n machine integers. Takes the reference. */
static PyObject *
dumped(PyObject *given, uint32_t *kind, uint32_t *nrows)
{
    unsigned int n = 0;
    PyObject *owned = given;
    if (given != NULL && PyTuple_CheckExact(given)) {
        owned = PyArg_ParseTuple(given, "IS", &n, &owned) ? Py_NewRef(owned) : NULL;
        Py_DECREF(given);
        *kind = MN_INDEX_NUMBERED;
        *nrows = n;
    }
    if (owned != NULL
        && (!PyBytes_Check(owned) || PyBytes_GET_SIZE(owned) / (Py_ssize_t)sizeof(int64_t) < n)) {
        PyErr_SetString(PyExc_TypeError, "dumps must return bytes, or a number of them first");
        Py_CLEAR(owned);
    }
    return owned;
}

/* Converts indices for the core. A list of exact ints that fit 64 bits becomes machine integers,
 * and sets *nrows. Anything else goes through dumps(indices). That returns bytes, or (n, bytes),
 * which begin with n machine integers and set *nrows. Returns the bytes that *index points into, or
 * NULL with an exception. */
static PyObject *
fill_index(uint32_t *kind, const void **index, uint64_t *bytes, uint32_t *nrows,
           PyObject *indices, PyObject *dumps)
{
    PyObject *owned = as_int64(indices);
    *kind = MN_INDEX_INT64;
    if (owned != NULL) {
        *nrows = (uint32_t)(PyBytes_GET_SIZE(owned) / (Py_ssize_t)sizeof(int64_t));
    }
    else if (!PyErr_Occurred()) {
        *kind = MN_INDEX_PICKLE;
        owned = dumped(PyObject_CallOneArg(dumps, indices), kind, nrows);
    }
    if (owned != NULL) {
        *index = PyBytes_AS_STRING(owned);
        *bytes = (uint64_t)PyBytes_GET_SIZE(owned);
    }
    return owned;
}

/* Converts an argument; sets an exception if it does not fit. */
static uint32_t
as_uint32(PyObject *number)
{
    unsigned long v = PyLong_AsUnsignedLong(number);
    if (v > UINT32_MAX && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_OverflowError, "a number is too large");
    }
    return (uint32_t)v;
}

/* Subtracts the spares, which are the last indices, from *nrows. Returns false with an exception if
 * there are fewer indices. */
static bool
split_spares(uint32_t *nrows, uint32_t spares)
{
    if (spares > *nrows) {
        PyErr_SetString(PyExc_ValueError, "there are fewer indices than spares");
        return false;
    }
    *nrows -= spares;
    return true;
}

/* ---- layouts that workers can read ------------------------------------------------------ */

uint32_t
mn_engine_posted(PyObject *self, PyObject *layout)
{
    const struct mn_posted *p = ((struct mn_engine_object *)self)->posted;
    while (p != NULL && p->layout != layout) {
        p = p->next;
    }
    return p != NULL ? p->at : 0;
}

/* Returns where workers read the layout. Posts it at the first use. 0 with an exception. */
static uint32_t
post(PyObject *self, struct mn_engine *e, PyObject *layout)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint32_t posted = mn_is_layout(self, layout) ? mn_engine_posted(self, layout) : 0;
    if (posted != 0 || PyErr_Occurred()) {
        return posted;
    }
    PyObject *description = ((struct mn_layout *)layout)->description;
    if (description == NULL) {
        PyErr_SetString(PyExc_ValueError, "the layout has no description for workers");
        return 0;
    }
    struct mn_posted *p = PyMem_Malloc(sizeof(*p));
    if (p == NULL) {
        (void)PyErr_NoMemory();
        return 0;
    }
    uint64_t at = 0;
    int rc = mn_engine_post(e, PyBytes_AS_STRING(description),
                            (uint64_t)PyBytes_GET_SIZE(description), &at);
    if (mn_raise_errno(rc, "no memory for a layout") < 0) {
        PyMem_Free(p);
        return 0;
    }
    *p = (struct mn_posted){o->posted, Py_NewRef(layout), (uint32_t)at};
    o->posted = p;
    return p->at;
}

/* Fills in what is the same for both kinds of scheduling, from an Epoch of minato/_records.py.
 * Returns its dumps(); NULL with an exception. */
static PyObject *
fill_epoch(PyObject *self, struct mn_plan_batch *b, PyObject *epoch, PyObject *spares)
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    if (!Py_IS_TYPE(epoch, st->epoch_type)) {
        return PyErr_Format(PyExc_TypeError, "expected an Epoch, got %s", Py_TYPE(epoch)->tp_name);
    }
    b->epoch = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(epoch, 0));
    b->base_seed = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(epoch, 1));
    b->user_epoch = PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(epoch, 3));
    b->seeded = as_uint32(PyTuple_GET_ITEM(epoch, 4));
    b->splits = PyTuple_GET_ITEM(epoch, 5) == Py_True;
    b->spares = as_uint32(spares);
    return PyErr_Occurred() ? NULL : PyTuple_GET_ITEM(epoch, 2);
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

static PyObject *
submit(PyObject *self, const struct mn_plan_batch *b, const struct mn_form *form, uint32_t queue)
{
    mn_pending_reclaim(PyType_GetModuleState(Py_TYPE(self)));
    struct mn_engine *e = mn_engine_get(self); /* dumps may have closed it */
    uint64_t off;
    if (e == NULL) {
        return NULL;
    }
    if (mn_engine_submit(e, b, form, queue, &off) == 0) {
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
    "Static scheduling: publishes a batch to a worker's queue. layout: how the worker may place\n"
    "its samples, if there is memory for them now (Block.has_rows); None: it may not. The last\n"
    "spares of the indices are of other samples, which replace one that fails. number=None: no\n"
    "batch, but the worker's actions at the start of a new epoch, as torch's marker triggers\n"
    "them. Returns None if there is no memory now and a batch is in flight. Raises MemoryError if\n"
    "it could never be placed.";

/* Counts the rows of a batch whose indices may not be machine integers. whole: one, more are not
 * used. Returns false with an exception. */
static bool
count_rows(struct mn_plan_batch *b, PyObject *indices, bool whole)
{
    Py_ssize_t n = whole ? 1 : PyObject_Size(indices);
    b->nrows = (uint32_t)n;
    return n >= 0 && (whole || split_spares(&b->nrows, b->spares));
}

PyObject *
mn_engine_py_submit(PyObject *self, struct mn_engine *e, PyObject *const *args,
                    Py_ssize_t nargs)
{
    if (nargs != 6) {
        return PyErr_Format(PyExc_TypeError, "submit() takes six arguments");
    }
    struct mn_form form = {.kind = MN_KIND_RESUME};
    struct mn_plan_batch own = {.index_kind = MN_INDEX_INT64, .index = ""}, *b = &own;
    PyObject *indices = args[3], *layout = args[4], *dumps = fill_epoch(self, b, args[0], args[5]);
    if (dumps == NULL) {
        return NULL;
    }
    unsigned long worker = PyLong_AsUnsignedLong(args[1]);
    uint32_t queue = MN_QUEUE_WORKER + (uint32_t)worker;
    bool resumes = args[2] == Py_None;
    b->number = resumes ? 0 : PyLong_AsUnsignedLongLong(args[2]);
    if (PyErr_Occurred()) {
        return NULL;
    }
    if (worker >= mn_engine_shm(e)->ctl->nworkers) {
        return PyErr_Format(PyExc_ValueError, "no such worker");
    }
    if (resumes) {
        return submit(self, b, &form, queue);
    }
    form.kind = MN_KIND_BATCH;
    if (layout != Py_None) {
        form.layout = post(self, e, layout); /* first: the size may be a program's code */
        if (form.layout == 0) {
            return NULL;
        }
        mn_layout_form((struct mn_layout *)layout, &form);
    }
    if (!count_rows(b, indices, layout == Py_None)) {
        return NULL;
    }
    uint32_t nrows = b->nrows;
    PyObject *owned = fill_index(&b->index_kind, &b->index, &b->index_bytes, &nrows, indices,
                                 dumps);
    bool counted = owned != NULL && b->index_kind != MN_INDEX_PICKLE;
    if (owned == NULL || (counted && !split_spares(&nrows, b->spares))) {
        Py_XDECREF(owned);
        return NULL;
    }
    b->nrows = nrows;
    PyObject *block = submit(self, b, &form, queue);
    Py_DECREF(owned);
    return block;
}

const char mn_engine_poll_doc[] =
    "poll(block) -> when its last task finished, in ns by the monotonic clock; 0: it is not done.\n"
    "A done block may have lost tasks, see lost().";

PyObject *
mn_engine_py_poll(PyObject *self, struct mn_engine *e, PyObject *block)
{
    uint64_t off;
    if (mn_engine_of_block(self, block, &off) == NULL) {
        return NULL;
    }
    bool busy = mn_engine_settle(e, off) == MN_BLOCK_BUSY;
    uint64_t done_ns = busy ? 0 : mn_engine_done_ns(e, off);
    return PyLong_FromUnsignedLongLong(busy || done_ns != 0 ? done_ns : 1); /* all tasks lost */
}

/* ---- batches of any worker -------------------------------------------------------------- */

const char mn_engine_plan_doc[] =
    "plan(epoch, indices, number, position, whole, begins, spares, hints) -> int | None\n\n"
    "Plans the next batch, with the sampler's indices. Returns its sequence; None: try later.\n"
    "number: in the epoch; position: of its first sample in the sampler's order. whole: one\n"
    "worker fetches and collates it. begins: None, or a byte for each row, not 0 where the\n"
    "dataset says that a group begins. spares: this many of the indices, at the end, are of\n"
    "other samples, which replace one that fails. hints: None, or a float32 for each row, finite\n"
    "and not negative, from which costs are predicted (schedule/mn_costs.h). For the\n"
    "batch that was planned last it returns the sequence again and does nothing: an interrupt may\n"
    "have hidden the result from the caller.";

/* Reads the arguments of plan(). Returns the bytes that the batch points into; NULL with an
 * exception. */
static PyObject *
fill_batch(PyObject *self, struct mn_plan_batch *b, PyObject *const *args)
{
    PyObject *indices = args[1], *begins = args[5], *hints = args[7];
    PyObject *dumps = fill_epoch(self, b, args[0], args[6]);
    if (dumps == NULL) {
        return NULL;
    }
    b->number = PyLong_AsUnsignedLongLong(args[2]);
    b->position = PyLong_AsUnsignedLongLong(args[3]);
    b->whole = PyObject_IsTrue(args[4]) > 0;
    if (begins != Py_None && !PyBytes_Check(begins) && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "begins must be bytes or None");
    }
    if (hints != Py_None && !PyBytes_Check(hints) && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "hints must be bytes or None");
    }
    if (PyErr_Occurred() || !count_rows(b, indices, b->whole)) {
        return NULL;
    }
    uint32_t n = b->nrows;
    PyObject *owned =
        fill_index(&b->index_kind, &b->index, &b->index_bytes, &n, indices, dumps);
    bool sound = owned != NULL
                 && (b->index_kind == MN_INDEX_PICKLE || split_spares(&n, b->spares));
    b->nrows = n;
    b->splits = b->splits && PyList_CheckExact(indices) && n > 1;
    if (sound && begins != Py_None) {
        b->begins = (const uint8_t *)PyBytes_AS_STRING(begins);
        sound = PyBytes_GET_SIZE(begins) >= (Py_ssize_t)n;
        if (!sound) {
            PyErr_SetString(PyExc_ValueError, "begins must have a byte for each row");
        }
    }
    if (sound && hints != Py_None && b->index_kind != MN_INDEX_PICKLE) {
        b->hint = (const float *)(const void *)PyBytes_AS_STRING(hints);
        sound = (size_t)PyBytes_GET_SIZE(hints) >= n * sizeof(float);
        if (!sound) {
            PyErr_SetString(PyExc_ValueError, "hints must have a float32 for each row");
        }
    }
    if (!sound) {
        Py_CLEAR(owned);
    }
    return owned;
}

PyObject *
mn_engine_py_plan(PyObject *self, struct mn_engine *e, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 8) {
        return PyErr_Format(PyExc_TypeError, "plan() takes eight arguments");
    }
    struct mn_plan_batch b = {0};
    PyObject *owned = fill_batch(self, &b, args);
    if (owned == NULL) {
        return NULL;
    }
    mn_pending_reclaim(PyType_GetModuleState(Py_TYPE(self)));
    e = mn_engine_get(self); /* dumps may have closed it */
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    int rc = MN_FULL;
    if (e != NULL && o->planned == args[0] && o->planned_number == b.number
        && o->planned_position == b.position) {
        b.sequence = o->planned_sequence;
        rc = MN_OK;
    }
    else if (e != NULL) {
        b.sequence = mn_engine_next_sequence(e);
        rc = mn_engine_plan(e, &b);
    }
    if (rc == MN_OK) {
        Py_XSETREF(o->planned, Py_NewRef(args[0]));
        o->planned_number = b.number;
        o->planned_position = b.position;
        o->planned_sequence = b.sequence;
    }
    Py_DECREF(owned);
    if (e == NULL) {
        return NULL;
    }
    if (rc == MN_FULL) {
        Py_RETURN_NONE;
    }
    return rc < 0 ? PyErr_NoMemory() : PyLong_FromUnsignedLongLong(b.sequence);
}

const char mn_engine_set_form_doc[] =
    "set_form(layout): how rows travel from now on; None: in envelopes";

PyObject *
mn_engine_py_set_form(PyObject *self, struct mn_engine *e, PyObject *layout)
{
    struct mn_form form = {.kind = MN_KIND_SAMPLES};
    if (layout != Py_None) {
        form.layout = post(self, e, layout);
        if (form.layout == 0) {
            return NULL;
        }
        form.kind = MN_KIND_ROWS;
        mn_layout_form((struct mn_layout *)layout, &form);
    }
    mn_engine_set_form(e, &form);
    Py_RETURN_NONE;
}

const char mn_engine_plan_end_doc[] = "plan_end(): no more batches in this epoch";

PyObject *
mn_engine_py_plan_end(PyObject *Py_UNUSED(self), struct mn_engine *e,
                      PyObject *Py_UNUSED(ignored))
{
    mn_engine_plan_end(e);
    Py_RETURN_NONE;
}

const char mn_engine_plan_clear_doc[] = "plan_clear(): abandons all batches";

PyObject *
mn_engine_py_plan_clear(PyObject *Py_UNUSED(self), struct mn_engine *e,
                        PyObject *Py_UNUSED(ignored))
{
    mn_engine_plan_clear(e);
    Py_RETURN_NONE;
}

const char mn_engine_next_doc[] =
    "next(timeout) -> Block | int\n\n"
    "Waits for the batch to deliver next, at most timeout seconds (negative: forever; 0: only\n"
    "looks, before the caller asks for it). Returns a Block; if it is not made, see its refusal.\n"
    "NEXT_TIMEOUT: the time is over. NEXT_HEALTH: look at health(). NEXT_PLAN: workers wait for\n"
    "more batches to be planned, if there are any. Handles signals.";

/* Makes the Block that next() gives. Its runs are read while objects are made, and that may collect
 * garbage which closes the engine. */
static PyObject *
given(PyObject *self, struct mn_engine *e, uint64_t sequence, uint64_t off)
{
    struct mn_block_object *b = (struct mn_block_object *)mn_block_new(self, sequence, off, NULL);
    const struct mn_run *runs;
    uint32_t nruns = b != NULL ? mn_delivery_runs(e, &runs) : 0;
    if (nruns == 0) {
        return (PyObject *)b;
    }
    mn_engine_pin(e);
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < nruns; i++) {
        PyObject *block = mn_block_new(self, runs[i].sequence, runs[i].block_off, NULL);
        mn_list_add(&list, block != NULL ? Py_BuildValue("(NII)", block, runs[i].row0,
                                                         runs[i].nrows)
                                         : NULL);
    }
    mn_engine_unpin(e);
    b->runs = list;
    if (list == NULL) {
        Py_CLEAR(b);
    }
    return (PyObject *)b;
}

PyObject *
mn_engine_py_next(PyObject *self, struct mn_engine *e, PyObject *args)
{
    double timeout;
    if (!PyArg_ParseTuple(args, "d", &timeout)) {
        return NULL;
    }
    /* many batches are planned at once: memory that was dropped since would wait for that */
    mn_pending_reclaim(PyType_GetModuleState(Py_TYPE(self)));
    if (mn_engine_get(self) == NULL) {
        return NULL;
    }
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint64_t until = mn_engine_until(timeout);
    for (;;) {
        int64_t slice = mn_engine_slice(until);
        uint64_t sequence = 0, block = 0;
        o->inside++;
        int rc = MN_WITHOUT_GIL(mn_engine_next(e, slice, &sequence, &block));
        o->inside--;
        if (rc == MN_NEXT_BATCH) {
            return mn_engine_get(self) != NULL ? given(self, e, sequence, block) : NULL;
        }
        if (PyErr_CheckSignals() < 0 || mn_engine_goes_on(self) < 0) {
            return NULL;
        }
        if (rc == MN_NEXT_HEALTH || rc == MN_NEXT_PLAN) {
            return PyLong_FromLong(rc);
        }
        if (slice == 0) { /* that was the last look; signals end other sleeps early */
            return PyLong_FromLong(MN_NEXT_TIMEOUT);
        }
    }
}

const char mn_engine_retire_doc[] =
    "retire(block): frees a done block that was read. A planned one must be what next() gave.";

PyObject *
mn_engine_py_retire(PyObject *self, struct mn_engine *e, PyObject *block)
{
    const struct mn_block_object *b = mn_block_of(self, block);
    uint64_t off;
    if (b == NULL) {
        return NULL;
    }
    if (b->sequence != MN_UNPLANNED) {
        if (mn_engine_taken(e, b->sequence, b->off, false) < 0) {
            return PyErr_Format(PyExc_ValueError,
                                "the block is not what next() gave, or was retired");
        }
    }
    else if (mn_engine_of_block(self, block, &off) == NULL) {
        return NULL;
    }
    else if (mn_engine_poll(e, off) == MN_BLOCK_BUSY) {
        return PyErr_Format(PyExc_ValueError, "the block's batch is not done");
    }
    else {
        mn_engine_retire(e, off);
    }
    Py_RETURN_NONE;
}
