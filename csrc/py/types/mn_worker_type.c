/* mn_worker_type.c - minato._core.Worker: the hot loop of a worker process.
 * SPDX-License-Identifier: Apache-2.0
 *
 * next() claims tasks and runs those that need no Python of ours: seed, dataset[index],
 * write the row.  It returns only for what does: whole batches, results that do not fit
 * rows, exceptions, stop.  Python then sends the result with finish().
 */
#include <malloc.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_error.h"
#include "engine/mn_results.h"
#include "workers/mn_worker_clock.h"
#include "os/mn_clock.h"
#include "os/mn_proc.h"
#include "py/transport/mn_envelope.h"
#include "py/seeding/mn_seed.h"
#include "py/module/mn_state.h"

/* Sleeping workers look this often whether the trainer still lives. */
#define IDLE_NS (INT64_C(1000) * 1000 * 1000)

/* What an envelope entry of a row is; numbers of minato/workers/process.py. */
enum mn_extra { MN_EXTRA_SAMPLE = 0, MN_EXTRA_ERROR = 1, MN_EXTRA_OBJECTS = 2 };

struct mn_worker_object {
    PyObject_HEAD
    struct mn_worker_side side;
    PyObject *segment;
    PyObject *dataset;
    PyObject *seeder;     /* or None */
    PyObject *open_layout; /* bytes -> Layout */
    PyObject *load_index; /* bytes -> object */
    PyObject *set_epoch;  /* int -> None: tells the dataset, or None */
    uint64_t user_epoch;  /* the last it was told, + 1 */
    PyObject *layouts;    /* dict: offset -> Layout */
    PyObject *indices;    /* unpickled indices of the block at indices_of */
    uint64_t indices_of, indices_number;
    bool holding;         /* a task is RUNNING under us */
    uint32_t task;
    uint32_t collate;     /* claimed when its block's last part was done, or MN_NO_TASK */
    struct mn_worker_clock clock;
    uint64_t mark_ns;     /* end of the last row that mark() was told of */
};

static PyObject *
worker_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "number", "dataset", "seeder", "open_layout",
                            "load_index", "set_epoch", "user_epoch", NULL};
    struct mn_state *st = mn_state_of_type(type);
    PyObject *segment, *dataset, *seeder, *open_layout, *load_index, *set_epoch = Py_None;
    unsigned int number;
    unsigned long long user_epoch = 0;
    if (st == NULL
        || !PyArg_ParseTupleAndKeywords(args, kwargs, "O!IOOOO|OK", names, st->segment_type,
                                        &segment, &number, &dataset, &seeder, &open_layout,
                                        &load_index, &set_epoch, &user_epoch)) {
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
    o->collate = MN_NO_TASK;
    o->layouts = PyDict_New();
    struct mn_shm *shm = &((struct mn_segment *)segment)->shm;
    if (number >= shm->ctl->nworkers || mn_worker_attach(&o->side, shm, number) < 0) {
        PyErr_SetString(PyExc_ValueError, "no such worker");
        Py_CLEAR(o);
    }
    if (o != NULL && o->layouts == NULL) {
        Py_CLEAR(o);
    }
    return (PyObject *)o;
}

static int
worker_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(o->dataset);
    Py_VISIT(o->seeder);
    Py_VISIT(o->open_layout);
    Py_VISIT(o->load_index);
    Py_VISIT(o->set_epoch);
    Py_VISIT(o->layouts);
    Py_VISIT(o->indices);
    return 0;
}

static int
worker_clear(PyObject *self)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    Py_CLEAR(o->dataset);
    Py_CLEAR(o->seeder);
    Py_CLEAR(o->open_layout);
    Py_CLEAR(o->load_index);
    Py_CLEAR(o->set_epoch);
    Py_CLEAR(o->layouts);
    Py_CLEAR(o->indices);
    return 0;
}

static void
worker_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    worker_clear(self);
    Py_CLEAR(((struct mn_worker_object *)self)->segment);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- one row ------------------------------------------------------------------------ */

static int
add_extra(PyObject *extras, uint32_t row, enum mn_extra what, PyObject *o)
{
    PyObject *t = Py_BuildValue("(IiO)", row, (int)what, o);
    int rc = t != NULL ? PyList_Append(extras, t) : -1;
    Py_XDECREF(t);
    return rc;
}

/* The exception of a sample becomes an entry of the envelope; what is no Exception
 * (KeyboardInterrupt, SystemExit) ends the worker. 0 or -1. */
static int
add_error(PyObject *extras, uint32_t row)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
        return -1;
    }
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    PyErr_NormalizeException(&type, &value, &tb);
    if (tb != NULL) {
        PyException_SetTraceback(value, tb);
    }
    int rc = add_extra(extras, row, MN_EXTRA_ERROR, value);
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
    return Py_XNewRef(PyList_GetItem(o->indices, row));
}

