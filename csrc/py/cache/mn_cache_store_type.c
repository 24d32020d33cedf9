/* mn_cache_store_type.c - Store: a client of a cache file.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Methods may be called by any thread. What may wait, for a lock, another maker or a copy,
 * releases the GIL.
 */
#include "py/cache/mn_cache_module.h"

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"
#include "os/mn_thread.h"

#define TEXT(number) TEXT_OF(number)
#define TEXT_OF(number) #number

/* Why the folder cannot hold a cache. */
static const char *const reasons[] = {
    [MN_CACHE_NOT_IN_MEMORY] = "it is not on a file system in memory (tmpfs)",
    [MN_CACHE_FOREIGN] =
        "it, or the file in it, belongs to another user, is a symbolic link, or lets other users "
        "write; remove it, or make it yours alone (chmod 700)",
    [MN_CACHE_TOO_SMALL] = "its file system is too small. Docker gives a container 64 MB unless it "
                           "is started with --shm-size (or --ipc=host)",
    [MN_CACHE_NO_LOCKS] = "its file system does not lock files or share memory as a local one does",
    [MN_CACHE_DAMAGED] = "the file in it is damaged",
    [MN_CACHE_BUSY] = "another process has held the file's lock for " TEXT(MN_CACHE_HEADER_WAIT_S)
                      " seconds; it may be stopped",
    [MN_CACHE_NO_SLOT] = "1024 processes use the file already",
    [MN_CACHE_OTHER_LAYOUT] =
        "the file in it was made by another version of minato, in another format",
    [MN_CACHE_REMOTE] =
        "it is on a network's file system, or on one that a program provides (FUSE), where "
        "processes may see different bytes; take a folder on a local disk",
    [MN_CACHE_NO_RESERVING] = "its file system cannot reserve room for a file (fallocate)",
    [MN_CACHE_OTHER_FILE] =
        "a file of the cache's name is in it that no cache has made; move it elsewhere",
    [MN_CACHE_IN_USE] = "processes use the file",
};

#define REASONS ((int)(sizeof(reasons) / sizeof(reasons[0])))

MN_STATIC_ASSERT(MN_CACHE_SLOTS == 1024, "a reason says so");

/* 0 for 0, else -1 with OSError, MemoryError or Refused. */
static int
raise_for(struct mn_cache_state *st, int rc, const char *folder)
{
    if (rc == 0) {
        return 0;
    }
    if (rc == -ENOMEM) {
        PyErr_NoMemory();
    }
    else if (rc < 0) {
        errno = -rc;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, folder);
    }
    else {
        bool drop = rc == MN_CACHE_DAMAGED || rc == MN_CACHE_OTHER_LAYOUT;
        const char *why = rc < REASONS && reasons[rc] != NULL ? reasons[rc] : "unknown reason";
        PyErr_Format(st->refused,
                     drop ? "%s cannot hold a cache: %s; `minato cache drop %s` removes it"
                          : "%s cannot hold a cache: %s",
                     folder, why, folder);
    }
    return -1;
}

#define PARTS_MAX 65536
#define INSERTED_FIRST 256 /* of them, in one call, at first */

struct store {
    PyObject_HEAD
    struct mn_cache *cache;
    char *folder; /* for messages */
};

static struct mn_cache *
cache_of(PyObject *self)
{
    return ((struct store *)self)->cache;
}

struct mn_cache *
mn_cache_of_store(PyObject *store)
{
    return cache_of(store);
}

static int
raised(PyObject *self, int rc)
{
    struct mn_cache_state *st = PyType_GetModuleState(Py_TYPE(self));
    return raise_for(st, rc, ((struct store *)self)->folder);
}

static int
digest_of(PyObject *bytes, struct mn_cache_digest *digest)
{
    if (!PyBytes_Check(bytes) || PyBytes_GET_SIZE(bytes) != (Py_ssize_t)sizeof(*digest)) {
        return MN_RAISE(PyExc_TypeError, "a digest is 16 bytes");
    }
    memcpy(digest, PyBytes_AS_STRING(bytes), sizeof(*digest));
    return 0;
}

