/* mn_engine_type_take.c - done blocks of an Engine as batches; __next__ of iterators (HandsOut).
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/types/mn_engine_object.h"

#include <stddef.h>
#include <string.h>

/* Returns whether the rows of the block follow the layout; raises ValueError if not. */
static bool
follows(PyObject *self, struct mn_engine *e, PyObject *block, PyObject *layout)
{
    const struct mn_block_object *b = (const struct mn_block_object *)block;
    uint32_t posted = b->layout == NULL ? mn_engine_posted(self, layout) : 0;
    bool same = b->layout == layout
                || (posted != 0 && mn_block_at(mn_engine_shm(e), b->off)->layout == posted);
    if (!same) {
        PyErr_SetString(PyExc_ValueError, "the rows of the block follow another layout, or none");
    }
    return same;
}

/* A class of the program's may have been called, and may have closed the engine. Values read after
 * that do not belong to the batch. */
static PyObject *
unless_closed(PyObject *self, PyObject *made)
{
    if (made != NULL && mn_engine_get(self) == NULL) {
        Py_CLEAR(made);
    }
    return made;
}

/* Returns whether rows that their workers have reported one by one are written; if not, sets an
 * exception. */
static bool
are_written(struct mn_engine *e, uint64_t off, uint32_t row0, uint32_t n)
{
    const struct mn_result *first = mn_engine_result(e, off, 0);
    bool reported = first != NULL && first->kind == MN_KIND_ROWS;
    const struct mn_report *r = reported ? mn_engine_read_reports(e, off) : NULL;
    for (uint32_t i = row0; reported && i < row0 + n; i++) {
        if (r[i].status != MN_ROW_WRITTEN) {
            PyErr_SetString(PyExc_RuntimeError,
                            "a DataLoader worker sent fewer rows than it reported. Code in the "
                            "worker writes to memory where it must not");
            return false;
        }
    }
    return true;
}

/* Opens a block for reading by the layout, and pins the engine. Returns where it lies. 0 with an
 * exception if it is not in flight, or is none. */
static uint64_t
open_block(PyObject *self, struct mn_engine *e, PyObject *block, PyObject *layout,
           struct mn_reading *r)
{
    const struct mn_block_object *b =
        mn_is_layout(self, layout) ? mn_block_of(self, block) : NULL;
    if (b == NULL || mn_engine_get(self) == NULL) { /* converting a number may have closed it */
        return 0;
    }
    uint64_t row_bytes = ((struct mn_layout *)layout)->all_bytes;
    if (b->off == 0 || !mn_engine_read(e, b->off, b->serial, row_bytes, r)) {
        PyErr_SetString(PyExc_ValueError, "the block's batch is not in flight");
        return 0;
    }
    return b->off;
}

/* Makes a batch of an open block. objects: as in decode(), NULL for None. At the ceiling the caller
 * gets a copy: it may retain half of the limit. If the block is not full the batch is a copy, too,
 * so that the caller does not retain the rest of it. */
static PyObject *
decode(PyObject *self, struct mn_engine *e, PyObject *block, PyObject *layout,
       const struct mn_reading *r, PyObject *objects, uint32_t nrows)
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    struct mn_layout *l = (struct mn_layout *)layout;
    uint64_t off = ((struct mn_block_object *)block)->off;
    uint32_t all = mn_block_at(mn_engine_shm(e), off)->nrows;
    if (objects == NULL && (l->nobjects != 0 || !r->in_rows)) {
        Py_RETURN_NONE;
    }
    if (!follows(self, e, block, layout)) {
        return NULL;
    }
    nrows = nrows < all ? nrows : all;
    if (objects != NULL && !are_written(e, off, 0, nrows)) {
        return NULL;
    }
    PyObject *batch =
        mn_layout_decode(st, l, e, off, nrows, objects, r->copy || nrows < all);
    return unless_closed(self, batch);
}