/* The sample of a row, or NULL with an exception. Made twice where it has made a generator of
 * its own: what it drew from that, no other worker would. */
static PyObject *
make_sample(struct mn_worker_object *o, struct mn_block *b, uint32_t row)
{
    PyObject *sample = NULL;
    bool seeded = b->seeded && o->seeder != Py_None;
    int again = 1;
    for (int times = 0; times < 2 && again == 1; times++) {
        Py_CLEAR(sample);
        if (seeded
            && mn_seeder_seed(o->seeder, b->base_seed, b->epoch, b->position + row, 0) < 0) {
            return NULL;
        }
        PyObject *index = index_of(o, b, row);
        sample = index != NULL ? PyObject_GetItem(o->dataset, index) : NULL;
        Py_XDECREF(index);
        again = seeded && sample != NULL ? mn_seeder_renew(o->seeder) : 0;
    }
    if (again < 0) {
        Py_CLEAR(sample);
    }
    return sample;
}

/* 1 in place, 0 into the envelope, -1 the worker ends, -2 the task ends (an exception). */
static int
do_row(struct mn_state *st, struct mn_worker_object *o, struct mn_block *b,
       struct mn_layout *layout, uint32_t row, PyObject *extras)
{
    PyObject *sample = make_sample(o, b, row);
    if (sample == NULL) {
        return add_error(extras, row) < 0 ? -1 : -2;
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
        rc = add_error(extras, row) < 0 ? -1 : -2;
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
        Py_XDECREF(l); /* the dictionary keeps it */
    }
    Py_XDECREF(key);
    return (struct mn_layout *)l;
}

static PyObject *
load_indices(struct mn_worker_object *o, struct mn_block *b)
{
    return PyObject_CallFunction(o->load_index, "y#", (const char *)mn_block_index(b),
                                 (Py_ssize_t)b->index_bytes);
}

/* Unpickled once for all tasks of a block. */
static int
need_indices(struct mn_worker_object *o, const struct mn_task *t, struct mn_block *b)
{
    if (b->index_kind == MN_INDEX_INT64
        || (o->indices != NULL && o->indices_of == t->block_off
            && o->indices_number == b->number)) {
        return 0;
    }
    Py_XSETREF(o->indices, load_indices(o, b));
    o->indices_of = t->block_off;
    o->indices_number = b->number;
    if (o->indices != NULL && !PyList_CheckExact(o->indices)) {
        Py_SETREF(o->indices, PySequence_List(o->indices));
    }
    return o->indices != NULL ? 0 : -1;
}

static void
finish_task(struct mn_worker_object *o)
{
    mn_worker_account(&o->side, &o->clock, o->task);
    o->holding = false;
    o->collate = mn_worker_done(&o->side, o->task);
}

/* Runs the rows of a task. The extras, or NULL with an exception that ends the worker. */
static PyObject *
run_rows(struct mn_state *st, struct mn_worker_object *o, struct mn_task *t,
         struct mn_block *b)
{
    PyObject *extras = PyList_New(0);
    if (extras == NULL) {
        return NULL;
    }
    struct mn_layout *layout = NULL;
    struct mn_report *reports = mn_block_reports(b);
    if ((t->kind == MN_KIND_ROWS && (layout = layout_of(st, o, b)) == NULL)
        || need_indices(o, t, b) < 0) {
        if (add_error(extras, t->row0) < 0) {
            Py_CLEAR(extras);
        }
        return extras;
    }
    uint64_t before = o->clock.begin_ns;
    for (uint32_t row = t->row0; row < t->row0 + t->nrows; row++) {
        mn_a64_store_relaxed(&o->side.me->row, row); /* for people */
        int rc = do_row(st, o, b, layout, row, extras);
        if (rc == -1) {
            Py_DECREF(extras);
            return NULL;
        }
        uint64_t now = mn_now_ns();
        reports[row].wall_ns = now - before;
        reports[row].status = rc == 1 ? MN_ROW_WRITTEN : MN_ROW_ENVELOPE;
        before = now;
        if (rc == -2) {
            break; /* torch stops at the first exception of a batch */
        }
    }
    return extras;
}

/* (kind, number, epoch, position, base_seed, seeded, row0, nrows, payload): what Python has
 * to do. payload: extras of rows, or the index object of a batch. */
static PyObject *
hand_over(struct mn_task *t, struct mn_block *b, PyObject *payload)
{
    return Py_BuildValue("(IKKKKiIIN)", t->kind, (unsigned long long)b->number,
                         (unsigned long long)b->epoch, (unsigned long long)b->position,
                         (unsigned long long)b->base_seed, (int)b->seeded, t->row0, t->nrows,
                         payload);
}

