/* mn_process.c - functions of minato._core about this process: its parent, signals, limits.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "os/mn_limits.h"
#include "os/mn_proc.h"

/* ---- signals that a scheduler sends to all processes of a job ----
 *
 * SIGTERM before a job ends is meant for the trainer, which may save a checkpoint first
 * and needs its workers for that. A worker obeys the signal if the trainer, the worker's parent or
 * the worker itself has sent it, and ignores it otherwise. When the trainer ends, its workers end,
 * too.
 *
 * Signal handlers belong to the whole process, so the filters are its global state. A fork inherits
 * the handler and passes every signal on, until it has a filter of its own.
 */

#define MN_SIGNALS 65 /* one more than the largest number on Linux */

struct mn_filter {
    struct sigaction before; /* what happens with a signal that passes the filter */
    pid_t owner;             /* of the filter: a fork of this process has none */
    pid_t trainer;
};

/* Written before the handler is installed. */
static struct mn_filter mn_filters[MN_SIGNALS];

static void
pass_on(const struct sigaction *before, int number, siginfo_t *info, void *context)
{
    if ((before->sa_flags & SA_SIGINFO) != 0) {
        before->sa_sigaction(number, info, context);
    }
    else if (before->sa_handler == SIG_DFL) {
        struct sigaction plain;
        memset(&plain, 0, sizeof(plain));
        plain.sa_handler = SIG_DFL;
        (void)sigaction(number, &plain, NULL);
        (void)raise(number); /* it is delivered when the handler has returned */
    }
    else if (before->sa_handler != SIG_IGN) {
        before->sa_handler(number);
    }
}

static void
filter(int number, siginfo_t *info, void *context)
{
    int saved = errno;
    const struct mn_filter *f = &mn_filters[number];
    pid_t me = getpid(), from = info->si_pid;
    if (me != f->owner || from == me || from == getppid() || from == f->trainer) {
        pass_on(&f->before, number, info, context);
    }
    errno = saved;
}

/* Puts a filter before the process's present handling of the signal, which then applies only if
 * `trainer`, the parent or this process sends it. A handler that is set later replaces the filter.
 * Only one thread at a time may call this. Returns 0 or a negative errno. */
static int
set_signal_filter(int number, pid_t trainer)
{
    struct sigaction now, ours;
    if (number <= 0 || number >= MN_SIGNALS) {
        return -EINVAL;
    }
    if (sigaction(number, NULL, &now) < 0) {
        return -errno;
    }
    struct mn_filter *f = &mn_filters[number];
    if ((now.sa_flags & SA_SIGINFO) == 0 || now.sa_sigaction != filter) {
        f->before = now;
    }
    f->owner = getpid();
    f->trainer = trainer;
    memset(&ours, 0, sizeof(ours));
    ours.sa_sigaction = filter;
    ours.sa_mask = f->before.sa_mask;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
    return sigaction(number, &ours, NULL) < 0 ? -errno : 0;
}

/* ---- the functions ---- */

static PyObject *
die_with_parent(PyObject *Py_UNUSED(module), PyObject *on)
{
    int yes = PyObject_IsTrue(on);
    return yes < 0 ? NULL
                   : PyBool_FromLong(prctl(PR_SET_PDEATHSIG, yes ? SIGKILL : 0, 0, 0, 0) == 0);
}

static PyObject *
machine(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    uint64_t ns = 0;
    PyObject *throttled = mn_cpu_throttled("", &ns) == 0 ? PyFloat_FromDouble((double)ns / 1e9)
                                                     : Py_NewRef(Py_None);
    if (throttled == NULL) {
        return NULL;
    }
    return Py_BuildValue("{si sK sK sN}", "cpus", mn_cpu_count(""), "memory_total",
                         (unsigned long long)mn_mem_total(""), "memory_available",
                         (unsigned long long)mn_mem_available(""), "throttled", throttled);
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
disposition(PyObject *Py_UNUSED(module), PyObject *args)
{
    struct sigaction now, want;
    const char *bytes = NULL;
    Py_ssize_t n = 0;
    int number;
    if (!PyArg_ParseTuple(args, "i|y#", &number, &bytes, &n)) {
        return NULL;
    }
    if (bytes != NULL && n != (Py_ssize_t)sizeof(now)) {
        return PyErr_Format(PyExc_ValueError, "not the bytes of a disposition");
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
filter_signal(PyObject *Py_UNUSED(module), PyObject *args)
{
    int number, trainer;
    if (!PyArg_ParseTuple(args, "ii", &number, &trainer)) {
        return NULL;
    }
    return mn_none_unless(
        mn_raise_errno(set_signal_filter(number, (pid_t)trainer), "cannot filter a signal"));
}

PyMethodDef mn_process_functions[] = {
    {"disposition", disposition, METH_VARARGS, disposition_doc},
    {"filter_signal", filter_signal, METH_VARARGS, filter_signal_doc},
    {"die_with_parent", die_with_parent, METH_O,
     PyDoc_STR("die_with_parent(on) -> bool: the system kills this process when the thread that "
               "forked it ends, but not its children. False: it refuses.")},
    {"machine", machine, METH_NOARGS,
     PyDoc_STR("machine() -> {cpus, memory_total, memory_available, throttled}: what this process "
               "may use (affinity, cgroups), bytes; seconds for which CPU quotas have stopped its "
               "control groups, None without a quota")},
    {NULL, NULL, 0, NULL},
};
