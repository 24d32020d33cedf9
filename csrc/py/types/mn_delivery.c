/* mn_delivery.c - HandsOut: next() of iterators, without Python for a batch that is prefetched.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A program whose steps take milliseconds comes back to cold caches. Then the Python that a
 * next() runs costs twenty times what it does in a loop, some 40 us even where the batch was
 * received long ago. So the iterator says when it takes some ahead how many of them may be
 * given out with nothing else to do, and those are, here.
 *
 * Owner: whoever holds the GIL. Nothing here lets it go before all is written that belongs
 * together.
 */
#include "py/types/mn_engine_object.h"

#include <stddef.h>
#include <structmember.h>

struct mn_delivery {
    PyObject_HEAD
    struct mn_state *st;
    PyObject *prefetched;  /* deque of [what, batch] */
    PyObject *engine;
    PyObject *progress; /* what was delivered, its .head counts on */
    Py_ssize_t granted; /* so many may be handed out here; 0: the three above are NULL */
    Py_ssize_t yielded;
};

static void
revoke(struct mn_delivery *h)
{
    h->granted = 0;
    Py_CLEAR(h->prefetched);
    Py_CLEAR(h->engine);
    Py_CLEAR(h->progress);
}

/* Whether each batch must go through torch's __next__: somebody has put his own in its place,
 * or listens to the range that it marks. -1 with an exception. */
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

static PyObject *
deliver(struct mn_delivery *h)
{
    struct mn_engine *e = mn_engine_get(h->engine);
    if (e == NULL || count_on(h->st, h->progress) < 0) {
        return NULL;
    }
    PyObject *entry = PyObject_CallMethodNoArgs(h->prefetched, h->st->str_popleft);
    if (entry == NULL) {
        return NULL;
    }
    mn_engine_handed(e);
    PyObject *batch = Py_NewRef(PyList_GET_ITEM(entry, 1));
    h->granted--;
    h->yielded++;
    Py_DECREF(entry);
    return batch;
}

static void
dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    revoke((struct mn_delivery *)self);
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
    return h->granted > 0 ? deliver(h) : PyObject_CallMethodNoArgs(self, h->st->str__next);
}

static PyObject *
new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(kwargs))
{
    PyTypeObject *own = type; /* its subclasses have no module of C */
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
"The next count calls of next() may give batches of the deque prefetched, of [what, batch], and\n"
"tell the engine and progress.head. 0 takes that back.");

static PyObject *
grant(PyObject *self, PyObject *args)
{
    struct mn_delivery *h = (struct mn_delivery *)self;
    PyObject *prefetched = NULL, *engine = NULL, *progress = NULL;
    Py_ssize_t count;
    if (!PyArg_ParseTuple(args, "n|OOO", &count, &prefetched, &engine, &progress)) {
        return NULL;
    }
    revoke(h);
    if (count > 0) {
        h->prefetched = Py_NewRef(prefetched);
        h->engine = Py_NewRef(engine);
        h->progress = Py_NewRef(progress);
        h->granted = count;
    }
    Py_RETURN_NONE;
}

static int
traverse(PyObject *self, visitproc visit, void *arg)
{
    struct mn_delivery *h = (struct mn_delivery *)self;
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(h->prefetched);
    Py_VISIT(h->engine);
    Py_VISIT(h->progress);
    return 0;
}

static int
clear(PyObject *self)
{
    revoke((struct mn_delivery *)self);
    return 0;
}

static PyMethodDef methods[] = {
    {"_grant", grant, METH_VARARGS, grant_doc},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"_num_yielded", T_PYSSIZET, offsetof(struct mn_delivery, yielded), 0,
     PyDoc_STR("torch's count of batches handed out")},
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
