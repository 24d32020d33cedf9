/* mn_pagelock_type.c - PageLock: a device may read a range of the arena as long as it lives.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The functions of a driver are passed as addresses: the core is linked against none. See
 * memory/mn_pagelocks.h for what is locked, and minato/device/copies.py for the code that
 * asks.
 */
#include <errno.h>

#include "memory/mn_pagelocks.h"
#include "os/mn_proc.h"
#include "py/types/mn_engine_object.h"

struct mn_pagelock {
    PyObject_HEAD
    struct mn_engine *engine; /* pinned by this object */
    const char *at;
    uint64_t bytes;
    pid_t pid;
};

static void
let_go(struct mn_engine *e, const char *at, uint64_t bytes)
{
    mn_pagelocks_used(mn_engine_pagelocks(e), at, bytes);
    mn_engine_unpin(e);
}

static void
lock_dealloc(PyObject *self)
{
    struct mn_pagelock *p = (struct mn_pagelock *)self;
    if (p->pid == mn_proc_self()) { /* a forked copy neither locks nor frees */
        /* the driver may be busy with another thread */
        MN_DO_WITHOUT_GIL(let_go(p->engine, p->at, p->bytes));
    }
    mn_free_object(self);
}

/* Returns where copies must be cut: offsets in the range at which another chunk begins. */
static PyObject *
lock_cuts(PyObject *self, void *Py_UNUSED(closure))
{
    struct mn_pagelock *p = (struct mn_pagelock *)self;
    uint64_t off = (uint64_t)(p->at - mn_engine_pagelocks(p->engine)->base);
    PyObject *cuts = PyList_New(0);
    uint64_t cut = MN_PAGELOCKS_CHUNK - off % MN_PAGELOCKS_CHUNK;
    for (; cuts != NULL && cut < p->bytes; cut += MN_PAGELOCKS_CHUNK) {
        mn_list_add(&cuts, PyLong_FromUnsignedLongLong(cut));
    }
    return cuts;
}

static PyGetSetDef lock_getset[] = {
    {"cuts", lock_cuts, NULL, PyDoc_STR("Offsets that a copy must not cross."), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_dealloc, lock_dealloc},
    {Py_tp_getset, lock_getset},
    {Py_tp_doc, PyDoc_STR("A range of the arena that a device may read.")},
    {0, NULL},
};

PyType_Spec mn_pagelock_spec = {"minato._core.PageLock", sizeof(struct mn_pagelock), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION
                                    | Py_TPFLAGS_IMMUTABLETYPE, lock_slots};

/* ---- methods of Engine ------------------------------------------------------------------- */

const char mn_engine_set_page_driver_doc[] =
    "set_page_driver(enter, leave, lock, unlock, context, flags)\n\n"
    "From now on lock_pages() locks by these functions, given as their addresses:\n"
    "enter(context), leave(&context), lock(at, bytes, flags), unlock(at), each 0 or an error.\n"
    "They are called from any thread, without the GIL, and must exist as long as the memory.\n"
    "Without arguments: it locks no more; pages in use are unlocked with their PageLock.";

PyObject *
mn_engine_py_set_page_driver(PyObject *Py_UNUSED(self), struct mn_engine *e, PyObject *args)
{
    unsigned long long enter, leave, lock, unlock, context;
    unsigned int flags;
    if (PyTuple_GET_SIZE(args) == 0) {
        mn_engine_pin(e);
        MN_DO_WITHOUT_GIL(mn_pagelocks_stop(mn_engine_pagelocks(e)); mn_engine_unpin(e));
        Py_RETURN_NONE;
    }
    if (!PyArg_ParseTuple(args, "KKKKKI", &enter, &leave, &lock, &unlock, &context, &flags)) {
        return NULL;
    }
    struct mn_pagelocks_driver driver = {
        .enter = (int (*)(void *))(uintptr_t)enter,
        .leave = (int (*)(void **))(uintptr_t)leave,
        .lock = (int (*)(void *, size_t, unsigned int))(uintptr_t)lock,
        .unlock = (int (*)(void *))(uintptr_t)unlock,
        .context = (void *)(uintptr_t)context,
        .flags = flags,
    };
    /* In whole chunks, and one more for a batch that lies across a boundary. */
    uint64_t limit = mn_engine_memory(e).limit, most = limit + 2 * MN_PAGELOCKS_CHUNK;
    int rc = mn_pagelocks_set(mn_engine_pagelocks(e), &driver, most > limit ? most : limit);
    return mn_none_unless(mn_raise_errno(rc, "cannot set the functions that lock pages"));
}

const char mn_engine_lock_pages_doc[] =
    "lock_pages(address, bytes) -> PageLock | None\n\n"
    "None: it is not a range of the arena, or may not be locked. The caller must own the range "
    "for\n"
    "as long as it has the lock.";

PyObject *
mn_engine_py_lock_pages(PyObject *self, struct mn_engine *e, PyObject *args)
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    unsigned long long address, bytes;
    if (!PyArg_ParseTuple(args, "KK", &address, &bytes)) {
        return NULL;
    }
    const char *at = (const char *)(uintptr_t)address;
    mn_engine_pin(e);
    int rc = MN_WITHOUT_GIL(mn_pagelocks_use(mn_engine_pagelocks(e), at, bytes));
    struct mn_pagelock *p = rc == 0 ? PyObject_New(struct mn_pagelock, st->pagelock_type) : NULL;
    if (p != NULL) {
        *p = (struct mn_pagelock){p->ob_base, e, at, bytes, mn_proc_self()};
        return (PyObject *)p;
    }
    if (rc == 0) {
        let_go(e, at, bytes);
        return NULL;
    }
    mn_engine_unpin(e);
    Py_RETURN_NONE;
}

const char mn_engine_page_locks_doc[] =
    "page_locks() -> (locked, refused): bytes that are locked, and the driver's error at the "
    "first\n"
    "lock that it refused, or 0";

PyObject *
mn_engine_py_page_locks(PyObject *Py_UNUSED(self), struct mn_engine *e,
                        PyObject *Py_UNUSED(ignored))
{
    unsigned long long locked;
    int refused;
    mn_engine_pin(e);
    Py_BEGIN_ALLOW_THREADS
    mn_mutex_lock(&mn_engine_pagelocks(e)->mutex);
    locked = mn_engine_pagelocks(e)->locked_bytes;
    refused = mn_engine_pagelocks(e)->refused;
    mn_mutex_unlock(&mn_engine_pagelocks(e)->mutex);
    mn_engine_unpin(e);
    Py_END_ALLOW_THREADS
    return Py_BuildValue("Ki", locked, refused);
}
