/* mn_delivered_memory.c - ranges of the arena that Python objects see, and when they may be reused.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A range may be reused only when nothing can see it. A tensor's storage calls its deleter when
 * *it* no longer needs its memory; that is not enough. Tensor.share_memory_() and multiprocessing
 * queues replace the memory of a living storage, while NumPy arrays made earlier still show the old
 * memory. Such an array keeps its tensor alive, and the tensor its storage. So the rule is: the
 * deleter was called AND the storage is dead, as a weak reference to the storage shows
 * (torch.UntypedStorage._weak_ref, _expired). The deleter may run where Python must not be called,
 * or the storage may live on. Then the hold waits on the pending list until a thread that may call
 * Python looks again.
 *
 * A fork copies holds. The child's copies never free: they compare process ids. And memory that
 * the child sees must not change under it. A range that was handed out when the trainer forked
 * waits until that child is gone (os/mn_forks.h; minato/transport/torch_bridge.py reports forks). A
 * hold remembers how many forks were counted at its birth and at its end, and every living fork in
 * between sees it. Its end is not the run of the deleter, but the moment when the rule above is
 * found to hold. Until then a child may inherit an object that shows the range.
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "engine/mn_engine_snapshot.h"
#include "os/mn_forks.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"

struct mn_hold {
    void *heap;              /* a copy in ordinary memory; NULL: a range of the arena */
    bool pages;              /* heap is a mapping of whole pages */
    struct mn_engine *engine;
    uint64_t off;
    uint64_t bytes;
    pid_t pid;
    struct mn_pending *pending;
    uint64_t born, ended; /* forks counted when it was made, and when it ended */
    bool over;            /* `ended` is set */
    PyObject *guard;      /* int: weak reference to the storage; NULL: not needed */
    struct mn_hold *next;
};

/* Lives as long as the process: a deleter may run after the module is gone. */
struct mn_pending {
    struct mn_mutex mutex;
    struct mn_hold *first;
    uint64_t alive;        /* holds handed out; 0: no fork sees any */
    struct mn_forks forks;
    PyObject *expired;     /* int -> bool; set once, before the first guard */
    PyObject *free_weak;   /* int -> None */
};

struct mn_hold *
mn_hold_new(struct mn_state *st, struct mn_engine *e, uint64_t block_off, uint64_t off,
            uint64_t bytes)
{
    struct mn_hold *h = calloc(1, sizeof(*h));
    int rc = h != NULL ? mn_engine_retain(e, block_off, off, bytes) : -ENOMEM;
    if (rc < 0) {
        free(h);
        if (rc == -ENOMEM) {
            PyErr_NoMemory();
        }
        else {
            PyErr_SetString(PyExc_RuntimeError, "the loader was shut down; make a new iterator");
        }
        return NULL;
    }
    h->engine = e;
    h->off = off;
    h->bytes = bytes;
    h->pid = mn_proc_self();
    h->pending = st->pending;
    mn_mutex_lock(&h->pending->mutex);
    h->born = h->pending->forks.count;
    h->pending->alive++;
    mn_mutex_unlock(&h->pending->mutex);
    return h;
}

/* From this size on a copy gets pages of its own. Copies are made when memory is short, and in
 * malloc's heap the hole of a large aligned block is too small for the next one. */
#define PAGES_BYTES (UINT64_C(1) << 20)

struct mn_hold *
mn_hold_copy(struct mn_state *st, const void *data, uint64_t bytes)
{
    struct mn_hold *h = calloc(1, sizeof(*h));
    if (h != NULL) { /* aligned like torch's own; never empty, so that it has an address */
        h->pages = bytes >= PAGES_BYTES;
        h->heap = h->pages ? mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
                           : aligned_alloc(64, ((size_t)bytes + 64) & ~(size_t)63);
    }
    if (h == NULL || h->heap == NULL || h->heap == MAP_FAILED) {
        free(h);
        PyErr_NoMemory();
        return NULL;
    }
    memcpy(h->heap, data, (size_t)bytes);
    h->bytes = bytes;
    h->pid = mn_proc_self();
    h->pending = st->pending;
    return h;
}

void *
mn_hold_data(const struct mn_hold *hold)
{
    if (hold->heap != NULL) {
        return hold->heap;
    }
    return mn_at(mn_engine_shm(hold->engine), hold->off);
}

int
mn_hold_guard(struct mn_state *st, struct mn_hold *hold, PyObject *tensor)
{
    if (st->weak_ref == NULL) {
        return 0;
    }
    hold->guard = PyObject_CallOneArg(st->weak_ref, tensor);
    return hold->guard != NULL ? 0 : -1;
}

