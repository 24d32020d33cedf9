/* mn_engine_type_snapshot.c - what an Engine reports, and requests to its workers.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "py/types/mn_engine_object.h"

struct of_block {
    struct mn_state *st;
    struct mn_engine *e;
    uint64_t block, env_off;
};

/* Returns one part of an envelope: a view of the arena if it is big, else a copy. */
static PyObject *
part(void *arg, const struct mn_envelope_part *p)
{
    const struct of_block *o = arg;
    uint64_t off = o->env_off + p->at;
    bool copy = p->bytes < MN_FIELD_BIG || !mn_engine_may_retain(o->e, p->bytes);
    struct mn_hold *hold = copy ? mn_hold_copy(o->st, mn_at(mn_engine_shm(o->e), off), p->bytes)
                                : mn_hold_new(o->st, o->e, o->block, off, p->bytes);
    return hold != NULL ? mn_arena_view_new(o->st, hold, p->bytes) : NULL;
}

static PyObject *
open_envelope(struct mn_state *st, struct mn_engine *e, uint64_t block,
              const struct mn_result *t)
{
    struct of_block o = {st, e, block, t->env_off};
    PyObject *sent = mn_envelope_read(mn_at(mn_engine_shm(e), t->env_off), t->env_len,
                                      &t->envelope /* copied when the block was done */, part, &o);
    PyObject *made = sent == NULL ? NULL
                                  : mn_named_tuple(st->envelope_type, "((IIIOO))", t->worker,
                                                   t->row0, t->nrows, PyTuple_GET_ITEM(sent, 0),
                                                   PyTuple_GET_ITEM(sent, 1));
    Py_XDECREF(sent);
    return made;
}

const char mn_engine_envelopes_doc[] =
    "envelopes(block, row=-1) -> [Envelope]\n\n"
    "The messages of a done block, in row order; with a row only that of the task that has made\n"
    "it, which may be done before its block is. pickle is None where a worker found no room for\n"
    "its result under the memory limit. Buffers may lie in the message itself, which can be\n"
    "opened once.";

PyObject *
mn_engine_py_envelopes(PyObject *self, struct mn_engine *e, PyObject *args)
{
    uint64_t off;
    long long row = -1;
    PyObject *block;
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    if (!PyArg_ParseTuple(args, "O|L", &block, &row)
        || mn_engine_of_block(self, block, &off) == NULL) {
        return NULL;
    }
    const struct mn_result *t;
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && (t = mn_engine_result(e, off, i)) != NULL; i++) {
        bool other = row >= 0 && (row < t->row0 || row - t->row0 >= t->nrows);
        if (other || !t->accepted || t->flags == 0
            || t->kind == MN_KIND_PART) { /* only the result of its collate task is needed */
            continue;
        }
        PyObject *one = t->flags & MN_FLAG_NO_ROOM
                            ? mn_named_tuple(st->envelope_type, "((IIIOO))", t->worker, t->row0,
                                             t->nrows, Py_None, Py_None)
                            : open_envelope(st, e, off, t);
        mn_list_add(&out, one);
    }
    return out;
}

const char mn_engine_written_doc[] =
    "written(block, row) -> bool: whether the worker has written this row of a done block";

PyObject *
mn_engine_py_written(PyObject *self, struct mn_engine *e, PyObject *args)
{
    uint64_t off;
    unsigned int row;
    PyObject *block;
    if (!PyArg_ParseTuple(args, "OI", &block, &row)
        || mn_engine_of_block(self, block, &off) == NULL) {
        return NULL;
    }
    bool there = row < mn_block_at(mn_engine_shm(e), off)->nrows;
    return PyBool_FromLong(there
                           && mn_engine_read_reports(e, off)[row].status == MN_ROW_WRITTEN);
}

const char mn_engine_lost_doc[] =
    "lost(block) -> [Loss] of its tasks that were lost, in row order";

