/* mn_block_type.c - Block: Python's name for a batch in flight, for the engine that made it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Python never sees where a block lies. The owner of a Block may ask its engine about it until the
 * batch has ended. After that, and at any other engine, it is a ValueError. So no argument from
 * Python can make the engine read memory that is not a block.
 */
#include "engine/mn_engine_snapshot.h"
#include "py/types/mn_engine_object.h"

#include <stddef.h>
#include <structmember.h>

PyObject *
mn_block_new(PyObject *engine, uint64_t sequence, uint64_t off, PyObject *layout)
{
    struct mn_engine *e = mn_engine_get(engine);
    struct mn_state *st = mn_state_of_type(Py_TYPE(engine));
    if (e == NULL || st == NULL) {
        return NULL;
    }
    struct mn_block_object *b = PyObject_New(struct mn_block_object, st->block_type);
    if (b != NULL) {
        b->engine = Py_NewRef(engine);
        b->layout = Py_XNewRef(layout);
        b->sequence = sequence;
        b->off = off;
        b->serial = off != 0 ? mn_block_at(mn_engine_shm(e), off)->serial : 0;
    }
    return (PyObject *)b;
}

struct mn_block_object *
mn_block_of(PyObject *engine, PyObject *block)
{
    struct mn_state *st = mn_state_of_type(Py_TYPE(engine));
    if (st == NULL || !Py_IS_TYPE(block, st->block_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Block, got %s", Py_TYPE(block)->tp_name);
        return NULL;
    }
    struct mn_block_object *b = (struct mn_block_object *)block;
    if (b->engine != engine) {
        PyErr_SetString(PyExc_ValueError, "the block belongs to another engine");
        return NULL;
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
        PyErr_SetString(PyExc_ValueError, "the block's batch is not in flight");
        return NULL;
    }
    *block_off = b->off;
    return e;
}

struct mn_engine *
mn_engine_of_done(PyObject *self, PyObject *block, uint64_t *block_off)
{
    struct mn_engine *e = mn_engine_of_block(self, block, block_off);
    if (e != NULL && mn_engine_poll(e, *block_off) == MN_BLOCK_BUSY) {
        PyErr_SetString(PyExc_ValueError, "the block's batch is not done");
        return NULL;
    }
    return e;
}

static void
dealloc(PyObject *self)
{
    struct mn_block_object *b = (struct mn_block_object *)self;
    PyTypeObject *type = Py_TYPE(self);
    Py_DECREF(b->engine);
    Py_XDECREF(b->layout);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
get_made(PyObject *self, void *closure)
{
    (void)closure;
    return PyBool_FromLong(((struct mn_block_object *)self)->off != 0);
}

static PyMemberDef members[] = {
    {"sequence", T_ULONGLONG, offsetof(struct mn_block_object, sequence), READONLY,
     PyDoc_STR("position in the order of planning, over epochs")},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef getset[] = {
    {"made", get_made, NULL, PyDoc_STR("False: the batch cannot be made, see refused()"), NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_dealloc, dealloc},
    {Py_tp_members, members},
    {Py_tp_getset, getset},
    {Py_tp_doc, PyDoc_STR("A batch in flight. Only its own Engine accepts it.")},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "minato._core.Block",
    .basicsize = sizeof(struct mn_block_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = slots,
};

int
mn_block_add_type(PyObject *module, struct mn_state *st)
{
    st->block_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
    return st->block_type == NULL ? -1 : PyModule_AddType(module, st->block_type);
}