static void
give_back(struct mn_hold *h)
{
    if (h->heap != NULL) {
        if (h->pages) {
            (void)munmap(h->heap, (size_t)h->bytes);
        }
        else {
            free(h->heap);
        }
        free(h);
        return;
    }
    mn_mutex_lock(&h->pending->mutex);
    h->pending->alive--;
    mn_mutex_unlock(&h->pending->mutex);
    mn_engine_release(h->engine, h->off, h->bytes);
    free(h);
}

/* Returns whether a living child of a fork still sees a range that nothing in this process sees. */
static bool
forked(struct mn_hold *h)
{
    struct mn_pending *p = h->pending;
    if (h->heap != NULL) {
        return false; /* a child has its own copy */
    }
    mn_mutex_lock(&p->mutex);
    if (!h->over) {
        h->over = true;
        h->ended = p->forks.count;
    }
    bool seen = mn_forks_see(&p->forks, h->born, h->ended);
    mn_mutex_unlock(&p->mutex);
    return seen;
}

/* Returns whether the guarded storage is dead, and frees the weak reference if so. Call it in a
 * Python thread. */
static bool
unseen(struct mn_hold *h)
{
    if (h->guard == NULL) {
        return true;
    }
    bool dead = false;
    PyObject *type, *value, *tb;
    PyErr_Fetch(&type, &value, &tb);
    PyObject *r = PyObject_CallOneArg(h->pending->expired, h->guard);
    if (r == Py_True) {
        dead = true;
        PyObject *n = PyObject_CallOneArg(h->pending->free_weak, h->guard);
        Py_XDECREF(n);
        Py_CLEAR(h->guard);
    }
    Py_XDECREF(r);
    PyErr_Restore(type, value, tb);
    return dead;
}

void
mn_hold_release(struct mn_hold *hold)
{
    if (hold->pid != mn_proc_self()) {
        return; /* a forked copy: do not free or lock */
    }
    bool known = hold->guard == NULL || (Py_IsInitialized() && PyGILState_Check());
    if (known && unseen(hold) && !forked(hold)) {
        give_back(hold);
        return;
    }
    mn_mutex_lock(&hold->pending->mutex);
    hold->next = hold->pending->first;
    hold->pending->first = hold;
    mn_mutex_unlock(&hold->pending->mutex);
}

/* Lock held. While nothing is handed out, forks need no watching and no descriptor. */
static void
forget_if_unseen(struct mn_pending *p)
{
    if (p->alive == 0) {
        mn_forks_forget(&p->forks);
    }
}

void
mn_pending_reclaim(struct mn_state *st)
{
    struct mn_pending *p = st->pending;
    mn_mutex_lock(&p->mutex);
    struct mn_hold *h = p->first, *kept = NULL, **end = &kept, *next;
    p->first = NULL;
    if (h != NULL) {
        mn_forks_look(&p->forks);
    }
    else {
        forget_if_unseen(p);
    }
    mn_mutex_unlock(&p->mutex);
    if (h == NULL) {
        return;
    }
    for (; h != NULL; h = next) {
        next = h->next;
        if (h->pid == mn_proc_self() && unseen(h) && !forked(h)) {
            give_back(h);
        }
        else {
            *end = h;
            end = &h->next;
        }
    }
    mn_mutex_lock(&p->mutex);
    *end = p->first; /* released meanwhile */
    p->first = kept;
    forget_if_unseen(p);
    mn_mutex_unlock(&p->mutex);
}

static PyObject *
fork_begins(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    struct mn_pending *p = ((struct mn_state *)PyModule_GetState(module))->pending;
    mn_mutex_lock(&p->mutex);
    mn_forks_before(&p->forks); /* even if none is out: another thread may get one now */
    mn_mutex_unlock(&p->mutex);
    Py_RETURN_NONE;
}

static PyObject *
fork_ends(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    struct mn_pending *p = ((struct mn_state *)PyModule_GetState(module))->pending;
    mn_mutex_lock(&p->mutex);
    mn_forks_in_parent(&p->forks);
    forget_if_unseen(p);
    mn_mutex_unlock(&p->mutex);
    Py_RETURN_NONE;
}

static PyObject *
after_fork(PyObject *module, PyObject *Py_UNUSED(ignored))
{
    struct mn_pending *p = ((struct mn_state *)PyModule_GetState(module))->pending;
    /* At the moment of the fork, a deleter in a thread that does not exist here may have held the
     * lock. No other thread exists: the lock is initialized anew, and the contents of the list and
     * the counts belong to the parent. */
    int rc = mn_mutex_init(&p->mutex);
    mn_forks_in_child(&p->forks);
    p->first = NULL;
    p->alive = 0;
    return mn_raise_errno(rc, "a lock in a forked child") < 0 ? NULL : Py_NewRef(Py_None);
}

/* ---- a bytes-like object over a hold ------------------------------------------------ */

struct mn_arena_view {
    PyObject_HEAD
    struct mn_hold *hold;
    Py_ssize_t bytes;
};

