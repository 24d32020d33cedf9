/* mn_worker_type.c - minato._core.Worker: the hot loop of a worker process.
 * SPDX-License-Identifier: Apache-2.0
 *
 * next() claims tasks and runs those that need none of our Python code. It
 * returns only for tasks that do: whole batches, results that do not fit rows, exceptions, stop.
 * Python then sends the result with finish().
 */
#include "base/mn_base.h"
#include "engine/mn_batches.h"
#include "py/seeding/mn_seed.h"
#include "py/transport/mn_layout.h"
#include "workers/mn_records.h"
#include "workers/mn_tasks_and_retries.h"

#include <malloc.h>
#include <string.h>
#include <unistd.h>

struct mn_worker_object {
    PyObject_HEAD
    struct mn_worker_side side;
    PyObject *segment;
    PyObject *dataset;
    PyObject *seeder;     /* or None */
    PyObject *open_layout; /* bytes -> Layout */
    PyObject *load_index; /* bytes -> object */
    PyObject *set_epoch;  /* int -> dataset of that epoch: sets the dataset's epoch; or None */
    uint64_t user_epoch;  /* 1 + the last epoch that was set */
    uint64_t epoch;       /* of the last task; UINT64_MAX: there was none */
    bool looked;          /* at what samples of an earlier epoch have changed in the dataset */
    PyObject *layouts;    /* dict: offset -> Layout */
    PyObject *indices;    /* unpickled indices of the block with this serial */
    uint32_t indices_of;
    bool goes_on;         /* continue after a sample that has failed: Python handles that sample */
    bool thread;          /* a thread of the trainer: it manages its own entry
                           * (workers/mn_tasks_and_retries.h) */
    struct mn_native_part *native; /* makes the samples; NULL: Python does */
    bool holding;         /* `task` is RUNNING under us */
    uint32_t task;
    uint32_t collate;     /* claimed when its block's last part was done, or MN_NO_TASK */
    struct mn_worker_clock clock;
};

/* ---- Running a task: seed, dataset[index], write the row ----
 *
 * Samples that do not fit their row, and exceptions, become extras, which Python sends in the
 * task's envelope. Samples that Python has fetched are written to rows all together.
 */

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
    PyObject *value = mn_fetch_error();
    int rc = add_extra(extras, row, what, value);
    Py_XDECREF(value);
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

