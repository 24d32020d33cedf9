/* mn_peek.c - minato._core.peek(): a loader's records, read from outside its processes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Works on copies of another process's memory that a callable fetches. So every number may be from
 * another moment than its neighbour, and none may be used as an offset before it was checked.
 */
#include <stdlib.h>
#include <string.h>

#include "os/mn_clock.h"
#include "py/module/mn_state.h"

#define MOST_WORKERS 65536u
#define MOST_TASKS (1u << 20)
#define MOST_BYTES (UINT64_C(1) << 56)

/* Copies [off, off + n) of the loader's mapping. Returns 0 or -1. */
static int
bring(PyObject *read, uint64_t off, void *to, uint64_t n)
{
    PyObject *o = PyObject_CallFunction(read, "KK", (unsigned long long)off,
                                        (unsigned long long)n);
    char *data;
    Py_ssize_t got;
    int rc = o != NULL ? PyBytes_AsStringAndSize(o, &data, &got) : -1;
    if (rc == 0 && (uint64_t)got != n) {
        PyErr_SetString(PyExc_ValueError, "the loader's memory ends too early");
        rc = -1;
    }
    if (rc == 0) {
        memcpy(to, data, n);
    }
    Py_XDECREF(o);
    return rc;
}

static int
bring_ctl(PyObject *read, struct mn_ctl *c)
{
    if (bring(read, 0, c, sizeof(*c)) < 0) {
        return -1;
    }
    if (c->magic != MN_MAGIC) {
        PyErr_SetString(PyExc_ValueError, "this is not a loader's memory, or not yet");
        return -1;
    }
    if (c->sizes != mn_sizes_word()) {
        PyErr_SetString(PyExc_ValueError,
                        "the loader runs another version of minato than this program");
        return -1;
    }
    uint64_t workers_end = c->workers_off + (uint64_t)c->nworkers * sizeof(struct mn_worker);
    uint64_t tasks_end = c->tasks_off + (uint64_t)c->ntasks * sizeof(struct mn_task);
    if (c->total_bytes > MOST_BYTES || c->workers_off > c->total_bytes
        || c->tasks_off > c->total_bytes /* so the sums above did not wrap */
        || c->nworkers > MOST_WORKERS || c->ntasks > MOST_TASKS || workers_end > c->tasks_off
        || tasks_end > c->queues_off || c->queues_off > c->input_off
        || c->input_off > c->arena_off || c->arena_off > c->total_bytes) {
        PyErr_SetString(PyExc_ValueError, "the loader's memory is damaged");
        return -1;
    }
    return 0;
}

/* Copies the block at off. Returns 0; -2 if there is none any more; -1 with an exception. */
static int
bring_block(PyObject *read, const struct mn_ctl *c, uint64_t off, struct mn_block *b)
{
    if (off < c->input_off || off + sizeof(*b) > c->arena_off) {
        return -2;
    }
    if (bring(read, off, b, sizeof(*b)) < 0) {
        return -1;
    }
    bool whole = b->bytes <= c->arena_off - off && b->index_at <= b->bytes
                 && b->index_bytes <= b->bytes - b->index_at;
    return whole ? 0 : -2;
}

/* Returns (batch, row, first row of the task, rows of it, index | "collate" | None) of a running
 * task, or None. */
static PyObject *
at_work(PyObject *read, const struct mn_ctl *c, const struct mn_worker *k,
        const struct mn_task *tasks)
{
    uint32_t task;
    uint64_t since, row = mn_a64_load_relaxed(&k->row); /* of a copy */
    if (!mn_worker_at_work(k, c->ntasks, &task, &since)) {
        Py_RETURN_NONE;
    }
    const struct mn_task *t = &tasks[task];
    struct mn_block b;
    int rc = bring_block(read, c, t->block_off, &b);
    if (rc == -1) {
        return NULL;
    }
    if (rc < 0 || t->kind == MN_KIND_RESUME) {
        Py_RETURN_NONE;
    }
    if (t->kind == MN_KIND_COLLATE) {
        return Py_BuildValue("(KKIIs)", (unsigned long long)b.number, (unsigned long long)row,
                             t->row0, t->nrows, "collate");
    }
    PyObject *index = Py_NewRef(Py_None);
    if (b.index_kind != MN_INDEX_PICKLE && (row + 1) * sizeof(int64_t) <= b.index_bytes) {
        int64_t v;
        if (bring(read, t->block_off + b.index_at + row * sizeof(v), &v, sizeof(v)) < 0) {
            Py_DECREF(index);
            return NULL;
        }
        Py_SETREF(index, PyLong_FromLongLong(v));
    }
    return Py_BuildValue("(KKIIN)", (unsigned long long)b.number, (unsigned long long)row,
                         t->row0, t->nrows, index);
}

static PyObject *
worker_dict(PyObject *read, const struct mn_ctl *c, struct mn_worker *k,
            const struct mn_task *tasks)
{
    PyObject *running = at_work(read, c, k, tasks);
    if (running == NULL) {
        return NULL;
    }
    /* Relaxed: of a copy. */
    return Py_BuildValue(
        "{sI sI sI sN sK sK sK sK sK}", "state", mn_a32_load_relaxed(&k->state), "pid",
        mn_worker_pid(k), "starts", mn_worker_starts(k), "running", running, "since_ns",
        (unsigned long long)mn_a64_load_relaxed(&k->since_ns), "tasks",
        (unsigned long long)mn_a64_load_relaxed(&k->tasks_done), "rows",
        (unsigned long long)mn_a64_load_relaxed(&k->rows_done), "busy_ns",
        (unsigned long long)mn_a64_load_relaxed(&k->busy_ns), "cpu_ns",
        (unsigned long long)mn_a64_load_relaxed(&k->cpu_ns));
}