PyObject *
mn_engine_py_lost(PyObject *self, struct mn_engine *e, PyObject *block)
{
    uint64_t off;
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    if (mn_engine_of_block(self, block, &off) == NULL) {
        return NULL;
    }
    uint32_t ntasks = mn_block_at(mn_engine_shm(e), off)->ntasks;
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i < ntasks; i++) {
        struct mn_loss x;
        if (mn_engine_loss(e, off, i, &x)) {
            mn_list_add(&out, mn_named_tuple(st->loss_type, "((IIiIIK))", x.death.worker,
                                             x.death.pid, x.death.status, x.row0, x.nrows,
                                             (unsigned long long)x.death.row));
        }
    }
    return out;
}

const char mn_engine_workers_doc[] =
    "workers() -> one dict a worker: state (0 none, 1 wanted, 2 starting, 3 ready,\n"
    "4 exited, 5 swept, 6 leaving), pid, starts, status, running (batch, row) or None,\n"
    "since_ns, tasks, rows, busy_ns, cpu_ns, init_states (three hashes, see mn_records.h)";

static PyObject *
running_of(const struct mn_shm *shm, struct mn_worker *k)
{
    /* For people: the task may be over by the time it is shown. */
    uint32_t task;
    uint64_t since;
    if (!mn_worker_at_work(k, shm->ctl->ntasks, &task, &since)) {
        Py_RETURN_NONE;
    }
    uint64_t block = mn_task_at(shm, task)->block_off;
    if (block < shm->ctl->input_off || block >= shm->ctl->arena_off) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(KK)", (unsigned long long)mn_block_at(shm, block)->number,
                         (unsigned long long)mn_a64_load_relaxed(&k->row));
}

PyObject *
mn_engine_py_workers(PyObject *Py_UNUSED(self), struct mn_engine *e,
                     PyObject *Py_UNUSED(ignored))
{
    const struct mn_shm *shm = mn_engine_shm(e);
    uint32_t n = shm->ctl->nworkers;
    PyObject *out = PyList_New(0);
    for (uint32_t w = 0; out != NULL && w < n; w++) {
        struct mn_worker *k = mn_worker_at(shm, w);
        mn_list_add(&out, mn_worker_dict(k, running_of(shm, k)));
    }
    return out;
}

const char mn_engine_kill_worker_doc[] =
    "kill_worker(number, signal, retire=False) -> bool: signals the worker's process. Whether it\n"
    "lived. retire: it is not replaced when it ends.";

PyObject *
mn_engine_py_kill_worker(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    unsigned int w;
    int sig, retire = 0;
    if (!PyArg_ParseTuple(args, "Ii|p", &w, &sig, &retire)) {
        return NULL;
    }
    if (w >= mn_engine_shm(e)->ctl->nworkers) {
        return PyErr_Format(PyExc_IndexError, "no such worker");
    }
    int rc = mn_engine_kill_worker(e, w, sig, retire != 0);
    if (rc != -ESRCH && mn_raise_errno(rc, "cannot signal a worker") < 0) {
        return NULL;
    }
    return PyBool_FromLong(rc == 0);
}

const char mn_engine_end_late_doc[] =
    "end_late(number, batch, row, end) -> bool: whether the worker makes that row. If so, and if\n"
    "it is killed now, its task is not retried. end: kills it.";

PyObject *
mn_engine_py_end_late(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    unsigned int w;
    unsigned long long number, row;
    int end;
    if (!PyArg_ParseTuple(args, "IKKp", &w, &number, &row, &end)) {
        return NULL;
    }
    return PyBool_FromLong(mn_engine_end_late(e, w, number, row, end != 0));
}

const char mn_engine_end_worker_doc[] =
    "end_worker(number, finished): asks a worker to exit after its current sample. It is not\n"
    "replaced. finished: it has nothing more to do, and that is no death. Else, for a thread, it\n"
    "counts as a death by SIGTERM. No error for a number that no worker has.";

PyObject *
mn_engine_py_end_worker(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    unsigned int w;
    int finished;
    if (!PyArg_ParseTuple(args, "Ip", &w, &finished)) {
        return NULL;
    }
    mn_engine_ask_to_exit(e, w, finished ? MN_EXIT_SHRINK : MN_EXIT_ENDED);
    Py_RETURN_NONE;
}

