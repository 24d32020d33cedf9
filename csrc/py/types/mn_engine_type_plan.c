/* mn_engine_type_plan.c - the methods of Engine for static and for balanced scheduling.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_error.h"
#include "engine/mn_engine_snapshot.h"
#include "py/module/mn_critical_section.h"
#include "py/types/mn_engine_object.h"
#include "py/types/mn_index.h"
#include "schedule/mn_forming.h"

#include <errno.h>
#include <string.h>

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

static struct mn_engine *
planner(PyObject *self)
{
    struct mn_engine *e = mn_engine_get(self);
    if (e != NULL && !mn_engine_is_balanced(e)) {
        PyErr_SetString(PyExc_RuntimeError, "the engine was opened without a window");
        return NULL;
    }
    return e;
}

const char mn_engine_plan_doc[] =
    "plan(epoch, indices, number, position, whole, begins, spares, hints) -> int | None\n\n"
    "Plans the next batch, with the sampler's indices. Returns its sequence; None: try later.\n"
    "number: in the epoch; position: of its first sample in the sampler's order. whole: one\n"
    "worker fetches and collates it. begins: None, or a byte for each row, not 0 where the\n"
    "dataset says that a group begins. spares: this many of the indices, at the end, are of\n"
    "other samples, which replace one that fails. hints: None, or a float32 for each row, finite\n"
    "and not negative, from which costs are predicted (csrc/schedule/policy_hint.h). For the\n"
    "batch that was planned last it returns the sequence again and does nothing: an interrupt "
    "may\n"
    "have hidden the result from the caller.";

/* Counts the rows of a batch whose indices are not machine integers. Returns false with an
 * exception. */
static bool
count_rows(struct mn_plan_batch *b, PyObject *indices)
{
    Py_ssize_t n = b->whole ? 1 : PyObject_Size(indices);
    if (n < 0) {
        return false;
    }
    b->nrows = (uint32_t)n;
    return b->whole || mn_split_spares(&b->nrows, b->spares);
}

/* Reads the arguments of plan(). Returns the bytes that the batch points into; NULL with an
 * exception. */
