/* mn_engine_type_snapshot.c - what an Engine reports: envelopes, reports, deaths, workers, memory.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <string.h>

#include "engine/mn_engine_snapshot.h"
#include "py/types/mn_engine_object.h"

/* Returns one part of an envelope: a view of the arena if it is big, else a copy. */
static PyObject *
part(struct mn_state *st, struct mn_engine *e, uint64_t block, uint64_t env_off,
     const struct mn_envelope_part *p)
{
    bool copy = p->bytes < MN_FIELD_BIG || !mn_engine_may_retain(e, p->bytes);
    struct mn_hold *hold =
        copy ? mn_hold_copy(st, mn_at(mn_engine_shm(e), env_off + p->at), p->bytes)
             : mn_hold_new(st, e, block, env_off + p->at, p->bytes);
    return hold != NULL ? mn_arena_view_new(st, hold, p->bytes) : NULL;
}

static PyObject *
open_envelope(struct mn_state *st, struct mn_engine *e, uint64_t block,
              const struct mn_result *t)
{
    const struct mn_envelope *env = &t->envelope; /* copied when the block was done */
    const char *at = mn_at(mn_engine_shm(e), t->env_off);
    PyObject *pickle =
        PyBytes_FromStringAndSize(at + env->pickle_at, (Py_ssize_t)env->pickle_bytes);
    struct mn_envelope_part *parts =
        pickle != NULL ? mn_envelope_open(at, t->env_len, env) : NULL;
    PyObject *list = parts != NULL ? PyList_New(0) : NULL;
    for (uint64_t i = 0; list != NULL && i < env->nparts; i++) {
        mn_list_add(&list, part(st, e, block, t->env_off, &parts[i]));
    }
    PyMem_Free(parts);
    if (list == NULL) {
        Py_XDECREF(pickle);
        return NULL;
    }
    return mn_named_tuple(st->envelope_type, "(IIINN)", t->worker, t->row0, t->nrows, pickle,
                          list);
}

#define EVERY_ROW (-1)

/* Reads (block, row=EVERY_ROW). */
static struct mn_engine *
of_block_or_row(PyObject *self, PyObject *args, uint64_t *block_off, long long *row)
{
    PyObject *block;
    *row = EVERY_ROW;
    return PyArg_ParseTuple(args, "O|L", &block, row) ? mn_engine_of_block(self, block, block_off)
                                                      : NULL;
}

static bool
has_row(const struct mn_result *t, long long row)
{
    return row == EVERY_ROW || (row >= t->row0 && row - t->row0 < t->nrows);
}

const char mn_engine_envelopes_doc[] =
    "envelopes(block, row=-1) -> [Envelope]\n\n"
    "The messages of a done block, in row order; with a row only that of the task that has made\n"
    "it, which may be done before its block is. pickle is None where a worker found no room for\n"
    "its result under the memory limit. Buffers may lie in the message itself, which can be\n"
    "opened once.";

PyObject *
mn_engine_py_envelopes(PyObject *self, PyObject *args)
{
    uint64_t off;
    long long row;
    struct mn_engine *e = of_block_or_row(self, args, &off, &row);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (e == NULL || st == NULL) {
        return NULL;
    }
    const struct mn_result *t;
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && (t = mn_engine_result(e, off, i)) != NULL; i++) {
        if (!has_row(t, row) || !t->accepted || t->flags == 0
            || t->kind == MN_KIND_PART) { /* only the result of its collate task is needed */
            continue;
        }
        PyObject *one = t->flags & MN_FLAG_NO_ROOM
                            ? mn_named_tuple(st->envelope_type, "(IIIOO)", t->worker, t->row0,
                                             t->nrows, Py_None, Py_None)
                            : open_envelope(st, e, off, t);
        mn_list_add(&out, one);
    }
    return out;
}

const char mn_engine_form_doc[] =
    "form(block) -> (kind, has_rows): how its samples travelled; whether it has rows for them";