/* Makes the sample of a row; NULL with an exception. made() in minato/workers/fetch_or_skip.py does
 * the same. */
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
        if (layout->nobjects != 0) {
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

/* Returns the indices of a batch, those of spare samples at the end. */
static PyObject *
load_indices(struct mn_worker_object *o, struct mn_block *b)
{
    PyObject *sent = mn_sent_indices(b);
    if (sent == NULL || b->index_kind == MN_INDEX_INT64) {
        return sent;
    }
    PyObject *indices = PyObject_CallOneArg(o->load_index, sent);
    Py_DECREF(sent);
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

/* Ends the current task, whose result is in its place. */
static void
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
        mn_a64_store_relaxed(&o->side.me->row, row);
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

/* Calls set_epoch of a dataset before the first sample of a new epoch, or has the source of the
 * samples look for changes of the dataset (-1). Its generators are in the state of some earlier
 * sample, so they are seeded before set_epoch, alike in each worker. The result of the call makes
 * the samples: the dataset, or an object that raises in its place; None: as before. Returns 0 or
 * -1. */
static int
begin_epoch(struct mn_worker_object *o, const struct mn_block *b)
{
    bool told = b->user_epoch != o->user_epoch && b->user_epoch != 0;
    bool next = b->epoch != o->epoch && o->epoch != UINT64_MAX;
    o->epoch = b->epoch;
    if (o->set_epoch == Py_None || (!told && !next)) {
        return 0;
    }
    o->user_epoch = told ? b->user_epoch : o->user_epoch;
    if (told && b->seeded && o->seeder != Py_None
        && mn_seeder_seed(o->seeder, b->base_seed, b->epoch, b->user_epoch,
                          MN_SEED_SET_EPOCH) < 0) {
        return -1;
    }
    long long epoch = told ? (long long)b->user_epoch - 1 : -1;
    PyObject *r = PyObject_CallFunction(o->set_epoch, "L", epoch);
    if (r == NULL) {
        return -1;
    }
    if (r != Py_None) {
        Py_SETREF(o->dataset, r);
    }
    else {
        Py_DECREF(r);
        if (o->looked) {
            return 0;
        }
    }
    o->looked = true;
    return o->seeder != Py_None && mn_seeder_look(o->seeder) < 0 ? -1 : 0;
}

/* Begins the task that was claimed. Returns what Python must do, to be answered with finish(); NULL
 * with an exception that ends the worker. NULL without an exception: done, claim the next; or, in a
 * thread, it is over. */
static PyObject *
mn_worker_run_task(struct mn_state *st, struct mn_worker_object *o)
{
    const struct mn_task *t = &o->side.held;
    struct mn_block *b = mn_block_at(&o->side.shm, t->block_off);
    o->holding = true;
    mn_worker_begin(&o->side, &o->clock);
    if (begin_epoch(o, b) < 0) {
        return NULL;
    }
    if (t->kind != MN_KIND_ROWS && t->kind != MN_KIND_SAMPLES && t->kind != MN_KIND_PART) {
        return mn_task_tuple(st, t, b, load_indices(o, b), Py_NewRef(Py_None));
    }
    PyObject *extras = run_rows(st, o, t, b);
    if (extras == NULL) {
        return NULL;
    }
    if (PyList_GET_SIZE(extras) != 0) { /* a failed sample may be replaced by another one */
        PyObject *indices = o->goes_on ? load_indices(o, b) : Py_NewRef(Py_None);
        return mn_task_tuple(st, t, b, indices, extras);
    }
    Py_DECREF(extras); /* all of it is in rows: Python has nothing left to do */
    mn_worker_finish_task(o);
    return NULL;
}

static PyObject *
worker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "number", "dataset", "seeder", "open_layout",
                            "load_index", "set_epoch", "user_epoch", "goes_on", "thread",
                            "native", NULL};
    struct mn_state *st = PyType_GetModuleState(type);
    PyObject *segment, *dataset, *seeder, *open_layout, *load_index, *set_epoch = Py_None;
    PyObject *native = NULL;
    unsigned int number;
    unsigned long long user_epoch = 0;
    int goes_on = 0, thread = 0;
    if (mn_find_records(st) < 0
        || !PyArg_ParseTupleAndKeywords(args, kwargs, "O!IOOOO|OKppO!", names, st->segment_type,
                                        &segment, &number, &dataset, &seeder, &open_layout,
                                        &load_index, &set_epoch, &user_epoch, &goes_on,
                                        &thread, &PyTuple_Type, &native)) {
        return NULL;
    }
    struct mn_worker_object *o = (struct mn_worker_object *)type->tp_alloc(type, 0);
    if (o == NULL) {
        return NULL;
    }
    o->segment = Py_NewRef(segment);
    o->dataset = Py_NewRef(dataset);
    o->seeder = Py_NewRef(seeder);
    o->open_layout = Py_NewRef(open_layout);
    o->load_index = Py_NewRef(load_index);
    o->set_epoch = Py_NewRef(set_epoch);
    o->user_epoch = user_epoch;
    o->epoch = UINT64_MAX;
    o->goes_on = goes_on != 0;
    o->thread = thread != 0;
    o->collate = MN_NO_TASK;
    o->layouts = PyDict_New();
    struct mn_segment *s = (struct mn_segment *)segment;
    if (number >= s->shm.ctl->nworkers || mn_worker_attach(&o->side, &s->shm, number) < 0) {
        Py_DECREF(o);
        return PyErr_Format(PyExc_ValueError, "no such worker");
    }
    o->side.trainer = o->thread ? NULL : &s->trainer;
    o->native = native != NULL ? mn_native_open(native) : NULL;
    if (o->layouts == NULL || (native != NULL && o->native == NULL)) {
        Py_CLEAR(o);
    }
    return (PyObject *)o;
}

