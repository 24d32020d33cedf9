/* mn_segment_type.c - minato._core.Segment: the shared mapping for the zygote and the workers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The methods include the zygote's changes of a worker's entry (mn_records.h).
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_memfd.h"
#include "py/module/mn_state.h"
#include "workers/mn_tasks_and_retries.h"

static PyObject *
segment_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"fd", "lifeline", NULL};
    int fd, lifeline;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ii", names, &fd, &lifeline)) {
        return NULL;
    }
    struct mn_ctl head;
    if (pread(fd, &head, sizeof(head), 0) != (ssize_t)sizeof(head) || head.magic != MN_MAGIC
        || head.sizes != mn_sizes_word()) {
        return PyErr_Format(PyExc_RuntimeError,
                            "loader and worker run different versions of minato");
    }
    void *base;
    int rc = mn_memfd_map(fd, head.total_bytes, &base);
    if (mn_raise_errno(rc, "cannot map the loader's memory") < 0) {
        return NULL;
    }
    (void)mn_memfd_dontdump(base, head.total_bytes);
    struct mn_segment *s = (struct mn_segment *)type->tp_alloc(type, 0);
    if (s == NULL) {
        mn_memfd_unmap(base, head.total_bytes);
        return NULL;
    }
    s->shm.base = base;
    s->shm.ctl = base;
    s->bytes = head.total_bytes;
    mn_lifeline_hold(&s->trainer, lifeline);
    return (PyObject *)s;
}

static void
segment_dealloc(PyObject *self)
{
    struct mn_segment *s = (struct mn_segment *)self;
    if (s->owner == NULL) {
        mn_memfd_unmap(s->shm.base, s->bytes);
    }
    Py_XDECREF(s->owner);
    mn_free_object(self);
}

static struct mn_worker *
entry(PyObject *self, unsigned long w)
{
    struct mn_segment *s = (struct mn_segment *)self;
    if (w >= s->shm.ctl->nworkers) {
        return (void *)PyErr_Format(PyExc_IndexError, "no such worker");
    }
    return mn_worker_at(&s->shm, (uint32_t)w);
}

/* Defines what the type calls for a method that gets a worker's number. */
#define OF_ENTRY(method)                                                                \
    static PyObject *segment_##method(PyObject *self, PyObject *number)                 \
    {                                                                                   \
        unsigned long w = PyLong_AsUnsignedLong(number);                                \
        struct mn_worker *k = PyErr_Occurred() ? NULL : entry(self, w);                 \
        return k != NULL ? entry_##method((struct mn_segment *)self, k) : NULL;                 \
    }

static PyObject *
entry_state(struct mn_segment *Py_UNUSED(s), struct mn_worker *k)
{
    return PyLong_FromUnsignedLong(mn_a32_load_acquire(&k->state));
}

static PyObject *
entry_starts(struct mn_segment *Py_UNUSED(s), struct mn_worker *k)
{
    return PyLong_FromUnsignedLong(mn_worker_starts(k));
}

/* The zygote is about to fork worker w. Called before the fork, so that the child finds it done. */
static PyObject *
entry_starting(struct mn_segment *Py_UNUSED(s), struct mn_worker *k)
{
    mn_worker_set_owner(k, mn_worker_starts(k) + 1, 0);
    mn_a32_store_release(&k->state, MN_WORKER_STARTING);
    MN_FAULT("zygote.starting");
    Py_RETURN_NONE;
}

/* The system has refused the fork: the zygote will try again. */
static PyObject *
entry_not_started(struct mn_segment *Py_UNUSED(s), struct mn_worker *k)
{
    mn_worker_set_owner(k, mn_worker_starts(k) - 1, 0);
    mn_a32_store_release(&k->state, MN_WORKER_WANTED);
    Py_RETURN_NONE;
}

/* Notes which process is this start of the entry. The worker and its parent both do so. If the
 * parent has died before it could, the next zygote calls give_up_entry() instead. All of
 * them exchange the same word, so the first wins: false, if the next zygote did. */
static bool
take_entry(struct mn_worker *k, uint32_t starts, uint32_t pid)
{
    uint64_t seen = (uint64_t)starts << 32, mine = seen | pid;
    return mn_a64_cas_acqrel(&k->owner, &seen, mine) || seen == mine;
}

/* Counts a start that no process took. True: a process that tries to take it now is refused. False:
 * a process has taken the entry. */
static bool
give_up_entry(struct mn_worker *k)
{
    uint64_t seen = mn_a64_load_acquire(&k->owner);
    return (uint32_t)seen == 0 && mn_a64_cas_acqrel(&k->owner, &seen, seen + (UINT64_C(1) << 32));
}