static PyObject *
fill_batch(PyObject *self, struct mn_plan_batch *b, PyObject *const *args)
{
    const struct mn_epoch *epoch = mn_epoch_of(self, args[0]);
    if (epoch == NULL) {
        return NULL;
    }
    PyObject *indices = args[1], *begins = args[5], *hints = args[7];
    b->epoch = epoch->number;
    b->base_seed = epoch->base_seed;
    b->user_epoch = epoch->user_epoch;
    b->seeded = epoch->seeded;
    b->number = PyLong_AsUnsignedLongLong(args[2]);
    b->position = PyLong_AsUnsignedLongLong(args[3]);
    b->whole = PyObject_IsTrue(args[4]) > 0;
    b->spares = mn_as_uint32(args[6]);
    if (begins != Py_None && !PyBytes_Check(begins) && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "begins must be bytes or None");
    }
    if (hints != Py_None && !PyBytes_Check(hints) && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_TypeError, "hints must be bytes or None");
    }
    if (PyErr_Occurred() || !count_rows(b, indices)) {
        return NULL;
    }
    uint32_t n = b->nrows;
    PyObject *owned =
        mn_fill_index(&b->index_kind, &b->index, &b->index_bytes, &n, indices, epoch->dumps);
    bool sound = owned != NULL
                 && (b->index_kind == MN_INDEX_PICKLE || mn_split_spares(&n, b->spares));
    b->nrows = n;
    b->splits = epoch->splits && PyList_CheckExact(indices) && n > 1;
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
mn_engine_py_plan(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 8) {
        PyErr_SetString(PyExc_TypeError, "plan() takes eight arguments");
        return NULL;
    }
    struct mn_plan_batch b = {0};
    PyObject *owned = planner(self) != NULL ? fill_batch(self, &b, args) : NULL;
    if (owned == NULL) {
        return NULL;
    }
    mn_pending_reclaim(mn_state_of_type(Py_TYPE(self)));
    struct mn_engine *e = planner(self); /* dumps may have closed it */
    struct mn_epoch *epoch = (struct mn_epoch *)args[0];
    int rc = MN_FULL;
    if (e != NULL && epoch->planned && epoch->last_number == b.number
        && epoch->last_position == b.position) {
        b.sequence = epoch->last_sequence;
        rc = MN_OK;
    }
    else if (e != NULL) {
        b.sequence = mn_engine_next_sequence(e);
        rc = mn_engine_plan(e, &b);
    }
    if (rc == MN_OK) {
        epoch->planned = true;
        epoch->last_number = b.number;
        epoch->last_position = b.position;
        epoch->last_sequence = b.sequence;
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
    "set_form(layout): how rows travel from now on; None: in envelopes. The layout must have\n"
    "been posted.";

PyObject *
mn_engine_py_set_form(PyObject *self, PyObject *layout)
{
    struct mn_engine *e = planner(self);
    struct mn_form form = {.kind = MN_KIND_SAMPLES};
    if (e == NULL) {
        return NULL;
    }
    if (layout != Py_None) {
        form.layout = mn_engine_posted(self, layout);
        if (form.layout == 0) {
            PyErr_SetString(PyExc_ValueError, "the layout was not posted");
            return NULL;
        }
        form.kind = MN_KIND_ROWS;
        form.nfields = mn_layout_nfields((struct mn_layout *)layout);
        form.row_bytes = mn_layout_row_bytes((struct mn_layout *)layout);
    }
    mn_engine_set_form(e, &form);
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_plan_end(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = planner(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_plan_end(e);
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_plan_clear(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = planner(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_plan_clear(e);
    Py_RETURN_NONE;
}

const char mn_engine_next_doc[] =
    "next(timeout) -> Block | None | bool\n\n"
    "Waits for the batch to deliver next, at most timeout seconds (negative: forever; 0: only\n"
    "looks, before the caller asks for it). Returns a Block; if it is not made, see refused().\n"
    "None: the time is over. False: look at health(). True: workers wait for more batches to be\n"
    "planned, if there are any. Handles signals.";

PyObject *
mn_engine_py_next(PyObject *self, PyObject *args)
{
    double timeout;
    if (!PyArg_ParseTuple(args, "d", &timeout)) {
        return NULL;
    }
    /* many batches are planned at once: memory that was dropped since would wait for that */
    mn_pending_reclaim(mn_state_of_type(Py_TYPE(self)));
    struct mn_engine *e = planner(self);
    if (e == NULL) {
        return NULL;
    }
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint64_t until = mn_engine_until(timeout);
    for (;;) {
        int64_t slice = mn_engine_slice(until);
        uint64_t sequence = 0, block = 0;
        int rc;
        o->inside++;
        Py_BEGIN_ALLOW_THREADS
        rc = mn_engine_next(e, slice, &sequence, &block);
        Py_END_ALLOW_THREADS
        o->inside--;
        if (rc == MN_OK) {
            return mn_block_new(self, sequence, block, NULL);
        }
        if (PyErr_CheckSignals() < 0 || mn_engine_goes_on(self) < 0) {
            return NULL;
        }
        if (rc == MN_CLOSED) {
            Py_RETURN_FALSE;
        }
        if (rc == MN_EMPTY) {
            Py_RETURN_TRUE;
        }
        if (slice == 0) { /* that was the last look; signals end other sleeps early */
            Py_RETURN_NONE;
        }
    }
}

const char mn_engine_refused_doc[] =
    "refused(block) -> (why, need, all): for a batch that is not made. why: 1 task descriptors,\n"
    "2 bytes for indices and reports, 3 bytes of the arena, 4 bytes of the system, 0: it was not\n"
    "refused; all: how many there are, in use or not";

PyObject *
mn_engine_py_refused(PyObject *self, PyObject *block)
{
    struct mn_engine *e = planner(self);
    const struct mn_block_object *b = e != NULL ? mn_block_of(self, block) : NULL;
    if (b == NULL) {
        return NULL;
    }
    struct mn_refusal r = mn_engine_refused(e, b->sequence);
    return Py_BuildValue("(iKK)", (int)r.why, (unsigned long long)r.need,
                         (unsigned long long)r.all);
}

PyObject *
mn_engine_py_taken(PyObject *self, PyObject *block)
{
    struct mn_engine *e = planner(self);
    const struct mn_block_object *b = e != NULL ? mn_block_of(self, block) : NULL;
    if (b == NULL) {
        return NULL;
    }
    if (mn_engine_taken(e, b->sequence, b->off) < 0) {
        PyErr_SetString(PyExc_ValueError, "the block is not what next() gave, or was taken");
        return NULL;
    }
    Py_RETURN_NONE;
}

const char mn_engine_timing_doc[] =
    "timing() -> {delivered, waits, wait_ns, wait_max_ns, consumer_ns, planned, ready,\n"
    "starts, helped, together}: batches delivered, the caller's waits in next(), its time for a\n"
    "batch, batches planned and not started, complete ones, tasks started by reason (window,\n"
    "early, ahead, finale, order), how often a worker took over part of another's share, and\n"
    "whether neighbours are kept together";

PyObject *
mn_engine_py_timing(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = planner(self);
    if (e == NULL) {
        return NULL;
    }
    uint64_t held;
    struct mn_waits w = mn_engine_waits(e, &held);
    struct mn_progress p = mn_engine_progress(e);
    const uint64_t *starts = p.starts;
    return Py_BuildValue("{sK sK sK sK sL sK sK s(KKKKK) sK sO}", "delivered",
                         (unsigned long long)p.delivered, "waits", (unsigned long long)w.n,
                         "wait_ns", (unsigned long long)w.wait_ns, "wait_max_ns",
                         (unsigned long long)w.max_ns, "consumer_ns", (long long)p.consumer_ns,
                         "planned", (unsigned long long)p.planned, "ready",
                         (unsigned long long)p.ready, "starts", (unsigned long long)starts[1],
                         (unsigned long long)starts[2], (unsigned long long)starts[3],
                         (unsigned long long)starts[4], (unsigned long long)starts[5], "helped",
                         (unsigned long long)p.helped, "together",
                         p.together ? Py_True : Py_False);
}

const char mn_engine_formed_doc[] =
    "formed() -> [(block, row0, nrows)]: the runs of rows of planned batches that make up the\n"
    "batch that next() gave. [] if this is not ready mode";

PyObject *
mn_engine_py_formed(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = planner(self);
    if (e == NULL) {
        return NULL;
    }
    const struct mn_run *runs;
    uint32_t nruns = mn_engine_formed(e, &runs);
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i < nruns; i++) {
        const struct mn_run *r = &runs[i];
        PyObject *block = mn_block_new(self, r->sequence, r->block_off, NULL);
        mn_list_add(&out,
                    block != NULL ? Py_BuildValue("(NII)", block, r->row0, r->nrows) : NULL);
    }
    return out;
}

const char mn_engine_displaced_doc[] =
    "displaced() -> (max, sum) of how far samples moved from their positions in the sampler's\n"
    "order, in batches";

PyObject *
mn_engine_py_displaced(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = planner(self);
    if (e == NULL) {
        return NULL;
    }
    int64_t most, sum;
    mn_engine_displaced(e, &most, &sum);
    return Py_BuildValue("(LL)", (long long)most, (long long)sum);
}

/* Returns whether every row of the formed batch was written in place by the layout posted there,
 * and nothing else belongs to it. */
static bool
all_written(struct mn_engine *e, const struct mn_layout *l, uint32_t posted)
{
    const struct mn_run *runs;
    uint32_t nruns = mn_engine_formed(e, &runs);
    bool all = nruns != 0 && posted != 0 && !mn_layout_has_objects(l);
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
    uint32_t nruns = mn_engine_formed(e, &runs);
    struct mn_block *target = mn_block_at(shm, to);
    for (uint32_t i = 0; i < mn_layout_nfields(l); i++) {
        uint64_t bytes = mn_layout_row_bytes(l)[i];
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
    "gather(layout) -> Block | None\n\n"
    "A new block with the rows of the formed batch, to be decoded and retired; None if the rows\n"
    "are not all that belongs to it.";

PyObject *
mn_engine_py_gather(PyObject *self, PyObject *layout)
{
    struct mn_engine *e = planner(self);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (e == NULL || st == NULL) {
        return NULL;
    }
    if (!mn_engine_forms(e) || !Py_IS_TYPE(layout, st->layout_type)) {
        PyErr_SetString(PyExc_TypeError, "expected an engine that forms batches, and a Layout");
        return NULL;
    }
    struct mn_layout *l = (struct mn_layout *)layout;
    if (!all_written(e, l, mn_engine_posted(self, layout))) {
        Py_RETURN_NONE;
    }
    struct mn_submit s = {.kind = MN_KIND_ROWS,
                          .nfields = mn_layout_nfields(l),
                          .row_bytes = mn_layout_row_bytes(l)};
    const struct mn_run *runs;
    uint32_t nruns = mn_engine_formed(e, &runs);
    for (uint32_t i = 0; i < nruns; i++) {
        s.nrows += runs[i].nrows;
    }
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint64_t to = 0;
    int rc;
    o->inside++;
    Py_BEGIN_ALLOW_THREADS
    rc = mn_engine_gather_block(e, &s, &to);
    if (rc == 0) {
        copy_rows(e, l, to);
    }
    Py_END_ALLOW_THREADS
    o->inside--;
    if (mn_raise_errno(rc, "no memory to gather a batch") < 0) {
        return NULL;
    }
    return mn_block_new(self, MN_UNPLANNED, to, layout);
}

const char mn_engine_place_doc[] =
    "place(samples, layout, objects) -> Block | None\n\n"
    "A new block with the samples as rows, to be decoded and retired; None if one does not\n"
    "fit. objects: a list for each sample, to which its object leaves are appended.";

PyObject *
mn_engine_py_place(PyObject *self, PyObject *args)
{
    struct mn_engine *e = planner(self);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    PyObject *samples, *layout, *objects;
    if (e == NULL || st == NULL
        || !PyArg_ParseTuple(args, "O!O!O!", &PyList_Type, &samples, st->layout_type, &layout,
                             &PyList_Type, &objects)) {
        return NULL;
    }
    struct mn_layout *l = (struct mn_layout *)layout;
    struct mn_submit s = {.nrows = (uint32_t)PyList_GET_SIZE(samples),
                          .kind = MN_KIND_ROWS,
                          .nfields = mn_layout_nfields(l),
                          .row_bytes = mn_layout_row_bytes(l)};
    uint64_t to = 0;
    if (mn_raise_errno(mn_engine_gather_block(e, &s, &to), "no memory for a batch") < 0) {
        return NULL;
    }
    const struct mn_shm *shm = mn_engine_shm(e);
    int rc = 1;
    mn_engine_pin(e);
    for (uint32_t i = 0; rc == 1 && i < s.nrows; i++) {
        /* called code may change the lists */
        PyObject *own = PyList_GetItemRef(objects, i);
        PyObject *sample = own != NULL ? PyList_GetItemRef(samples, i) : NULL;
        rc = sample == NULL
                 ? -1
                 : mn_layout_encode(st, l, sample, shm, mn_block_at(shm, to), i, own);
        Py_XDECREF(sample);
        Py_XDECREF(own);
    }
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

const char mn_engine_scheduler_doc[] =
    "scheduler() -> {active, low, high, stragglers, decisions, saved} | None\n\n"
    "decisions: [Decision], oldest first. saved: for the next Engine of the loader.";

static const char *
reason_text(int32_t reason)
{
    switch (reason) {
    case MN_STANDBY_ADMITTED:
        return "a straggler keeps its worker busy: a standby worker is admitted";
    case MN_STANDBY_RETIRED:
        return "the straggler is done: its standby worker exits";
    default:
        return mn_scaler_text((enum mn_scaler_reason)reason);
    }
}

PyObject *
mn_engine_py_scheduler(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    struct mn_engine *e = planner(self);
    if (st == NULL || e == NULL) {
        return NULL;
    }
    struct mn_autoscale_log log;
    if (!mn_engine_autoscale(e, &log)) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < log.n; i++) {
        const struct mn_decision *d = &log.last[i];
        PyObject *one = mn_named_tuple(st->decision_type, "(Kiiisiiid)",
                                       (unsigned long long)d->at_ns, d->from, d->to, d->reason,
                                       reason_text(d->reason), d->occupancy, d->cpu, d->wait,
                                       (double)d->rate_milli / 1000.0);
        mn_list_add(&list, one);
    }
    return list == NULL ? NULL
                        : Py_BuildValue("{sI sI sI sK sN sy#}", "active", log.active, "low",
                                        log.low, "high", log.high, "stragglers",
                                        (unsigned long long)log.stragglers, "decisions", list,
                                        "saved", (const char *)&log.saved,
                                        (Py_ssize_t)sizeof(log.saved));
}