/* The objects of the program's that may refer to the worker. */
#define OBJECTS(X)                                                                       \
    X(dataset) X(seeder) X(open_layout) X(load_index) X(set_epoch) X(layouts) X(indices)

static int
worker_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    Py_VISIT(Py_TYPE(self));
#define VISIT(name) Py_VISIT(o->name);
    OBJECTS(VISIT)
    return 0;
}

static int
worker_clear(PyObject *self)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
#define CLEAR(name) Py_CLEAR(o->name);
    OBJECTS(CLEAR)
    return 0;
}

static void
worker_dealloc(PyObject *self)
{
    PyObject_GC_UnTrack(self);
    worker_clear(self);
    mn_native_close(((struct mn_worker_object *)self)->native);
    /* Not earlier: it keeps the mapping alive, which side points into. */
    Py_CLEAR(((struct mn_worker_object *)self)->segment);
    mn_free_object(self);
}

/* Returns MN_OK, MN_EMPTY after at most a second without a task, or MN_CLOSED on stop. */
static int
claim(struct mn_worker_object *o)
{
    int rc = mn_worker_try(&o->side, &o->task);
    if (rc == MN_EMPTY) {
        rc = MN_WITHOUT_GIL(mn_worker_claim(&o->side, MN_WORKER_IDLE_NS, &o->task));
        mn_worker_waited(&o->clock);
    }
    return rc;
}

/* Does the same for a thread, which exits and comes back by itself. Returns MN_OK, or MN_CLOSED: it
 * is over. */
static int
claim_in_thread(struct mn_worker_object *o)
{
    int rc;
    while ((rc = claim(o)) != MN_OK && !mn_entry_over(&o->side)) {
        Py_BEGIN_ALLOW_THREADS
        if (rc == MN_CLOSED) {
            mn_entry_leave(&o->side);
        }
        (void)mn_entry_begin(&o->side);
        Py_END_ALLOW_THREADS
        mn_worker_waited(&o->clock);
    }
    return mn_entry_over(&o->side) ? MN_CLOSED : MN_OK;
}

PyDoc_STRVAR(next_doc,
"next() -> Task | None | False\n\n"
"Runs tasks until one needs Python, to be answered with finish(); None after at most\n"
"a second without a task (check the trainer; never in a thread of it); False when the\n"
"loader stops.");

static PyObject *
worker_next(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    if (o->native != NULL) {
        PyObject *todo = mn_native_next(st, o->native, &o->side, &o->clock, &o->task);
        o->holding = todo != Py_False;
        return todo;
    }
    for (;;) {
        int rc = MN_OK;
        if (o->collate != MN_NO_TASK) {
            o->task = o->collate;
            o->collate = MN_NO_TASK;
        }
        else {
            rc = o->thread ? claim_in_thread(o) : claim(o);
        }
        if (rc == MN_OK) {
            PyObject *todo = mn_worker_run_task(st, o);
            if (todo != NULL || PyErr_Occurred()) {
                return todo;
            }
        }
        /* between the row loop and the next claim: checks signals of a worker that never sleeps */
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
        if (rc == MN_CLOSED) {
            Py_RETURN_FALSE;
        }
        if (rc == MN_EMPTY) {
            Py_RETURN_NONE;
        }
    }
}

/* ---- results that do not fit rows ----------------------------------------------------- */

PyDoc_STRVAR(finish_doc,
"finish(pickle, buffers) -> bool\n\n"
"Sends the result of the task that next() returned: a pickle (bytes) and its buffers out\n"
"of band (C-contiguous), or None if all of it is in rows. False if the loader stopped\n"
"meanwhile.");

