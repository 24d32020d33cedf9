/* mn_engine_type.c - minato._core.Engine: the trainer's side for Python.
 * SPDX-License-Identifier: Apache-2.0
 *
 * One Engine belongs to one iterator and to the process that made it. The iterating thread calls
 * its methods; wait(), next(), gather() and close() release the GIL. A call from another thread
 * waits until no thread is in a method, except where that method sleeps (mn_python.h).
 */
#define _DEFAULT_SOURCE /* usleep */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "os/mn_memfd.h"
#include "os/mn_proc.h"
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
                            "ready_mixes", "processes", "title", NULL};
    struct mn_autoscale_saved saved;
    struct mn_engine_config cfg = {.title = ""};
    const char *saved_bytes = NULL;
    Py_ssize_t saved_size = 0;
    double straggler = 0.0;
    int respawn, in_order = 1, group_neighbours = 0, ready_mixes = 0, processes = 0;
    PyObject *costs = Py_None;
    unsigned long long limit = 0, arena = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "IIp|KKIpOIIdz#IpIIpps", names, &cfg.workers,
                                     &cfg.max_retries, &respawn, &limit, &arena, &cfg.window,
                                     &in_order, &costs, &cfg.min_workers, &cfg.max_workers,
                                     &straggler, &saved_bytes, &saved_size, &cfg.blocks,
                                     &group_neighbours, &cfg.ready_batch, &cfg.ready_bound,
                                     &ready_mixes, &processes, &cfg.title)) {
        return NULL;
    }
    if (saved_bytes != NULL) {
        if (saved_size != (Py_ssize_t)sizeof(saved)) {
            return PyErr_Format(PyExc_ValueError,
                                "saved_scheduler is not a value that scheduler() has returned");
        }
        memcpy(&saved, saved_bytes, sizeof(saved)); /* bytes have no alignment */
        cfg.saved_scheduler = &saved;
    }
    if (cfg.workers == 0 || cfg.workers > 4096 || cfg.max_workers > 4096) {
        return PyErr_Format(PyExc_ValueError, "workers must be between 1 and 4096");
    }
    struct mn_state *st = PyType_GetModuleState(type);
    if (mn_find_records(st) < 0) {
        return NULL;
    }
    if (costs != Py_None && (cfg.costs = mn_costs_of(st, costs)) == NULL) {
        return NULL;
    }
    mn_pending_reclaim(st);
    struct mn_engine_object *o = (struct mn_engine_object *)type->tp_alloc(type, 0);
    if (o == NULL) {
        return NULL;
    }
    cfg.straggler_ns = straggler_ns(straggler);
    cfg.max_retries = cfg.max_retries < 200 ? cfg.max_retries : 200;
    cfg.respawn = respawn != 0;
    cfg.memory_limit = limit;
    cfg.arena_bytes = arena;
    cfg.in_order = in_order != 0;
    cfg.group_neighbours = group_neighbours != 0;
    cfg.ready_mixes = ready_mixes != 0;
    cfg.processes = processes != 0;
    o->pid = mn_proc_self();
    o->costs = Py_NewRef(costs);
    int rc = mn_engine_open(&o->engine, &cfg);
    if (mn_raise_errno(rc, "cannot make the memory that loader and workers share") < 0) {
        Py_DECREF(o);
        return NULL;
    }
    return (PyObject *)o;
}

static void
engine_dealloc(PyObject *self)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    if (o->engine != NULL && o->pid == mn_proc_self()) {
        mn_engine_stop(o->engine);
        MN_DO_WITHOUT_GIL(mn_engine_close(o->engine));
    }
    Py_XDECREF(o->costs);
    Py_XDECREF(o->planned);
    while (o->posted != NULL) {
        struct mn_posted *p = o->posted;
        o->posted = p->next;
        Py_DECREF(p->layout);
        PyMem_Free(p);
    }
    mn_free_object(self);
}

const char mn_engine_start_doc[] =
    "start(pidfd, command_fd): watch the zygote, answer workers. Called again: another zygote has\n"
    "taken its place, and these descriptors are its own.";

