/* mn_process.c - functions of minato._core about this process: children, signals, system calls.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/types.h>
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

/* ---- system calls of this process that would change files ----
 *
 * They wait for another process's leave. A seccomp filter has a listener (Linux 5.5). Calls that
 * name a file to change it, and those that open one with a flag by which it could be changed, are
 * reported to the listener. All others go on at once. Calls that would pass the filter by, as those
 * of io_uring, fail with ENOSYS. Writing to a descriptor is not filtered: opening it was. Children
 * inherit the filter. It cannot be removed.
 */

#if defined(__x86_64__)
#define MN_ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define MN_ARCH AUDIT_ARCH_AARCH64
#else
#define MN_ARCH 0 /* no system has this number: each call would fail, so filter_own_writes() does */
#endif

#define NONE (-1)
#define CHANGES (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC)
#define SYS_FCHMODAT2 452 /* Linux 6.6; the same number on all systems, as are those below */
#define SYS_SETXATTRAT 463
#define SYS_REMOVEXATTRAT 466
#define SYS_FILE_SETATTR 469
#define X32 0x40000000 /* numbers of another ABI of the same processor */

/* Which arguments of a call name files. A folder without a path is a descriptor of the file. */
static const struct mn_rule {
    int number;
    int folder, path;   /* NONE: the path counts from the current folder */
    int folder2, path2; /* of a second file; both NONE without one */
    int flags;          /* those of open() */
} mn_rules[] = {
    {SYS_openat, 0, 1, NONE, NONE, 2},
#ifdef SYS_open /* newer systems have only the calls that take a folder */
    {SYS_open, NONE, 0, NONE, NONE, 1},
    {SYS_creat, NONE, 0, NONE, NONE, NONE},
    {SYS_mkdir, NONE, 0, NONE, NONE, NONE},
    {SYS_rmdir, NONE, 0, NONE, NONE, NONE},
    {SYS_unlink, NONE, 0, NONE, NONE, NONE},
    {SYS_rename, NONE, 0, NONE, 1, NONE},
    {SYS_link, NONE, 0, NONE, 1, NONE},
    {SYS_symlink, NONE, 1, NONE, NONE, NONE},
    {SYS_mknod, NONE, 0, NONE, NONE, NONE},
    {SYS_chmod, NONE, 0, NONE, NONE, NONE},
    {SYS_chown, NONE, 0, NONE, NONE, NONE},
    {SYS_lchown, NONE, 0, NONE, NONE, NONE},
    {SYS_utime, NONE, 0, NONE, NONE, NONE},
    {SYS_utimes, NONE, 0, NONE, NONE, NONE},
    {SYS_futimesat, 0, 1, NONE, NONE, NONE},
#endif
#ifdef SYS_renameat
    {SYS_renameat, 0, 1, 2, 3, NONE},
#endif
    {SYS_renameat2, 0, 1, 2, 3, NONE},
    {SYS_mkdirat, 0, 1, NONE, NONE, NONE},
    {SYS_unlinkat, 0, 1, NONE, NONE, NONE},
    {SYS_linkat, 0, 1, 2, 3, NONE},
    {SYS_symlinkat, 1, 2, NONE, NONE, NONE},
    {SYS_mknodat, 0, 1, NONE, NONE, NONE},
    {SYS_truncate, NONE, 0, NONE, NONE, NONE},
    {SYS_fchmodat, 0, 1, NONE, NONE, NONE},
    {SYS_FCHMODAT2, 0, 1, NONE, NONE, NONE},
    {SYS_fchownat, 0, 1, NONE, NONE, NONE},
    {SYS_utimensat, 0, 1, NONE, NONE, NONE},
    {SYS_setxattr, NONE, 0, NONE, NONE, NONE},
    {SYS_lsetxattr, NONE, 0, NONE, NONE, NONE},
    {SYS_removexattr, NONE, 0, NONE, NONE, NONE},
    {SYS_lremovexattr, NONE, 0, NONE, NONE, NONE},
    {SYS_SETXATTRAT, 0, 1, NONE, NONE, NONE},
    {SYS_REMOVEXATTRAT, 0, 1, NONE, NONE, NONE},
    {SYS_FILE_SETATTR, 0, 1, NONE, NONE, NONE},
    {SYS_fchmod, 0, NONE, NONE, NONE, NONE},
    {SYS_fchown, 0, NONE, NONE, NONE, NONE},
    {SYS_fsetxattr, 0, NONE, NONE, NONE, NONE},
    {SYS_fremovexattr, 0, NONE, NONE, NONE, NONE},
    {SYS_bind, NONE, 1, NONE, NONE, NONE}, /* a socket may have a file */
};
#define MN_RULES (sizeof(mn_rules) / sizeof(mn_rules[0]))

/* Calls that name files where a filter cannot see them; the C library does without. */
static const int mn_refused[] = {
    SYS_open_by_handle_at,
    425, /* io_uring_setup */
    437, /* openat2 */
};
#define MN_REFUSED (sizeof(mn_refused) / sizeof(mn_refused[0]))