static int
view_getbuffer(PyObject *self, Py_buffer *buf, int flags)
{
    struct mn_arena_view *v = (struct mn_arena_view *)self;
    return PyBuffer_FillInfo(buf, self, mn_hold_data(v->hold), v->bytes, 0, flags);
}

static PyObject *
view_guard(PyObject *self, PyObject *tensor)
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    return mn_none_unless(mn_hold_guard(st, ((struct mn_arena_view *)self)->hold, tensor));
}

static void
view_dealloc(PyObject *self)
{
    mn_hold_release(((struct mn_arena_view *)self)->hold);
    mn_free_object(self);
}

static PyMethodDef view_methods[] = {
    {"guard", view_guard, METH_O,
     PyDoc_STR("guard(tensor): reuse the memory only once the tensor's storage is dead.")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot view_slots[] = {
    {Py_tp_dealloc, view_dealloc},
    {Py_tp_methods, view_methods},
    {Py_bf_getbuffer, view_getbuffer},
    {Py_tp_doc, PyDoc_STR("Writable bytes of the arena, freed with the last reference.")},
    {0, NULL},
};

PyType_Spec mn_arena_view_spec = {"minato._core.ArenaView", sizeof(struct mn_arena_view), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION
                                      | Py_TPFLAGS_IMMUTABLETYPE, view_slots};

PyObject *
mn_arena_view_new(struct mn_state *st, struct mn_hold *hold, uint64_t bytes)
{
    struct mn_arena_view *v = PyObject_New(struct mn_arena_view, st->arena_view_type);
    if (v == NULL) {
        mn_hold_release(hold);
        return NULL;
    }
    v->hold = hold;
    v->bytes = (Py_ssize_t)bytes;
    return (PyObject *)v;
}

/* ---- functions of the module ---- */

PyDoc_STRVAR(bind_torch_doc,
"bind_torch(tensor_type, exchange_api, plain_tensor, from_view, weak_ref, expired,\n"
"free_weak, iterator)\n\n"
"Sets how the core makes tensors: torch.Tensor, its DLPack exchange capsule or None,\n"
"the capsule of minato._torch or None, the Python functions that mn_state.h describes, and\n"
"torch's class of iterators with workers.");

static PyObject *
bind_torch(PyObject *module, PyObject *args)
{
    struct mn_state *st = PyModule_GetState(module);
    PyObject *type, *capsule, *plain_tensor, *from_view, *weak_ref, *expired, *free_weak, *iterator;
    if (!PyArg_ParseTuple(args, "O!OOOOOOO", &PyType_Type, &type, &capsule, &plain_tensor,
                          &from_view, &weak_ref, &expired, &free_weak, &iterator)) {
        return NULL;
    }
    const struct mn_plain_tensor *plain =
        plain_tensor != Py_None ? PyCapsule_GetPointer(plain_tensor, MN_PLAIN_TENSOR) : NULL;
    const struct mn_dl_api *api =
        capsule != Py_None ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : NULL;
    PyObject *next = PyErr_Occurred() ? NULL : PyObject_GetAttr(iterator, st->str_next);
    if (next == NULL) {
        return NULL;
    }
    if (api != NULL && api->version.major != 1) {
        api = NULL; /* another ABI: use the fallback */
    }
    Py_XSETREF(st->torch_next, next);
    Py_XSETREF(st->torch_iterator, Py_NewRef(iterator));
    st->dlpack = api;
    st->plain = plain;
    Py_XSETREF(st->tensor_type, (PyTypeObject *)Py_NewRef(type));
    Py_XSETREF(st->from_view, Py_NewRef(from_view));
    Py_XSETREF(st->weak_ref, Py_NewRef(weak_ref));
    Py_XSETREF(st->pending->expired, Py_NewRef(expired)); /* holds can be guarded from now on */
    Py_XSETREF(st->pending->free_weak, Py_NewRef(free_weak));
    return PyBool_FromLong(api != NULL);
}

static PyMethodDef functions[] = {
    {"bind_torch", bind_torch, METH_VARARGS, bind_torch_doc},
    {"fork_begins", fork_begins, METH_NOARGS,
     PyDoc_STR("fork_begins(): call it before each fork.")},
    {"fork_ends", fork_ends, METH_NOARGS,
     PyDoc_STR("fork_ends(): call it after the fork, in the same thread of the parent.")},
    {"forked", after_fork, METH_NOARGS,
     PyDoc_STR("forked(): call it in the child, which starts without the parent's forks.")},
    {NULL, NULL, 0, NULL},
};

int
mn_pending_open(PyObject *module, struct mn_state *st)
{
    struct mn_pending *p = calloc(1, sizeof(*p));
    if (p == NULL || mn_mutex_init(&p->mutex) < 0) {
        free(p);
        return (PyErr_NoMemory(), -1);
    }
    st->pending = p;
    return PyModule_AddFunctions(module, functions);
}