const char mn_engine_decode_doc[] =
    "decode(block, layout, objects, nrows=all) -> batch | None\n\n"
    "The batch of a done block whose rows, or the first nrows of them, were written in place.\n"
    "objects: one list for each row, for a layout with object leaves. With None such a block, "
    "one\n"
    "with envelopes, or one without rows gives None.";

PyObject *
mn_engine_py_decode(PyObject *self, struct mn_engine *e, PyObject *args)
{
    PyObject *block, *layout, *objects, *batch = NULL;
    unsigned int nrows = UINT32_MAX;
    struct mn_reading r;
    if (!PyArg_ParseTuple(args, "OOO|I", &block, &layout, &objects, &nrows)
        || open_block(self, e, block, layout, &r) == 0) {
        return NULL;
    }
    if (r.status == MN_BLOCK_BUSY) {
        PyErr_SetString(PyExc_ValueError, "the block's batch is not done");
    }
    else {
        batch = decode(self, e, block, layout, &r, objects != Py_None ? objects : NULL, nrows);
    }
    mn_engine_unpin(e);
    return batch;
}

const char mn_engine_take_doc[] =
    "take(block, layout) -> batch | None\n\n"
    "decode(block, layout, None) and retire(block) for a block that next() gave. Returns None and\n"
    "does nothing if more is needed: the block has lost a task, was made without a layout, or\n"
    "decode gives None.";

PyObject *
mn_engine_py_take(PyObject *self, struct mn_engine *e, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        return PyErr_Format(PyExc_TypeError, "take() takes two arguments");
    }
    struct mn_reading r;
    uint64_t off = open_block(self, e, args[0], args[1], &r);
    if (off == 0) {
        return NULL;
    }
    uint64_t sequence = ((struct mn_block_object *)args[0])->sequence;
    PyObject *batch = NULL;
    if (sequence == MN_UNPLANNED) {
        PyErr_SetString(PyExc_ValueError, "use decode() for blocks that were not planned");
    }
    else if (r.status != MN_BLOCK_DONE) {
        batch = Py_NewRef(Py_None);
    }
    else {
        batch = decode(self, e, args[0], args[1], &r, NULL, UINT32_MAX);
        if (batch != Py_None && ((struct mn_engine_object *)self)->engine == e) {
            if (mn_engine_taken(e, sequence, off, true) < 0 && batch != NULL) {
                Py_CLEAR(batch);
                PyErr_SetString(PyExc_ValueError,
                                "the block is not what next() gave, or was retired");
            }
            return batch;
        }
    }
    mn_engine_unpin(e);
    return batch;
}

const char mn_engine_row_doc[] =
    "row(block, layout, row, objects): the sample that was written there.";

PyObject *
mn_engine_py_row(PyObject *self, struct mn_engine *e, PyObject *args)
{
    PyObject *block, *layout, *objects;
    unsigned int row;
    uint64_t off;
    if (!PyArg_ParseTuple(args, "OOIO", &block, &layout, &row, &objects)
        || !mn_is_layout(self, layout) || mn_engine_of_block(self, block, &off) == NULL
        || !follows(self, e, block, layout)) {
        return NULL;
    }
    if (row >= mn_block_at(mn_engine_shm(e), off)->nrows) {
        return PyErr_Format(PyExc_ValueError, "the block has no such row");
    }
    if (!are_written(e, off, row, 1)) {
        return NULL;
    }
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    mn_engine_pin(e);
    PyObject *sample = mn_layout_row(st, (struct mn_layout *)layout, e, off, row,
                                     objects == Py_None ? NULL : objects);
    mn_engine_unpin(e);
    return unless_closed(self, sample);
}

/* ---- blocks that the trainer makes: rows of several batches, samples that it got ---- */

/* Returns whether every row of the formed batch was written in place by the layout posted there,
 * and nothing else belongs to it. */
