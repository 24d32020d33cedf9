/* mn_engine_type.c - minato._core.Engine: the trainer's side for Python.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One Engine belongs to one iterator and to the process that made it. The iterating thread calls
 * its methods; wait() and close() release the GIL. A call from another thread waits until no thread
 * is in a method, except where that method sleeps (mn_critical_section.h).
 */
#define _DEFAULT_SOURCE /* usleep */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "engine/mn_engine_snapshot.h"
#include "os/mn_memfd.h"
#include "os/mn_proc.h"
#include "py/module/mn_critical_section.h"
#include "py/types/mn_engine_object.h"

/* Converts seconds. A time too long for a count of nanoseconds means never; a time below one
 * nanosecond counts as one. */
static int64_t
straggler_ns(double seconds)
{
    double ns = seconds * 1e9;
    if (!(seconds > 0.0)) {
        return seconds < 0.0 ? -1 : 0;
    }
    return ns >= 9e18 ? -1 : ns < 1.0 ? 1 : (int64_t)ns;
}

static PyObject *
engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"workers", "max_retries", "respawn", "memory_limit",
                            "arena_bytes", "window", "in_order", "costs", "min_workers",
                            "max_workers", "straggler_seconds", "saved_scheduler", "blocks",
                            "group_neighbours", "ready_batch", "ready_bound",
                            "ready_mixes", NULL};
    struct mn_autoscale_saved saved;
    const char *saved_bytes = NULL;
    Py_ssize_t saved_size = 0;
    unsigned int workers, retries, window = 0, min_workers = 0, max_workers = 0, blocks = 0;
    unsigned int ready_batch = 0, ready_bound = 0;
    double straggler = 0.0;
    int respawn, in_order = 1, group_neighbours = 0, ready_mixes = 0;
    PyObject *costs = Py_None;
    unsigned long long limit = 0, arena = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIp|KKIpOIIdz#IpIIp", names, &workers, &retries,
                                     &respawn, &limit, &arena, &window, &in_order, &costs,
                                     &min_workers, &max_workers, &straggler, &saved_bytes,
                                     &saved_size, &blocks, &group_neighbours, &ready_batch,
                                     &ready_bound, &ready_mixes)) {
        return NULL;
    }
    if (saved_bytes != NULL) {
        if (saved_size != (Py_ssize_t)sizeof(saved)) {
            PyErr_SetString(PyExc_ValueError,
                            "saved_scheduler is not a value that scheduler() has returned");
            return NULL;
        }
        memcpy(&saved, saved_bytes, sizeof(saved)); /* bytes have no alignment */
    }
    if (workers == 0 || workers > 4096 || max_workers > 4096) {
        PyErr_SetString(PyExc_ValueError, "workers must be between 1 and 4096");
        return NULL;
    }
    struct mn_state *st = mn_state_of_type(type);
    if (st == NULL) {
        return NULL;
    }
    struct mn_shared_costs *shared = NULL;
    if (costs != Py_None && (shared = mn_costs_of(st, costs)) == NULL) {
        return NULL;
    }
    mn_pending_reclaim(st);
    struct mn_engine_object *o = (struct mn_engine_object *)type->tp_alloc(type, 0);
    if (o == NULL) {
        return NULL;
    }
    struct mn_engine_config cfg = {.workers = workers,
                                   .min_workers = min_workers,
                                   .max_workers = max_workers,
                                   .straggler_ns = straggler_ns(straggler),
                                   .max_retries = retries < 200 ? retries : 200,
                                   .respawn = respawn != 0,
                                   .memory_limit = limit,
                                   .arena_bytes = arena,
                                   .window = window,
                                   .blocks = blocks,
                                   .in_order = in_order != 0,
                                   .costs = shared,
                                   .group_neighbours = group_neighbours != 0,
                                   .ready_batch = ready_batch,
                                   .ready_bound = ready_bound,
                                   .ready_mixes = ready_mixes != 0,
                                   .saved_scheduler = saved_bytes != NULL ? &saved : NULL};
    o->pid = mn_proc_self();
    o->costs = Py_NewRef(costs);
    int rc = mn_engine_open(&o->engine, &cfg);
    if (mn_raise_errno(rc, "cannot map the memory that loader and workers share") < 0) {
        Py_DECREF(o);
        return NULL;
    }
    return (PyObject *)o;
}

