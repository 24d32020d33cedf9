/* mn_costs_type.c - minato._core.CostModel: what a loader's samples have cost.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>
#include <math.h>
#include <string.h>

#include "engine/mn_shared_costs.h"
#include "os/mn_proc.h"
#include "py/module/mn_state.h"

struct costs_object {
    PyObject_HEAD
    struct mn_shared_costs shared;
    bool open;
    pid_t pid; /* process whose threads may hold the lock */
};

/* In a forked child the model is a copy. The lock is initialized anew: the engine thread may have
 * held it at the moment of the fork, and does not exist here. It may have been writing numbers, of
 * which any value is valid. */
static struct mn_shared_costs *
own(PyObject *self)
{
    struct costs_object *o = (struct costs_object *)self;
    Py_BEGIN_CRITICAL_SECTION(self); /* the first of the child's threads does it */
    if (o->pid != mn_proc_self() && mn_mutex_init(&o->shared.mutex) == 0) {
        o->pid = mn_proc_self();
    }
    Py_END_CRITICAL_SECTION();
    return &o->shared;
}

/* Returns the model, locked until unlock(). */
static struct mn_costs *
lock(PyObject *self)
{
    struct mn_shared_costs *s = own(self);
    mn_shared_costs_lock(s);
    return &s->costs;
}

static void
unlock(PyObject *self)
{
    mn_shared_costs_unlock(own(self));
}

struct mn_shared_costs *
mn_costs_of(struct mn_state *st, PyObject *costs)
{
    if (!Py_IS_TYPE(costs, st->costs_type)) {
        return (void *)PyErr_Format(PyExc_TypeError, "costs must be a CostModel or None");
    }
    return own(costs);
}

static PyObject *
costs_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n", NULL};
    long long n = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|L", names, &n)) {
        return NULL;
    }
    if (n < 0) {
        return PyErr_Format(PyExc_ValueError, "n must not be negative");
    }
    struct costs_object *o = (struct costs_object *)type->tp_alloc(type, 0);
    if (o != NULL && mn_shared_costs_init(&o->shared, n) < 0) {
        Py_DECREF(o);
        return PyErr_NoMemory();
    }
    if (o != NULL) {
        o->open = true;
        o->pid = mn_proc_self();
    }
    return (PyObject *)o;
}

static void
costs_dealloc(PyObject *self)
{
    if (((struct costs_object *)self)->open) {
        mn_shared_costs_fini(own(self)); /* a held lock must not be destroyed */
    }
    mn_free_object(self);
}

static PyObject *
costs_observe(PyObject *self, PyObject *args)
{
    long long index, wall;
    float hint = -1.0f;
    if (!PyArg_ParseTuple(args, "LL|f", &index, &wall, &hint)) {
        return NULL;
    }
    struct mn_costs *c = lock(self);
    int rc = hint >= 0.0f ? mn_costs_hinted(c) : 0;
    if (rc == 0) {
        mn_costs_observe(c, index, hint >= 0.0f ? &hint : NULL, wall);
    }
    unlock(self);
    return rc < 0 ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *
costs_predict(PyObject *self, PyObject *args)
{
    long long index;
    float hint = -1.0f;
    if (!PyArg_ParseTuple(args, "L|f", &index, &hint)) {
        return NULL;
    }
    int64_t at = index, ns = 0;
    mn_costs_predict(lock(self), &at, hint >= 0.0f ? &hint : NULL, 1, false, &ns);
    unlock(self);
    return PyLong_FromLongLong(ns);
}

PyDoc_STRVAR(save_doc,
"save() -> (indices, wall_ns, ratios): bytes of int64 arrays, one place for each index that\n"
"was observed, and of a float32 array: ns for one unit of the index's hint, 0 unknown. ratios is\n"
"empty if no sample had a hint.");

static PyObject *
zeros(int64_t bytes)
{
    PyObject *made = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)bytes);
    if (made != NULL) {
        memset(PyBytes_AS_STRING(made), 0, (size_t)bytes);
    }
    return made;
}

static PyObject *
costs_save(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    struct mn_costs *c = lock(self);
    int64_t n = c->model.known;
    bool hinted = c->hint.scaled != 0;
    unlock(self);
    PyObject *saved =
        Py_BuildValue("(NNN)", zeros(8 * n), zeros(8 * n), zeros(hinted ? 4 * n : 0));
    if (saved == NULL) {
        return NULL;
    }
    void *place[3];
    for (int i = 0; i < 3; i++) {
        place[i] = PyBytes_AS_STRING(PyTuple_GET_ITEM(saved, i));
    }
    /* Indices only become known; those since then are left out. */
    (void)mn_costs_save(lock(self), n, place[0], place[1], hinted ? place[2] : NULL);
    unlock(self);
    return saved;
}

