/* mn_engine_type_take.c - done blocks of an Engine as batches.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine_snapshot.h"
#include "py/types/mn_engine_object.h"
#include "py/transport/mn_layout.h"

/* Returns whether every row was written in place and whole, and no envelope exists. */
static bool
all_in_rows(struct mn_engine *e, const struct mn_layout *l, uint64_t off)
{
    const struct mn_block *block = mn_block_at(mn_engine_shm(e), off);
    if (mn_layout_has_objects(l)) {
        return false;
    }
    return block->ntasks == 0 || (block->layout != 0 && mn_engine_in_rows(e, off));
}

/* At the ceiling the caller gets copies: it may retain half of the limit. */
static bool
must_copy(struct mn_engine *e, const struct mn_layout *l, uint32_t nrows)
{
    uint64_t bytes = 0;
    for (uint32_t f = 0; f < mn_layout_nfields(l); f++) {
        bytes += mn_layout_row_bytes(l)[f] * nrows;
    }
    return !mn_engine_may_retain(e, bytes);
}

static bool
is_layout(PyObject *self, PyObject *layout)
{
    const struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    bool is = st != NULL && Py_IS_TYPE(layout, st->layout_type);
    if (st != NULL && !is) {
        PyErr_SetString(PyExc_TypeError, "layout must be a Layout");
    }
    return is;
}

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

/* objects: as in decode(), NULL for None. If the block is not full the batch is a copy, so that the
 * caller does not retain the rest of it. */
static PyObject *
decode(PyObject *self, struct mn_engine *e, PyObject *block, PyObject *layout, PyObject *objects,
       uint32_t nrows)
{
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    struct mn_layout *l = (struct mn_layout *)layout;
    uint64_t off = ((struct mn_block_object *)block)->off;
    uint32_t all = mn_block_at(mn_engine_shm(e), off)->nrows;
    if (objects == NULL && !all_in_rows(e, l, off)) {
        Py_RETURN_NONE;
    }
    if (!follows(self, e, block, layout)) {
        return NULL;
    }
    nrows = nrows < all ? nrows : all;
    if (objects != NULL && !are_written(e, off, 0, nrows)) {
        return NULL;
    }
    bool copy = nrows < all || must_copy(e, l, nrows);
    mn_engine_pin(e);
    PyObject *batch = mn_layout_decode(st, l, e, off, nrows, objects, copy);
    mn_engine_unpin(e);
    return unless_closed(self, batch);
}

const char mn_engine_decode_doc[] =
    "decode(block, layout, objects, nrows=all) -> batch | None\n\n"
    "The batch of a done block whose rows, or the first nrows of them, were written in place.\n"
    "objects: one list for each row, for a layout with object leaves. With None such a block, "
    "one\n"
    "with envelopes, or one without rows gives None.";

PyObject *
mn_engine_py_decode(PyObject *self, PyObject *args)
{
    PyObject *block, *layout, *objects;
    unsigned int nrows = UINT32_MAX;
    uint64_t off;
    if (!PyArg_ParseTuple(args, "OOO|I", &block, &layout, &objects, &nrows)
        || !is_layout(self, layout)) {
        return NULL;
    }
    struct mn_engine *e = mn_engine_of_done(self, block, &off);
    return e == NULL ? NULL
                     : decode(self, e, block, layout, objects != Py_None ? objects : NULL, nrows);
}

const char mn_engine_take_doc[] =
    "take(block, layout) -> batch | None\n\n"
    "decode(block, layout, None) and taken(block) for a block that next() gave. Returns None and\n"
    "does nothing if more is needed: the block has lost a task, was made without a layout, or\n"
    "decode gives None.";

PyObject *
mn_engine_py_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t off;
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "take() takes two arguments");
        return NULL;
    }
    PyObject *block = args[0], *layout = args[1];
    struct mn_engine *e = is_layout(self, layout) ? mn_engine_of_block(self, block, &off) : NULL;
    if (e == NULL) {
        return NULL;
    }
    uint64_t sequence = ((struct mn_block_object *)block)->sequence;
    if (sequence == MN_UNPLANNED) {
        PyErr_SetString(PyExc_ValueError, "use decode() for blocks that were not planned");
        return NULL;
    }
    if (mn_block_at(mn_engine_shm(e), off)->layout == 0
        || mn_engine_poll(e, off) != MN_BLOCK_DONE) {
        Py_RETURN_NONE;
    }
    PyObject *batch = decode(self, e, block, layout, NULL, UINT32_MAX);
    bool open = ((struct mn_engine_object *)self)->engine == e;
    if (batch != Py_None && open && mn_engine_taken(e, sequence, off) < 0 && batch != NULL) {
        Py_CLEAR(batch);
        PyErr_SetString(PyExc_ValueError, "the block is not what next() gave, or was taken");
    }
    return batch;
}

PyObject *
mn_engine_py_row(PyObject *self, PyObject *args)
{
    PyObject *block, *layout, *objects;
    unsigned int row;
    uint64_t off;
    if (!PyArg_ParseTuple(args, "OOIO", &block, &layout, &row, &objects)
        || !is_layout(self, layout)) {
        return NULL;
    }
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    if (e == NULL || !follows(self, e, block, layout)) {
        return NULL;
    }
    if (row >= mn_block_at(mn_engine_shm(e), off)->nrows) {
        PyErr_SetString(PyExc_ValueError, "the block has no such row");
        return NULL;
    }
    if (!are_written(e, off, row, 1)) {
        return NULL;
    }
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    mn_engine_pin(e);
    PyObject *sample = mn_layout_row(st, (struct mn_layout *)layout, e, off, row,
                                     objects == Py_None ? NULL : objects);
    mn_engine_unpin(e);
    return unless_closed(self, sample);
}