PyObject *
mn_engine_py_form(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    if (e == NULL) {
        return NULL;
    }
    const struct mn_result *first = mn_engine_result(e, off, 0);
    uint32_t kind = first != NULL ? first->kind : (uint32_t)MN_KIND_SAMPLES;
    bool has_rows = mn_block_at(mn_engine_shm(e), off)->layout != 0;
    return Py_BuildValue("(IO)", kind, has_rows ? Py_True : Py_False);
}

const char mn_engine_reports_doc[] =
    "reports(block) -> [(status, wall_ns)] of the rows of a done block";

PyObject *
mn_engine_py_reports(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    if (e == NULL) {
        return NULL;
    }
    struct mn_block *b = mn_block_at(mn_engine_shm(e), off);
    const struct mn_report *r = mn_engine_read_reports(e, off);
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i < b->nrows; i++) {
        mn_list_add(&out,
                    Py_BuildValue("(IK)", r[i].status, (unsigned long long)r[i].wall_ns));
    }
    return out;
}

const char mn_engine_lost_doc[] =
    "lost(block) -> [Loss] of its tasks that were lost, in row order";

PyObject *
mn_engine_py_lost(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (e == NULL || st == NULL) {
        return NULL;
    }
    uint32_t ntasks = mn_block_at(mn_engine_shm(e), off)->ntasks;
    PyObject *out = PyList_New(0);
    for (uint32_t i = 0; out != NULL && i < ntasks; i++) {
        struct mn_loss x;
        if (mn_engine_loss(e, off, i, &x)) {
            mn_list_add(&out, mn_named_tuple(st->loss_type, "(IIiIIK)", x.death.worker,
                                             x.death.pid, x.death.status, x.row0, x.nrows,
                                             (unsigned long long)x.death.row));
        }
    }
    return out;
}

const char mn_engine_workers_doc[] =
    "workers() -> one dict a worker: state (0 none, 1 wanted, 2 starting, 3 ready,\n"
    "4 exited, 5 swept), pid, status, running (batch, row) or None, since_ns, tasks, rows,\n"
    "busy_ns, cpu_ns, init_states (three hashes, see mn_records.h)";

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
mn_engine_py_workers(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    const struct mn_shm *shm = mn_engine_shm(e);
    uint32_t n = shm->ctl->nworkers;
    PyObject *out = PyList_New(0);
    for (uint32_t w = 0; out != NULL && w < n; w++) {
        struct mn_worker *k = mn_worker_at(shm, w);
        PyObject *running = running_of(shm, k);
        PyObject *one =
            running == NULL
                ? NULL
                : Py_BuildValue(
                      "{sI sI si sN sK sK sK sK sK s(KKK)}", "state",
                      mn_a32_load_acquire(&k->state), /* [S2] */
                      "pid", mn_worker_pid(k), "status",
                      (int32_t)mn_a32_load_relaxed(&k->exit_status), "running", running, "since_ns",
                      (unsigned long long)mn_a64_load_relaxed(&k->since_ns), "tasks",
                      (unsigned long long)mn_a64_load_relaxed(&k->tasks_done), "rows",
                      (unsigned long long)mn_a64_load_relaxed(&k->rows_done), "busy_ns",
                      (unsigned long long)mn_a64_load_relaxed(&k->busy_ns), "cpu_ns",
                      (unsigned long long)mn_a64_load_relaxed(&k->cpu_ns), "init_states",
                      (unsigned long long)k->init_states[0],
                      (unsigned long long)k->init_states[1],
                      (unsigned long long)k->init_states[2]);
        mn_list_add(&out, one);
    }
    return out;
}

/* Calls a function of the engine for one worker. No error for a number that no worker has. */
static PyObject *
tell_of(PyObject *self, PyObject *number, int (*what)(struct mn_engine *, uint32_t))
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned long w = PyLong_AsUnsignedLong(number);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    if (w <= UINT32_MAX) {
        (void)what(e, (uint32_t)w);
    }
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_retire_worker(PyObject *self, PyObject *number)
{
    return tell_of(self, number, mn_engine_retire_worker);
}

const char mn_engine_kill_worker_doc[] =
    "kill_worker(number, signal) -> bool: signals the worker's process. Whether it lived.";