PyDoc_STRVAR(claim_doc,
"claim(number, starts, pid) -> bool: notes the process of an entry; the worker and its parent do\n"
"so. False: the parent has died before it could, and this worker must end.");

static PyObject *
segment_claim(PyObject *self, PyObject *args)
{
    unsigned long w;
    unsigned int starts, pid;
    struct mn_worker *k;
    if (!PyArg_ParseTuple(args, "kII", &w, &starts, &pid) || (k = entry(self, w)) == NULL) {
        return NULL;
    }
    MN_FAULT("zygote.claim");
    return PyBool_FromLong(take_entry(k, starts, pid));
}

PyDoc_STRVAR(adopt_doc,
"adopt(number) -> int | None: in a zygote, once another one has died. The process id of the\n"
"worker in this entry, or 0 where the system refused to make one. None: there is no worker. One\n"
"that the zygote was about to fork is wanted again.");

static PyObject *
entry_adopt(struct mn_segment *Py_UNUSED(s), struct mn_worker *k)
{
    uint32_t state = mn_a32_load_acquire(&k->state);
    if (state == MN_WORKER_STARTING && give_up_entry(k)) {
        mn_a32_store_release(&k->state, MN_WORKER_WANTED);
        state = MN_WORKER_WANTED;
    }
    if (state == MN_WORKER_EMPTY || state == MN_WORKER_WANTED) {
        Py_RETURN_NONE;
    }
    return PyLong_FromUnsignedLong(mn_worker_pid(k));
}

/* The process of worker w has done its last task. If the loader has not stopped, its place is
 * filled again; the trainer handles what the entry says. */
static PyObject *
entry_leaving(struct mn_segment *s, struct mn_worker *k)
{
    if (mn_a32_load_acquire(&s->shm.ctl->stop) != 0) {
        mn_a32_store_release(&k->state, MN_WORKER_LEAVING);
    }
    Py_RETURN_NONE;
}

static PyObject *
segment_exited(PyObject *self, PyObject *args)
{
    unsigned long w;
    int status;
    struct mn_worker *k;
    if (!PyArg_ParseTuple(args, "ki", &w, &status) || (k = entry(self, w)) == NULL) {
        return NULL;
    }
    struct mn_segment *s = (struct mn_segment *)self;
    MN_FAULT("zygote.exited.before");
    mn_a32_store_relaxed(&k->exit_status, (uint32_t)status);
    mn_a32_store_seqcst(&k->state, MN_WORKER_EXITED); /* [S1] */
    MN_FAULT("zygote.exited.silent");
    /* the dead one may have claimed the event without waking its sleeper */
    mn_event_notify_always(&s->shm.ctl->engine);
    MN_FAULT("zygote.exited.after");
    Py_RETURN_NONE;
}

PyDoc_STRVAR(reap_doc,
"reap(number) -> None | int\n\n"
"None while the trainer has not looked at the death yet; then in how many milliseconds to fork\n"
"another, or -1: none.");

static PyObject *
entry_reap(struct mn_segment *Py_UNUSED(s), struct mn_worker *k)
{
    if (mn_a32_load_acquire(&k->state) != MN_WORKER_SWEPT) {
        Py_RETURN_NONE;
    }
    long pause_ms = k->respawn ? k->pause_ms : -1;
    mn_a32_store_release(&k->state, pause_ms >= 0 ? MN_WORKER_WANTED : MN_WORKER_EMPTY);
    MN_FAULT("zygote.reap");
    return PyLong_FromLong(pause_ms);
}

static PyObject *
segment_stopped(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_segment *s = (struct mn_segment *)self;
    MN_FAULT("zygote.stopped");
    return PyBool_FromLong(mn_a32_load_acquire(&s->shm.ctl->stop) != 0);
}

PyDoc_STRVAR(trainer_lives_doc,
"trainer_lives() -> bool: whether the process that made the mapping still runs.");

static PyObject *
segment_trainer_lives(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(!mn_lifeline_is_cut(&((struct mn_segment *)self)->trainer));
}

PyDoc_STRVAR(await_wanted_doc,
"await_wanted(number) -> bool: in a thread that is to be this worker, waits until there is to be\n"
"one. False: the loader closes, or the interpreter exits.");

static PyObject *
segment_await_wanted(PyObject *self, PyObject *arg)
{
    struct mn_segment *s = (struct mn_segment *)self;
    unsigned long w = PyLong_AsUnsignedLong(arg);
    struct mn_worker_side side;
    if (PyErr_Occurred() || entry(self, w) == NULL) {
        return NULL;
    }
    bool wanted = false;
    if (mn_worker_attach(&side, &s->shm, (uint32_t)w) == 0) {
        wanted = MN_WITHOUT_GIL(mn_entry_await(&side));
    }
    return PyBool_FromLong(wanted);
}