static PyObject *
workers_list(PyObject *read, const struct mn_ctl *c, const struct mn_task *tasks)
{
    /* aligned as the records require */
    struct mn_worker *w = aligned_alloc(MN_CACHELINE, ((size_t)c->nworkers + 1) * sizeof(*w));
    PyObject *out = w != NULL ? PyList_New(0) : PyErr_NoMemory();
    if (out != NULL
        && bring(read, c->workers_off, w, (uint64_t)c->nworkers * sizeof(*w)) < 0) {
        Py_CLEAR(out);
    }
    for (uint32_t i = 0; out != NULL && i < c->nworkers; i++) {
        mn_list_add(&out, worker_dict(read, c, &w[i], tasks));
    }
    free(w);
    return out;
}

struct place {
    uint64_t block_off;
    bool busy;
};

static int
by_block(const void *a, const void *b)
{
    uint64_t x = ((const struct place *)a)->block_off, y = ((const struct place *)b)->block_off;
    return (x > y) - (x < y);
}

/* Returns {queued, running, done, waiting, batches, ready}: tasks by state; batches in flight; and
 * those that are complete and not taken. */
static PyObject *
queue_dict(const struct mn_ctl *c, const struct mn_task *tasks)
{
    struct place *p = PyMem_Calloc((size_t)c->ntasks + 1, sizeof(*p));
    if (p == NULL) {
        return PyErr_NoMemory();
    }
    unsigned int n[8] = {0}, count = 0, batches = 0, ready = 0;
    for (uint32_t i = 0; i < c->ntasks; i++) {
        enum mn_task_status st = mn_word_status(mn_a64_load_relaxed(&tasks[i].word));
        if (st == MN_TASK_FREE || st > MN_TASK_WAITING) {
            continue;
        }
        n[st]++;
        p[count++] = (struct place){tasks[i].block_off,
                                    st == MN_TASK_QUEUED || st == MN_TASK_RUNNING
                                        || st == MN_TASK_PLANNED || st == MN_TASK_WAITING};
    }
    qsort(p, count, sizeof(*p), by_block);
    for (unsigned int i = 0; i < count;) {
        bool busy = false;
        uint64_t block = p[i].block_off;
        for (; i < count && p[i].block_off == block; i++) {
            busy |= p[i].busy;
        }
        batches++;
        ready += !busy;
    }
    PyMem_Free(p);
    return Py_BuildValue("{sI sI sI sI sI sI}", "queued", n[MN_TASK_QUEUED], "running",
                         n[MN_TASK_RUNNING], "done", n[MN_TASK_DONE], "waiting",
                         n[MN_TASK_PLANNED] + n[MN_TASK_WAITING], "batches", batches, "ready",
                         ready);
}

const char mn_peek_doc[] =
    "peek(read) -> dict\n\n"
    "A snapshot of a loader, read from outside. read(offset, bytes) -> bytes copies from its\n"
    "mapping. Raises ValueError if that was not made by this version, and any exception of read.\n"
    "now_ns and the other times are of the monotonic clock.";

PyObject *
mn_peek(PyObject *module, PyObject *read)
{
    (void)module;
    struct mn_ctl c;
    if (bring_ctl(read, &c) < 0) {
        return NULL;
    }
    PyObject *workers = NULL, *queue = NULL;
    struct mn_task *tasks = PyMem_Calloc((size_t)c.ntasks + 1, sizeof(*tasks));
    if (tasks == NULL) {
        return PyErr_NoMemory();
    }
    if (bring(read, c.tasks_off, tasks, (uint64_t)c.ntasks * sizeof(*tasks)) == 0) {
        workers = workers_list(read, &c, tasks);
    }
    if (workers != NULL && (queue = queue_dict(&c, tasks)) == NULL) {
        Py_CLEAR(workers);
    }
    PyMem_Free(tasks);
    if (workers == NULL) {
        return NULL;
    }
    const char *end = memchr(c.title, 0, sizeof(c.title));
    Py_ssize_t length = end != NULL ? end - c.title : (Py_ssize_t)sizeof(c.title);
    PyObject *title = PyUnicode_DecodeUTF8(c.title, length, "replace");
    if (title == NULL) {
        Py_DECREF(workers);
        Py_DECREF(queue);
        return NULL;
    }
    /* Relaxed: of a copy. */
    return Py_BuildValue(
        "{sN sI sO sK sK sK sK sK sK sK sK sK sK sN sN}", "title", title,
        "trainer_pid", c.trainer_pid,
        "stopped", mn_a32_load_relaxed(&c.stop) != 0 ? Py_True : Py_False, "now_ns",
        (unsigned long long)mn_now_ns(), "opened_ns",
        (unsigned long long)mn_a64_load_relaxed(&c.opened_ns), "waiting_since_ns",
        (unsigned long long)mn_a64_load_relaxed(&c.waiting_since_ns), "wait_ns",
        (unsigned long long)mn_a64_load_relaxed(&c.wait_ns), "given",
        (unsigned long long)mn_a64_load_relaxed(&c.given), "used_bytes",
        (unsigned long long)mn_a64_load_relaxed(&c.used_bytes), "limit_bytes",
        (unsigned long long)mn_a64_load_relaxed(&c.limit_bytes), "opening_ns",
        (unsigned long long)mn_a64_load_relaxed(&c.opening_ns), "group_milli",
        (unsigned long long)mn_a64_load_relaxed(&c.group_milli), "failed",
        (unsigned long long)mn_a64_load_relaxed(&c.failed), "queue", queue, "workers", workers);
}
