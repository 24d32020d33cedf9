/* mn_engine_look.c - what an Engine tells: envelopes, reports, deaths, workers, memory.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "engine/mn_scheduler.h"
#include "os/mn_memfd.h"
#include "os/mn_proc.h"
#include "py/types/mn_engine_object.h"
#include "py/transport/mn_envelope.h"

/* One part of an envelope: a view of the arena when it is big, else a copy. */
static PyObject *
part(struct mn_state *st, struct mn_engine *e, uint64_t block, uint64_t env_off,
     const struct mn_envelope_part *p)
{
    bool copy = p->bytes < MN_FIELD_BIG || e->arena.kept_bytes + p->bytes > e->arena.limit / 2;
    struct mn_hold *hold =
        copy ? mn_hold_copy(st, mn_at(&e->shm, env_off + p->at), p->bytes)
             : mn_hold_new(st, e, block, env_off + p->at, p->bytes);
    return hold != NULL ? mn_view_new(st, hold, p->bytes) : NULL;
}

static PyObject *
open_envelope(struct mn_state *st, struct mn_engine *e, uint64_t block,
              const struct mn_result *t)
{
    const struct mn_envelope *env = &t->envelope; /* copied when the block was done */
    PyObject *pickle = PyBytes_FromStringAndSize(mn_at(&e->shm, t->env_off + env->pickle_at),
                                                 (Py_ssize_t)env->pickle_bytes);
    PyObject *list = pickle != NULL ? PyList_New((Py_ssize_t)env->nparts) : NULL;
    for (uint64_t i = 0; list != NULL && i < env->nparts; i++) {
        struct mn_envelope_part p;
        bool sound = mn_envelope_part_look(mn_at(&e->shm, t->env_off), t->env_len, env, i, &p);
        if (!sound) {
            PyErr_SetString(PyExc_RuntimeError, "a worker has changed its result after it sent it");
        }
        PyObject *b = sound ? part(st, e, block, t->env_off, &p) : NULL;
        if (b == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, (Py_ssize_t)i, b);
    }
    if (list == NULL) {
        Py_XDECREF(pickle);
        return NULL;
    }
    return Py_BuildValue("(IIINN)", t->worker, t->row0, t->nrows, pickle, list);
}

const char mn_engine_envelopes_doc[] =
    "envelopes(block) -> [(worker, row0, nrows, pickle, buffers)]\n\n"
    "The messages of a done block, in row order. pickle is None where a worker found no\n"
    "room for its result under the memory limit.";

PyObject *
mn_engine_envelopes(PyObject *self, PyObject *block)
{
    struct mn_engine *e = mn_engine_get(self);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    unsigned long long off = PyLong_AsUnsignedLongLong(block);
    if (e == NULL || st == NULL || PyErr_Occurred()) {
        return NULL;
    }
    struct mn_block *b = mn_block_at(&e->shm, off);
    const uint32_t *tasks = mn_block_tasks(b);
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i < b->ntasks; i++) {
        const struct mn_result *t = &e->tasks.results[tasks[i]];
        if (!t->accepted || t->flags == 0
            || t->kind == MN_KIND_PART) { /* what its collate task has made is of interest */
            continue;
        }
        PyObject *one = t->flags & MN_FLAG_NO_ROOM
                            ? Py_BuildValue("(IIIOO)", t->worker, t->row0, t->nrows, Py_None,
                                            Py_None)
                            : open_envelope(st, e, off, t);
        if (one == NULL || PyList_Append(out, one) < 0) {
            Py_CLEAR(out);
        }
        Py_XDECREF(one);
    }
    return out;
}

const char mn_engine_form_doc[] =
    "form(block) -> (kind, layout_at): how its rows travelled; layout_at 0 without a layout";

PyObject *
mn_engine_form(PyObject *self, PyObject *block)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned long long off = PyLong_AsUnsignedLongLong(block);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    struct mn_block *b = mn_block_at(&e->shm, off);
    uint32_t kind = b->ntasks != 0 ? e->tasks.results[mn_block_tasks(b)[0]].kind
                                   : (uint32_t)MN_KIND_SAMPLES;
    return Py_BuildValue("(II)", kind, b->layout);
}

const char mn_engine_reports_doc[] =
    "reports(block) -> [(status, wall_ns)] of the rows of a done block";

PyObject *
mn_engine_reports(PyObject *self, PyObject *block)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned long long off = PyLong_AsUnsignedLongLong(block);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    struct mn_block *b = mn_block_at(&e->shm, off);
    const struct mn_report *r = mn_engine_read_reports(e, off);
    PyObject *out = PyList_New(b->nrows);
    for (uint32_t i = 0; out != NULL && i < b->nrows; i++) {
        PyObject *one = Py_BuildValue("(IK)", r[i].status, (unsigned long long)r[i].wall_ns);
        if (one == NULL) {
            Py_CLEAR(out);
            break;
        }
        PyList_SET_ITEM(out, i, one);
    }
    return out;
}