/* More than a person wants to read. */
#define MOST_SLOWEST 100

PyDoc_STRVAR(slowest_doc,
"slowest(most) -> [(index, wall_ns), ...]: the observed indices that cost most, at most 100.");

static PyObject *
costs_slowest(PyObject *self, PyObject *arg)
{
    int64_t most = PyLong_AsLongLong(arg), index[MOST_SLOWEST], wall[MOST_SLOWEST];
    if (PyErr_Occurred()) {
        return NULL;
    }
    most = most < 0 ? 0 : most < MOST_SLOWEST ? most : MOST_SLOWEST;
    int64_t n = mn_costs_slowest(lock(self), most, index, wall);
    unlock(self);
    PyObject *out = PyList_New(0);
    for (Py_ssize_t i = 0; out != NULL && i < n; i++) {
        mn_list_add(&out, Py_BuildValue("LL", (long long)index[i], (long long)wall[i]));
    }
    return out;
}

PyDoc_STRVAR(load_doc,
"load(indices, wall_ns, ratios=b'', errors=None) -> taken: the parts of save(), and errors of\n"
"summary(), finite and not negative.");

static PyObject *
costs_load(PyObject *self, PyObject *args)
{
    Py_buffer b[3] = {{0}};
    double error[MN_HINT_PREDICTORS] = {-1.0, 0.0, 0.0};
    if (!PyArg_ParseTuple(args, "y*y*|y*(ddd)", &b[0], &b[1], &b[2], &error[0], &error[1],
                          &error[2])) {
        return NULL;
    }
    int64_t n = b[0].len / 8, taken = -1;
    bool hinted = b[2].len != 0;
    if (b[0].len == b[1].len && b[0].len % 8 == 0 && (!hinted || b[2].len == 4 * n)) {
        taken = mn_costs_load(lock(self), n, b[0].buf, b[1].buf, hinted ? b[2].buf : NULL,
                              error[0] >= 0.0 ? error : NULL);
        unlock(self);
    }
    for (int i = 0; i < 3; i++) {
        PyBuffer_Release(&b[i]);
    }
    if (taken < 0) {
        return PyErr_Format(PyExc_ValueError, "saved costs are damaged: lengths differ");
    }
    return PyLong_FromLongLong(taken);
}

PyDoc_STRVAR(tell_bytes_doc,
"tell_bytes(indices, bytes): how many bytes samples are read from; buffers of int64.");

static PyObject *
costs_tell_bytes(PyObject *self, PyObject *args)
{
    Py_buffer b[2];
    if (!PyArg_ParseTuple(args, "y*y*", &b[0], &b[1])) {
        return NULL;
    }
    int rc = -EINVAL;
    if (b[0].len == b[1].len && b[0].len % 8 == 0) {
        rc = mn_costs_tell_bytes(lock(self), b[0].buf, b[1].buf, b[0].len / 8);
        unlock(self);
    }
    for (int i = 0; i < 2; i++) {
        PyBuffer_Release(&b[i]);
    }
    if (rc == -EINVAL) {
        return PyErr_Format(PyExc_ValueError, "indices and bytes differ in length");
    }
    return rc < 0 ? PyErr_NoMemory() : Py_NewRef(Py_None);
}