static PyObject *
batch_payload(struct mn_worker_object *o, struct mn_block *b)
{
    if (b->index_kind == MN_INDEX_PICKLE) {
        return load_indices(o, b);
    }
    PyObject *list = PyList_New(b->nrows);
    const int64_t *v = mn_block_index(b);
    for (uint32_t i = 0; list != NULL && i < b->nrows; i++) {
        PyObject *n = PyLong_FromLongLong(v[i]);
        if (n == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, n);
    }
    return list;
}

/* A dataset that has set_epoch hears of a new epoch before its first sample. 0 or -1. */
static int
tell_epoch(struct mn_worker_object *o, const struct mn_block *b)
{
    if (b->user_epoch == o->user_epoch || b->user_epoch == 0 || o->set_epoch == Py_None) {
        return 0;
    }
    o->user_epoch = b->user_epoch;
    PyObject *r = PyObject_CallFunction(o->set_epoch, "K", (unsigned long long)b->user_epoch - 1);
    if (r == NULL) {
        return -1;
    }
    Py_DECREF(r);
    return o->seeder != Py_None && mn_seeder_look(o->seeder) < 0 ? -1 : 0;
}

/* NULL and no exception: done, claim the next. */
static PyObject *
run_task(struct mn_state *st, struct mn_worker_object *o)
{
    struct mn_task *t = mn_task_at(&o->side.shm, o->task);
    struct mn_block *b = mn_block_at(&o->side.shm, t->block_off);
    o->holding = true;
    mn_worker_begin(&o->side, &o->clock, o->task);
    o->mark_ns = o->clock.begin_ns;
    if (tell_epoch(o, b) < 0) {
        return NULL;
    }
    if (t->kind != MN_KIND_ROWS && t->kind != MN_KIND_SAMPLES && t->kind != MN_KIND_PART) {
        PyObject *payload = batch_payload(o, b);
        return payload != NULL ? hand_over(t, b, payload) : NULL;
    }
    PyObject *extras = run_rows(st, o, t, b);
    if (extras == NULL) {
        return NULL;
    }
    if (PyList_GET_SIZE(extras) != 0) {
        return hand_over(t, b, extras);
    }
    Py_DECREF(extras);
    finish_task(o);
    return NULL;
}

PyDoc_STRVAR(next_doc,
"next() -> tuple | None | False\n\n"
"Runs tasks until Python is needed: a tuple (kind, number, epoch, position, base_seed,\n"
"seeded, row0, nrows, payload) to be answered with finish(); None after a second without\n"
"work (look after the trainer); False when the loader stops.");

static PyObject *
worker_next(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (st == NULL) {
        return NULL;
    }
    for (;;) {
        int rc = MN_OK;
        if (o->collate != MN_NO_TASK) {
            o->task = o->collate;
            o->collate = MN_NO_TASK;
        }
        else {
            rc = mn_worker_try(&o->side, &o->task);
        }
        if (rc == MN_EMPTY) {
            Py_BEGIN_ALLOW_THREADS
            rc = mn_worker_claim(&o->side, IDLE_NS, &o->task);
            Py_END_ALLOW_THREADS
            mn_worker_waited(&o->clock);
        }
        if (rc == MN_OK) {
            PyObject *todo = run_task(st, o);
            if (todo != NULL || PyErr_Occurred()) {
                return todo;
            }
        }
        /* between the row loop and the next claim: signals of a worker that never sleeps */
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
"Sends the result of the task that next() handed out: a pickle (bytes) and its buffers out\n"
"of band (C-contiguous). False when the loader stopped meanwhile.");

static PyObject *
worker_finish(PyObject *self, PyObject *args)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    const char *pickle;
    Py_ssize_t pickle_bytes;
    PyObject *list;
    if (!PyArg_ParseTuple(args, "y#O!", &pickle, &pickle_bytes, &PyList_Type, &list)) {
        return NULL;
    }
    if (!o->holding) {
        PyErr_SetString(PyExc_RuntimeError, "no task to finish");
        return NULL;
    }
    struct mn_task *t = mn_task_at(&o->side.shm, o->task);
    int rc = mn_envelope_send(&o->side, t, pickle, pickle_bytes, list);
    if (rc < 0) {
        return NULL;
    }
    if (rc == 0) {
        finish_task(o);
    }
    return PyBool_FromLong(rc == 0);
}

/* The parts are copied: a collate_fn may write into samples and may keep them, and its task is
 * done again when this worker dies. */