const char mn_engine_lost_doc[] =
    "lost(block) -> (worker, pid, status, row0, nrows) of its first lost task, or None";

PyObject *
mn_engine_lost(PyObject *self, PyObject *block)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned long long off = PyLong_AsUnsignedLongLong(block);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    struct mn_block *b = mn_block_at(&e->shm, off);
    const uint32_t *tasks = mn_block_tasks(b);
    for (uint32_t i = 0; i < b->ntasks; i++) {
        struct mn_task *t = mn_task_at(&e->shm, tasks[i]);
        if (mn_word_status(mn_a64_load_acquire(&t->word)) == MN_TASK_LOST) { /* [T4] */
            const struct mn_death *d = &e->tasks.lost[tasks[i]];
            const struct mn_result *r = &e->tasks.results[tasks[i]];
            return Py_BuildValue("(IIiII)", d->worker, d->pid, d->status, r->row0, r->nrows);
        }
    }
    Py_RETURN_NONE;
}

const char mn_engine_workers_doc[] =
    "workers() -> one dict a worker: state (0 none, 1 wanted, 2 starting, 3 ready,\n"
    "4 exited, 5 swept), pid, status, running (batch, row) or None, since_ns, tasks, rows,\n"
    "busy_ns, cpu_ns, init_states (three hashes, see mn_message.h)";

static PyObject *
running_of(struct mn_engine *e, struct mn_worker *k)
{
    /* For people: the task may be over by the time it is shown. */
    uint32_t task;
    uint64_t since;
    if (!mn_worker_at_work(k, e->shm.ctl->ntasks, &task, &since)) {
        Py_RETURN_NONE;
    }
    const struct mn_task *t = mn_task_at(&e->shm, task);
    if (t->block_off < e->shm.ctl->input_off
        || t->block_off >= e->shm.ctl->arena_off) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(KK)",
                         (unsigned long long)mn_block_at(&e->shm, t->block_off)->number,
                         (unsigned long long)mn_a64_load_relaxed(&k->row));
}

PyObject *
mn_engine_workers(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    uint32_t n = e->shm.ctl->nworkers;
    PyObject *out = PyList_New(n);
    for (uint32_t w = 0; out != NULL && w < n; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        PyObject *running = running_of(e, k);
        PyObject *one =
            running == NULL
                ? NULL
                : Py_BuildValue(
                      "{sI sI si sN sK sK sK sK sK s(KKK)}", "state",
                      mn_a32_load_acquire(&k->state), /* [S2] */
                      "pid", k->pid, "status", k->exit_status, "running", running, "since_ns",
                      (unsigned long long)mn_a64_load_relaxed(&k->since_ns), "tasks",
                      (unsigned long long)mn_a64_load_relaxed(&k->tasks_done), "rows",
                      (unsigned long long)mn_a64_load_relaxed(&k->rows_done), "busy_ns",
                      (unsigned long long)mn_a64_load_relaxed(&k->busy_ns), "cpu_ns",
                      (unsigned long long)mn_a64_load_relaxed(&k->cpu_ns), "init_states",
                      (unsigned long long)k->init_states[0],
                      (unsigned long long)k->init_states[1],
                      (unsigned long long)k->init_states[2]);
        if (one == NULL) {
            Py_CLEAR(out);
            break;
        }
        PyList_SET_ITEM(out, w, one);
    }
    return out;
}

PyObject *
mn_engine_retire_worker(PyObject *self, PyObject *number)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned long w = PyLong_AsUnsignedLong(number);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    if (w < e->shm.ctl->nworkers) {
        mn_mutex_lock(&e->mutex);
        mn_worker_at(&e->shm, (uint32_t)w)->retired = 1;
        mn_mutex_unlock(&e->mutex);
    }
    Py_RETURN_NONE;
}

const char mn_engine_kill_worker_doc[] =
    "kill_worker(number, signal) -> bool: signals the worker's process, whoever watches it, and\n"
    "nobody who has got its id since. Whether it lived.";