#ifdef MN_TEST_BINDINGS
const char mn_engine_move_to_doc[] =
    "move_to(workers): that many, as if the worker scheduler had decided so; it goes on from\n"
    "there. RuntimeError where it has nothing to decide: its bounds are one number.";

PyObject *
mn_engine_py_move_to(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *workers)
{
    long target = PyLong_AsLong(workers);
    if (target == -1 && PyErr_Occurred()) {
        return NULL;
    }
    if (mn_engine_move_to(e, target < INT32_MAX ? (int32_t)target : INT32_MAX) < 0) {
        return PyErr_Format(PyExc_RuntimeError, "the number of workers is fixed");
    }
    Py_RETURN_NONE;
}
#endif

const char mn_engine_note_failed_doc[] =
    "note_failed(samples): sets the number of samples left out or replaced so far, which other\n"
    "processes read.";

PyObject *
mn_engine_py_note_failed(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *arg)
{
    unsigned long long samples = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    mn_engine_note_failed(e, samples);
    Py_RETURN_NONE;
}

const char mn_engine_health_doc[] =
    "health() -> {zygote_lost, zygote_hung, deaths, crash_loop, live, retries, worker, pid,\n"
    "status}\n\n"
    "Unexpected deaths so far, the longest row of them up to now in one place without a finished\n"
    "task, workers that may still finish something, and the last death.";

PyObject *
mn_engine_py_health(PyObject *Py_UNUSED(self), struct mn_engine *e,
                    PyObject *Py_UNUSED(ignored))
{
    struct mn_health h = mn_engine_health(e);
    return Py_BuildValue("{sO sO sI sI sI sK sI sI si}", "zygote_lost",
                         h.zygote_lost ? Py_True : Py_False, "zygote_hung",
                         h.zygote_hung ? Py_True : Py_False, "deaths", h.deaths, "crash_loop",
                         h.crash_loop, "live", h.live,
                         "retries", (unsigned long long)h.retries, "worker", h.last.worker, "pid",
                         h.last.pid, "status", h.last.status);
}

const char mn_engine_deaths_doc[] = "deaths() -> unexpected deaths so far, as in health()";

PyObject *
mn_engine_py_deaths(PyObject *Py_UNUSED(self), struct mn_engine *e,
                    PyObject *Py_UNUSED(ignored))
{
    return PyLong_FromUnsignedLong(mn_engine_health(e).deaths);
}

const char mn_engine_memory_doc[] =
    "memory() -> {used, kept, limit, in_flight, envelope_bytes}: bytes of the arena in use, those\n"
    "that the program keeps, the ceiling, batches in flight, and a batch's bytes in envelopes";

PyObject *
mn_engine_py_memory(PyObject *self, struct mn_engine *e, PyObject *Py_UNUSED(ignored))
{
    mn_pending_reclaim(PyType_GetModuleState(Py_TYPE(self)));
    if (mn_engine_get(self) == NULL) {
        return NULL;
    }
    struct mn_memory_snapshot m = mn_engine_memory(e);
    return Py_BuildValue("{sK sK sK sI sK}", "used", (unsigned long long)m.used, "kept",
                         (unsigned long long)m.kept, "limit", (unsigned long long)m.limit,
                         "in_flight", m.in_flight, "envelope_bytes",
                         (unsigned long long)m.envelope_bytes);
}

const char mn_engine_progress_doc[] =
    "progress() -> dict. waits, wait_ns, wait_max_ns, wait_first_ns: batches the caller waited\n"
    "for, its time in next() (in all, longest, first). epochs, epochs_ns: waits for the first\n"
    "batches of later epochs (how many, in all). steady_max_ns: the longest of the other waits.\n"
    "held: batches during which the memory limit held tasks back. used_ns: the caller's time\n"
    "between calls. asked_ns, given_ns: the last wait's begin and end (0 without one), by the\n"
    "monotonic clock. The rest is 0 for static scheduling. planned, ready: batches that have not\n"
    "started, and complete ones. starts: tasks started by reason (window, early, ahead, finale,\n"
    "order). helped: how often a worker took over part of another's share. together: whether\n"
    "neighbours are kept together. displaced: (max, sum) of how far samples moved from their\n"
    "positions in the sampler's order, in batches";