static PyObject *
worker_finish(PyObject *self, PyObject *args)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    const char *pickle;
    Py_ssize_t pickle_bytes;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "z#O!", &pickle, &pickle_bytes, &PyList_Type, &list)) {
        return NULL;
    }
    if (!o->holding) {
        return PyErr_Format(PyExc_RuntimeError, "no task to finish");
    }
    int rc = pickle != NULL ? mn_envelope_send(&o->side, o->task, pickle, pickle_bytes, list) : 0;
    if (rc < 0) {
        return NULL;
    }
    if (rc == 0) {
        mn_worker_finish_task(o);
    }
    return PyBool_FromLong(rc == 0);
}

/* Copies a part: a collate_fn may write into samples and keep them, and its task is run again if
 * this worker dies. */
static PyObject *
copy_of(void *at, const struct mn_envelope_part *part)
{
    return PyByteArray_FromStringAndSize((const char *)at + part->at, (Py_ssize_t)part->bytes);
}

static PyObject *
part_of(struct mn_worker_object *o, uint32_t task)
{
    const struct mn_ctl *c = o->side.shm.ctl;
    const struct mn_task *t = mn_task_at(&o->side.shm, task);
    uint64_t off = t->env_off, len = t->env_len;
    char *at = mn_at(&o->side.shm, off);
    struct mn_envelope env;
    /* written by another worker: treat a damaged one as missing */
    if (off < c->arena_off || off > c->total_bytes || len > c->total_bytes - off
        || !mn_envelope_look(at, len, &env)) {
        Py_RETURN_NONE;
    }
    PyObject *sent = mn_envelope_read(at, len, &env, copy_of, at);
    if (sent == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear();
        Py_RETURN_NONE;
    }
    return sent;
}

PyDoc_STRVAR(parts_doc,
"parts() -> [(pickle, buffers) | None]\n\n"
"The results of the parts of the current collate task's batch, in row order; None if there\n"
"was no memory for one. Buffers are the caller's own and can be written to.");

static PyObject *
worker_parts(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    const struct mn_task *own = o->holding ? &o->side.held : NULL;
    if (own == NULL || own->kind != MN_KIND_COLLATE) {
        return PyErr_Format(PyExc_RuntimeError, "the worker has no collate task");
    }
    struct mn_block *b = mn_block_at(&o->side.shm, own->block_off);
    const uint32_t *tasks = mn_block_tasks(b);
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i + 1 < b->ntasks; i++) {
        struct mn_task *t = mn_task_at(&o->side.shm, tasks[i]); /* DONE, seen with [C1] */
        bool sent = (t->flags & MN_FLAG_ENVELOPE) != 0;
        mn_list_add(&out, sent ? part_of(o, tasks[i]) : Py_NewRef(Py_None));
    }
    return out;
}

PyDoc_STRVAR(place_doc,
"place(samples, objects) -> bool\n\n"
"Writes the samples of the current batch, a list, as the first rows of its block. For each\n"
"sample, a list of its objects that are not row data is appended to objects. False if some do\n"
"not fit, or there is no memory for rows.");

static PyObject *
worker_place(PyObject *self, PyObject *args)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    PyObject *samples, *objects;
    if (!PyArg_ParseTuple(args, "OO!", &samples, &PyList_Type, &objects)) {
        return NULL;
    }
    if (!o->holding) {
        return PyErr_Format(PyExc_RuntimeError, "no current task");
    }
    struct mn_block *b = mn_block_at(&o->side.shm, o->side.held.block_off);
    Py_ssize_t n = PyList_CheckExact(samples) ? PyList_GET_SIZE(samples) : 0;
    if (b->layout == 0 || n == 0 || n > (Py_ssize_t)b->nrows) {
        Py_RETURN_FALSE;
    }
    struct mn_layout *layout = layout_of(st, o, b);
    int rc = layout != NULL ? mn_layout_encode_list(st, layout, samples, &o->side.shm, b,
                                                    (uint32_t)n, objects)
                            : -1;
    struct mn_report *reports = mn_block_reports(b);
    for (uint32_t row = 0; rc == 1 && row < n; row++) {
        reports[row].status = MN_ROW_WRITTEN;
    }
    return rc < 0 ? NULL : PyBool_FromLong(rc);
}

