/* PolicyDispatch as a Python object.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include "base/mn_error.h"
#include "schedule/policy_dispatch.h"

struct dispatch_object {
    PyObject_HEAD
    struct mn_dispatch d;
    void *memory;
};

static struct mn_dispatch *
dispatch_of(PyObject *self)
{
    return &((struct dispatch_object *)self)->d;
}

static PyObject *
dispatch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"capacity", "period", "consumer", "typical",
                            "window",   "starved_below", "workers",  NULL};
    unsigned int capacity, workers;
    long long period, consumer, typical, window, starved_below;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ILLLLLI:PolicyDispatch", names,
                                     &capacity, &period, &consumer, &typical, &window,
                                     &starved_below, &workers)) {
        return NULL;
    }
    struct mn_dispatch_rates rates = {.period_ns = period,
                                      .consumer_ns = consumer,
                                      .typical_ns = typical,
                                      .window = window,
                                      .starved_below = starved_below,
                                      .workers = workers};
    struct dispatch_object *self = (struct dispatch_object *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->memory = PyMem_Calloc(1, mn_dispatch_bytes(capacity));
    if (self->memory == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    if (mn_dispatch_init(&self->d, self->memory, capacity, &rates) < 0) {
        PyErr_SetString(PyExc_ValueError, "capacity, period, window and workers must be "
                                          "positive, the others not negative");
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void
dispatch_dealloc(PyObject *self)
{
    PyMem_Free(((struct dispatch_object *)self)->memory);
    mn_policy_dealloc(self);
}

static PyObject *
dispatch_insert(PyObject *self, PyObject *args)
{
    long long position, batch, cost;
    unsigned long long tag = 0;
    if (!PyArg_ParseTuple(args, "LLL|K:insert", &position, &batch, &cost, &tag)) {
        return NULL;
    }
    struct mn_dispatch_task task = {
        .position = position, .batch = batch, .cost_ns = cost, .tag = tag};
    int rc = mn_dispatch_insert(dispatch_of(self), &task, NULL);
    if (rc < 0) {
        PyErr_SetString(PyExc_ValueError, "position and batch must not be negative");
        return NULL;
    }
    return PyBool_FromLong(rc == MN_OK);
}

static PyObject *
choice_value(const struct mn_dispatch_choice *c)
{
    return Py_BuildValue("(LLLKLiI)", (long long)c->task.position,
                         (long long)c->task.batch, (long long)c->task.cost_ns,
                         (unsigned long long)c->task.tag, (long long)c->slack_ns,
                         (int)c->why, (unsigned int)c->node);
}

static PyObject *
dispatch_peek(PyObject *self, PyObject *args)
{
    long long head, ready, last = INT64_MAX;
    if (!PyArg_ParseTuple(args, "LL|L:peek", &head, &ready, &last)) {
        return NULL;
    }
    struct mn_dispatch_view view = {
        .head_batch = head, .ready_batches = ready, .last_batch = last};
    struct mn_dispatch_choice choice;
    if (mn_dispatch_peek(dispatch_of(self), &view, &choice) != MN_OK) {
        Py_RETURN_NONE;
    }
    return choice_value(&choice);
}

static PyObject *
dispatch_first(PyObject *self, PyObject *unused)
{
    (void)unused;
    struct mn_dispatch_choice choice;
    if (mn_dispatch_first(dispatch_of(self), &choice) != MN_OK) {
        Py_RETURN_NONE;
    }
    return choice_value(&choice);
}

/* Returns whether node is in use: the heap place of a free node does not point back at it. */
static int
holds(const struct mn_dispatch *d, unsigned long node)
{
    return node < d->capacity && d->nodes[node].at[0] < d->count
           && d->heap[0][d->nodes[node].at[0]] == node;
}

static PyObject *
dispatch_take(PyObject *self, PyObject *arg)
{
    unsigned long node = PyLong_AsUnsignedLong(arg);
    if (node == (unsigned long)-1 && PyErr_Occurred()) {
        return NULL;
    }
    if (!holds(dispatch_of(self), node)) {
        PyErr_SetString(PyExc_ValueError, "not the node of a task that is held");
        return NULL;
    }
    mn_dispatch_take(dispatch_of(self), (uint32_t)node);
    Py_RETURN_NONE;
}

