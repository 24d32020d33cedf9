/* failing.c - makes calls that loaded libraries make fail, each once.
 *
 * failing_install() puts functions of this file in the place of what a library calls of others,
 * in its global offset table: calls of everybody else are not touched. Every place that
 * calls one of them is a site. The calls of each site are counted, in memory that forks share, and
 * one call of one site may be told to fail, in whichever process it is made.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { SITES = 8192, NAME = 84, LIBRARIES = 8, MOST_ARGUMENTS = 8 };

struct site {
    _Atomic uint64_t place; /* 0: free */
    _Atomic uint32_t calls;
    char name[NAME]; /* of what is called there, and of the place if it is Python's */
};

/* Shared with forks. Python sees the first members. */
struct table {
    _Atomic uint32_t armed; /* whether calls are counted */
    _Atomic uint32_t failed;
    uint64_t place; /* of the site that fails */
    uint32_t call;  /* which of its calls */
    uint32_t way;   /* which of two errors the call has */
    int32_t trainer;
    _Atomic int32_t live; /* what the trainer has allocated at sites and has not freed */
    struct site sites[SITES];
};

static struct table *table;
static struct library {
    uintptr_t base, end;
} libraries[LIBRARIES];
static int nlibraries;

struct table *
failing_table(void)
{
    table = mmap(NULL, sizeof(*table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return table;
}

/* Counts a call; whether it is the one that fails. */
int
failing_site(uint64_t place, const char *name)
{
    if (table == NULL || atomic_load(&table->armed) == 0) {
        return 0;
    }
    place |= (uint64_t)(getpid() != table->trainer) << 63;
    struct site *s = NULL;
    for (uint64_t at = place * UINT64_C(0x9E3779B97F4A7C15) >> 20;; at++) {
        uint64_t free = 0;
        s = &table->sites[at % SITES];
        if (atomic_compare_exchange_strong(&s->place, &free, place)) {
            strncpy(s->name, name, NAME - 1);
            break;
        }
        if (free == place) {
            break;
        }
    }
    uint32_t call = atomic_fetch_add(&s->calls, 1);
    if (place != table->place || call != table->call) {
        return 0;
    }
    atomic_store(&table->failed, 1);
    return 1;
}

/* A tail call returns elsewhere: all those of one function are one site. */
static int
fails(const char *name, const void *returns_to)
{
    uint64_t place = UINT64_C(1) << 60 | ((uintptr_t)name & 0xFFFFFFFF);
    for (int i = 0; i < nlibraries; i++) {
        uintptr_t at = (uintptr_t)returns_to;
        if (libraries[i].base <= at && at < libraries[i].end) {
            place = (uint64_t)(i + 1) << 40 | (at - libraries[i].base);
        }
    }
    return failing_site(place, name);
}

#define FAILS(name) fails(#name, __builtin_return_address(0))
#define ERRNO(first, second) (errno = table->way == 0 ? (first) : (second))

/* ---- the C library ----------------------------------------------------------------------- */

#define C_CALL(type, name, failed, first, second, parameters, arguments) \
    static type fail_##name parameters                                   \
    {                                                                    \
        if (FAILS(name)) {                                               \
            ERRNO(first, second);                                        \
            return failed;                                               \
        }                                                                \
        return name arguments;                                           \
    }

static int
trains(void)
{
    return table != NULL && getpid() == table->trainer;
}

static void *
count(void *made)
{
    atomic_fetch_add(&table->live, made != NULL && trains());
    return made;
}

#define MEMORY(type, name, parameters, arguments) \
    static type fail_##name parameters            \
    {                                             \
        if (FAILS(name)) {                        \
            errno = ENOMEM;                       \
            return NULL;                          \
        }                                         \
        return count(name arguments);             \
    }

MEMORY(void *, malloc, (size_t n), (n))
MEMORY(void *, calloc, (size_t n, size_t each), (n, each))
MEMORY(void *, aligned_alloc, (size_t to, size_t n), (to, n))
MEMORY(char *, strdup, (const char *text), (text))
C_CALL(void *, mmap, MAP_FAILED, ENOMEM, EAGAIN,
       (void *at, size_t n, int prot, int flags, int fd, off_t off), (at, n, prot, flags, fd, off))
C_CALL(int, madvise, -1, ENOMEM, EINVAL, (void *at, size_t n, int what), (at, n, what))
C_CALL(int, memfd_create, -1, EMFILE, ENOMEM, (const char *name, unsigned flags), (name, flags))
C_CALL(int, ftruncate, -1, EFBIG, EINTR, (int fd, off_t n), (fd, n))
C_CALL(ssize_t, read, -1, EIO, EINTR, (int fd, void *to, size_t n), (fd, to, n))
C_CALL(ssize_t, pread, -1, EIO, EINTR, (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
C_CALL(ssize_t, preadv2, -1, EIO, EOPNOTSUPP,
       (int fd, const struct iovec *v, int n, off_t at, int flags), (fd, v, n, at, flags))
C_CALL(ssize_t, write, -1, EIO, EINTR, (int fd, const void *from, size_t n), (fd, from, n))
C_CALL(int, poll, -1, ENOMEM, EINTR, (struct pollfd *f, nfds_t n, int ms), (f, n, ms))
C_CALL(int, ppoll, -1, EINTR, ENOMEM,
       (struct pollfd *f, nfds_t n, const struct timespec *t, const sigset_t *s), (f, n, t, s))
C_CALL(int, pthread_create, (EAGAIN), EAGAIN, EAGAIN,
       (pthread_t *t, const pthread_attr_t *a, void *(*f)(void *), void *arg), (t, a, f, arg))
C_CALL(int, pthread_setname_np, ERANGE, ERANGE, ERANGE, (pthread_t t, const char *n), (t, n))
C_CALL(int, sched_getaffinity, -1, EINVAL, EINVAL, (pid_t p, size_t n, cpu_set_t *s), (p, n, s))
C_CALL(int, access, -1, EACCES, ENOMEM, (const char *path, int mode), (path, mode))
C_CALL(FILE *, fopen, NULL, EMFILE, ENOENT, (const char *path, const char *mode), (path, mode))
C_CALL(char *, fgets, NULL, EIO, EINTR, (char *to, int n, FILE *f), (to, n, f))
C_CALL(size_t, fread, 0, EIO, EINTR, (void *to, size_t s, size_t n, FILE *f), (to, s, n, f))
C_CALL(int, fstat, -1, EIO, ENOMEM, (int fd, struct stat *s), (fd, s))
C_CALL(int, stat, -1, EACCES, ENOMEM, (const char *path, struct stat *s), (path, s))
C_CALL(int, fstatfs, -1, EIO, EINTR, (int fd, struct statfs *s), (fd, s))
C_CALL(int, nanosleep, -1, EINTR, EINTR, (const struct timespec *t, struct timespec *r), (t, r))
C_CALL(int, usleep, -1, EINTR, EINTR, (useconds_t n), (n))
C_CALL(int, posix_fadvise, ESPIPE, 0, 0, (int fd, off_t a, off_t n, int how), (fd, a, n, how))
C_CALL(void *, dlopen, NULL, ENOMEM, ENOMEM, (const char *path, int flags), (path, flags))

static void *
fail_realloc(void *old, size_t n)
{
    if (FAILS(realloc)) {
        errno = ENOMEM;
        return NULL;
    }
    return old != NULL ? realloc(old, n) : count(malloc(n));
}

static int
fail_posix_memalign(void **out, size_t to, size_t n)
{
    int rc = FAILS(posix_memalign) ? ENOMEM : posix_memalign(out, to, n);
    (void)count(rc == 0 ? *out : NULL);
    return rc;
}

static void
counted_free(void *memory)
{
    atomic_fetch_sub(&table->live, memory != NULL && trains());
    free(memory);
}

static void
counted_PyMem_Free(void *memory)
{
    atomic_fetch_sub(&table->live, memory != NULL && trains());
    PyMem_Free(memory);
}

static int
fail_open(const char *path, int flags, ...)
{
    va_list list;
    va_start(list, flags);
    int mode = va_arg(list, int);
    va_end(list);
    if (FAILS(open)) {
        ERRNO(EMFILE, EACCES);
        return -1;
    }
    return open(path, flags, mode);
}

/* The descriptor is closed all the same. */
static int
fail_close(int fd)
{
    int rc = close(fd);
    if (FAILS(close)) {
        ERRNO(EINTR, EIO);
        return -1;
    }
    return rc;
}

static long
fail_syscall(long number, ...)
{
    long a[6];
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) {
        a[i] = va_arg(list, long);
    }
    va_end(list);
    if (number != SYS_gettid && FAILS(syscall)) {
        if (number == SYS_futex) {
            ERRNO(EINTR, EAGAIN);
        }
        else if (number == SYS_pidfd_send_signal) {
            ERRNO(EPERM, ESRCH);
        }
        else {
            ERRNO(EMFILE, ENOMEM);
        }
        return -1;
    }
    return syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* ---- Python's functions ------------------------------------------------------------------ */

/* Of no more than six arguments, none of which is a floating-point number. Those that a function
 * does not have are whatever its caller left there, as they were without this file. That the
 * pointers are no constants keeps the compiler from knowing what they point to. */
#define WORDS intptr_t a, intptr_t b, intptr_t c, intptr_t d, intptr_t e, intptr_t f
typedef intptr_t (*words_function)(WORDS);

#define PY_CALL(name, failed, remember)               \
    extern void *real_##name;                         \
    void *real_##name = (void *)name;                 \
    static intptr_t fail_##name(WORDS)                \
    {                                                 \
        if (FAILS(name)) {                            \
            remember;                                 \
            return failed;                            \
        }                                             \
        words_function real = real_##name;            \
        return real(a, b, c, d, e, f);                \
    }
#define OBJECT_CALL(name) PY_CALL(name, 0, PyErr_NoMemory())
#define STATUS_CALL(name) PY_CALL(name, -1, PyErr_NoMemory())

#define OBJECT_CALLS(X)                                                                         \
    X(PyBool_FromLong) X(PyByteArray_FromStringAndSize) X(PyBytes_FromStringAndSize) X(PyDict_New) \
    X(PyDict_GetItemWithError) X(PyImport_ImportModule) X(PyList_AsTuple) X(PyList_New)         \
    X(PyLong_FromLong) X(PyLong_FromLongLong) X(PyLong_FromSsize_t) X(PyLong_FromUnsignedLong)  \
    X(PyLong_FromUnsignedLongLong) X(PyNumber_Index) X(PyObject_Call) X(PyObject_CallNoArgs)    \
    X(PyObject_CallOneArg) X(PyObject_GetAttr) X(PyObject_GetAttrString) X(PyObject_GetItem)    \
    X(PyObject_VectorcallMethod) X(PySequence_Fast) X(PySequence_List) X(PySequence_Tuple)      \
    X(PyStructSequence_New) X(PyStructSequence_NewType) X(PyTuple_New) X(_PyObject_New)         \
    X(PyType_FromModuleAndSpec) X(PyUnicode_FromString) X(PyUnicode_InternFromString)           \
    X(PyUnicode_DecodeFSDefault) X(PyType_GenericAlloc) X(PyCapsule_New)                        \
    X(PyUnicode_FromStringAndSize) X(PyMemoryView_FromObject) X(PyTuple_Pack)                   \
    X(PyUnicode_AsUTF8AndSize) X(PyUnicode_AsUTF8)
#define STATUS_CALLS(X)                                                                         \
    X(PyBuffer_FillInfo) X(PyDict_SetItem) X(PyDict_SetItemString) X(PyList_Append)             \
    X(PyModule_AddObjectRef) X(PyModule_AddStringConstant) X(PyModule_AddType)                  \
    X(PyObject_IsTrue) X(PyObject_SetAttr) X(PyObject_Size) X(PyErr_CheckSignals) X(PyErr_WarnEx) \
    X(PyModule_AddIntConstant)

OBJECT_CALLS(OBJECT_CALL)
STATUS_CALLS(STATUS_CALL)
MEMORY(void *, PyMem_Malloc, (size_t n), (n))
MEMORY(void *, PyMem_Calloc, (size_t n, size_t each), (n, each))

static void *
fail_PyMem_Realloc(void *old, size_t n)
{
    if (FAILS(PyMem_Realloc)) {
        return NULL;
    }
    return old != NULL ? PyMem_Realloc(old, n) : count(PyMem_Malloc(n));
}

static PyObject *
fail_PyFloat_FromDouble(double value)
{
    return FAILS(PyFloat_FromDouble) ? PyErr_NoMemory() : PyFloat_FromDouble(value);
}

static int
fail_PyObject_GetBuffer(PyObject *object, Py_buffer *view, int flags)
{
    if (FAILS(PyObject_GetBuffer)) {
        view->obj = NULL;
        PyErr_NoMemory();
        return -1;
    }
    return PyObject_GetBuffer(object, view, flags);
}

static PyObject *
fail__Py_BuildValue_SizeT(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *made = Py_VaBuildValue(format, list);
    va_end(list);
    if (FAILS(_Py_BuildValue_SizeT)) { /* which takes what it is given all the same */
        Py_CLEAR(made);
        PyErr_NoMemory();
    }
    return made;
}

static PyObject *
fail_PyUnicode_FromFormat(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *made = FAILS(PyUnicode_FromFormat) ? PyErr_NoMemory()
                                                 : PyUnicode_FromFormatV(format, list);
    va_end(list);
    return made;
}

static PyObject *
fail_PyObject_CallFunctionObjArgs(PyObject *callable, ...)
{
    PyObject *arguments[MOST_ARGUMENTS];
    size_t n = 0;
    va_list list;
    va_start(list, callable);
    while (n < MOST_ARGUMENTS && (arguments[n] = va_arg(list, PyObject *)) != NULL) {
        n++;
    }
    va_end(list);
    return FAILS(PyObject_CallFunctionObjArgs) ? PyErr_NoMemory()
                                               : PyObject_Vectorcall(callable, arguments, n, NULL);
}

/* As calls of this family do: a tuple is the arguments, anything else is the one argument. */
static PyObject *
call_built(PyObject *callable, const char *format, va_list list)
{
    PyObject *built = callable == NULL                       ? NULL
                      : format == NULL || format[0] == '\0' ? PyTuple_New(0)
                                                             : Py_VaBuildValue(format, list);
    PyObject *arguments = built == NULL || PyTuple_Check(built) ? built : PyTuple_Pack(1, built);
    PyObject *result = arguments != NULL ? PyObject_Call(callable, arguments, NULL) : NULL;
    Py_XDECREF(built != arguments ? built : NULL);
    Py_XDECREF(arguments);
    return result;
}

static PyObject *
fail__PyObject_CallFunction_SizeT(PyObject *callable, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *result = FAILS(_PyObject_CallFunction_SizeT) ? PyErr_NoMemory()
                                                           : call_built(callable, format, list);
    va_end(list);
    return result;
}

static PyObject *
fail__PyObject_CallMethod_SizeT(PyObject *object, const char *name, const char *format, ...)
{
    va_list list;
    va_start(list, format);
    PyObject *result = NULL;
    if (FAILS(_PyObject_CallMethod_SizeT)) {
        PyErr_NoMemory();
    }
    else {
        PyObject *method = PyObject_GetAttrString(object, name);
        result = call_built(method, format, list);
        Py_XDECREF(method);
    }
    va_end(list);
    return result;
}

/* ---- in their place ---------------------------------------------------------------------- */

#define ENTRY(name) {#name, (void *)fail_##name},
static const struct entry {
    const char *name;
    void *function;
} entries[] = {
    ENTRY(malloc) ENTRY(calloc) ENTRY(realloc) ENTRY(aligned_alloc) ENTRY(posix_memalign)
    ENTRY(strdup) ENTRY(mmap) ENTRY(madvise) ENTRY(memfd_create) ENTRY(ftruncate) ENTRY(read)
    ENTRY(pread) ENTRY(preadv2) ENTRY(write) ENTRY(poll) ENTRY(ppoll)
    ENTRY(pthread_create) ENTRY(pthread_setname_np) ENTRY(sched_getaffinity) ENTRY(access)
    ENTRY(fopen) ENTRY(fgets) ENTRY(fread) ENTRY(fstat) ENTRY(stat) ENTRY(fstatfs)
    ENTRY(nanosleep) ENTRY(usleep)
    ENTRY(posix_fadvise) ENTRY(dlopen) ENTRY(open) ENTRY(close) ENTRY(syscall)
    OBJECT_CALLS(ENTRY) STATUS_CALLS(ENTRY)
    ENTRY(PyMem_Malloc) ENTRY(PyMem_Calloc) ENTRY(PyMem_Realloc)
    {"free", (void *)counted_free}, {"PyMem_Free", (void *)counted_PyMem_Free},
    ENTRY(PyFloat_FromDouble) ENTRY(PyObject_GetBuffer) ENTRY(_Py_BuildValue_SizeT)
    ENTRY(PyUnicode_FromFormat) ENTRY(PyObject_CallFunctionObjArgs)
    ENTRY(_PyObject_CallFunction_SizeT) ENTRY(_PyObject_CallMethod_SizeT)
};

static int
replace(uintptr_t base, const ElfW(Rela) *at, size_t bytes, const ElfW(Sym) *symbols,
        const char *strings)
{
    int replaced = 0;
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t i = 0; i < bytes / sizeof(*at); i++) {
        const char *name = strings + symbols[ELF64_R_SYM(at[i].r_info)].st_name;
        for (size_t k = 0; k < sizeof(entries) / sizeof(entries[0]); k++) {
            if (strcmp(name, entries[k].name) == 0) {
                void **slot = (void **)(base + at[i].r_offset);
                void *at_page = (void *)((uintptr_t)slot & ~(uintptr_t)(page - 1));
                if (mprotect(at_page, page, PROT_READ | PROT_WRITE) == 0) {
                    *slot = entries[k].function;
                    replaced++;
                }
            }
        }
    }
    return replaced;
}

static int
install_in(struct dl_phdr_info *info, size_t size, void *path)
{
    (void)size;
    if (strcmp(info->dlpi_name, path) != 0 || nlibraries == LIBRARIES) {
        return 0;
    }
    struct library *library = &libraries[nlibraries++];
    uintptr_t base = library->base = info->dlpi_addr;
    const ElfW(Dyn) *dynamic = NULL;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *p = &info->dlpi_phdr[i];
        if (p->p_type == PT_LOAD && base + p->p_vaddr + p->p_memsz > library->end) {
            library->end = base + p->p_vaddr + p->p_memsz;
        }
        if (p->p_type == PT_DYNAMIC) {
            dynamic = (const ElfW(Dyn) *)(base + p->p_vaddr);
        }
    }
    uintptr_t value[DT_NUM] = {0};
    for (; dynamic != NULL && dynamic->d_tag != DT_NULL; dynamic++) {
        if (dynamic->d_tag < DT_NUM) {
            value[dynamic->d_tag] = dynamic->d_un.d_ptr;
        }
    }
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)value[DT_SYMTAB];
    const char *strings = (const char *)value[DT_STRTAB];
    return replace(base, (const ElfW(Rela) *)value[DT_JMPREL], value[DT_PLTRELSZ], symbols, strings)
           + replace(base, (const ElfW(Rela) *)value[DT_RELA], value[DT_RELASZ], symbols, strings);
}

/* How many slots of the library's were replaced. */
int
failing_install(const char *path)
{
    return dl_iterate_phdr(install_in, (void *)path);
}

/* Objects of a type are made by a pointer in it, which is no slot of the library's. */
static PyObject *
fail_allocation(PyTypeObject *type, Py_ssize_t n)
{
    return FAILS(tp_alloc) ? PyErr_NoMemory() : PyType_GenericAlloc(type, n);
}

void
failing_type(PyTypeObject *type)
{
    if (type->tp_alloc == PyType_GenericAlloc) {
        type->tp_alloc = fail_allocation;
    }
}