static void
engine_dealloc(PyObject *self)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    if (o->engine != NULL && o->pid == mn_proc_self()) {
        mn_engine_stop(o->engine);
        Py_BEGIN_ALLOW_THREADS
        mn_engine_close(o->engine);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(o->costs);
    mn_engine_forget_posted(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
engine_start(PyObject *self, PyObject *args)
{
    int pidfd, cmd;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL || !PyArg_ParseTuple(args, "ii", &pidfd, &cmd)) {
        return NULL;
    }
    if (mn_raise_errno(mn_engine_start(e, pidfd, cmd), "cannot start the engine thread") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
engine_open_lifeline(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL
        || mn_raise_errno(mn_engine_open_lifeline(e), "cannot make a pipe for workers") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
engine_stop(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_stop(e);
    Py_RETURN_NONE;
}

static PyObject *
engine_close(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    o->engine = NULL;
    mn_engine_stop(e);
    while (o->inside != 0) { /* another thread waits inside: it sees the stop and returns */
        Py_BEGIN_ALLOW_THREADS
        mn_engine_wake_waiters(e);
        usleep(1000);
        Py_END_ALLOW_THREADS
    }
    Py_BEGIN_ALLOW_THREADS
    mn_engine_close(e);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* ---- waiting and reading ------------------------------------------------------------ */

static PyObject *
engine_poll(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    if (e == NULL) {
        return NULL;
    }
    return PyLong_FromLong(mn_engine_settle(e, off));
}

PyDoc_STRVAR(wait_doc,
"wait(block, timeout) -> bool\n\n"
"Sleeps until the block (None: any block) may be done, or health() may have changed,\n"
"at most timeout seconds (negative: forever). False when the time is over. Handles signals,\n"
"for which it sleeps in slices (mn_engine_slice).");

static PyObject *
engine_wait(PyObject *self, PyObject *args)
{
    PyObject *block;
    double timeout;
    if (!PyArg_ParseTuple(args, "Od", &block, &timeout)) {
        return NULL;
    }
    uint64_t wanted = MN_WANT_ANY;
    struct mn_engine *e = block == Py_None ? mn_engine_get(self)
                                           : mn_engine_of_block(self, block, &wanted);
    if (e == NULL) {
        return NULL;
    }
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint64_t until = mn_engine_until(timeout);
    for (;;) {
        int64_t left = mn_engine_slice(until);
        int rc;
        o->inside++;
        Py_BEGIN_ALLOW_THREADS
        rc = mn_engine_wait(e, wanted, left);
        Py_END_ALLOW_THREADS
        o->inside--;
        if (PyErr_CheckSignals() < 0 || mn_engine_goes_on(self) < 0) {
            return NULL;
        }
        if (rc == 0) {
            Py_RETURN_TRUE;
        }
        if (left == 0) {
            Py_RETURN_FALSE;
        }
    }
}

static PyObject *
engine_done_ns(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    if (e == NULL) {
        return NULL;
    }
    return PyLong_FromUnsignedLongLong(mn_engine_done_ns(e, off));
}

static PyObject *
engine_retire(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_done(self, block, &off);
    if (e == NULL) {
        return NULL;
    }
    if (((struct mn_block_object *)block)->sequence != MN_UNPLANNED) {
        PyErr_SetString(PyExc_ValueError, "call taken() for a planned block");
        return NULL;
    }
    mn_engine_retire(e, off);
    Py_RETURN_NONE;
}

MN_METHOD_ALONE(engine_start)
MN_METHOD_ALONE(engine_open_lifeline)
MN_METHOD_ALONE(engine_stop)
MN_METHOD_ALONE(engine_close)
MN_FAST_METHOD_ALONE(mn_engine_py_submit)
MN_METHOD_ALONE(mn_engine_py_resume)
MN_FAST_METHOD_ALONE(mn_engine_py_plan)
MN_METHOD_ALONE(mn_engine_py_set_form)
MN_METHOD_ALONE(mn_engine_py_plan_end)
MN_METHOD_ALONE(mn_engine_py_plan_clear)
MN_METHOD_ALONE(mn_engine_py_next)
MN_METHOD_ALONE(mn_engine_py_refused)
MN_METHOD_ALONE(mn_engine_py_taken)
MN_REPORT_ALONE(mn_engine_py_formed)
MN_METHOD_ALONE(mn_engine_py_displaced)
MN_METHOD_ALONE(mn_engine_py_gather)
MN_METHOD_ALONE(mn_engine_py_place)
MN_METHOD_ALONE(mn_engine_py_scheduler)
MN_METHOD_ALONE(mn_engine_py_timing)
MN_METHOD_ALONE(mn_engine_py_post)
MN_METHOD_ALONE(engine_poll)
MN_METHOD_ALONE(engine_wait)
MN_METHOD_ALONE(engine_done_ns)
MN_METHOD_ALONE(mn_engine_py_decode)
MN_FAST_METHOD_ALONE(mn_engine_py_take)
MN_METHOD_ALONE(mn_engine_py_row)
MN_METHOD_ALONE(engine_retire)
MN_REPORT_ALONE(mn_engine_py_envelopes)
MN_METHOD_ALONE(mn_engine_py_form)
MN_REPORT_ALONE(mn_engine_py_reports)
MN_REPORT_ALONE(mn_engine_py_lost)
MN_REPORT_ALONE(mn_engine_py_workers)
MN_METHOD_ALONE(mn_engine_py_kill_worker)
MN_METHOD_ALONE(mn_engine_py_zygote_replaced)
MN_METHOD_ALONE(mn_engine_py_retire_worker)
MN_METHOD_ALONE(mn_engine_py_end_worker)
MN_METHOD_ALONE(mn_engine_py_end_late)
#ifdef MN_TEST_BINDINGS
MN_METHOD_ALONE(mn_engine_py_move_to)
#endif
MN_METHOD_ALONE(mn_engine_py_let_go)
MN_METHOD_ALONE(mn_engine_py_note_failed)
MN_METHOD_ALONE(mn_engine_py_set_title)
MN_METHOD_ALONE(mn_engine_py_dismiss)
MN_METHOD_ALONE(mn_engine_py_health)
MN_METHOD_ALONE(mn_engine_py_deaths)
MN_METHOD_ALONE(mn_engine_py_memory)
MN_METHOD_ALONE(mn_engine_py_waits)
MN_METHOD_ALONE(mn_engine_py_wait_begins)
MN_METHOD_ALONE(mn_engine_py_wait_ends)
MN_METHOD_ALONE(mn_engine_py_delivered)
MN_METHOD_ALONE(mn_engine_py_set_driver)
MN_METHOD_ALONE(mn_engine_py_lock_pages)
MN_METHOD_ALONE(mn_engine_py_unlock_pages)
MN_METHOD_ALONE(mn_engine_py_page_locks)
MN_REPORT_ALONE(mn_engine_py_spans)

static PyMethodDef engine_methods[] = {
    {"start", MN_ALONE(engine_start), METH_VARARGS,
     PyDoc_STR("start(pidfd, command_fd): watch the zygote, answer workers.")},
    {"open_lifeline", MN_ALONE(engine_open_lifeline), METH_NOARGS,
     PyDoc_STR("open_lifeline(): makes the pipe by which workers notice the end of this process.\n"
               "Call it once, before any process gets the segment.")},
    {"stop", MN_ALONE(engine_stop), METH_NOARGS, PyDoc_STR("Asks the workers to exit.")},
    {"close", MN_ALONE(engine_close), METH_NOARGS,
     PyDoc_STR("Ends the engine; no worker may live.")},
    {"submit", MN_FAST_ALONE(mn_engine_py_submit), METH_FASTCALL,
     mn_engine_submit_doc},
    {"resume", MN_ALONE(mn_engine_py_resume), METH_VARARGS,
     PyDoc_STR("resume(epoch, worker) -> Block | None: for the worker's actions at the start of a "
               "new\n"
               "epoch, as torch's marker triggers them")},
    {"plan", MN_FAST_ALONE(mn_engine_py_plan), METH_FASTCALL, mn_engine_plan_doc},
    {"set_form", MN_ALONE(mn_engine_py_set_form), METH_O, mn_engine_set_form_doc},
    {"plan_end", MN_ALONE(mn_engine_py_plan_end), METH_NOARGS,
     PyDoc_STR("plan_end(): no more batches in this epoch")},
    {"plan_clear", MN_ALONE(mn_engine_py_plan_clear), METH_NOARGS,
     PyDoc_STR("plan_clear(): abandons all batches")},
    {"next", MN_ALONE(mn_engine_py_next), METH_VARARGS, mn_engine_next_doc},
    {"refused", MN_ALONE(mn_engine_py_refused), METH_O, mn_engine_refused_doc},
    {"taken", MN_ALONE(mn_engine_py_taken), METH_O,
     PyDoc_STR("taken(block): the batch that next() gave was read, frees it")},
    {"formed", MN_ALONE(mn_engine_py_formed), METH_NOARGS, mn_engine_formed_doc},
    {"displaced", MN_ALONE(mn_engine_py_displaced), METH_NOARGS, mn_engine_displaced_doc},
    {"gather", MN_ALONE(mn_engine_py_gather), METH_O, mn_engine_gather_doc},
    {"place", MN_ALONE(mn_engine_py_place), METH_VARARGS, mn_engine_place_doc},
    {"scheduler", MN_ALONE(mn_engine_py_scheduler), METH_NOARGS, mn_engine_scheduler_doc},
    {"timing", MN_ALONE(mn_engine_py_timing), METH_NOARGS, mn_engine_timing_doc},
    {"post", MN_ALONE(mn_engine_py_post), METH_VARARGS, mn_engine_post_doc},
    {"poll", MN_ALONE(engine_poll), METH_O,
     PyDoc_STR("poll(block): 0 busy, 1 done, 2 lost a task")},
    {"wait", MN_ALONE(engine_wait), METH_VARARGS, wait_doc},
    {"done_ns", MN_ALONE(engine_done_ns), METH_O,
     PyDoc_STR("When the block's last task finished.")},
    {"decode", MN_ALONE(mn_engine_py_decode), METH_VARARGS, mn_engine_decode_doc},
    {"take", MN_FAST_ALONE(mn_engine_py_take), METH_FASTCALL, mn_engine_take_doc},
    {"row", MN_ALONE(mn_engine_py_row), METH_VARARGS,
     PyDoc_STR("row(block, layout, row, objects): the sample that was written there.")},
    {"retire", MN_ALONE(engine_retire), METH_O,
     PyDoc_STR("Frees a done block that was not planned.")},
    {"envelopes", MN_ALONE(mn_engine_py_envelopes), METH_VARARGS, mn_engine_envelopes_doc},
    {"form", MN_ALONE(mn_engine_py_form), METH_O, mn_engine_form_doc},
    {"reports", MN_ALONE(mn_engine_py_reports), METH_O, mn_engine_reports_doc},
    {"lost", MN_ALONE(mn_engine_py_lost), METH_O, mn_engine_lost_doc},
    {"workers", MN_ALONE(mn_engine_py_workers), METH_NOARGS, mn_engine_workers_doc},
    {"kill_worker", MN_ALONE(mn_engine_py_kill_worker), METH_VARARGS, mn_engine_kill_worker_doc},
    {"zygote_replaced", MN_ALONE(mn_engine_py_zygote_replaced), METH_NOARGS,
     PyDoc_STR("zygote_replaced(): the descriptors that start() was given are another zygote's.")},
    {"retire_worker", MN_ALONE(mn_engine_py_retire_worker), METH_O,
     PyDoc_STR("retire_worker(number): do not replace it when it dies.")},
    {"end_worker", MN_ALONE(mn_engine_py_end_worker), METH_O, mn_engine_end_worker_doc},
    {"end_late", MN_ALONE(mn_engine_py_end_late), METH_VARARGS,
     PyDoc_STR("end_late(number, batch, row) -> bool: kills the worker if it makes that row.\n"
               "Its task is not retried. Whether it did")},
#ifdef MN_TEST_BINDINGS
    {"move_to", MN_ALONE(mn_engine_py_move_to), METH_O, mn_engine_move_to_doc},
#endif
    {"let_go", MN_ALONE(mn_engine_py_let_go), METH_O, mn_engine_let_go_doc},
    {"note_failed", MN_ALONE(mn_engine_py_note_failed), METH_O, mn_engine_note_failed_doc},
    {"set_title", MN_ALONE(mn_engine_py_set_title), METH_O,
     PyDoc_STR("set_title(text): the loader's name, for other processes; before it has workers")},
    {"dismiss", MN_ALONE(mn_engine_py_dismiss), METH_NOARGS, mn_engine_dismiss_doc},
    {"health", MN_ALONE(mn_engine_py_health), METH_NOARGS, mn_engine_health_doc},
    {"deaths", MN_ALONE(mn_engine_py_deaths), METH_NOARGS,
     PyDoc_STR("deaths() -> unexpected deaths so far, as in health()")},
    {"memory", MN_ALONE(mn_engine_py_memory), METH_NOARGS, mn_engine_memory_doc},
    {"waits", MN_ALONE(mn_engine_py_waits), METH_NOARGS, mn_engine_waits_doc},
    {"wait_begins", MN_ALONE(mn_engine_py_wait_begins), METH_NOARGS,
     PyDoc_STR("wait_begins() -> ns that the caller needs for a batch, on average; 0: not known.\n"
               "The caller begins to wait for a batch; next() does this by itself")},
    {"wait_ends", MN_ALONE(mn_engine_py_wait_ends), METH_VARARGS,
     PyDoc_STR("wait_ends(got, held): got: with a batch; held: the caller has one to give later")},
    {"delivered", MN_ALONE(mn_engine_py_delivered), METH_NOARGS,
     PyDoc_STR("delivered(): both, for a prefetched batch")},
    {"set_page_driver", MN_ALONE(mn_engine_py_set_driver), METH_VARARGS, mn_engine_set_driver_doc},
    {"lock_pages", MN_ALONE(mn_engine_py_lock_pages), METH_VARARGS, mn_engine_lock_pages_doc},
    {"unlock_pages", MN_ALONE(mn_engine_py_unlock_pages), METH_NOARGS,
     PyDoc_STR("unlock_pages(): locks no more pages; those in use are unlocked with their "
               "PageLock.")},
    {"page_locks", MN_ALONE(mn_engine_py_page_locks), METH_NOARGS, mn_engine_page_locks_doc},
    {"spans", MN_ALONE(mn_engine_py_spans), METH_O, mn_engine_spans_doc},
    {NULL, NULL, 0, NULL},
};

static PyObject *
engine_get_fd(PyObject *self, void *closure)
{
    (void)closure;
    struct mn_engine *e = mn_engine_get(self);
    return e != NULL ? PyLong_FromLong(mn_engine_fd(e)) : NULL;
}

/* Returns the mapping in a form that a forked child may use. */
static PyObject *
engine_get_segment(PyObject *self, void *closure)
{
    (void)closure;
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (st != NULL && o->engine == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
    }
    if (st == NULL || o->engine == NULL) {
        return NULL;
    }
    struct mn_segment *s = PyObject_New(struct mn_segment, st->segment_type);
    if (s != NULL) {
        s->shm = *mn_engine_shm(o->engine);
        s->bytes = mn_engine_mapped(o->engine);
        mn_lifeline_hold(&s->trainer, mn_engine_lifeline_end(o->engine));
        s->owner = Py_NewRef(self);
    }
    return (PyObject *)s;
}

static PyGetSetDef engine_getset[] = {
    {"fd", engine_get_fd, NULL, PyDoc_STR("the mapping's descriptor, -1 once started"), NULL},
    {"segment", engine_get_segment, NULL, PyDoc_STR("the mapping, for forked children"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_getset},
    {Py_tp_doc, PyDoc_STR("Engine(workers, max_retries, respawn, memory_limit=0, "
                          "arena_bytes=0): the trainer's side of one set of workers.")},
    {0, NULL},
};

PyType_Spec mn_engine_spec = {
    .name = "minato._core.Engine",
    .basicsize = sizeof(struct mn_engine_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = engine_slots,
};