PyObject *
mn_engine_py_progress(PyObject *Py_UNUSED(self), struct mn_engine *e,
                      PyObject *Py_UNUSED(ignored))
{
    typedef unsigned long long number;
    struct mn_progress p = mn_engine_progress(e);
    const struct mn_waits *w = &p.waits;
    return Py_BuildValue(
        "{sK sK sK sK sK sK sK sK sK sK sK sK sK s(KKKKK) sK sO s(LL)}", "waits", (number)w->n,
        "wait_ns", (number)w->wait_ns, "wait_max_ns", (number)w->max_ns, "wait_first_ns",
        (number)w->first_ns, "epochs", (number)w->starts, "epochs_ns", (number)w->starts_ns,
        "steady_max_ns", (number)w->steady_max_ns, "held", (number)p.held, "used_ns",
        (number)w->used_ns, "asked_ns", (number)w->asked_ns, "given_ns", (number)w->given_ns,
        "planned", (number)p.planned, "ready", (number)p.ready, "starts", (number)p.starts[1],
        (number)p.starts[2], (number)p.starts[3], (number)p.starts[4], (number)p.starts[5],
        "helped", (number)p.helped, "together", p.together ? Py_True : Py_False, "displaced",
        (long long)p.displaced_max, (long long)p.displaced_sum);
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
mn_engine_py_scheduler(PyObject *self, struct mn_engine *e, PyObject *Py_UNUSED(ignored))
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    struct mn_autoscale_log log;
    if (!mn_engine_autoscale(e, &log)) {
        Py_RETURN_NONE;
    }
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < log.n; i++) {
        const struct mn_decision *d = &log.last[i];
        PyObject *one = mn_named_tuple(st->decision_type, "((Kiiisiiid))",
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

const char mn_engine_spans_doc[] =
    "spans(block) -> (epoch, number, [Span]): the finished tasks of a done block";

static PyObject *
span(const struct mn_state *st, struct mn_block *b, const struct mn_report *r,
     const struct mn_result *t, const struct mn_task *task)
{
    uint64_t word = mn_a64_load_acquire(&task->word); /* statistics only */
    /* a BATCH task has as many reports as the block has rows */
    uint32_t end = t->kind == MN_KIND_COLLATE ? t->row0 : t->row0 + t->nrows;
    end = end < b->nrows ? end : b->nrows;
    PyObject *rows = PyList_New(0);
    for (uint32_t i = t->row0; rows != NULL && i < end; i++) {
        mn_list_add(&rows, PyLong_FromUnsignedLongLong(r[i].wall_ns));
    }
    return rows == NULL ? NULL
                        : mn_named_tuple(st->span_type, "((IIIIIIKKKN))", t->worker,
                                         mn_word_attempt(word), t->kind, task->why, t->row0,
                                         t->nrows, (unsigned long long)t->done_ns,
                                         (unsigned long long)t->wall_ns,
                                         (unsigned long long)t->cpu_ns, rows);
}

PyObject *
mn_engine_py_spans(PyObject *self, struct mn_engine *e, PyObject *block)
{
    uint64_t off;
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    if (mn_engine_of_block(self, block, &off) == NULL) {
        return NULL;
    }
    const struct mn_shm *shm = mn_engine_shm(e);
    struct mn_block *b = mn_block_at(shm, off);
    const struct mn_report *reports = mn_engine_read_reports(e, off);
    const struct mn_result *t;
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && (t = mn_engine_result(e, off, i)) != NULL; i++) {
        if (!t->accepted) {
            continue;
        }
        mn_list_add(&out, span(st, b, reports, t, mn_task_at(shm, mn_block_tasks(b)[i])));
    }
    return out == NULL ? NULL
                       : Py_BuildValue("(KKN)", (unsigned long long)b->epoch,
                                       (unsigned long long)b->number, out);
}