PyObject *
mn_engine_kill_worker(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned int w;
    int sig;
    if (e == NULL || !PyArg_ParseTuple(args, "Ii", &w, &sig)) {
        return NULL;
    }
    if (w >= e->shm.ctl->nworkers) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return NULL;
    }
    const struct mn_worker *k = mn_worker_at(&e->shm, w);
    mn_mutex_lock(&e->mutex);
    uint32_t pid = e->crew.members[w].pid;
    uint64_t born = e->crew.members[w].born;
    mn_mutex_unlock(&e->mutex);
    if (pid == 0) { /* the engine has not seen it yet */
        pid = k->pid;
        born = k->born;
    }
    int rc = pid != 0 ? mn_proc_kill((pid_t)pid, born, sig) : -ESRCH;
    if (rc != -ESRCH && mn_raise_errno(rc, "cannot signal a worker") < 0) {
        return NULL;
    }
    return PyBool_FromLong(rc == 0);
}

static PyObject *
ask_to_leave(PyObject *self, PyObject *number, enum mn_leave how)
{
    PyObject *done = mn_engine_retire_worker(self, number);
    unsigned long w = PyLong_AsUnsignedLong(number);
    struct mn_engine *e = done != NULL ? mn_engine_get(self) : NULL;
    if (e != NULL && w < e->shm.ctl->nworkers) {
        struct mn_worker *k = mn_worker_at(&e->shm, (uint32_t)w);
        mn_a32_store_seqcst(&k->leave, how);
        mn_bell_ring(&k->bell);
    }
    return done;
}

const char mn_engine_end_worker_doc[] =
    "end_worker(number): a native worker leaves when it has finished what it has in hand; that\n"
    "counts as a death by SIGTERM, and nobody takes its place.";

PyObject *
mn_engine_end_worker(PyObject *self, PyObject *number)
{
    return ask_to_leave(self, number, MN_LEAVE_ENDED);
}

const char mn_engine_let_go_doc[] =
    "let_go(number): the worker has nothing more to do and leaves; that is no death, and\n"
    "nobody takes its place.";

PyObject *
mn_engine_let_go(PyObject *self, PyObject *number)
{
    return ask_to_leave(self, number, MN_LEAVE_SHRINK);
}

#ifdef MN_TEST_BINDINGS
const char mn_engine_move_to_doc[] =
    "move_to(workers): that many, as if the worker scheduler had decided so; it goes on from\n"
    "there. RuntimeError where it has nothing to decide: its bounds are one number.";

PyObject *
mn_engine_move_to(PyObject *self, PyObject *workers)
{
    struct mn_engine *e = mn_engine_get(self);
    long target = PyLong_AsLong(workers);
    if (e == NULL || (target == -1 && PyErr_Occurred())) {
        return NULL;
    }
    if (e->scheduler == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the number of workers is fixed");
        return NULL;
    }
    mn_mutex_lock(&e->mutex);
    mn_scheduler_move(e, target < INT32_MAX ? (int32_t)target : INT32_MAX);
    mn_engine_unlock(e);
    Py_RETURN_NONE;
}
#endif

const char mn_engine_dismiss_doc[] =
    "dismiss(): native workers end after the sample in hand; who waits for a batch is not told";

PyObject *
mn_engine_py_dismiss(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_dismiss(e);
    Py_RETURN_NONE;
}

const char mn_engine_health_doc[] =
    "health() -> {zygote_lost, zygote_hung, deaths, barren, live, retries, worker, pid, status}\n\n"
    "Unexpected deaths so far, the longest row of them up to now in one place without a finished\n"
    "task, workers that may still finish something, and the last death.";

PyObject *
mn_engine_health(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    mn_mutex_lock(&e->mutex);
    struct mn_death d = e->crew.death;
    uint32_t deaths = e->crew.ndeaths, live = mn_crew_live(&e->crew);
    uint32_t barren = mn_crew_barren(&e->crew);
    bool lost = e->crew.lost, hung = e->crew.hung;
    uint64_t retries = e->tasks.retries;
    mn_mutex_unlock(&e->mutex);
    return Py_BuildValue("{sO sO sI sI sI sK sI sI si}", "zygote_lost", lost ? Py_True : Py_False,
                         "zygote_hung", hung ? Py_True : Py_False, "deaths", deaths, "barren",
                         barren, "live", live, "retries", (unsigned long long)retries, "worker",
                         d.worker, "pid", d.pid, "status", d.status);
}

const char mn_engine_memory_doc[] =
    "memory() -> {used, kept, warm, reclaimed, limit, in_flight, envelope_bytes}: bytes of the\n"
    "arena in use, those of them that the program keeps, those free that may hold pages, those\n"
    "given back to the system so far, the ceiling, and batches in flight";