static bool
all_written(struct mn_engine *e, const struct mn_layout *l, uint32_t posted)
{
    const struct mn_run *runs;
    uint32_t nruns = mn_delivery_runs(e, &runs);
    bool all = nruns != 0 && posted != 0 && l->nobjects == 0;
    for (uint32_t i = 0; all && i < nruns; i++) {
        const struct mn_run *r = &runs[i];
        all = r->block_off != 0
              && mn_block_at(mn_engine_shm(e), r->block_off)->layout == posted;
        const struct mn_report *reports = all ? mn_engine_read_reports(e, r->block_off) : NULL;
        for (uint32_t row = r->row0; all && row < r->row0 + r->nrows; row++) {
            all = reports[row].status == MN_ROW_WRITTEN;
        }
    }
    return all;
}

/* Copies the rows of the formed batch to a block, one after another, without the GIL. */
static void
copy_rows(struct mn_engine *e, const struct mn_layout *l, uint64_t to)
{
    const struct mn_shm *shm = mn_engine_shm(e);
    const struct mn_run *runs;
    uint32_t nruns = mn_delivery_runs(e, &runs);
    struct mn_block *target = mn_block_at(shm, to);
    for (uint32_t i = 0; i < l->nfields; i++) {
        uint64_t bytes = l->row_bytes[i];
        char *dst = mn_at(shm, mn_block_fields(target)[i]);
        for (uint32_t k = 0; k < nruns && bytes != 0; k++) {
            const struct mn_run *r = &runs[k];
            struct mn_block *b = mn_block_at(shm, r->block_off);
            const char *rows = mn_at(shm, mn_block_fields(b)[i]);
            memcpy(dst, rows + r->row0 * bytes, r->nrows * bytes);
            dst += r->nrows * bytes;
        }
    }
}

const char mn_engine_gather_doc[] =
    "gather(layout) -> batch | None\n\n"
    "A copy of the rows of the formed batch; None if the rows are not all that belongs to it.";

PyObject *
mn_engine_py_gather(PyObject *self, struct mn_engine *e, PyObject *layout)
{
    if (!mn_is_layout(self, layout)) {
        return NULL;
    }
    struct mn_layout *l = (struct mn_layout *)layout;
    if (!all_written(e, l, mn_engine_posted(self, layout))) {
        Py_RETURN_NONE;
    }
    struct mn_form form = {.kind = MN_KIND_ROWS};
    mn_layout_form(l, &form);
    const struct mn_run *runs;
    uint32_t nruns = mn_delivery_runs(e, &runs), nrows = 0;
    for (uint32_t i = 0; i < nruns; i++) {
        nrows += runs[i].nrows;
    }
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint64_t to = 0;
    int rc;
    o->inside++;
    Py_BEGIN_ALLOW_THREADS
    rc = mn_engine_gather_block(e, nrows, &form, &to);
    if (rc == 0) {
        copy_rows(e, l, to);
    }
    Py_END_ALLOW_THREADS
    o->inside--;
    if (mn_raise_errno(rc, "no memory to gather a batch") < 0) {
        return NULL;
    }
    PyObject *block = mn_block_new(self, MN_UNPLANNED, to, layout), *batch = NULL;
    struct mn_reading r;
    if (block != NULL && open_block(self, e, block, layout, &r) != 0) {
        batch = decode(self, e, block, layout, &r, NULL, UINT32_MAX);
        mn_engine_unpin(e);
    }
    Py_XDECREF(block);
    if (o->engine == e) {
        mn_engine_retire(e, to);
    }
    return batch;
}

const char mn_engine_place_doc[] =
    "place(samples, layout, objects) -> Block | None\n\n"
    "A new block with the samples as rows, to be decoded and retired; None if one does not\n"
    "fit. For each sample, a list of its object leaves is appended to objects, if there are any.";