static PyObject *
store_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    const char *folder, *name, *label = "";
    unsigned long long bytes, job, reserve, tree = 0, rank = 0;
    int keep, on_disk = 0;
    if (!PyArg_ParseTuple(args, "ssKKpK|psKK", &folder, &name, &bytes, &job, &keep, &reserve,
                          &on_disk, &label, &tree, &rank)) {
        return NULL;
    }
    struct store *self = (struct store *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    struct mn_cache_place place = {.folder = folder, .name = name, .bytes = bytes, .job = job,
                                   .tree = tree, .rank = rank, .keep = keep != 0,
                                   .on_disk = on_disk != 0};
    (void)snprintf(place.label, sizeof(place.label), "%s", label);
    self->folder = strdup(folder);
    int rc = self->folder == NULL ? -ENOMEM : mn_cache_open(&place, reserve, &self->cache);
    if (raise_for(PyType_GetModuleState(type), rc, folder) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
store_dealloc(PyObject *self)
{
    struct store *s = (struct store *)self;
    if (s->cache != NULL) {
        MN_DO_WITHOUT_GIL(mn_cache_close(s->cache));
    }
    free(s->folder);
    mn_free_object(self);
}

static PyObject *
attach(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    int rc = MN_WITHOUT_GIL(mn_cache_attach(cache_of(self)));
    return mn_none_unless(raised(self, rc));
}

static PyObject *
detach(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    MN_DO_WITHOUT_GIL(mn_cache_detach(cache_of(self)));
    Py_RETURN_NONE;
}

PyDoc_STRVAR(find_doc,
"find(digest, count) -> Entry | None\n\n"
"count: whether it counts as a hit or as a miss.");

static PyObject *
find(PyObject *self, PyObject *args)
{
    struct mn_cache_state *st = PyType_GetModuleState(Py_TYPE(self));
    struct mn_cache_digest digest;
    struct mn_cache_found found;
    PyObject *bytes;
    int count;
    if (!PyArg_ParseTuple(args, "Sp", &bytes, &count) || digest_of(bytes, &digest) < 0) {
        return NULL;
    }
    struct mn_cache *cache = cache_of(self); /* in memory: sooner than the GIL is taken again */
    int rc = mn_cache_is_on_disk(cache)
                 ? MN_WITHOUT_GIL(mn_cache_find(cache, digest, count != 0, &found))
                 : mn_cache_find(cache, digest, count != 0, &found);
    if (rc == MN_EMPTY) {
        Py_RETURN_NONE;
    }
    if (raised(self, rc) < 0) {
        return NULL;
    }
    PyObject *entry = st->entry_type->tp_alloc(st->entry_type, 0);
    if (entry != NULL) {
        ((struct mn_cache_entry_object *)entry)->store = Py_NewRef(self);
        ((struct mn_cache_entry_object *)entry)->found = found;
    }
    return entry;
}

/* The buffers of a sequence. The number of them, or -1 with an exception and none. */
static Py_ssize_t
buffers_of(PyObject *tuple, Py_buffer *views, struct mn_cache_part *parts)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    for (Py_ssize_t i = 0; i < n; i++) {
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(tuple, i), &views[i], PyBUF_ANY_CONTIGUOUS) < 0) {
            while (i > 0) {
                PyBuffer_Release(&views[--i]);
            }
            return -1;
        }
        parts[i] = (struct mn_cache_part){views[i].buf, (uint64_t)views[i].len};
    }
    return n;
}

PyDoc_STRVAR(put_doc,
"put(digest, made_ns, description, parts, function=0, evicts=True) -> int\n\n"
"Stores a description and a tuple of contiguous buffers. 0: stored; 1: there is no room; 2: it is\n"
"larger than a segment, and never will be stored. function: a number for the one that made it,\n"
"whose waiters learn what its values cost. evicts: it may take the place of older values, if\n"
"several jobs share the file.");