PyDoc_STRVAR(over_doc,
"over() -> bool: whether the loader closes, or the interpreter exits.");

static PyObject *
segment_over(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_worker_side side = {.shm = ((struct mn_segment *)self)->shm};
    return PyBool_FromLong(mn_entry_over(&side));
}

static PyObject *
segment_set_start(PyObject *self, PyObject *how)
{
    unsigned long start = PyLong_AsUnsignedLong(how);
    if (PyErr_Occurred()) {
        return NULL;
    }
    mn_a32_store_release(&((struct mn_segment *)self)->shm.ctl->start, (uint32_t)start);
    Py_RETURN_NONE;
}

static PyObject *
segment_dontfork(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_segment *s = (struct mn_segment *)self;
    (void)mn_memfd_dontfork(s->shm.base, s->bytes);
    Py_RETURN_NONE;
}

OF_ENTRY(state)
OF_ENTRY(starts)
OF_ENTRY(starting)
OF_ENTRY(not_started)
OF_ENTRY(adopt)
OF_ENTRY(leaving)
OF_ENTRY(reap)

static PyMethodDef segment_methods[] = {
    {"state", segment_state, METH_O, PyDoc_STR("state(number) of a worker's entry")},
    {"starts", segment_starts, METH_O,
     PyDoc_STR("starts(number): how many processes there have been in its entry, with this one")},
    {"starting", segment_starting, METH_O, PyDoc_STR("starting(number): about to fork it")},
    {"not_started", segment_not_started, METH_O,
     PyDoc_STR("not_started(number): it could not be forked, and is wanted still")},
    {"claim", segment_claim, METH_VARARGS, claim_doc},
    {"adopt", segment_adopt, METH_O, adopt_doc},
    {"leaving", segment_leaving, METH_O,
     PyDoc_STR("leaving(number): the loader has stopped, and this worker does what ends it")},
    {"exited", segment_exited, METH_VARARGS,
     PyDoc_STR("exited(number, status): it is dead; exit code, or minus the signal")},
    {"reap", segment_reap, METH_O, reap_doc},
    {"stopped", segment_stopped, METH_NOARGS, PyDoc_STR("whether the loader is closing")},
    {"trainer_lives", segment_trainer_lives, METH_NOARGS, trainer_lives_doc},
    {"await_wanted", segment_await_wanted, METH_O, await_wanted_doc},
    {"over", segment_over, METH_NOARGS, over_doc},
    {"set_start", segment_set_start, METH_O,
     PyDoc_STR("set_start(how): enum mn_start, how the zygote starts workers.")},
    {"dontfork", segment_dontfork, METH_NOARGS,
     PyDoc_STR("Keeps the mapping out of processes that a worker forks.")},
    {NULL, NULL, 0, NULL},
};

static PyObject *
segment_get_workers(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(((struct mn_segment *)self)->shm.ctl->nworkers);
}

static PyObject *
segment_get_trainer(PyObject *self, void *Py_UNUSED(closure))
{
    return PyLong_FromUnsignedLong(((struct mn_segment *)self)->shm.ctl->trainer_pid);
}

static PyObject *
segment_get_start(PyObject *self, void *Py_UNUSED(closure))
{
    struct mn_ctl *c = ((struct mn_segment *)self)->shm.ctl;
    return PyLong_FromUnsignedLong(mn_a32_load_acquire(&c->start));
}

static PyGetSetDef segment_getset[] = {
    {"workers", segment_get_workers, NULL, PyDoc_STR("number of worker entries"), NULL},
    {"start", segment_get_start, NULL, PyDoc_STR("how workers are started: enum mn_start"), NULL},
    {"trainer_pid", segment_get_trainer, NULL, PyDoc_STR("process that made it"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef segment_members[] = {
    {"lifeline", T_INT, offsetof(struct mn_segment, trainer.fd), READONLY,
     PyDoc_STR("descriptor that hangs up when the process that made the mapping is gone; or -1")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot segment_slots[] = {
    {Py_tp_new, segment_new},
    {Py_tp_dealloc, segment_dealloc},
    {Py_tp_methods, segment_methods},
    {Py_tp_getset, segment_getset},
    {Py_tp_members, segment_members},
    {Py_tp_doc, PyDoc_STR("Segment(fd, lifeline): attaches to the loader's mapping.")},
    {0, NULL},
};

PyType_Spec mn_segment_spec = {"minato._core.Segment", sizeof(struct mn_segment), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, segment_slots};
