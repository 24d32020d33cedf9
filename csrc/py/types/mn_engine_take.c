/* mn_engine_take.c - done blocks of an Engine as batches.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_engine_snapshot.h"
#include "py/types/mn_engine_object.h"
#include "py/transport/mn_layout.h"

/* Every row written in place, whole, and nothing in an envelope. */
static bool
all_in_rows(struct mn_engine *e, const struct mn_layout *l, uint64_t off)
{
    const struct mn_block *block = mn_block_at(mn_engine_shm(e), off);
    if (mn_layout_has_objects(l)) {
        return false;
    }
    return block->ntasks == 0 || (block->layout != 0 && mn_engine_in_rows(e, off));
}

/* At the ceiling the caller gets copies: half of the limit may be kept by it. */
static bool
must_copy(struct mn_engine *e, const struct mn_layout *l, uint32_t nrows)
{
    uint64_t bytes = 0;
    for (uint32_t f = 0; f < mn_layout_nfields(l); f++) {
        bytes += mn_layout_row_bytes(l)[f] * nrows;
    }
    return !mn_engine_may_keep(e, bytes);
}

static int
layout_arg(PyObject *self, PyObject *layout, struct mn_state **st)
{
    *st = mn_state_of_type(Py_TYPE(self));
    if (*st != NULL && !Py_IS_TYPE(layout, (*st)->layout_type)) {
        PyErr_SetString(PyExc_TypeError, "layout must be a Layout");
        *st = NULL;
    }
    return *st != NULL ? 0 : -1;
}

/* A class of the program's may have been called, and have closed the engine: what was read after
 * that are no bytes of the batch. */
static PyObject *
unless_closed(PyObject *self, PyObject *made)
{
    if (made != NULL && mn_engine_get(self) == NULL) {
        Py_CLEAR(made);
    }
    return made;
}

/* objects: as in decode, NULL for None. Of a block that is not full the batch is a copy, so that
 * nobody keeps the rest of it. */
static PyObject *
decode(PyObject *self, struct mn_state *st, struct mn_engine *e, uint64_t off, PyObject *layout,
       PyObject *objects, uint32_t nrows)
{
    struct mn_layout *l = (struct mn_layout *)layout;
    const struct mn_block *block = mn_block_at(mn_engine_shm(e), off);
    bool copy = nrows < block->nrows || must_copy(e, l, nrows);
    if (objects == NULL && !all_in_rows(e, l, off)) {
        Py_RETURN_NONE;
    }
    mn_engine_pin(e);
    PyObject *batch = mn_layout_decode(st, l, e, off, nrows, objects, copy);
    mn_engine_unpin(e);
    return unless_closed(self, batch);
}

const char mn_engine_decode_doc[] =
    "decode(block, layout, objects, nrows=all) -> batch | None\n\n"
    "The batch of a done block whose rows, or the first nrows of them, were written in place.\n"
    "objects: one list a row for a layout with object leaves; with None such a block, one with\n"
    "envelopes, or one without rows gives None.";

PyObject *
mn_engine_py_decode(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    struct mn_state *st;
    unsigned long long off;
    PyObject *layout, *objects;
    unsigned int nrows = UINT32_MAX;
    if (e == NULL || !PyArg_ParseTuple(args, "KOO|I", &off, &layout, &objects, &nrows)
        || layout_arg(self, layout, &st) < 0) {
        return NULL;
    }
    uint32_t all = mn_block_at(mn_engine_shm(e), off)->nrows;
    return decode(self, st, e, off, layout, objects != Py_None ? objects : NULL,
                  nrows < all ? nrows : all);
}

const char mn_engine_take_doc[] =
    "take(sequence, block, layout) -> batch | None\n\n"
    "decode(block, layout, None) and taken(sequence, block) of a planned block that next() gave.\n"
    "None, and nothing done, where that is not all there is to do: the block has lost a task, was\n"
    "made without a layout, or decode gives None.";

PyObject *
mn_engine_py_take(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    struct mn_state *st;
    unsigned long long sequence, off;
    PyObject *layout;
    if (e == NULL || !PyArg_ParseTuple(args, "KKO", &sequence, &off, &layout)
        || layout_arg(self, layout, &st) < 0) {
        return NULL;
    }
    if (mn_block_at(mn_engine_shm(e), off)->layout == 0 || mn_engine_poll(e, off) != MN_BLOCK_DONE) {
        Py_RETURN_NONE;
    }
    PyObject *batch = decode(self, st, e, off, layout, NULL, mn_block_at(mn_engine_shm(e), off)->nrows);
    if (batch != Py_None && ((struct mn_engine_object *)self)->engine == e) {
        mn_engine_taken(e, sequence, off);
    }
    return batch;
}

PyObject *
mn_engine_py_row(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    struct mn_state *st;
    unsigned long long off;
    unsigned int row;
    PyObject *layout, *objects;
    if (e == NULL || !PyArg_ParseTuple(args, "KOIO", &off, &layout, &row, &objects)
        || layout_arg(self, layout, &st) < 0) {
        return NULL;
    }
    mn_engine_pin(e);
    PyObject *sample = mn_layout_row(st, (struct mn_layout *)layout, e, off, row,
                                     objects == Py_None ? NULL : objects);
    mn_engine_unpin(e);
    return unless_closed(self, sample);
}
