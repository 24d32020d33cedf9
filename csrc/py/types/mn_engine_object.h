/* mn_engine_object.h - the Engine object, for the files that implement it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_OBJECT_H
#define MN_ENGINE_OBJECT_H

#include <sys/types.h>

#include "engine/mn_batches.h"
#include "engine/mn_delivery.h"
#include "engine/mn_engine.h"
#include "engine/mn_engine_snapshot.h"
#include "py/transport/mn_layout.h"

/* A layout that workers read. There are one or two of them. */
struct mn_posted {
    struct mn_posted *next;
    PyObject *layout;
    uint32_t at;
};

struct mn_engine_object {
    PyObject_HEAD
    struct mn_engine *engine; /* NULL: closed */
    PyObject *costs;          /* CostModel or None: outlives the engine */
    struct mn_posted *posted; /* kept alive */
    PyObject *planned;        /* Epoch of the batch planned last; NULL: none yet */
    uint64_t planned_number, planned_position, planned_sequence; /* of that batch */
    pid_t pid;                /* process that owns it; in a forked child it does nothing */
    unsigned int inside;      /* threads in its functions without the GIL; close() waits for them */
};

/* A batch in flight, as Python sees it. */
struct mn_block_object {
    PyObject_HEAD
    PyObject *engine;  /* its engine */
    PyObject *layout;  /* of rows that the trainer itself has placed; NULL: the posted one */
    PyObject *runs;    /* of the batch that next() has formed; NULL: not in ready mode */
    uint64_t sequence; /* of a planned batch; or MN_UNPLANNED */
    uint64_t off;      /* 0: it cannot be made */
    uint32_t serial;   /* of the block there: later blocks have another */
    uint32_t kind;     /* enum mn_task_kind: how its samples travel */
    bool has_rows;     /* for its samples */
    PyObject *refusal; /* why it cannot be made; NULL: it can */
};

#define MN_UNPLANNED UINT64_MAX

/* Returns the engine; NULL with an exception if it is closed or belongs to another process. */
struct mn_engine *
mn_engine_get(PyObject *self);

/* Does the same for an engine that was opened with a window. */
struct mn_engine *
mn_engine_balanced(PyObject *self);

/* Makes a Block of the engine. Returns NULL with an exception. */
PyObject *
mn_block_new(PyObject *engine, uint64_t sequence, uint64_t off, PyObject *layout);

/* Returns the Block if it belongs to this engine, in flight or not. NULL with an exception. */
struct mn_block_object *
mn_block_of(PyObject *engine, PyObject *block);

/* Returns the engine, and where the block of a batch in flight lies. NULL with an exception for any
 * other object. */
struct mn_engine *
mn_engine_of_block(PyObject *self, PyObject *block, uint64_t *block_off);

/* Returns whether to continue a wait. -1 with an exception: another thread has begun to close the
 * engine, or a signal handler has closed it, and it may be gone. Needs the GIL. */
int
mn_engine_goes_on(PyObject *self);

/* Returns when a wait of `seconds` ends, by the monotonic clock; never for a negative number. */
uint64_t
mn_engine_until(double seconds);

/* Returns how long to sleep before the next check of signals and the clock. 0: the time is over, no
 * matter how the earlier sleeps have ended. */
int64_t
mn_engine_slice(uint64_t until);

/* Returns where workers read the layout; 0: it was not posted. */
uint32_t
mn_engine_posted(PyObject *self, PyObject *layout);

bool
mn_is_layout(PyObject *self, PyObject *layout);

/* Sets the fields of rows that follow the layout. */
static inline void
mn_layout_form(const struct mn_layout *l, struct mn_form *form)
{
    form->nfields = l->nfields;
    form->row_bytes = l->row_bytes;
}

/* ---- methods ------------------------------------------------------------------------------
 *
 * X(name, how, get, flags) for each method. mn_engine_type.c makes of the list what the type needs.
 * how: BRIEF; or REPORT, which reads memory that close() frees while it makes objects; or FAST,
 * with METH_FASTCALL. get: mn_engine_get, or mn_engine_balanced for engines with a window only. The
 * method gets the open engine that it returns.
 */