PyObject *
mn_engine_memory(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (e == NULL || st == NULL) {
        return NULL;
    }
    mn_pending_reclaim(st);
    mn_mutex_lock(&e->mutex);
    uint64_t used = mn_arena_used(&e->arena), kept = e->arena.kept_bytes;
    uint64_t warm = mn_arena_warm(&e->arena), reclaimed = e->arena.reclaimed_bytes;
    uint64_t limit = e->arena.limit, mean = e->flight.mean_envelope_bytes;
    uint32_t inflight = e->flight.n;
    mn_mutex_unlock(&e->mutex);
    return Py_BuildValue("{sK sK sK sK sK sI sK}", "used", (unsigned long long)used, "kept",
                         (unsigned long long)kept, "warm", (unsigned long long)warm,
                         "reclaimed", (unsigned long long)reclaimed, "limit",
                         (unsigned long long)limit, "in_flight", inflight, "envelope_bytes",
                         (unsigned long long)mean);
}

const char mn_engine_waits_doc[] =
    "waits() -> {waits, wait_ns, wait_max_ns, wait_first_ns, held, used_ns, asked_ns, given_ns}:\n"
    "batches the caller waited for, its time in next() (in all, longest, first), batches during\n"
    "which the memory limit held tasks back, its time between calls, and the last wait's begin\n"
    "and end (0 without one), by the monotonic clock";

PyObject *
mn_engine_waits(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    return Py_BuildValue("{sK sK sK sK sK sK sK sK}", "waits", (unsigned long long)e->waits.n,
                         "wait_ns", (unsigned long long)e->waits.wait_ns, "wait_max_ns",
                         (unsigned long long)e->waits.max_ns, "wait_first_ns",
                         (unsigned long long)e->waits.first_ns, "held",
                         (unsigned long long)e->held, "used_ns",
                         (unsigned long long)e->waits.used_ns, "asked_ns",
                         (unsigned long long)e->waits.asked_ns, "given_ns",
                         (unsigned long long)e->waits.given_ns);
}

PyObject *
mn_engine_py_asked(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_span_begin(e);
    return PyLong_FromLongLong(e->plan != NULL ? e->plan->consumer_ns : 0);
}

PyObject *
mn_engine_py_given(PyObject *self, PyObject *got)
{
    struct mn_engine *e = mn_engine_get(self);
    int yes = PyObject_IsTrue(got);
    if (e == NULL || yes < 0) {
        return NULL;
    }
    mn_engine_span_end(e, yes != 0);
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_handed(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_handed(e);
    Py_RETURN_NONE;
}

const char mn_engine_spans_doc[] =
    "spans(block) -> (epoch, number, [(worker, attempt, kind, why, row0, nrows, done_ns,\n"
    "wall_ns, cpu_ns, rows)]): the finished tasks of a done block: where and when each ran\n"
    "(monotonic clock, its end and how long), why it was started (0 static, else enum\n"
    "mn_dispatch_why), and how long each of its rows took, one after another from its begin; 0\n"
    "where that is not known";

static PyObject *
span(struct mn_block *b, const struct mn_report *r, const struct mn_result *t,
     const struct mn_task *task)
{
    uint64_t word = mn_a64_load_acquire(&task->word); /* for people */
    /* a BATCH task has as many reports as the block has rows */
    uint32_t end = t->kind == MN_KIND_COLLATE ? t->row0 : t->row0 + t->nrows;
    end = end < b->nrows ? end : b->nrows;
    PyObject *rows = PyList_New(end - t->row0);
    for (uint32_t i = t->row0; rows != NULL && i < end; i++) {
        PyObject *ns = PyLong_FromUnsignedLongLong(r[i].wall_ns);
        if (ns == NULL) {
            Py_CLEAR(rows);
            break;
        }
        PyList_SET_ITEM(rows, i - t->row0, ns);
    }
    return rows == NULL ? NULL
                        : Py_BuildValue("(IIIIIIKKKN)", t->worker,
                                        mn_word_attempt(word), t->kind, task->why, t->row0,
                                        t->nrows, (unsigned long long)t->done_ns,
                                        (unsigned long long)t->wall_ns,
                                        (unsigned long long)t->cpu_ns, rows);
}

PyObject *
mn_engine_spans(PyObject *self, PyObject *block)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned long long off = PyLong_AsUnsignedLongLong(block);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    struct mn_block *b = mn_block_at(&e->shm, off);
    const uint32_t *tasks = mn_block_tasks(b);
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i < b->ntasks; i++) {
        const struct mn_result *t = &e->tasks.results[tasks[i]];
        if (!t->accepted) {
            continue;
        }
        PyObject *one = span(b, mn_engine_read_reports(e, off), t, mn_task_at(&e->shm, tasks[i]));
        if (one == NULL || PyList_Append(out, one) < 0) {
            Py_CLEAR(out);
        }
        Py_XDECREF(one);
    }
    return out == NULL ? NULL
                       : Py_BuildValue("(KKN)", (unsigned long long)b->epoch,
                                       (unsigned long long)b->number, out);
}
