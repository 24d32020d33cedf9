/* mn_module.c - minato._core: module state, bind_torch(), facts of the build.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include "base/mn_atomic.h"
#include "base/mn_fault.h"
#include "os/mn_limits.h"
#include "os/mn_proc.h"
#include "os/mn_signal_filter.h"
#include "os/mn_write_filter.h"
#include "py/module/mn_numpy.h"
#include "py/seeding/mn_seed.h"
#include "workers/mn_records.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

static PyObject *
adopt_orphans(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    (void)module;
    return PyBool_FromLong(mn_proc_adopt_orphans() == 0);
}

static PyObject *
die_with_parent(PyObject *module, PyObject *on)
{
    (void)module;
    int yes = PyObject_IsTrue(on);
    return yes < 0 ? NULL : PyBool_FromLong(mn_proc_die_with_parent(yes != 0) == 0);
}

PyDoc_STRVAR(bind_torch_doc,
"bind_torch(tensor_type, exchange_api, plain_tensor, from_view, weak_ref, expired,\n"
"free_weak, iterator)\n\n"
"Sets how the core makes tensors: torch.Tensor, its DLPack exchange capsule or None,\n"
"the capsule of minato._torch or None, the Python functions that mn_state.h describes, and\n"
"torch's class of iterators with workers.");

static PyObject *
bind_torch(PyObject *module, PyObject *args)
{
    struct mn_state *st = mn_state_of(module);
    PyObject *type, *capsule, *plain_tensor, *from_view, *weak_ref, *expired, *free_weak, *iterator;
    if (!PyArg_ParseTuple(args, "O!OOOOOOO", &PyType_Type, &type, &capsule, &plain_tensor,
                          &from_view, &weak_ref, &expired, &free_weak, &iterator)) {
        return NULL;
    }
    const struct mn_plain_tensor *plain = NULL;
    if (plain_tensor != Py_None) {
        plain = PyCapsule_GetPointer(plain_tensor, MN_PLAIN_TENSOR);
        if (plain == NULL) {
            return NULL;
        }
    }
    const struct mn_dl_api *api = NULL;
    if (capsule != Py_None) {
        api = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
        if (api == NULL) {
            return NULL;
        }
        if (api->version.major != 1) {
            api = NULL; /* another ABI: use the fallback */
        }
    }
    PyObject *next = PyObject_GetAttr(iterator, st->str_next);
    if (next == NULL) {
        return NULL;
    }
    Py_XSETREF(st->torch_next, next);
    Py_XSETREF(st->torch_iterator, Py_NewRef(iterator));
    st->dlpack = api;
    st->plain = plain;
    Py_XSETREF(st->tensor_type, (PyTypeObject *)Py_NewRef(type));
    Py_XSETREF(st->from_view, Py_NewRef(from_view));
    Py_XSETREF(st->weak_ref, Py_NewRef(weak_ref));
    Py_XSETREF(st->expired, Py_NewRef(expired));
    Py_XSETREF(st->free_weak, Py_NewRef(free_weak));
    mn_pending_bind(st);
    return PyBool_FromLong(api != NULL);
}

static PyObject *
machine(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    (void)module;
    uint64_t ns = 0;
    PyObject *throttled = mn_cpu_throttled(&ns) == 0 ? PyFloat_FromDouble((double)ns / 1e9)
                                                     : Py_NewRef(Py_None);
    if (throttled == NULL) {
        return NULL;
    }
    return Py_BuildValue("{si sK sK sN}", "cpus", mn_cpu_count(), "memory_total",
                         (unsigned long long)mn_mem_total(), "memory_available",
                         (unsigned long long)mn_mem_available(), "throttled", throttled);
}

PyDoc_STRVAR(disposition_doc,
"disposition(signal) -> bytes, disposition(signal, new) -> None\n\n"
"The system's handling of a signal, from sigaction(): the signal module does not know all of\n"
"it. new: bytes of an earlier call, which are set again.");