#define MN_ENGINE_METHODS(X)                                                            \
    /* mn_engine_type.c: life, waits */                                                 \
    X(start, BRIEF, mn_engine_get, METH_VARARGS)                                        \
    X(stop, BRIEF, mn_engine_get, METH_VARARGS)                                         \
    X(close, BRIEF, mn_engine_get, METH_NOARGS)                                         \
    X(wait, BRIEF, mn_engine_get, METH_VARARGS)                                         \
    X(wait_begins, BRIEF, mn_engine_get, METH_NOARGS)                                   \
    X(wait_ends, BRIEF, mn_engine_get, METH_VARARGS)                                    \
    /* mn_engine_type_plan.c: static scheduling; layouts that rows may follow, ... */   \
    X(submit, FAST, mn_engine_get, METH_FASTCALL)                                       \
    X(poll, BRIEF, mn_engine_get, METH_O)                                               \
    /* ... and balanced scheduling */                                                   \
    X(plan, FAST, mn_engine_balanced, METH_FASTCALL)                                    \
    X(set_form, BRIEF, mn_engine_balanced, METH_O)                                      \
    X(plan_end, BRIEF, mn_engine_balanced, METH_NOARGS)                                 \
    X(plan_clear, BRIEF, mn_engine_balanced, METH_NOARGS)                               \
    X(next, BRIEF, mn_engine_balanced, METH_VARARGS)                                    \
    X(retire, BRIEF, mn_engine_get, METH_O)                                             \
    /* mn_engine_type_take.c: batches of what is done */                                \
    X(decode, BRIEF, mn_engine_get, METH_VARARGS)                                       \
    X(take, FAST, mn_engine_get, METH_FASTCALL)                                         \
    X(row, BRIEF, mn_engine_get, METH_VARARGS)                                          \
    X(gather, BRIEF, mn_engine_balanced, METH_O)                                        \
    X(place, BRIEF, mn_engine_balanced, METH_VARARGS)                                   \
    /* mn_pagelock_type.c: pages that a device may read */                              \
    X(set_page_driver, BRIEF, mn_engine_get, METH_VARARGS)                              \
    X(lock_pages, BRIEF, mn_engine_get, METH_VARARGS)                                   \
    X(page_locks, BRIEF, mn_engine_get, METH_NOARGS)                                    \
    /* mn_engine_type_snapshot.c: reports; requests to workers */                       \
    X(envelopes, REPORT, mn_engine_get, METH_VARARGS)                                   \
    X(written, BRIEF, mn_engine_get, METH_VARARGS)                                      \
    X(lost, REPORT, mn_engine_get, METH_O)                                              \
    X(spans, REPORT, mn_engine_get, METH_O)                                             \
    X(workers, REPORT, mn_engine_get, METH_NOARGS)                                      \
    X(health, BRIEF, mn_engine_get, METH_NOARGS)                                        \
    X(deaths, BRIEF, mn_engine_get, METH_NOARGS)                                        \
    X(memory, BRIEF, mn_engine_get, METH_NOARGS)                                        \
    X(progress, BRIEF, mn_engine_get, METH_NOARGS)                                      \
    X(scheduler, BRIEF, mn_engine_balanced, METH_NOARGS)                                \
    X(kill_worker, BRIEF, mn_engine_get, METH_VARARGS)                                  \
    X(end_worker, BRIEF, mn_engine_get, METH_VARARGS)                                   \
    X(end_late, BRIEF, mn_engine_get, METH_VARARGS)                                     \
    X(note_failed, BRIEF, mn_engine_get, METH_O)

#define MN_ENGINE_TAKES_BRIEF PyObject *arg
#define MN_ENGINE_TAKES_REPORT PyObject *arg
#define MN_ENGINE_TAKES_FAST PyObject *const *args, Py_ssize_t nargs
#define MN_ENGINE_DECLARE(name, how, get, flags)                                        \
    extern const char mn_engine_##name##_doc[];                                         \
    PyObject *mn_engine_py_##name(PyObject *self, struct mn_engine *e, MN_ENGINE_TAKES_##how);

MN_ENGINE_METHODS(MN_ENGINE_DECLARE)

#ifdef MN_TEST_BINDINGS
MN_ENGINE_DECLARE(move_to, BRIEF, , )
#endif

#endif