static PyObject *
put(PyObject *self, PyObject *args)
{
    struct mn_cache_digest digest;
    struct mn_cache_part description;
    unsigned long long made_ns, function = 0;
    PyObject *bytes, *text, *all;
    int evicts = 1;
    if (!PyArg_ParseTuple(args, "SKSO!|Kp", &bytes, &made_ns, &text, &PyTuple_Type, &all,
                          &function, &evicts)
        || digest_of(bytes, &digest) < 0) {
        return NULL;
    }
    size_t n = (size_t)PyTuple_GET_SIZE(all);
    if (n > PARTS_MAX) {
        return PyLong_FromLong(2);
    }
    Py_buffer *views = PyMem_Calloc(n + 1, sizeof(*views));
    struct mn_cache_part *parts = PyMem_Calloc(n + 1, sizeof(*parts));
    PyObject *result = NULL;
    description.data = PyBytes_AS_STRING(text);
    description.bytes = (uint64_t)PyBytes_GET_SIZE(text);
    if (views == NULL || parts == NULL) {
        PyErr_NoMemory();
    }
    else if (buffers_of(all, views, parts) >= 0) {
        struct mn_cache_value value = {&description, parts, n, made_ns, evicts != 0};
        int rc;
        Py_BEGIN_ALLOW_THREADS
        mn_cache_learn_cost(cache_of(self), function, made_ns);
        rc = mn_cache_store(cache_of(self), digest, &value);
        Py_END_ALLOW_THREADS
        for (size_t i = 0; i < n; i++) {
            PyBuffer_Release(&views[i]);
        }
        if (rc == MN_FULL || rc == MN_CACHE_TOO_LARGE) {
            result = PyLong_FromLong(rc == MN_FULL ? 1 : 2);
        }
        else if (raised(self, rc) == 0) {
            result = PyLong_FromLong(0);
        }
    }
    PyMem_Free(views);
    PyMem_Free(parts);
    return result;
}

PyDoc_STRVAR(claim_doc,
"claim(digest, wait, function=0) -> int\n\n"
"Before a value is made. 0: nothing was claimed, because the value is there by now, because it\n"
"was waited for long enough, or because the place is taken: look again and make it, if need be.\n"
"Else what release() wants to have. wait: for another thread or process that makes it.");

static PyObject *
claim(PyObject *self, PyObject *args)
{
    struct mn_cache *cache = cache_of(self);
    struct mn_cache_digest digest;
    struct mn_cache_claimed claimed;
    struct mn_cache_found found;
    PyObject *bytes;
    unsigned long long function = 0;
    int wait;
    if (!PyArg_ParseTuple(args, "Sp|K", &bytes, &wait, &function)
        || digest_of(bytes, &digest) < 0) {
        return NULL;
    }
    int64_t patience = -1;
    uint64_t start = 0;
    for (;;) {
        int rc = mn_cache_claim_key(cache, digest, &claimed);
        if (rc == 0) {
            return PyLong_FromUnsignedLongLong(claimed.word);
        }
        if (rc == MN_FULL || (rc == -EBUSY && !wait)) {
            return PyLong_FromLong(0);
        }
        if (rc != -EBUSY) {
            (void)raised(self, rc);
            return NULL;
        }
        if (patience < 0) {
            patience = mn_cache_patience_ns(cache, function);
            start = mn_now_ns();
        }
        if (mn_now_ns() - start >= (uint64_t)patience) {
            return PyLong_FromLong(0);
        }
        Py_BEGIN_ALLOW_THREADS
        (void)mn_cache_wait_for_key(&claimed);
        rc = mn_cache_find(cache, digest, false, &found);
        Py_END_ALLOW_THREADS
        if (PyErr_CheckSignals() < 0) {
            return NULL;
        }
        if (rc == 0) {
            return PyLong_FromLong(0);
        }
    }
}