static PyObject *
costs_sends(PyObject *self, PyObject *arg)
{
    int64_t ns = PyLong_AsLongLong(arg);
    if (PyErr_Occurred()) {
        return NULL;
    }
    mn_costs_sends(lock(self), ns);
    unlock(self);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(summary_doc,
"summary() -> {samples, known, mean_ns, p50_ns, p75_ns, p90_ns, p99_ns, p995_ns,\n"
"              slow_ns, collate_ns, send_ns, split, near, home, opening_ns, away_ns,\n"
"              each_ns, group, hinted, by, errors, correlations, hint_scale_ns, sized,\n"
"              bytes_by, bytes_errors, bytes_correlations}\n\n"
"slow_ns: from when on a sample in flight counts as slow, None if none does.\n"
"collate_ns: of a batch that workers collate, without its samples. send_ns: of sending a\n"
"sample to another worker, None: not known, or it cannot be done. split: whether batches\n"
"that one worker could make are split. near, home: whether samples are cheaper next to their\n"
"neighbours, and where they were made last; None: not known yet. opening_ns: the extra cost of\n"
"a sample away from its group, away_ns: of one away from its home. each_ns: a sample next to\n"
"its neighbour. group: samples in one. hinted: observed samples with a hint of the dataset.\n"
"by: what predicts hinted samples now, 0 history, 1 hint x scale, 2 hint x ratio of the index.\n"
"errors: of these three, root mean square logarithms of cost / prediction; None: not known\n"
"yet. correlations: of the logarithms of prediction and cost; NaN: not known. hint_scale_ns: for\n"
"one unit of hint. sized: indices with known bytes. bytes_by: what predicts their samples, 0\n"
"history, 1 bytes, 2 both. bytes_errors, bytes_correlations: of these three; NaN: not known.");

static PyObject *
answer(enum mn_contrast_answer a)
{
    return a == MN_CONTRAST_UNKNOWN ? Py_None : a == MN_CONTRAST_YES ? Py_True : Py_False;
}

static PyObject *
costs_summary(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    const struct mn_costs *c = lock(self);
    long long ns[5];
    static const int permille[5] = {500, 750, 900, 990, 995};
    for (int i = 0; i < 5; i++) {
        ns[i] = mn_costs_quantile(c, permille[i]);
    }
    struct mn_costs_view v = mn_costs_look(c);
    struct mn_costs_quality q = mn_costs_quality(c);
    double mean = c->model.mean_wall_ns, each = c->locality.each_ns;
    long long known = c->model.known, send = c->send_ns, sized = c->bytes.known;
    unsigned long long samples = c->model.samples, hinted = c->hint.scaled + c->hint.zeros;
    unlock(self);
    PyObject *slow = v.timeout_ns == MN_SLOW_NEVER ? Py_NewRef(Py_None)
                                                   : PyLong_FromLongLong(v.timeout_ns);
    PyObject *sends = send < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(send);
    PyObject *errors = isnan(q.hint_errors[0])
                           ? Py_NewRef(Py_None)
                           : Py_BuildValue("(ddd)", q.hint_errors[0], q.hint_errors[1],
                                           q.hint_errors[2]);
    const double *r = q.hint_correlations, *off = q.bytes_errors, *alike = q.bytes_correlations;
    return Py_BuildValue("{sK sL sd sL sL sL sL sL sN sL sN sO sO sO sL sL sd sd sK si sN s(ddd) sd"
                         " sL si s(ddd) s(ddd)}",
                         "samples", samples, "known", known, "mean_ns", mean, "p50_ns", ns[0],
                         "p75_ns", ns[1], "p90_ns", ns[2], "p99_ns", ns[3], "p995_ns", ns[4],
                         "slow_ns", slow, "collate_ns", (long long)v.collate_ns, "send_ns", sends,
                         "split", v.split ? Py_True : Py_False, "near", answer(v.near), "home",
                         answer(v.home), "opening_ns", (long long)v.opening_ns, "away_ns",
                         (long long)v.away_ns, "each_ns", each, "group", v.group, "hinted", hinted,
                         "by", (int)q.hint_by, "errors", errors, "correlations", r[0], r[1], r[2],
                         "hint_scale_ns", q.hint_scale_ns, "sized", sized, "bytes_by",
                         (int)q.bytes_by, "bytes_errors", off[0], off[1], off[2],
                         "bytes_correlations", alike[0], alike[1], alike[2]);
}

static PyMethodDef costs_methods[] = {
    {"observe", costs_observe, METH_VARARGS, PyDoc_STR("observe(index, wall_ns, hint=None)")},
    {"predict", costs_predict, METH_VARARGS,
     PyDoc_STR("predict(index, hint=None) -> wall_ns, 0 where nothing is known")},
    {"sends", costs_sends, METH_O,
     PyDoc_STR("sends(ns): what sending a sample to another worker takes; < 0: cannot")},
    {"save", costs_save, METH_NOARGS, save_doc},
    {"slowest", costs_slowest, METH_O, slowest_doc},
    {"load", costs_load, METH_VARARGS, load_doc},
    {"tell_bytes", costs_tell_bytes, METH_VARARGS, tell_bytes_doc},
    {"summary", costs_summary, METH_NOARGS, summary_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot costs_slots[] = {
    {Py_tp_new, costs_new},
    {Py_tp_dealloc, costs_dealloc},
    {Py_tp_methods, costs_methods},
    {Py_tp_doc, PyDoc_STR("CostModel(n=0): the costs of samples, by index of the dataset.")},
    {0, NULL},
};

PyType_Spec mn_costs_spec = {"minato._core.CostModel", sizeof(struct costs_object), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, costs_slots};