PyObject *
mn_engine_py_place(PyObject *self, struct mn_engine *e, PyObject *args)
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    PyObject *samples, *layout, *objects;
    if (!PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &samples, st->layout_type, &layout,
                          &PyList_Type, &objects)) {
        return NULL;
    }
    struct mn_layout *l = (struct mn_layout *)layout;
    struct mn_form form = {.kind = MN_KIND_ROWS};
    uint32_t nrows = (uint32_t)PyList_GET_SIZE(samples);
    mn_layout_form(l, &form);
    uint64_t to = 0;
    if (mn_raise_errno(mn_engine_gather_block(e, nrows, &form, &to),
                       "the memory shared by loader and workers cannot hold a batch (use smaller "
                       "batches, retain fewer, or raise memory_limit, `ulimit -v` or `ulimit -f`)")
        < 0) {
        return NULL;
    }
    const struct mn_shm *shm = mn_engine_shm(e);
    mn_engine_pin(e);
    int rc = mn_layout_encode_list(st, l, samples, shm, mn_block_at(shm, to), nrows, objects);
    bool open = ((struct mn_engine_object *)self)->engine == e;
    if (open && rc != 1) {
        mn_engine_retire(e, to);
    }
    mn_engine_unpin(e);
    if (!open && !PyErr_Occurred()) {
        (void)mn_engine_get(self); /* raises */
    }
    if (!open || rc == 1) {
        return open ? mn_block_new(self, MN_UNPLANNED, to, layout) : NULL;
    }
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- HandsOut: next() of iterators, without Python for a prefetched batch ----
 *
 * A program whose steps take milliseconds comes back to cold caches. Then the Python code of a
 * next() costs twenty times what it costs in a loop. It takes some 40 us even if the batch was
 * received long ago. So when the iterator takes some batches ahead, it says how many of them may be
 * delivered without further work, and this file delivers those.
 *
 * The grant is changed, and one batch of it taken, in critical sections of the iterator. These are
 * suspended while the thread waits for a Python lock.
 */

struct mn_hands_out {
    PyObject_HEAD
    struct mn_state *st;
    PyObject *grant;    /* arguments of the last _grant(): count, prefetched, engine, progress */
    Py_ssize_t granted; /* number of batches that may be delivered here */
    Py_ssize_t yielded;
};

/* Replaces the present grant by another. */
static void
exchange(PyObject *self, Py_ssize_t count, PyObject *grant)
{
    struct mn_hands_out *h = (struct mn_hands_out *)self;
    PyObject *old;
    Py_BEGIN_CRITICAL_SECTION(self);
    old = h->grant;
    h->grant = Py_XNewRef(grant);
    h->granted = count;
    Py_END_CRITICAL_SECTION();
    Py_XDECREF(old); /* may run code of the program's */
}

/* Takes one granted batch: returns the grant, or NULL if there is none. */
static PyObject *
take_one(struct mn_hands_out *h)
{
    if (h->granted == 0) {
        return NULL;
    }
    h->granted--;
    return Py_NewRef(h->grant);
}

/* Returns whether each batch must go through torch's __next__, because it was replaced, or a
 * profiler listens to the range that it marks, or minato._torch, which would know, is not built.
 * Returns -1 with an exception. */
static int
watched(struct mn_state *st)
{
    if (st->plain == NULL || st->plain->profiled()) {
        return 1;
    }
    PyObject *next = PyObject_GetAttr(st->torch_iterator, st->str_next);
    Py_XDECREF(next);
    return next == NULL ? -1 : next != st->torch_next;
}

/* progress.head += 1 */
static int
count_on(struct mn_state *st, PyObject *progress)
{
    PyObject *head = PyObject_GetAttr(progress, st->str_head);
    Py_ssize_t n = head == NULL ? -1 : PyLong_AsSsize_t(head);
    Py_XDECREF(head);
    head = n < 0 ? NULL : PyLong_FromSsize_t(n + 1);
    int rc = head == NULL ? -1 : PyObject_SetAttr(progress, st->str_head, head);
    Py_XDECREF(head);
    return rc;
}