static PyObject *
release(PyObject *self, PyObject *args)
{
    struct mn_cache_digest digest;
    unsigned long long word;
    PyObject *bytes;
    if (!PyArg_ParseTuple(args, "SK", &bytes, &word) || digest_of(bytes, &digest) < 0) {
        return NULL;
    }
    mn_cache_release_key(cache_of(self), digest, word);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(inserted_doc,
"inserted(cursor) -> (stored, oldest, cursor)\n\n"
"What all clients have stored since the cursor was returned. stored: for each value two uint64,\n"
"the first eight bytes of its digest and its generation. oldest: values of lower generations are\n"
"gone. b\"\" is a cursor before everything. A few values are never reported.");

static PyObject *
inserted(PyObject *self, PyObject *bytes)
{
    struct mn_cache_cursor cursor = {0};
    struct mn_cache_stored *stored = NULL;
    uint64_t n = 0, most = 0, got;
    int rc = 0;
    if (!PyBytes_Check(bytes)
        || (PyBytes_GET_SIZE(bytes) != 0
            && PyBytes_GET_SIZE(bytes) != (Py_ssize_t)sizeof(cursor))) {
        return PyErr_Format(PyExc_TypeError, "a cursor is b\"\" or what inserted() returned");
    }
    memcpy(&cursor, PyBytes_AS_STRING(bytes), (size_t)PyBytes_GET_SIZE(bytes));
    Py_BEGIN_ALLOW_THREADS
    do {
        most = most == 0 ? INSERTED_FIRST : 2 * most;
        struct mn_cache_stored *more = realloc(stored, most * sizeof(*stored));
        rc = more == NULL ? -ENOMEM : 0;
        if (rc == 0) {
            stored = more;
            rc = mn_cache_inserted(cache_of(self), &cursor, stored + n, most - n, &got);
            n += rc == 0 ? got : 0;
        }
    } while (rc == 0 && n == most);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (raised(self, rc) == 0) {
        result = Py_BuildValue("(y#Ky#)", (const char *)stored,
                               (Py_ssize_t)(n * sizeof(*stored)),
                               (unsigned long long)cursor.oldest, (const char *)&cursor,
                               (Py_ssize_t)sizeof(cursor));
    }
    free(stored);
    return result;
}

static PyObject *
stats(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_cache_sums s = {0};
    int rc = MN_WITHOUT_GIL(mn_cache_sum(cache_of(self), &s));
    PyObject *label = raised(self, rc) < 0 ? NULL
                          : PyUnicode_DecodeUTF8(s.label, (Py_ssize_t)strlen(s.label), "replace");
#define SUM(name, member) name, (unsigned long long)s.member
    return Py_BuildValue(
        "{sK sK sK sK sK sK sK sK sK sK sK sK sK sK sK sK sK sK sK sN}", SUM("hits", hits),
        SUM("hit_bytes", hit_bytes), SUM("saved_ns", saved_ns), SUM("misses", misses),
        SUM("made_ns", made_ns), SUM("stored", stored), SUM("stored_bytes", stored_bytes),
        SUM("refused", refused), SUM("bytes", bytes), SUM("used_bytes", used_bytes),
        SUM("entries", entries), SUM("recycled", recycled), SUM("returned", returned),
        SUM("processes", clients), SUM("jobs", jobs), SUM("largest", entry_bytes_max),
        SUM("damaged", damaged), SUM("parts", segments), SUM("removed", name), "label",
        label);
}

static PyObject *
verify(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    uint64_t checked, damaged;
    int rc = MN_WITHOUT_GIL(mn_cache_verify(cache_of(self), &checked, &damaged));
    if (raised(self, rc) < 0) {
        return NULL;
    }
    return Py_BuildValue("(KK)", (unsigned long long)checked, (unsigned long long)damaged);
}

static const char parts_doc[] =
    "parts(bytes) -> (number, bytes of each)\n\n"
    "The parts of a cache of that size, in each of which values lie whole.";

static PyObject *
parts(PyObject *Py_UNUSED(module), PyObject *arg)
{
    struct mn_cache_shape shape;
    unsigned long long bytes = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    if (!mn_cache_shape_of(bytes, 0, &shape)) {
        return PyErr_Format(PyExc_ValueError, "no cache has %llu bytes", bytes);
    }
    return Py_BuildValue("(KK)", (unsigned long long)shape.nsegments,
                         (unsigned long long)shape.segment_bytes);
}

static const char sweep_doc[] =
    "sweep(folder, name)\n\n"
    "Removes a file in memory that no process uses and that was not to be kept.";

static PyObject *
sweep(PyObject *Py_UNUSED(module), PyObject *args)
{
    const char *folder, *name;
    if (!PyArg_ParseTuple(args, "ss", &folder, &name)) {
        return NULL;
    }
    struct mn_cache_place place = {.folder = folder, .name = name, .job = 1};
    MN_DO_WITHOUT_GIL(mn_cache_file_sweep(&place));
    Py_RETURN_NONE;
}

static const char drop_doc[] =
    "drop(folder, name, on_disk, used)\n\n"
    "Removes the file of a cache; used: also if processes have it open. Raises OSError, or\n"
    "Refused, as for a file that does not begin as a cache does.";

static PyObject *
drop(PyObject *module, PyObject *args)
{
    const char *folder, *name;
    int on_disk, used;
    if (!PyArg_ParseTuple(args, "sspp", &folder, &name, &on_disk, &used)) {
        return NULL;
    }
    struct mn_cache_place place = {.folder = folder, .name = name, .on_disk = on_disk != 0};
    int rc = MN_WITHOUT_GIL(mn_cache_file_remove(&place, used != 0));
    return mn_none_unless(raise_for(PyModule_GetState(module), rc, folder));
}

PyDoc_STRVAR(promise_doc,
"promise(bytes)\n\n"
"Memory that this process may still take for other things, of which no cache may take any.");

static PyObject *
promise(PyObject *self, PyObject *arg)
{
    unsigned long long bytes = PyLong_AsUnsignedLongLong(arg);
    if (PyErr_Occurred() != NULL) {
        return NULL;
    }
    mn_cache_promise(cache_of(self), bytes);
    Py_RETURN_NONE;
}

static PyMethodDef store_methods[] = {
    {"promise", promise, METH_O, promise_doc},
    {"attach", attach, METH_NOARGS,
     PyDoc_STR("attach(): opens the file, unless it is open. Raises Refused or OSError.")},
    {"detach", detach, METH_NOARGS,
     PyDoc_STR("detach(): leaves the file, also as its last client. For no other thread in it.")},
    {"find", find, METH_VARARGS, find_doc},
    {"put", put, METH_VARARGS, put_doc},
    {"claim", claim, METH_VARARGS, claim_doc},
    {"release", release, METH_VARARGS,
     PyDoc_STR("release(digest, claimed): gives back what claim() returned.")},
    {"inserted", inserted, METH_O, inserted_doc},
    {"stats", stats, METH_NOARGS,
     PyDoc_STR("stats() -> dict of counts, bytes and nanoseconds, of all clients so far, and the\n"
               "label that a client gave the file, or ''")},
    {"verify", verify, METH_NOARGS,
     PyDoc_STR("verify() -> (entries, damaged ones): reads all that the index leads to")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot store_slots[] = {
    {Py_tp_new, store_new},
    {Py_tp_dealloc, store_dealloc},
    {Py_tp_methods, store_methods},
    {Py_tp_doc, PyDoc_STR("Store(folder, name, bytes, job, keep, reserve, on_disk=False, label='', "
                          "tree=job, rank=0)\n\nA client of a cache file. job 0: a guest, which "
                          "neither makes nor removes it. tree: a number of the tree of processes; "
                          "two trees of one job that have one rank are two jobs. label: whose "
                          "values these are, for people (255 bytes)")},
    {0, NULL},
};

PyType_Spec mn_cache_store_spec = {"minato._cache.Store", sizeof(struct store), 0,
                                   Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, store_slots};

PyMethodDef mn_cache_store_functions[] = {
    {"parts", parts, METH_O, parts_doc},
    {"drop", drop, METH_VARARGS, drop_doc},
    {"sweep", sweep, METH_VARARGS, sweep_doc},
    {NULL, NULL, 0, NULL},
};