#define LOAD(what) (struct sock_filter) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)(what))
#define IF(op, value, skipped)                                                                     \
    (struct sock_filter) BPF_JUMP(BPF_JMP | (op) | BPF_K, (uint32_t)(value), 0, skipped)
#define RETURN(what) (struct sock_filter) BPF_STMT(BPF_RET | BPF_K, (uint32_t)(what))
#define REFUSE (SECCOMP_RET_ERRNO | ENOSYS)

static unsigned short
write_program(struct sock_filter *to)
{
    unsigned short n = 0;
    to[n++] = LOAD(offsetof(struct seccomp_data, arch));
    to[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, MN_ARCH, 1, 0);
    to[n++] = RETURN(REFUSE);
    to[n++] = LOAD(offsetof(struct seccomp_data, nr));
    to[n++] = IF(BPF_JGE, X32, 1);
    to[n++] = RETURN(REFUSE);
    for (size_t i = 0; i < MN_REFUSED; i++) {
        to[n++] = IF(BPF_JEQ, mn_refused[i], 1);
        to[n++] = RETURN(REFUSE);
    }
    for (size_t i = 0; i < MN_RULES; i++) {
        const struct mn_rule *r = &mn_rules[i];
        bool opens = r->flags != NONE;
        to[n++] = IF(BPF_JEQ, r->number, opens ? 4 : 1);
        if (opens) { /* its lower half, on a little-endian processor */
            to[n++] = LOAD(offsetof(struct seccomp_data, args) + 8 * (size_t)r->flags);
            to[n++] = IF(BPF_JSET, CHANGES, 1);
            to[n++] = RETURN(SECCOMP_RET_USER_NOTIF);
            to[n++] = RETURN(SECCOMP_RET_ALLOW);
        }
        else {
            to[n++] = RETURN(SECCOMP_RET_USER_NOTIF);
        }
    }
    to[n++] = RETURN(SECCOMP_RET_ALLOW);
    return n;
}

/* Filters the calling process, which must have one thread. Returns the listener's descriptor, or
 * -errno. */
static int
filter_own_writes(void)
{
    struct sock_filter program[16 + 2 * MN_REFUSED + 5 * MN_RULES];
    struct sock_fprog given = {.filter = program};
    if (MN_ARCH == 0) {
        return -ENOSYS;
    }
    given.len = write_program(program);
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
        return -errno;
    }
    long fd = syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER,
                      SECCOMP_FILTER_FLAG_NEW_LISTENER | SECCOMP_FILTER_FLAG_SPEC_ALLOW, &given);
    return fd < 0 ? -errno : (int)fd;
}

/* ---- the functions ---- */

static PyObject *
adopt_orphans(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    return PyBool_FromLong(mn_proc_adopt_orphans() == 0);
}

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
    if (mn_raise_errno(set_signal_filter(number, (pid_t)trainer), "cannot filter a signal") < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
filter_writes(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    int fd = filter_own_writes();
    if (mn_raise_errno(fd < 0 ? fd : 0, "cannot filter system calls") < 0) {
        return NULL;
    }
    return PyLong_FromLong(fd);
}

static PyObject *
write_rules(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    PyObject *rules = PyList_New(0);
    for (size_t i = 0; rules != NULL && i < MN_RULES; i++) {
        const struct mn_rule *r = &mn_rules[i];
        int length = r->number == SYS_bind ? 2 : NONE;
        mn_list_add(&rules, Py_BuildValue("(i(iiiii))", r->number, r->folder, r->path, r->folder2,
                                          r->path2, length));
    }
    return rules;
}

PyMethodDef mn_process_functions[] = {
    {"disposition", disposition, METH_VARARGS, disposition_doc},
    {"filter_signal", filter_signal, METH_VARARGS, filter_signal_doc},
    {"adopt_orphans", adopt_orphans, METH_NOARGS,
     PyDoc_STR("adopt_orphans() -> bool: makes this process the parent of descendants whose parent "
               "dies. False: the system refuses.")},
    {"die_with_parent", die_with_parent, METH_O,
     PyDoc_STR("die_with_parent(on) -> bool: the system kills this process when the thread that "
               "forked it ends, but not its children. False: it refuses.")},
    {"machine", machine, METH_NOARGS,
     PyDoc_STR("machine() -> {cpus, memory_total, memory_available, throttled}: what this process "
               "may use (affinity, cgroups), bytes; seconds for which CPU quotas have stopped its "
               "control groups, None without a quota")},
    {"filter_writes", filter_writes, METH_NOARGS,
     PyDoc_STR("filter_writes() -> descriptor: from now on calls of this process that change files "
               "wait until the listener, minato/analyze/own_files.py, allows them")},
    {"write_rules", write_rules, METH_NOARGS,
     PyDoc_STR("write_rules() -> [(number, (folder, path, folder2, path2, length)), ...]: for each "
               "call\nthat waits, which of its arguments name files; -1: none. A folder without a "
               "path is itself\nthe file, and a path without a folder counts from the current one. "
               "length: of a socket's\naddress at path")},
    {NULL, NULL, 0, NULL},
};