PyObject *
mn_engine_py_kill_worker(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned int w;
    int sig;
    if (e == NULL || !PyArg_ParseTuple(args, "Ii", &w, &sig)) {
        return NULL;
    }
    if (w >= mn_engine_shm(e)->ctl->nworkers) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return NULL;
    }
    int rc = mn_engine_kill_worker(e, w, sig);
    if (rc != -ESRCH && mn_raise_errno(rc, "cannot signal a worker") < 0) {
        return NULL;
    }
    return PyBool_FromLong(rc == 0);
}

PyObject *
mn_engine_py_zygote_replaced(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    mn_engine_zygote_replaced(e);
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_end_late(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    unsigned int w;
    unsigned long long number, row;
    if (e == NULL || !PyArg_ParseTuple(args, "IKK", &w, &number, &row)) {
        return NULL;
    }
    return PyBool_FromLong(mn_engine_end_late(e, w, number, row));
}

static int
end_worker(struct mn_engine *e, uint32_t worker)
{
    return mn_engine_ask_to_exit(e, worker, MN_EXIT_ENDED);
}

static int
let_go(struct mn_engine *e, uint32_t worker)
{
    return mn_engine_ask_to_exit(e, worker, MN_EXIT_SHRINK);
}

const char mn_engine_end_worker_doc[] =
    "end_worker(number): asks a native worker to exit after its current sample. That counts as\n"
    "a death by SIGTERM. The worker is not replaced.";

PyObject *
mn_engine_py_end_worker(PyObject *self, PyObject *number)
{
    return tell_of(self, number, end_worker);
}

const char mn_engine_let_go_doc[] =
    "let_go(number): asks a worker that has nothing more to do to exit. That is no death. The\n"
    "worker is not replaced.";

PyObject *
mn_engine_py_let_go(PyObject *self, PyObject *number)
{
    return tell_of(self, number, let_go);
}

#ifdef MN_TEST_BINDINGS
const char mn_engine_move_to_doc[] =
    "move_to(workers): that many, as if the worker scheduler had decided so; it goes on from\n"
    "there. RuntimeError where it has nothing to decide: its bounds are one number.";

PyObject *
mn_engine_py_move_to(PyObject *self, PyObject *workers)
{
    struct mn_engine *e = mn_engine_get(self);
    long target = PyLong_AsLong(workers);
    if (e == NULL || (target == -1 && PyErr_Occurred())) {
        return NULL;
    }
    if (mn_engine_move_to(e, target < INT32_MAX ? (int32_t)target : INT32_MAX) < 0) {
        PyErr_SetString(PyExc_RuntimeError, "the number of workers is fixed");
        return NULL;
    }
    Py_RETURN_NONE;
}
#endif

const char mn_engine_dismiss_doc[] =
    "dismiss(): threads end after their current sample. A caller that waits for a batch gets no\n"
    "error.";

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

const char mn_engine_note_failed_doc[] =
    "note_failed(samples): sets the number of samples left out or replaced so far, which other\n"
    "processes read.";

PyObject *
mn_engine_py_note_failed(PyObject *self, PyObject *arg)
{
    unsigned long long samples = PyLong_AsUnsignedLongLong(arg);
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL || PyErr_Occurred()) {
        return NULL;
    }
    mn_engine_note_failed(e, samples);
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_set_title(PyObject *self, PyObject *arg)
{
    struct mn_engine *e = mn_engine_get(self);
    const char *title = e != NULL ? PyUnicode_AsUTF8(arg) : NULL;
    if (title == NULL) {
        return NULL;
    }
    mn_engine_set_title(e, title);
    Py_RETURN_NONE;
}

const char mn_engine_health_doc[] =
    "health() -> {zygote_lost, zygote_hung, deaths, crash_loop, live, retries, worker, pid,\n"
    "status}\n\n"
    "Unexpected deaths so far, the longest row of them up to now in one place without a finished\n"
    "task, workers that may still finish something, and the last death.";

PyObject *
mn_engine_py_health(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    struct mn_health h = mn_engine_health(e);
    return Py_BuildValue("{sO sO sI sI sI sK sI sI si}", "zygote_lost",
                         h.zygote_lost ? Py_True : Py_False, "zygote_hung",
                         h.zygote_hung ? Py_True : Py_False, "deaths", h.deaths, "crash_loop",
                         h.crash_loop, "live", h.live,
                         "retries", (unsigned long long)h.retries, "worker", h.last.worker, "pid",
                         h.last.pid, "status", h.last.status);
}

PyObject *
mn_engine_py_deaths(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    return e == NULL ? NULL : PyLong_FromUnsignedLong(mn_engine_health(e).deaths);
}

const char mn_engine_memory_doc[] =
    "memory() -> {used, kept, warm, reclaimed, limit, in_flight, envelope_bytes}: bytes of the\n"
    "arena in use, those of them that the program keeps, those free that may hold pages, those\n"
    "given back to the system so far, the ceiling, and batches in flight";

PyObject *
mn_engine_py_memory(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    mn_pending_reclaim(mn_state_of_type(Py_TYPE(self)));
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    struct mn_memory_snapshot m = mn_engine_memory(e);
    return Py_BuildValue("{sK sK sK sK sK sI sK}", "used", (unsigned long long)m.used, "kept",
                         (unsigned long long)m.kept, "warm", (unsigned long long)m.warm,
                         "reclaimed", (unsigned long long)m.reclaimed, "limit",
                         (unsigned long long)m.limit, "in_flight", m.in_flight, "envelope_bytes",
                         (unsigned long long)m.envelope_bytes);
}

const char mn_engine_waits_doc[] =
    "waits() -> {waits, wait_ns, wait_max_ns, wait_first_ns, starts, starts_ns, steady_max_ns,\n"
    "held, used_ns, asked_ns, given_ns}:\n"
    "batches the caller waited for, its time in next() (in all, longest, first), waits for the\n"
    "first batches of later epochs (how many, in all), the longest of the other waits, batches\n"
    "during which the memory limit held tasks back, its time between calls, and the last wait's\n"
    "begin and end (0 without one), by the monotonic clock";

PyObject *
mn_engine_py_waits(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    uint64_t held;
    struct mn_waits w = mn_engine_waits(e, &held);
    return Py_BuildValue("{sK sK sK sK sK sK sK sK sK sK sK}", "waits", (unsigned long long)w.n,
                         "wait_ns", (unsigned long long)w.wait_ns, "wait_max_ns",
                         (unsigned long long)w.max_ns, "wait_first_ns",
                         (unsigned long long)w.first_ns, "starts", (unsigned long long)w.starts,
                         "starts_ns", (unsigned long long)w.starts_ns, "steady_max_ns",
                         (unsigned long long)w.steady_max_ns, "held", (unsigned long long)held,
                         "used_ns", (unsigned long long)w.used_ns, "asked_ns",
                         (unsigned long long)w.asked_ns, "given_ns",
                         (unsigned long long)w.given_ns);
}

PyObject *
mn_engine_py_wait_begins(PyObject *self, PyObject *ignored)
{
    (void)ignored;
    struct mn_engine *e = mn_engine_get(self);
    if (e == NULL) {
        return NULL;
    }
    return PyLong_FromLongLong(mn_engine_span_begin(e));
}

PyObject *
mn_engine_py_wait_ends(PyObject *self, PyObject *args)
{
    struct mn_engine *e = mn_engine_get(self);
    int got, held;
    if (e == NULL || !PyArg_ParseTuple(args, "pp:wait_ends", &got, &held)) {
        return NULL;
    }
    mn_engine_span_end(e, got != 0, held != 0);
    Py_RETURN_NONE;
}

PyObject *
mn_engine_py_delivered(PyObject *self, PyObject *ignored)
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
                        : mn_named_tuple(st->span_type, "(IIIIIIKKKN)", t->worker,
                                         mn_word_attempt(word), t->kind, task->why, t->row0,
                                         t->nrows, (unsigned long long)t->done_ns,
                                         (unsigned long long)t->wall_ns,
                                         (unsigned long long)t->cpu_ns, rows);
}

PyObject *
mn_engine_py_spans(PyObject *self, PyObject *block)
{
    uint64_t off;
    struct mn_engine *e = mn_engine_of_block(self, block, &off);
    struct mn_state *st = mn_state_of_type(Py_TYPE(self));
    if (e == NULL || st == NULL) {
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
