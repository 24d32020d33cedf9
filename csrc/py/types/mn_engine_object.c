/* mn_engine_object.c - Block, and helpers of an Engine's methods. See mn_engine_object.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/types/mn_engine_object.h"

#include <stddef.h>

#include "os/mn_proc.h"
#include "os/mn_thread.h"

/* The longest sleep of next() before it checks for signals. A backstop: a signal to the main thread
 * ends the sleep by itself. */
#define SIGNAL_LOOK_NS (INT64_C(500) * 1000 * 1000)

struct mn_engine *
mn_engine_get(PyObject *self)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    if (o->engine == NULL || o->pid != mn_proc_self()) {
        PyErr_SetString(PyExc_RuntimeError,
                        o->engine == NULL ? "the engine is closed"
                                          : "the engine belongs to another process");
        return NULL;
    }
    return o->engine;
}

struct mn_engine *
mn_engine_balanced(PyObject *self)
{
    struct mn_engine *e = mn_engine_get(self);
    if (e != NULL && !mn_engine_is_balanced(e)) {
        return (void *)PyErr_Format(PyExc_RuntimeError, "the engine was opened without a window");
    }
    return e;
}

bool
mn_is_layout(PyObject *self, PyObject *layout)
{
    const struct mn_state *st = PyType_GetModuleState(Py_TYPE(self));
    bool is = Py_IS_TYPE(layout, st->layout_type);
    if (!is) {
        PyErr_SetString(PyExc_TypeError, "layout must be a Layout");
    }
    return is;
}

int
mn_engine_goes_on(PyObject *self)
{
    struct mn_engine *e = mn_engine_get(self);
    if (e != NULL && mn_engine_is_stopped(e)) {
        PyErr_SetString(PyExc_RuntimeError, "the loader was shut down; make a new iterator");
        return -1;
    }
    return e != NULL ? 0 : -1;
}

uint64_t
mn_engine_until(double seconds)
{
    bool endless = !(seconds >= 0 && seconds <= 1e9);
    return endless ? UINT64_MAX : mn_now_ns() + (uint64_t)(seconds * 1e9);
}

int64_t
mn_engine_slice(uint64_t until)
{
    uint64_t now = until == UINT64_MAX ? 0 : mn_now_ns();
    uint64_t left = until > now ? until - now : 0;
    return left < (uint64_t)SIGNAL_LOOK_NS ? (int64_t)left : SIGNAL_LOOK_NS;
}

/* ---- Block: Python's name for a batch in flight, for the engine that made it ----
 *
 * Python never sees where a block lies. The owner of a Block may ask its engine about it until the
 * batch has ended. After that, and at any other engine, it is a ValueError. So no argument from
 * Python can make the engine read memory that is not a block.
 */

PyObject *
mn_block_new(PyObject *engine, uint64_t sequence, uint64_t off, PyObject *layout)
{
    struct mn_engine *e = mn_engine_get(engine);
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(engine));
    if (e == NULL) {
        return NULL;
    }
    struct mn_block_object *b = PyObject_New(struct mn_block_object, st->block_type);
    if (b != NULL) {
        const struct mn_block *at = off != 0 ? mn_block_at(mn_engine_shm(e), off) : NULL;
        const struct mn_result *first = off != 0 ? mn_engine_result(e, off, 0) : NULL;
        b->engine = Py_NewRef(engine);
        b->layout = Py_XNewRef(layout);
        b->runs = NULL;
        b->sequence = sequence;
        b->off = off;
        b->serial = at != NULL ? at->serial : 0;
        b->kind = first != NULL ? first->kind : (uint32_t)MN_KIND_SAMPLES;
        b->has_rows = at != NULL && at->layout != 0;
        b->refusal = NULL;
    }
    if (b != NULL && off == 0) {
        struct mn_refusal r = mn_engine_refused(e, sequence);
        b->refusal = Py_BuildValue("(iKK)", (int)r.why, (unsigned long long)r.need,
                                   (unsigned long long)r.all);
        if (b->refusal == NULL) {
            Py_CLEAR(b);
        }
    }
    return (PyObject *)b;
}

struct mn_block_object *
mn_block_of(PyObject *engine, PyObject *block)
{
    struct mn_state *st = PyType_GetModuleState(Py_TYPE(engine));
    if (!Py_IS_TYPE(block, st->block_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Block, got %s", Py_TYPE(block)->tp_name);
        return NULL;
    }
    struct mn_block_object *b = (struct mn_block_object *)block;
    if (b->engine != engine) {
        return (void *)PyErr_Format(PyExc_ValueError, "the block belongs to another engine");
    }
    return b;
}

struct mn_engine *
mn_engine_of_block(PyObject *self, PyObject *block, uint64_t *block_off)
{
    struct mn_engine *e = mn_engine_get(self);
    struct mn_block_object *b = e != NULL ? mn_block_of(self, block) : NULL;
    if (b == NULL) {
        return NULL;
    }
    if (b->off == 0 || !mn_engine_has_block(e, b->off, b->serial)) {
        return (void *)PyErr_Format(PyExc_ValueError, "the block's batch is not in flight");
    }
    *block_off = b->off;
    return e;
}

static void
dealloc(PyObject *self)
{
    struct mn_block_object *b = (struct mn_block_object *)self;
    Py_DECREF(b->engine);
    Py_XDECREF(b->layout);
    Py_XDECREF(b->runs);
    Py_XDECREF(b->refusal);
    mn_free_object(self);
}

static PyMemberDef members[] = {
    {"sequence", T_ULONGLONG, offsetof(struct mn_block_object, sequence), READONLY,
     PyDoc_STR("position in the order of planning, over epochs")},
    {"kind", T_UINT, offsetof(struct mn_block_object, kind), READONLY,
     PyDoc_STR("how its samples travel")},
    {"has_rows", T_BOOL, offsetof(struct mn_block_object, has_rows), READONLY,
     PyDoc_STR("whether it has rows for its samples")},
    {"runs", T_OBJECT, offsetof(struct mn_block_object, runs), READONLY,
     PyDoc_STR("[(block, row0, nrows)] of a batch that next() gave in ready mode: the rows of\n"
               "planned batches that make it up; else None")},
    {"refusal", T_OBJECT, offsetof(struct mn_block_object, refusal), READONLY,
     PyDoc_STR("(why, need, all) of a batch that cannot be made, else None. why: 1 task\n"
               "descriptors, 2 bytes for indices and reports, 3 bytes of the arena, 4 bytes of\n"
               "the system, 0: it was not refused; all: how many there are, in use or not")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, dealloc},
    {Py_tp_members, members},
    {Py_tp_doc, PyDoc_STR("A batch in flight. Only its own Engine accepts it.")},
    {0, NULL},
};

PyType_Spec mn_block_spec = {"minato._core.Block", sizeof(struct mn_block_object), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION
                                 | Py_TPFLAGS_IMMUTABLETYPE, slots};