static PyObject *
dispatch_retime(PyObject *self, PyObject *args)
{
    long long period, consumer, typical, window, starved_below;
    unsigned int workers;
    if (!PyArg_ParseTuple(args, "LLLLLI:retime", &period, &consumer, &typical, &window,
                          &starved_below, &workers)) {
        return NULL;
    }
    struct mn_dispatch_rates rates = {.period_ns = period,
                                      .consumer_ns = consumer,
                                      .typical_ns = typical,
                                      .window = window,
                                      .starved_below = starved_below,
                                      .workers = workers};
    return PyBool_FromLong(mn_dispatch_retime(dispatch_of(self), &rates));
}

static PyObject *
dispatch_close(PyObject *self, PyObject *unused)
{
    (void)unused;
    mn_dispatch_close(dispatch_of(self));
    Py_RETURN_NONE;
}

static PyObject *
dispatch_reopen(PyObject *self, PyObject *unused)
{
    (void)unused;
    mn_dispatch_reopen(dispatch_of(self));
    Py_RETURN_NONE;
}

static bool
is_of(const struct mn_dispatch_task *task, void *batch)
{
    return task->batch == *(const long long *)batch;
}

static PyObject *
dispatch_drop(PyObject *self, PyObject *arg)
{
    long long batch = PyLong_AsLongLong(arg);
    if (batch == -1 && PyErr_Occurred()) {
        return NULL;
    }
    mn_dispatch_drop(dispatch_of(self), is_of, &batch);
    Py_RETURN_NONE;
}

static PyObject *
dispatch_clear(PyObject *self, PyObject *unused)
{
    (void)unused;
    mn_dispatch_clear(dispatch_of(self));
    Py_RETURN_NONE;
}

static Py_ssize_t
dispatch_len(PyObject *self)
{
    return (Py_ssize_t)dispatch_of(self)->count;
}

static PyObject *
dispatch_work(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLongLong(dispatch_of(self)->work_ns);
}

static PyMethodDef dispatch_methods[] = {
    {"insert", dispatch_insert, METH_VARARGS,
     "insert(position, batch, cost_ns, tag=0, /) -> False if it is full"},
    {"peek", dispatch_peek, METH_VARARGS,
     "peek(head_batch, ready_batches, last_batch=no limit, /)\n"
     "-> (position, batch, cost_ns, tag, slack_ns, why, node), or None when no\n"
     "task may start now. why: 1 window, 2 early, 3 ahead, 4 finale, 5 order."},
    {"first", dispatch_first, METH_NOARGS, "the first task in order, as peek, or None"},
    {"take", dispatch_take, METH_O, "take(node, /): removes a task"},
    {"retime", dispatch_retime, METH_VARARGS,
     "retime(period, consumer, typical, window, starved_below, workers, /)\n"
     "-> were the keys renewed?"},
    {"close", dispatch_close, METH_NOARGS, "all tasks of the epoch are inserted"},
    {"reopen", dispatch_reopen, METH_NOARGS, "more tasks will come"},
    {"drop", dispatch_drop, METH_O, "drop(batch, /): takes out all tasks of a batch"},
    {"clear", dispatch_clear, METH_NOARGS, "forgets all tasks"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef dispatch_getset[] = {
    {"work", dispatch_work, NULL, "sum of the costs held, ns", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

PyDoc_STRVAR(dispatch_doc,
"PolicyDispatch(capacity, period, consumer, typical, window, starved_below, workers)\n--\n\n"
"Least slack first within a window that costs widen. Times in ns, window and starved_below in\n"
"batches.");

static PyType_Slot dispatch_slots[] = {
    {Py_tp_doc, (void *)dispatch_doc},
    {Py_tp_new, dispatch_new},
    {Py_tp_dealloc, dispatch_dealloc},
    {Py_tp_methods, dispatch_methods},
    {Py_tp_getset, dispatch_getset},
    {Py_sq_length, dispatch_len},
    {0, NULL},
};

static PyType_Spec dispatch_spec = {
    .name = "minato._policy.PolicyDispatch",
    .basicsize = sizeof(struct dispatch_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = dispatch_slots,
};

int
mn_policy_add_dispatch(PyObject *module)
{
    return mn_policy_add_type(module, &dispatch_spec);
}