PyDoc_STRVAR(at_doc,
"at(row): this row of the current batch is fetched next; named if the worker dies with it.");

static PyObject *
worker_at(PyObject *self, PyObject *arg)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    unsigned long row = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    mn_a64_store_relaxed(&o->side.me->row, row);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(mark_doc,
"mark(row): this row of the current task has just been fetched; teaches its cost. Ends a\n"
"thread by SystemExit once the other rows are not needed.");

static PyObject *
worker_mark(PyObject *self, PyObject *arg)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    unsigned long row = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    const struct mn_task *t = o->holding ? &o->side.held : NULL;
    if (o->thread && mn_entry_over(&o->side)) {
        PyErr_SetNone(PyExc_SystemExit);
        return NULL;
    }
    if (t != NULL && row >= t->row0 && row < t->row0 + t->nrows) {
        struct mn_report *r = mn_block_reports(mn_block_at(&o->side.shm, t->block_off)) + row;
        r->wall_ns = mn_worker_lap(&o->clock);
        if (o->native != NULL) {
            r->status = MN_ROW_ENVELOPE;
        }
        mn_a64_store_relaxed(&o->side.me->row, row + 1);
    }
    Py_RETURN_NONE;
}

static PyObject *
worker_ready(PyObject *self, PyObject *args)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    unsigned long long states[3] = {0, 0, 0};
    if (!PyArg_ParseTuple(args, "|KKK", &states[0], &states[1], &states[2])) {
        return NULL;
    }
    for (int i = 0; i < 3; i++) {
        o->side.me->init_states[i] = states[i];
    }
    if (o->thread) {
        (void)MN_WITHOUT_GIL(mn_entry_begin(&o->side));
        mn_worker_waited(&o->clock);
        Py_RETURN_NONE;
    }
    /* Large arrays that a dataset makes and drops for each sample should come from the heap again,
     * not from the kernel. Page faults on fresh blocks cost more than the copy. 32 MiB is the
     * largest threshold that glibc accepts. */
    (void)mallopt(M_MMAP_THRESHOLD, 32 * 1024 * 1024);
    (void)mallopt(M_TRIM_THRESHOLD, 128 * 1024 * 1024);
    mn_worker_waited(&o->clock);
    o->side.me->began = 1;
    mn_a32_store_seqcst(&o->side.me->state, MN_WORKER_READY); /* [R1] */
    Py_RETURN_NONE;
}

static PyMethodDef worker_methods[] = {
    {"ready", worker_ready, METH_VARARGS,
     PyDoc_STR("ready(random=0, numpy=0, torch=0): the loop begins. Hashes of the states in "
               "which\n"
               "worker_init_fn has left the generators; 0 if it has not changed them.")},
    {"next", worker_next, METH_NOARGS, next_doc},
    {"at", worker_at, METH_O, at_doc},
    {"mark", worker_mark, METH_O, mark_doc},
    {"place", worker_place, METH_VARARGS, place_doc},
    {"parts", worker_parts, METH_NOARGS, parts_doc},
    {"finish", worker_finish, METH_VARARGS, finish_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_new, worker_new},
    {Py_tp_dealloc, worker_dealloc},
    {Py_tp_traverse, worker_traverse},
    {Py_tp_clear, worker_clear},
    {Py_tp_methods, worker_methods},
    {Py_tp_doc, PyDoc_STR("Worker(segment, number, dataset, seeder, open_layout, load_index, "
                          "set_epoch=None, user_epoch=0, goes_on=False,\n"
                          "thread=False, native=()): the worker's side of the loader's mapping.\n"
                          "goes_on: continue after a failed sample, to the end of the task.\n"
                          "thread: of the process that made the mapping, without a zygote.\n"
                          "native: of a thread whose samples a pipeline in C makes:\n"
                          "(capsule, stream, ranks, indices); tasks then have indices.")},
    {0, NULL},
};

PyType_Spec mn_worker_spec = {"minato._core.Worker", sizeof(struct mn_worker_object), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC
                                  | Py_TPFLAGS_IMMUTABLETYPE, worker_slots};