/* Reports to the engine that one batch is delivered. Returns 0, or -1 with an exception. */
static int
tell(PyObject *engine)
{
    struct mn_engine *e;
    Py_BEGIN_CRITICAL_SECTION(engine); /* so that it is not closed meanwhile */
    e = mn_engine_get(engine);
    if (e != NULL) {
        mn_engine_span_end(e, true, false);
    }
    Py_END_CRITICAL_SECTION();
    return e != NULL ? 0 : -1;
}

static PyObject *
deliver(struct mn_hands_out *h, PyObject *grant)
{
    PyObject *engine = PyTuple_GET_ITEM(grant, 2);
    if (mn_engine_get(engine) == NULL || count_on(h->st, PyTuple_GET_ITEM(grant, 3)) < 0) {
        return NULL;
    }
    PyObject *entry = PyObject_CallMethodNoArgs(PyTuple_GET_ITEM(grant, 1), h->st->str_popleft);
    if (entry == NULL) {
        return NULL;
    }
    PyObject *batch = tell(engine) == 0 ? Py_NewRef(PyList_GET_ITEM(entry, 1)) : NULL;
    Py_DECREF(entry);
    h->yielded += batch != NULL;
    return batch;
}

static PyObject *
next(PyObject *self)
{
    struct mn_hands_out *h = (struct mn_hands_out *)self;
    int seen = watched(h->st);
    if (seen != 0) {
        return seen < 0 ? NULL
                        : PyObject_CallMethodOneArg(h->st->torch_iterator, h->st->str_next, self);
    }
    PyObject *grant, *batch = NULL;
    Py_BEGIN_CRITICAL_SECTION(self); /* batches must be delivered in the order of their counts */
    grant = take_one(h);
    if (grant != NULL) {
        batch = deliver(h, grant);
    }
    Py_END_CRITICAL_SECTION();
    if (grant == NULL) {
        return PyObject_CallMethodNoArgs(self, h->st->str__next);
    }
    Py_DECREF(grant);
    return batch;
}

static int
clear(PyObject *self)
{
    exchange(self, 0, NULL);
    return 0;
}

static void
dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((struct mn_hands_out *)self)->grant);
    mn_free_object(self);
}

static PyObject *
new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyTypeObject *own = type; /* subclasses have no state of the C module */
    while (own->tp_dealloc != dealloc) {
        own = own->tp_base;
    }
    struct mn_hands_out *h = (struct mn_hands_out *)type->tp_alloc(type, 0);
    if (h != NULL) {
        h->st = PyType_GetModuleState(own);
    }
    return (PyObject *)h;
}

PyDoc_STRVAR(grant_doc,
"_grant(count, prefetched, engine, progress)\n\n"
"The next count calls of next() may return batches of the deque prefetched, of [what, batch].\n"
"Each is reported to the engine and counted in progress.head. 0 revokes that.");

static PyObject *
grant(PyObject *self, PyObject *args)
{
    PyObject *prefetched, *engine, *progress;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "n|OOO", &count, &prefetched, &engine, &progress)) {
        return NULL;
    }
    bool some = count > 0 && PyTuple_GET_SIZE(args) == 4;
    exchange(self, some ? count : 0, some ? args : NULL);
    Py_RETURN_NONE;
}

static int
traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((struct mn_hands_out *)self)->grant);
    return 0;
}

static PyMethodDef methods[] = {
    {"_grant", grant, METH_VARARGS, grant_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_num_yielded", T_PYSSIZET, offsetof(struct mn_hands_out, yielded), 0,
     PyDoc_STR("torch's count of delivered batches")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_iternext, next},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_doc, PyDoc_STR("Base of iterators whose _next() makes the next batch.")},
    {0, NULL},
};

PyType_Spec mn_hands_out_spec = {"minato._core.HandsOut", sizeof(struct mn_hands_out), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE
                                    | Py_TPFLAGS_HAVE_GC, slots};
