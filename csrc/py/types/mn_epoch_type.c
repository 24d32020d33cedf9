/* mn_epoch_type.c - Epoch: values that are the same for every batch of an epoch.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The planner makes one Epoch for each epoch, and passes it to the engine with each batch.
 * number: of the epoch; base_seed: of its samples; dumps: pickles indices that are no integers.
 * user_epoch: 1 + the argument of set_epoch(), or 0; seeded, splits: see struct mn_epoch.
 */
#include "py/types/mn_engine_object.h"

#include <stddef.h>
#include <structmember.h>

static PyObject *
new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"number", "base_seed", "dumps", "user_epoch", "seeded", "splits",
                            "by_index", NULL};
    unsigned long long number, base_seed, user_epoch = 0;
    PyObject *dumps;
    int seeded = 0, splits = 0, by_index = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKO|$Kppp", names, &number, &base_seed, &dumps,
                                     &user_epoch, &seeded, &splits, &by_index)) {
        return NULL;
    }
    struct mn_epoch *e = (struct mn_epoch *)type->tp_alloc(type, 0);
    if (e != NULL) {
        e->number = number;
        e->base_seed = base_seed;
        e->user_epoch = user_epoch;
        e->seeded = seeded == 0 ? 0 : by_index ? MN_SEEDED_BY_INDEX : MN_SEEDED_BY_PLACE;
        e->splits = splits != 0;
        e->dumps = Py_NewRef(dumps);
    }
    return (PyObject *)e;
}

struct mn_epoch *
mn_epoch_of(PyObject *engine, PyObject *epoch)
{
    struct mn_state *st = mn_state_of_type(Py_TYPE(engine));
    if (st == NULL || !Py_IS_TYPE(epoch, st->epoch_type)) {
        PyErr_Format(PyExc_TypeError, "expected an Epoch, got %s", Py_TYPE(epoch)->tp_name);
        return NULL;
    }
    return (struct mn_epoch *)epoch;
}

static int
traverse(PyObject *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(((struct mn_epoch *)self)->dumps);
    return 0;
}

static void
dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((struct mn_epoch *)self)->dumps);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"number", T_ULONGLONG, offsetof(struct mn_epoch, number), READONLY,
     PyDoc_STR("the epoch's number for seeds")},
    {"base_seed", T_ULONGLONG, offsetof(struct mn_epoch, base_seed), READONLY,
     PyDoc_STR("of the epoch")},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(doc,
"Epoch(number, base_seed, dumps, *, user_epoch=0, seeded=False, splits=False,\n"
"by_index=False)\n\n"
"Values that are the same for all batches of an epoch. dumps(indices) is sent if they are not\n"
"a list of machine integers. It returns bytes, or (n, bytes), which begin with n machine\n"
"integers by which costs are known. user_epoch: 1 + the argument of set_epoch. seeded: before\n"
"each sample, by_index: by its index. splits: a batch that one worker could fetch and collate\n"
"may, where that pays, be fetched by several and collated by one.");

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_traverse, traverse}, /* no clear: it is immutable, so it cannot close a cycle */
    {Py_tp_dealloc, dealloc},
    {Py_tp_members, members},
    {Py_tp_doc, (char *)doc},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "minato._core.Epoch",
    .basicsize = sizeof(struct mn_epoch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int
mn_epoch_add_type(PyObject *module, struct mn_state *st)
{
    st->epoch_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &spec, NULL);
    return st->epoch_type == NULL ? -1 : PyModule_AddType(module, st->epoch_type);
}