/* Equal dispositions must have equal bytes, but the C library leaves some of its struct
 * undefined. */
static PyObject *
disposition_bytes(const struct sigaction *of)
{
    struct sigaction plain;
    memset(&plain, 0, sizeof(plain));
    plain.sa_sigaction = of->sa_sigaction; /* or the other member of the union */
    plain.sa_flags = of->sa_flags;
    for (int number = 1; number < NSIG; number++) {
        if (sigismember(&of->sa_mask, number) == 1) {
            (void)sigaddset(&plain.sa_mask, number);
        }
    }
    return PyBytes_FromStringAndSize((const char *)&plain, (Py_ssize_t)sizeof(plain));
}

static PyObject *
disposition(PyObject *module, PyObject *args)
{
    (void)module;
    struct sigaction now, want;
    const char *bytes = NULL;
    Py_ssize_t n = 0;
    int number;
    if (!PyArg_ParseTuple(args, "i|y#", &number, &bytes, &n)) {
        return NULL;
    }
    if (bytes != NULL && n != (Py_ssize_t)sizeof(now)) {
        PyErr_SetString(PyExc_ValueError, "not the bytes of a disposition");
        return NULL;
    }
    if (bytes != NULL) {
        memcpy(&want, bytes, sizeof(want));
    }
    int rc = sigaction(number, bytes != NULL ? &want : NULL, &now);
    if (mn_raise_errno(rc < 0 ? -errno : 0, "cannot set the handling of a signal") < 0) {
        return NULL;
    }
    if (bytes != NULL) {
        Py_RETURN_NONE; /* once set, nothing can fail */
    }
    return disposition_bytes(&now);
}

PyDoc_STRVAR(filter_signal_doc,
"filter_signal(signal, trainer)\n\n"
"From now on this process obeys the signal only if the process `trainer`, its own parent or\n"
"itself sends it. Raises OSError for a signal that has no handler.");

