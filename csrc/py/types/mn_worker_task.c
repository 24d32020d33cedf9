/* mn_worker_task.c - runs a task in a worker: seed, dataset[index], write the row.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Samples that do not fit their row, and exceptions, become extras, which Python sends in the
 * task's envelope. Samples that Python has fetched are written to rows all together.
 */
#include <string.h>

#include "py/seeding/mn_seed.h"
#include "py/module/mn_named_tuples.h"
#include "py/module/mn_critical_section.h"
#include "py/transport/mn_envelope.h"
#include "py/types/mn_index.h"
#include "py/types/mn_worker_object.h"
#include "workers/mn_thread_entry.h"

/* ---- one row ------------------------------------------------------------------------ */

static int
add_extra(PyObject *extras, uint32_t row, enum mn_extra what, PyObject *o)
{
    PyObject *t = Py_BuildValue("(IiO)", row, (int)what, o);
    int rc = t != NULL ? PyList_Append(extras, t) : -1;
    Py_XDECREF(t);
    return rc;
}

/* Turns a sample's exception into an entry of the envelope. One that is no Exception
 * (KeyboardInterrupt, SystemExit) ends the worker, except a SystemExit if the worker continues
 * after failed samples. Returns 0 or -1. */
static int
add_error(const struct mn_worker_object *o, PyObject *extras, uint32_t row, enum mn_extra what)
{
    bool exits = o->goes_on && PyErr_ExceptionMatches(PyExc_SystemExit);
    if (!exits && !PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    PyErr_NormalizeException(&type, &value, &tb);
    if (tb != NULL) {
        PyException_SetTraceback(value, tb);
    }
    int rc = add_extra(extras, row, what, value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(tb);
    return rc;
}

static PyObject *
index_of(struct mn_worker_object *o, struct mn_block *b, uint32_t row)
{
    if (b->index_kind == MN_INDEX_INT64) {
        return PyLong_FromLongLong(((const int64_t *)mn_block_index(b))[row]);
    }
    return PyList_GetItemRef(o->indices, row);
}

/* Makes the sample of a row; NULL with an exception. made() in minato/workers/fetching.py does the
 * same. */
static PyObject *
make_sample(struct mn_worker_object *o, struct mn_block *b, uint32_t row)
{
    bool seeded = b->seeded && o->seeder != Py_None;
    if (seeded
        && mn_seeder_seed(o->seeder, b->base_seed, b->epoch, mn_seed_place(b, row),
                          MN_SEED_SAMPLE) < 0) {
        return NULL;
    }
    PyObject *index = index_of(o, b, row);
    PyObject *sample = index != NULL ? PyObject_GetItem(o->dataset, index) : NULL;
    Py_XDECREF(index);
    if (seeded && sample != NULL && mn_seeder_renew(o->seeder) < 0) {
        Py_CLEAR(sample);
    }
    return sample;
}

/* Returns 1: in place; 0: into the envelope; -1: the worker ends; -2: the task ends (an
 * exception). */
static int
do_row(struct mn_state *st, struct mn_worker_object *o, struct mn_block *b,
       struct mn_layout *layout, uint32_t row, PyObject *extras)
{
    PyObject *sample = make_sample(o, b, row);
    if (sample == NULL) {
        return add_error(o, extras, row, MN_EXTRA_ERROR) < 0 ? -1 : -2;
    }
    int rc = 0;
    PyObject *objects = NULL;
    if (layout != NULL) {
        if (mn_layout_has_objects(layout)) {
            objects = PyList_New(0);
        }
        rc = mn_layout_encode(st, layout, sample, &o->side.shm, b, row, objects);
    }
    if (rc == 1 && objects != NULL) {
        rc = add_extra(extras, row, MN_EXTRA_OBJECTS, objects) < 0 ? -1 : 1;
    }
    else if (rc == 0) {
        rc = add_extra(extras, row, MN_EXTRA_SAMPLE, sample) < 0 ? -1 : 0;
    }
    else if (rc < 0) {
        rc = add_error(o, extras, row, MN_EXTRA_ERROR) < 0 ? -1 : -2;
    }
    Py_XDECREF(objects);
    Py_DECREF(sample);
    return rc;
}

/* ---- one task ----------------------------------------------------------------------- */

static struct mn_layout *
layout_of(struct mn_state *st, struct mn_worker_object *o, struct mn_block *b)
{
    PyObject *key = PyLong_FromUnsignedLong(b->layout);
    PyObject *l = key != NULL ? PyDict_GetItemWithError(o->layouts, key) : NULL; /* borrowed */
    if (l == NULL && key != NULL && !PyErr_Occurred()) {
        const char *at = mn_at(&o->side.shm, b->layout);
        uint64_t n;
        memcpy(&n, at, sizeof(n));
        l = PyObject_CallFunction(o->open_layout, "y#", at + sizeof(n), (Py_ssize_t)n);
        if (l != NULL && !Py_IS_TYPE(l, st->layout_type)) {
            PyErr_SetString(PyExc_TypeError, "open_layout must return a Layout");
            Py_CLEAR(l);
        }
        if (l != NULL && PyDict_SetItem(o->layouts, key, l) < 0) {
            Py_CLEAR(l);
        }
        Py_XDECREF(l); /* the dictionary has a reference */
    }
    Py_XDECREF(key);
    return (struct mn_layout *)l;
}

/* Like mn_layout_encode(), for one sample of many. */
static int
place_row(struct mn_state *st, struct mn_layout *layout, PyObject *sample,
          const struct mn_shm *shm, struct mn_block *b, uint32_t row, PyObject *objects)
{
    PyObject *own = NULL;
    if (mn_layout_has_objects(layout)) {
        own = PyList_New(0);
        if (own == NULL || PyList_Append(objects, own) < 0) {
            Py_XDECREF(own);
            return -1;
        }
        Py_DECREF(own); /* objects has a reference */
    }
    return mn_layout_encode(st, layout, sample, shm, b, row, own);
}

int
mn_worker_place_rows(struct mn_state *st, struct mn_worker_object *o, PyObject *samples,
                     PyObject *objects)
{
    struct mn_block *b = mn_block_at(&o->side.shm, o->side.held.block_off);
    Py_ssize_t n = PyList_CheckExact(samples) ? PyList_GET_SIZE(samples) : 0;
    if (b->layout == 0 || n == 0 || n > (Py_ssize_t)b->nrows) {
        return 0;
    }
    struct mn_layout *layout = layout_of(st, o, b);
    int rc = layout != NULL ? 1 : -1;
    for (uint32_t row = 0; rc == 1 && row < n; row++) {
        PyObject *sample = PyList_GetItemRef(samples, row);
        rc = sample != NULL ? place_row(st, layout, sample, &o->side.shm, b, row, objects) : -1;
        Py_XDECREF(sample);
    }
    struct mn_report *reports = mn_block_reports(b);
    for (uint32_t row = 0; rc == 1 && row < n; row++) {
        reports[row].status = MN_ROW_WRITTEN;
    }
    return rc;
}

static PyObject *
load_indices(struct mn_worker_object *o, struct mn_block *b)
{
    PyObject *pickle = mn_index_pickle(b);
    PyObject *indices = pickle != NULL ? PyObject_CallOneArg(o->load_index, pickle) : NULL;
    Py_XDECREF(pickle);
    return indices;
}

/* Unpickles indices once for all tasks of a block. */
static int
need_indices(struct mn_worker_object *o, struct mn_block *b)
{
    if (b->index_kind == MN_INDEX_INT64 || (o->indices != NULL && o->indices_of == b->serial)) {
        return 0;
    }
    Py_XSETREF(o->indices, load_indices(o, b));
    o->indices_of = b->serial;
    if (o->indices != NULL && !PyList_CheckExact(o->indices)) {
        Py_SETREF(o->indices, PySequence_List(o->indices));
    }
    return o->indices != NULL ? 0 : -1;
}

void
mn_worker_finish_task(struct mn_worker_object *o)
{
    mn_worker_account(&o->side, &o->clock, o->task);
    o->holding = false;
    o->collate = mn_worker_done(&o->side, o->task);
}

/* Runs the rows of a task. Returns the extras; NULL with an exception that ends the worker; NULL
 * without one: the rest is not needed. */
static PyObject *
run_rows(struct mn_state *st, struct mn_worker_object *o, const struct mn_task *t,
         struct mn_block *b)
{
    PyObject *extras = PyList_New(0);
    if (extras == NULL) {
        return NULL;
    }
    struct mn_layout *layout = NULL;
    struct mn_report *reports = mn_block_reports(b);
    if ((t->kind == MN_KIND_ROWS && (layout = layout_of(st, o, b)) == NULL)
        || need_indices(o, b) < 0) {
        if (add_error(o, extras, t->row0, MN_EXTRA_FATAL) < 0) {
            Py_CLEAR(extras);
        }
        return extras;
    }
    for (uint32_t row = t->row0; row < t->row0 + t->nrows; row++) {
        if (o->thread && mn_entry_over(&o->side)) {
            Py_DECREF(extras);
            return NULL;
        }
        mn_a64_store_relaxed(&o->side.me->row, row); /* statistics only */
        int rc = do_row(st, o, b, layout, row, extras);
        if (rc == -1) {
            Py_DECREF(extras);
            return NULL;
        }
        reports[row].wall_ns = mn_worker_lap(&o->clock);
        reports[row].status = rc == 1 ? MN_ROW_WRITTEN : MN_ROW_ENVELOPE;
        if (rc == -2 && !b->apart && !o->goes_on) {
            break; /* torch stops at the first exception of a batch */
        }
    }
    return extras;
}

PyObject *
mn_worker_indices(struct mn_worker_object *o, struct mn_block *b)
{
    return b->index_kind == MN_INDEX_INT64 ? mn_index_list(b) : load_indices(o, b);
}

/* Calls set_epoch of a dataset before the first sample of a new epoch. Its generators are in the
 * state of some earlier sample, so they are seeded first, alike in each worker. The result of the
 * call makes the samples: the dataset, or an object that raises in its place. Returns 0 or -1. */
static int
tell_epoch(struct mn_worker_object *o, const struct mn_block *b)
{
    if (b->user_epoch == o->user_epoch || b->user_epoch == 0 || o->set_epoch == Py_None) {
        return 0;
    }
    o->user_epoch = b->user_epoch;
    if (b->seeded && o->seeder != Py_None
        && mn_seeder_seed(o->seeder, b->base_seed, b->epoch, b->user_epoch,
                          MN_SEED_SET_EPOCH) < 0) {
        return -1;
    }
    PyObject *r = PyObject_CallFunction(o->set_epoch, "K", (unsigned long long)b->user_epoch - 1);
    if (r == NULL) {
        return -1;
    }
    Py_SETREF(o->dataset, r);
    return o->seeder != Py_None && mn_seeder_look(o->seeder) < 0 ? -1 : 0;
}

PyObject *
mn_worker_run_task(struct mn_state *st, struct mn_worker_object *o)
{
    const struct mn_task *t = &o->side.held;
    struct mn_block *b = mn_block_at(&o->side.shm, t->block_off);
    o->holding = true;
    mn_worker_begin(&o->side, &o->clock);
    if (tell_epoch(o, b) < 0) {
        return NULL;
    }
    if (t->kind != MN_KIND_ROWS && t->kind != MN_KIND_SAMPLES && t->kind != MN_KIND_PART) {
        return mn_task_tuple(st, t, b, mn_worker_indices(o, b), Py_NewRef(Py_None));
    }
    PyObject *extras = run_rows(st, o, t, b);
    if (extras == NULL) {
        return NULL;
    }
    if (PyList_GET_SIZE(extras) != 0) {
        return mn_task_tuple(st, t, b, Py_NewRef(Py_None), extras);
    }
    Py_DECREF(extras); /* all of it is in rows: Python has nothing left to do */
    mn_worker_finish_task(o);
    return NULL;
}