PyObject *
mn_engine_py_start(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    int pidfd, cmd;
    if (!PyArg_ParseTuple(args, "ii", &pidfd, &cmd)
        || mn_raise_errno(mn_engine_start(e, pidfd, cmd), "cannot start the engine thread") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

const char mn_engine_stop_doc[] =
    "stop(dismiss=False): asks the workers to exit. dismiss: only threads, and a caller that\n"
    "waits for a batch gets no error.";

PyObject *
mn_engine_py_stop(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    int dismiss = 0;
    if (!PyArg_ParseTuple(args, "|p", &dismiss)) {
        return NULL;
    }
    (dismiss ? mn_engine_dismiss : mn_engine_stop)(e);
    Py_RETURN_NONE;
}

const char mn_engine_close_doc[] = "Ends the engine; no worker may live.";

PyObject *
mn_engine_py_close(PyObject *self, struct mn_engine *e, PyObject *Py_UNUSED(ignored))
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    o->engine = NULL;
    mn_engine_stop(e);
    while (o->inside != 0) { /* another thread waits inside: it sees the stop and returns */
        MN_DO_WITHOUT_GIL(mn_engine_wake_waiters(e); usleep(1000));
    }
    MN_DO_WITHOUT_GIL(mn_engine_close(e));
    Py_RETURN_NONE;
}

/* ---- waiting ------------------------------------------------------------------------- */

const char mn_engine_wait_doc[] =
    "wait(block, timeout) -> bool\n\n"
    "Sleeps until the block (None: any block) may be done, or health() may have changed,\n"
    "at most timeout seconds (negative: forever). False when the time is over. Handles signals,\n"
    "for which it sleeps in slices (mn_engine_slice).";

PyObject *
mn_engine_py_wait(PyObject *self, struct mn_engine *e, PyObject *args)
{
    PyObject *block;
    double timeout;
    uint64_t wanted = MN_WANT_ANY;
    if (!PyArg_ParseTuple(args, "Od", &block, &timeout)
        || (block != Py_None && mn_engine_of_block(self, block, &wanted) == NULL)) {
        return NULL;
    }
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    uint64_t until = mn_engine_until(timeout);
    for (;;) {
        int64_t left = mn_engine_slice(until);
        o->inside++;
        int rc = MN_WITHOUT_GIL(mn_engine_wait(e, wanted, left));
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

const char mn_engine_wait_begins_doc[] =
    "wait_begins() -> ns that the caller needs for a batch, on average; 0: not known.\n"
    "The caller begins to wait for a batch; next() does this by itself";

PyObject *
mn_engine_py_wait_begins(PyObject *Py_UNUSED(self), struct mn_engine *e,
                         PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromLongLong(mn_engine_span_begin(e));
}

const char mn_engine_wait_ends_doc[] =
    "wait_ends(got, held): got: with a batch; held: the caller has one to give later. Without\n"
    "wait_begins() the wait was for a prefetched batch, and took no time";

PyObject *
mn_engine_py_wait_ends(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    int got, held;
    if (!PyArg_ParseTuple(args, "pp:wait_ends", &got, &held)) {
        return NULL;
    }
    mn_engine_span_end(e, got != 0, held != 0);
    Py_RETURN_NONE;
}

/* ---- the type ------------------------------------------------------------------------ */

#define ARGS_BRIEF arg
#define ARGS_REPORT arg
#define ARGS_FAST args, nargs

/* Up to Python 3.11, making an object may collect garbage at once. That may collect the iterator,
 * which closes the engine: not in the middle of a report. */
enum { COLLECTS_BRIEF = 0, COLLECTS_FAST = 0, COLLECTS_REPORT = PY_VERSION_HEX < 0x030C0000 };

/* Defines what the type calls: the method in a critical section of its engine, if that is open. */
#define DEFINE(name, how, get, flags)                                                   \
    static PyObject *alone_##name(PyObject *self, MN_ENGINE_TAKES_##how)                \
    {                                                                                   \
        PyObject *result;                                                               \
        int collects = COLLECTS_##how && PyGC_Disable();                                \
        Py_BEGIN_CRITICAL_SECTION(self);                                                \
        struct mn_engine *e = get(self);                                                \
        result = e != NULL ? mn_engine_py_##name(self, e, ARGS_##how) : NULL;           \
        Py_END_CRITICAL_SECTION();                                                      \
        if (collects) {                                                                 \
            (void)PyGC_Enable();                                                        \
        }                                                                               \
        return result;                                                                  \
    }

#define ENTRY(name, how, get, flags)                                                    \
    {#name, (PyCFunction)(void (*)(void))alone_##name, flags, mn_engine_##name##_doc},

MN_ENGINE_METHODS(DEFINE)
#ifdef MN_TEST_BINDINGS
DEFINE(move_to, BRIEF, mn_engine_get, METH_O)
#endif

static PyMethodDef engine_methods[] = {
    MN_ENGINE_METHODS(ENTRY)
#ifdef MN_TEST_BINDINGS
    ENTRY(move_to, BRIEF, mn_engine_get, METH_O)
#endif
    {NULL, NULL, 0, NULL},
};

static PyObject *
engine_get_fd(PyObject *self, void *Py_UNUSED(closure))
{
    struct mn_engine *e = mn_engine_get(self);
    return e != NULL ? PyLong_FromLong(mn_engine_fd(e)) : NULL;
}

/* Returns the mapping in a form that a forked child may use. */
static PyObject *
engine_get_segment(PyObject *self, void *Py_UNUSED(closure))
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    if (o->engine == NULL) {
        return PyErr_Format(PyExc_RuntimeError, "the engine is closed");
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

PyType_Spec mn_engine_spec = {"minato._core.Engine", sizeof(struct mn_engine_object), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, engine_slots};