static PyObject *
filter_signal(PyObject *module, PyObject *args)
{
    (void)module;
    int number, trainer;
    if (!PyArg_ParseTuple(args, "ii", &number, &trainer)) {
        return NULL;
    }
    if (mn_raise_errno(mn_signal_filter(number, (pid_t)trainer), "cannot filter a signal") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
filter_writes(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    (void)module;
    int fd = mn_write_filter();
    if (mn_raise_errno(fd < 0 ? fd : 0, "cannot filter system calls") < 0) {
        return NULL;
    }
    return PyLong_FromLong(fd);
}

static PyObject *
next_write(PyObject *module, PyObject *listener)
{
    (void)module;
    struct mn_write_call call;
    int fd = PyObject_AsFileDescriptor(listener);
    if (fd < 0) {
        return NULL;
    }
    int rc = mn_write_next(fd, &call);
    if (rc == -ENOENT) {
        Py_RETURN_NONE;
    }
    if (mn_raise_errno(rc, "cannot take a system call that waits") < 0) {
        return NULL;
    }
    PyObject *places = PyTuple_New(call.places);
    for (int i = 0; places != NULL && i < call.places; i++) {
        const struct mn_write_place *p = &call.place[i];
        PyObject *place = Py_BuildValue("iKI", (int)p->folder, (unsigned long long)p->address,
                                        (unsigned int)p->length);
        if (place == NULL) {
            Py_CLEAR(places);
            break;
        }
        PyTuple_SET_ITEM(places, i, place);
    }
    if (places == NULL) {
        return NULL;
    }
    return Py_BuildValue("KiN", (unsigned long long)call.id, (int)call.pid, places);
}

static PyObject *
allow_write(PyObject *module, PyObject *args)
{
    (void)module;
    int fd;
    unsigned long long id;
    if (!PyArg_ParseTuple(args, "iK", &fd, &id)) {
        return NULL;
    }
    int rc = mn_write_allow(fd, id);
    if (mn_raise_errno(rc == -ENOENT ? 0 : rc, "cannot let a system call go on") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef core_methods[] = {
    {"bind_torch", bind_torch, METH_VARARGS, bind_torch_doc},
    {"fork_begins", mn_py_fork_begins, METH_NOARGS,
     PyDoc_STR("fork_begins(): call it before each fork.")},
    {"fork_ends", mn_py_fork_ends, METH_NOARGS,
     PyDoc_STR("fork_ends(): call it after the fork, in the same thread of the parent.")},
    {"forked", mn_py_forked, METH_NOARGS,
     PyDoc_STR("forked(): call it in the child, which starts without the parent's forks.")},
    {"peek", mn_peek, METH_O, mn_peek_doc},
    {"native_info", mn_native_info, METH_O, mn_native_info_doc},
    {"disposition", disposition, METH_VARARGS, disposition_doc},
    {"filter_signal", filter_signal, METH_VARARGS, filter_signal_doc},
    {"adopt_orphans", adopt_orphans, METH_NOARGS,
     PyDoc_STR("adopt_orphans() -> bool: makes this process the parent of descendants whose parent "
               "dies. False: the system refuses.")},
    {"die_with_parent", die_with_parent, METH_O,
     PyDoc_STR("die_with_parent(on) -> bool: the system kills this process when the thread that "
               "forked it ends. False: it refuses.")},
    {"machine", machine, METH_NOARGS,
     PyDoc_STR("machine() -> {cpus, memory_total, memory_available, throttled}: what this process "
               "may use (affinity, cgroups), bytes; seconds for which CPU quotas have stopped its "
               "control groups, None without a quota")},
    {"filter_writes", filter_writes, METH_NOARGS,
     PyDoc_STR("filter_writes() -> descriptor: from now on calls of this process that change files "
               "wait until the listener allows them")},
    {"next_write", next_write, METH_O,
     PyDoc_STR("next_write(listener) -> (id, pid, ((folder, address, length), ...)) or None: the "
               "next call that waits, and the files that it names")},
    {"allow_write", allow_write, METH_VARARGS, PyDoc_STR("allow_write(listener, id)")},
    {NULL, NULL, 0, NULL},
};

/* Names of worker states, which observers show. */
static int
add_worker_states(PyObject *module)
{
    static const char *const names[] = {
        [MN_WORKER_EMPTY] = "none",         [MN_WORKER_WANTED] = "wanted",
        [MN_WORKER_STARTING] = "starting",  [MN_WORKER_READY] = "ready",
        [MN_WORKER_EXITED] = "exited",      [MN_WORKER_SWEPT] = "swept",
        [MN_WORKER_LEAVING] = "leaving",
    };
    const Py_ssize_t count = sizeof(names) / sizeof(*names);
    PyObject *found = PyTuple_New(count);
    for (Py_ssize_t n = 0; found != NULL && n < count; n++) {
        PyObject *name = PyUnicode_FromString(names[n]);
        if (name == NULL) {
            Py_CLEAR(found);
            break;
        }
        PyTuple_SET_ITEM(found, n, name);
    }
    const int added = found != NULL ? PyModule_AddObjectRef(module, "worker_states", found) : -1;
    Py_XDECREF(found);
    return added;
}

#define SPEC(name) extern PyType_Spec mn_##name##_spec;
MN_STATE_TYPES(SPEC)

static int
core_exec(PyObject *module)
{
    struct mn_state *st = mn_state_of(module);
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
    if (mn_pending_open(st) < 0 || mn_named_tuples_add_types(module, st) < 0
        || add_worker_states(module) < 0
        || PyModule_AddStringConstant(module, "compiler", compiler) < 0) {
        return -1;
    }
    return 0;
}

static int
core_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct mn_state *st = mn_state_of(module);
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
    struct mn_state *st = mn_state_of(module);
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

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
#ifdef Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_MOD_GIL_NOT_USED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* py/module/mn_critical_section.h */
#endif
    {0, NULL},
};

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
