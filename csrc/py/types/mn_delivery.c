/* mn_delivery.c - HandsOut: next() of iterators, without Python for a prefetched batch.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A program whose steps take milliseconds comes back to cold caches. Then the Python code of a
 * next() costs twenty times what it costs in a loop. It takes some 40 us even if the batch was
 * received long ago. So when the iterator takes some batches ahead, it says how many of them may be
 * delivered without further work, and this file delivers those.
 *
 * The grant is changed, and one batch of it taken, in critical sections of the iterator. These are
 * suspended while the thread waits for a Python lock.
 */
#include "py/module/mn_critical_section.h"
#include "py/types/mn_engine_object.h"

#include <stddef.h>
#include <structmember.h>

/* The source of granted batches. */
struct grant {
    PyObject *prefetched; /* deque of [what, batch] */
    PyObject *engine;
    PyObject *progress; /* progress of delivery; its .head is incremented */
};

struct mn_delivery {
    PyObject_HEAD
    struct mn_state *st;
    struct grant grant;
    Py_ssize_t granted; /* number of batches that may be delivered here */
    Py_ssize_t yielded;
};

static void
drop(struct grant *g)
{
    Py_CLEAR(g->prefetched);
    Py_CLEAR(g->engine);
    Py_CLEAR(g->progress);
}

/* Replaces the present grant by another. */
static void
exchange(PyObject *self, Py_ssize_t count, struct grant *g)
{
    struct mn_delivery *h = (struct mn_delivery *)self;
    struct grant old;
    Py_BEGIN_CRITICAL_SECTION(self);
    old = h->grant;
    h->grant = *g;
    h->granted = count;
    Py_END_CRITICAL_SECTION();
    drop(&old); /* may run code of the program's */
}

/* Takes one granted batch, with the caller's own references. Returns false if there is none. */
static bool
take_one(struct mn_delivery *h, struct grant *g)
{
    if (h->granted == 0) {
        return false;
    }
    h->granted--;
    *g = (struct grant){Py_NewRef(h->grant.prefetched), Py_NewRef(h->grant.engine),
                        Py_NewRef(h->grant.progress)};
    return true;
}

/* Returns whether each batch must go through torch's __next__, because it was replaced, or a
 * profiler listens to the range that it marks. Returns -1 with an exception. */
static int
watched(struct mn_state *st)
{
    if (st->plain == NULL || st->plain->profiled()) {
        return 1;
    }
    PyObject *next = PyObject_GetAttr(st->torch_iterator, st->str_next);
    Py_XDECREF(next);
    return next == NULL ? -1 : next != st->torch_next;
}

/* progress.head += 1 */
static int
count_on(struct mn_state *st, PyObject *progress)
{
    PyObject *head = PyObject_GetAttr(progress, st->str_head);
    Py_ssize_t n = head == NULL ? -1 : PyLong_AsSsize_t(head);
    Py_XDECREF(head);
    head = n < 0 ? NULL : PyLong_FromSsize_t(n + 1);
    int rc = head == NULL ? -1 : PyObject_SetAttr(progress, st->str_head, head);
    Py_XDECREF(head);
    return rc;
}

/* Reports to the engine that one batch is delivered. Returns 0, or -1 with an exception. */
static int
tell(PyObject *engine)
{
    struct mn_engine *e;
    Py_BEGIN_CRITICAL_SECTION(engine); /* so that it is not closed meanwhile */
    e = mn_engine_get(engine);
    if (e != NULL) {
        mn_engine_handed(e);
    }
    Py_END_CRITICAL_SECTION();
    return e != NULL ? 0 : -1;
}

static PyObject *
deliver(struct mn_delivery *h, const struct grant *g)
{
    if (mn_engine_get(g->engine) == NULL || count_on(h->st, g->progress) < 0) {
        return NULL;
    }
    PyObject *entry = PyObject_CallMethodNoArgs(g->prefetched, h->st->str_popleft);
    if (entry == NULL) {
        return NULL;
    }
    PyObject *batch = tell(g->engine) == 0 ? Py_NewRef(PyList_GET_ITEM(entry, 1)) : NULL;
    Py_DECREF(entry);
    h->yielded += batch != NULL;
    return batch;
}

static void
dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    drop(&((struct mn_delivery *)self)->grant);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *
next(PyObject *self)
{
    struct mn_delivery *h = (struct mn_delivery *)self;
    int seen = watched(h->st);
    if (seen != 0) {
        return seen < 0 ? NULL
                        : PyObject_CallMethodOneArg(h->st->torch_iterator, h->st->str_next, self);
    }
    struct grant g = {0};
    PyObject *batch = NULL;
    bool any;
    Py_BEGIN_CRITICAL_SECTION(self); /* batches must be delivered in the order of their counts */
    any = take_one(h, &g);
    if (any) {
        batch = deliver(h, &g);
    }
    Py_END_CRITICAL_SECTION();
    drop(&g);
    return any ? batch : PyObject_CallMethodNoArgs(self, h->st->str__next);
}

static PyObject *
new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyTypeObject *own = type; /* subclasses have no state of the C module */
    while (own->tp_dealloc != dealloc) {
        own = own->tp_base;
    }
    struct mn_delivery *h = (struct mn_delivery *)type->tp_alloc(type, 0);
    if (h != NULL) {
        h->st = mn_state_of_type(own);
    }
    return (PyObject *)h;
}

PyDoc_STRVAR(grant_doc,
"_grant(count, prefetched, engine, progress)\n\n"
"The next count calls of next() may return batches of the deque prefetched, of [what, batch].\n"
"Each is reported to the engine and counted in progress.head. 0 revokes that.");

static PyObject *
grant(PyObject *self, PyObject *args)
{
    struct grant g = {0};
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "n|OOO", &count, &g.prefetched, &g.engine, &g.progress)) {
        return NULL;
    }
    if (count > 0) {
        g = (struct grant){Py_NewRef(g.prefetched), Py_NewRef(g.engine), Py_NewRef(g.progress)};
    }
    else {
        g = (struct grant){0};
    }
    exchange(self, count > 0 ? count : 0, &g);
    Py_RETURN_NONE;
}

static int
traverse(PyObject *self, visitproc visit, void *arg)
{
    struct mn_delivery *h = (struct mn_delivery *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(h->grant.prefetched);
    Py_VISIT(h->grant.engine);
    Py_VISIT(h->grant.progress);
    return 0;
}

static int
clear(PyObject *self)
{
    struct grant none = {0};
    exchange(self, 0, &none);
    return 0;
}

static PyMethodDef methods[] = {
    {"_grant", grant, METH_VARARGS, grant_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_num_yielded", T_PYSSIZET, offsetof(struct mn_delivery, yielded), 0,
     PyDoc_STR("torch's count of delivered batches")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, new},
    {Py_tp_iternext, next},
    {Py_tp_traverse, traverse},
    {Py_tp_clear, clear},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {Py_tp_doc, PyDoc_STR("Base of iterators whose _next() makes the next batch.")},
    {0, NULL},
};

static PyType_Spec spec = {
    .name = "minato._core.HandsOut",
    .basicsize = sizeof(struct mn_delivery),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .slots = slots,
};

int
mn_delivery_add_type(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &spec, NULL);
    int rc = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return rc;
}
