/* mn_module.c - minato._core: module state, peek(), facts of the build.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_atomic.h"
#include "base/mn_base.h"
#include "engine/mn_engine.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"
#include "py/module/mn_numpy.h"
#include "py/seeding/mn_seed.h"
#include "py/transport/mn_layout.h"
#include "schedule/mn_plan.h"
#include "schedule/policy_worker_count.h"
#include "schedule/mn_costs.h"
#include "schedule/policy_dispatch.h"
#include "workers/mn_crew.h"
#include "workers/mn_records.h"

/* ---- Dying at a labelled point, in builds with MN_FAULTS; empty in others ----
 *
 * MINATO_FAULT="LABEL N FILE HOW" in the environment names a point. A process that passes it for
 * the N-th time or later makes FILE, writes its process id there and ends itself. Each process
 * counts for itself. HOW is the signal by which the process ends or stops; 0: _exit(7); negative:
 * it sleeps forever. If FILE exists no process dies, so only one does. No process dies before
 * FILE's folder exists. The process that MINATO_FAULT_SPARES names, usually the trainer, never dies
 * of this.
 */

#ifdef MN_FAULTS

static mn_a32 passed; /* atomic: threads may be workers */

static void
die_here(const char *name)
{
    char label[64], file[1024];
    unsigned n;
    int how;
    const char *told = getenv("MINATO_FAULT"), *spared = getenv("MINATO_FAULT_SPARES");
    if (told == NULL || (spared != NULL && getpid() == (pid_t)atol(spared))
        || sscanf(told, "%63s %u %1023s %d", label, &n, file, &how) != 4
        || strcmp(label, name) != 0) {
        return;
    }
    if (mn_a32_add_relaxed(&passed, 1) + 1 >= n) {
        int fd = open(file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
        if (fd >= 0) {
            (void)dprintf(fd, "%d", (int)getpid());
            (void)close(fd);
            while (how < 0) {
                (void)pause();
            }
            (void)signal(how, SIG_DFL); /* a sanitizer would report it as a fault of this code */
            (void)(how != 0 ? kill(getpid(), how) : (_exit(7), 0));
        }
    }
}

/* In builds with MN_FAULTS, reads from the environment at which point to die. */
static void
mn_faults_arm(void)
{
    mn_fault_hook = die_here;
}

#else

static void
mn_faults_arm(void)
{
}

#endif

/* ---- peek(): a loader's records, read from outside its processes ----
 *
 * Works on copies of another process's memory that a callable fetches. So every number may be from
 * another moment than its neighbour, and none may be used as an offset before it was checked.
 */

#define MOST_TABLES (UINT64_C(1) << 30) /* bytes up to the end of the tasks */
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
        return MN_RAISE(PyExc_ValueError, "this is not a loader's memory, or not yet");
    }
    if (c->sizes != mn_sizes_word()) {
        return MN_RAISE(PyExc_ValueError,
                        "the loader runs another version of minato than this program");
    }
    uint64_t workers_end = c->workers_off + (uint64_t)c->nworkers * sizeof(struct mn_worker);
    uint64_t tasks_end = c->tasks_off + (uint64_t)c->ntasks * sizeof(struct mn_task);
    if (c->total_bytes > MOST_BYTES || c->workers_off > c->total_bytes
        || c->tasks_off > c->total_bytes /* so the sums above did not wrap */
        || (c->workers_off | c->tasks_off | c->queues_off) % MN_CACHELINE != 0
        || workers_end > c->tasks_off || tasks_end > c->queues_off || c->queues_off > MOST_TABLES
        || c->queues_off > c->input_off || c->input_off > c->arena_off
        || c->arena_off > c->total_bytes) {
        return MN_RAISE(PyExc_ValueError, "the loader's memory is damaged");
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
 * task, or None. tables: a copy of the mapping up to the end of the tasks. */
static PyObject *
at_work(PyObject *read, const struct mn_shm *tables, const struct mn_worker *k)
{
    uint32_t task;
    uint64_t since, row = mn_a64_load_relaxed(&k->row); /* of a copy */
    if (!mn_worker_at_work(k, tables->ctl->ntasks, &task, &since)) {
        Py_RETURN_NONE;
    }
    const struct mn_task *t = mn_task_at(tables, task);
    struct mn_block b;
    int rc = bring_block(read, tables->ctl, t->block_off, &b);
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

static const char peek_doc[] =
    "peek(read) -> dict\n\n"
    "A snapshot of a loader, read from outside. read(offset, bytes) -> bytes copies from its\n"
    "mapping. Raises ValueError if that was not made by this version, and any exception of read.\n"
    "now_ns and the other times are of the monotonic clock.";

static PyObject *
peek(PyObject *Py_UNUSED(module), PyObject *read)
{
    struct mn_ctl c;
    if (bring_ctl(read, &c) < 0) {
        return NULL;
    }
    struct mn_shm tables = {.base = aligned_alloc(MN_CACHELINE, c.queues_off)};
    tables.ctl = (struct mn_ctl *)tables.base;
    if (tables.ctl == NULL) {
        return PyErr_NoMemory();
    }
    bool whole = bring(read, 0, tables.base, c.queues_off) == 0;
    *tables.ctl = c; /* what was checked */
    PyObject *workers = whole ? PyList_New(0) : NULL;
    for (uint32_t i = 0; workers != NULL && i < c.nworkers; i++) {
        struct mn_worker *k = mn_worker_at(&tables, i);
        mn_list_add(&workers, mn_worker_dict(k, at_work(read, &tables, k)));
    }
    PyObject *queue = workers != NULL ? PyList_New(0) : NULL;
    for (uint32_t i = 0; queue != NULL && i < c.ntasks; i++) {
        const struct mn_task *t = mn_task_at(&tables, i);
        enum mn_task_status st = mn_word_status(mn_a64_load_relaxed(&t->word));
        if (st != MN_TASK_FREE) {
            mn_list_add(&queue, Py_BuildValue("(iK)", (int)st, (unsigned long long)t->block_off));
        }
    }
    free(tables.base);
    if (queue == NULL) {
        Py_XDECREF(workers);
        return NULL;
    }
    c.title[sizeof(c.title) - 1] = '\0';
    PyObject *title = PyUnicode_DecodeUTF8(c.title, (Py_ssize_t)strlen(c.title), "replace");
#define NUMBER(name) #name, (unsigned long long)mn_a64_load_relaxed(&c.name) /* of a copy */
    return Py_BuildValue(
        "{sN sI sO sK sK sK sK sK sK sK sK sK sK sN sN}", "title", title, "trainer_pid",
        c.trainer_pid, "stopped", mn_a32_load_relaxed(&c.stop) != 0 ? Py_True : Py_False, "now_ns",
        (unsigned long long)mn_now_ns(), NUMBER(opened_ns), NUMBER(waiting_since_ns),
        NUMBER(wait_ns), NUMBER(given), NUMBER(used_bytes), NUMBER(limit_bytes),
        NUMBER(opening_ns), NUMBER(group_milli), NUMBER(failed), "tasks", queue, "workers",
        workers);
#undef NUMBER
}

/* ---- the module ---- */

static PyMethodDef core_methods[] = {
    {"peek", peek, METH_O, peek_doc},
    {NULL, NULL, 0, NULL},
};

/* Enums that Python code shares with C: MN_<name> is the module's <name>. */
#define NUMBERS(X)                                                                       \
    X(KIND_ROWS) X(KIND_SAMPLES) X(KIND_BATCH) X(KIND_RESUME) X(KIND_PART)               \
    X(KIND_COLLATE)                                                                      \
    X(TASK_QUEUED) X(TASK_RUNNING) X(TASK_PLANNED) X(TASK_WAITING)                       \
    X(EXTRA_SAMPLE) X(EXTRA_ERROR) X(EXTRA_OBJECTS) X(EXTRA_REFUSED) X(EXTRA_LEFT_OUT)   \
    X(EXTRA_REPLACED) X(EXTRA_FATAL)                                                     \
    X(NODE_DICT) X(NODE_LIST) X(NODE_TUPLE) X(NODE_NAMED) X(NODE_TENSOR) X(NODE_ARRAY)   \
    X(NODE_INT) X(NODE_BOOL) X(NODE_FLOAT) X(NODE_SCALAR) X(NODE_OBJECT)                 \
    X(WORKER_WANTED) X(WORKER_STARTING) X(WORKER_READY) X(WORKER_EXITED) X(WORKER_SWEPT) \
    X(WORKER_LEAVING)                                                                    \
    X(START_UNKNOWN) X(START_FORKED) X(START_THREADS)                                    \
    X(REFUSED_TASKS) X(REFUSED_RECORDS) X(REFUSED_ROWS) X(REFUSED_PRIVATE)               \
    X(NEXT_TIMEOUT) X(NEXT_HEALTH) X(NEXT_PLAN) X(LATE_SIGNAL)                           \
    X(SEED_SAMPLE) X(SEED_GETITEMS) X(SEED_COLLATE) X(SEED_SET_EPOCH) X(SEED_BY_INDEX)   \
    X(SEEDED_BY_INDEX)                                                                   \
    X(SCALER_GROW_IDLE_CORES) X(SCALER_GROW_WAITING) X(SCALER_SHRINK_FULL)               \
    X(SCALER_UNDO_GROWTH) X(SCALER_STARVED_CPU_BUSY) X(SCALER_STARVED_AT_MAX)            \
    X(SCALER_STARVED_AT_CEILING) X(SCALER_FULL_AT_MIN) X(SCALER_FULL_AT_FLOOR)           \
    X(SCALER_STARVED_NO_MEMORY) X(SCALER_FULL_BUSY)

static int
add_numbers(PyObject *module)
{
#define NUMBER(name) {#name, (uint64_t)MN_##name},
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {NUMBERS(NUMBER)};
    for (size_t i = 0; i < sizeof(numbers) / sizeof(*numbers); i++) {
        PyObject *value = PyLong_FromUnsignedLongLong(numbers[i].value);
        int rc = PyModule_AddObjectRef(module, numbers[i].name, value);
        Py_XDECREF(value);
        if (rc < 0) {
            return -1;
        }
    }
    return 0;
}

/* Names of the numbers of enums, which stats() and observers show. */
#define NAMES(X)                                                                             \
    X(worker_states, [MN_WORKER_EMPTY] = "none", [MN_WORKER_WANTED] = "wanted",              \
      [MN_WORKER_STARTING] = "starting", [MN_WORKER_READY] = "ready",                        \
      [MN_WORKER_EXITED] = "exited", [MN_WORKER_SWEPT] = "swept",                            \
      [MN_WORKER_LEAVING] = "leaving")                                                       \
    X(start_reasons, [0] = "static", [MN_DISPATCH_WINDOW] = "window",                        \
      [MN_DISPATCH_EARLY] = "early", [MN_DISPATCH_AHEAD] = "ahead",                          \
      [MN_DISPATCH_FINALE_LPT] = "finale", [MN_DISPATCH_ORDER] = "order")                    \
    X(hint_predictors, [MN_HINT_HISTORY] = "history", [MN_HINT_SCALE] = "hint",              \
      [MN_HINT_RATIO] = "hint_by_index")                                                     \
    X(bytes_predictors, [MN_BYTES_HISTORY] = "history", [MN_BYTES_ALONE] = "bytes",          \
      [MN_BYTES_BOTH] = "bytes_and_history")

static int
add_tuple(PyObject *module, const char *attribute, const char *const *names, size_t count)
{
    PyObject *list = PyList_New(0);
    for (size_t n = 0; list != NULL && n < count; n++) {
        mn_list_add(&list, PyUnicode_FromString(names[n]));
    }
    PyObject *found = list != NULL ? PyList_AsTuple(list) : NULL;
    const int added = found != NULL ? PyModule_AddObjectRef(module, attribute, found) : -1;
    Py_XDECREF(list);
    Py_XDECREF(found);
    return added;
}

static int
add_names(PyObject *module)
{
#define TUPLE(attribute, ...)                                                           \
    static const char *const attribute[] = {__VA_ARGS__};                               \
    if (add_tuple(module, #attribute, attribute, sizeof(attribute) / sizeof(*attribute)) < 0) { \
        return -1;                                                                      \
    }
    NAMES(TUPLE)
    return 0;
}

#define SPEC(name) extern PyType_Spec mn_##name##_spec;
MN_STATE_TYPES(SPEC)

static int
core_exec(PyObject *module)
{
    struct mn_state *st = PyModule_GetState(module);
    import_array1(-1);
    mn_faults_arm();
    (void)mn_proc_self(); /* before a fork can happen next to a thread of ours */
#define NAME(name, text)                                      \
    if ((st->name = PyUnicode_InternFromString(text)) == NULL) { \
        return -1;                                            \
    }
    MN_STATE_NAMES(NAME)
#define TYPE(name)                                                                           \
    st->name##_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &mn_##name##_spec, NULL); \
    if (st->name##_type == NULL || PyModule_AddType(module, st->name##_type) < 0) {          \
        return -1;                                                                           \
    }
    MN_STATE_TYPES(TYPE)
#ifdef __clang__
    const char *compiler = "clang " __clang_version__;
#else
    const char *compiler = "gcc " __VERSION__;
#endif
    if (mn_pending_open(module, st) < 0
        || PyModule_AddFunctions(module, mn_process_functions) < 0
        || PyModule_AddFunctions(module, mn_native_functions) < 0
        || add_numbers(module) < 0 || add_names(module) < 0
        || PyModule_AddStringConstant(module, "compiler", compiler) < 0) {
        return -1;
    }
    return 0;
}

static int
core_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct mn_state *st = PyModule_GetState(module);
#define VISIT_TYPE(name) Py_VISIT(st->name##_type);
#define VISIT_NAME(name, text) Py_VISIT(st->name);
#define VISIT(name) Py_VISIT(st->name);
    MN_STATE_TYPES(VISIT_TYPE)
    MN_STATE_NAMES(VISIT_NAME)
    MN_STATE_OBJECTS(VISIT)
    return 0;
}

static int
core_clear(PyObject *module)
{
    struct mn_state *st = PyModule_GetState(module);
#define CLEAR_TYPE(name) Py_CLEAR(st->name##_type);
#define CLEAR_NAME(name, text) Py_CLEAR(st->name);
#define CLEAR(name) Py_CLEAR(st->name);
    MN_STATE_TYPES(CLEAR_TYPE)
    MN_STATE_NAMES(CLEAR_NAME)
    MN_STATE_OBJECTS(CLEAR)
    return 0;
}

static void
core_free(void *module)
{
    (void)core_clear(module);
}

static PyModuleDef_Slot core_slots[] =
    MN_MODULE_SLOTS(core_exec, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED);

struct PyModuleDef mn_core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "minato._core",
    .m_doc = PyDoc_STR("The engine of minato.DataLoader."),
    .m_size = sizeof(struct mn_state),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC
PyInit__core(void);

PyMODINIT_FUNC
PyInit__core(void)
{
    return PyModuleDef_Init(&mn_core_module);
}