static PyObject *
part_of(struct mn_worker_object *o, const struct mn_task *t)
{
    const struct mn_ctl *c = o->side.shm.ctl;
    uint64_t off = t->env_off, len = t->env_len;
    struct mn_envelope env;
    struct mn_envelope_part part;
    /* another worker's: one that makes no sense is as good as none */
    if (off < c->arena_off || off > c->total_bytes || len > c->total_bytes - off
        || !mn_envelope_look(mn_at(&o->side.shm, off), len, &env)) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New((Py_ssize_t)env.nparts);
    for (uint64_t i = 0; list != NULL && i < env.nparts; i++) {
        bool sound = mn_envelope_part_look(mn_at(&o->side.shm, off), len, &env, i, &part);
        PyObject *b = PyByteArray_FromStringAndSize(mn_at(&o->side.shm, off + part.at),
                                                    sound ? (Py_ssize_t)part.bytes : 0);
        if (b == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, b);
    }
    return list == NULL ? NULL
                        : Py_BuildValue("(y#N)",
                                        (char *)mn_at(&o->side.shm, off + env.pickle_at),
                                        (Py_ssize_t)env.pickle_bytes, list);
}

PyDoc_STRVAR(parts_doc,
"parts() -> [(pickle, buffers) | None]\n\n"
"What the parts of the batch whose collate task is in hand have left, in row order; None\n"
"where one found no room. Buffers are the caller's own and can be written to.");

static PyObject *
worker_parts(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    struct mn_task *own = o->holding ? mn_task_at(&o->side.shm, o->task) : NULL;
    if (own == NULL || own->kind != MN_KIND_COLLATE) {
        PyErr_SetString(PyExc_RuntimeError, "no collate task in hand");
        return NULL;
    }
    struct mn_block *b = mn_block_at(&o->side.shm, own->block_off);
    const uint32_t *tasks = mn_block_tasks(b);
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i + 1 < b->ntasks; i++) {
        struct mn_task *t = mn_task_at(&o->side.shm, tasks[i]); /* DONE, seen with [C1] */
        PyObject *one = t->flags & MN_FLAG_ENVELOPE ? part_of(o, t) : Py_NewRef(Py_None);
        if (one == NULL || PyList_Append(out, one) < 0) {
            Py_CLEAR(out);
        }
        Py_XDECREF(one);
    }
    return out;
}

PyDoc_STRVAR(mark_doc,
"mark(row): this row of the batch in hand has just been fetched; teaches its cost.");

static PyObject *
worker_mark(PyObject *self, PyObject *arg)
{
    struct mn_worker_object *o = (struct mn_worker_object *)self;
    unsigned long row = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    struct mn_task *t = o->holding ? mn_task_at(&o->side.shm, o->task) : NULL;
    if (t != NULL && row < t->nrows) {
        uint64_t now = mn_now_ns();
        mn_block_reports(mn_block_at(&o->side.shm, t->block_off))[row].wall_ns =
            now - o->mark_ns;
        mn_a64_store_relaxed(&o->side.me->row, row + 1); /* for people */
        o->mark_ns = now;
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
    /* Large arrays that a dataset makes and drops for each sample should come from the heap
     * again, not from the kernel: page faults on fresh blocks cost more than the copy. 32
     * MiB is the most glibc takes for the threshold. */
    (void)mallopt(M_MMAP_THRESHOLD, 32 * 1024 * 1024);
    (void)mallopt(M_TRIM_THRESHOLD, 128 * 1024 * 1024);
    (void)mn_proc_start_time(getpid(), &o->side.me->born);
    o->side.me->pid = (uint32_t)getpid();
    mn_worker_waited(&o->clock);
    mn_a32_store_release(&o->side.me->state, MN_WORKER_READY);
    Py_RETURN_NONE;
}

static PyMethodDef worker_methods[] = {
    {"ready", worker_ready, METH_VARARGS,
     PyDoc_STR("ready(random=0, numpy=0, torch=0): the loop begins. Hashes of the states that\n"
               "worker_init_fn has left their generators in, 0 where it has not.")},
    {"next", worker_next, METH_NOARGS, next_doc},
    {"mark", worker_mark, METH_O, mark_doc},
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
    {Py_tp_doc, PyDoc_STR("Worker(segment, number, dataset, seeder, open_layout, "
                          "load_index, set_epoch=None, user_epoch=0): the worker's side of the\n"
                          "loader's mapping.")},
    {0, NULL},
};

static PyType_Spec worker_spec = {
    .name = "minato._core.Worker",
    .basicsize = sizeof(struct mn_worker_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = worker_slots,
};

int
mn_worker_add_type(PyObject *module, struct mn_state *st)
{
    st->worker_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &worker_spec, NULL);
    return st->worker_type == NULL ? -1 : PyModule_AddType(module, st->worker_type);
}
