/* minato._policy: the module, and the policies that are functions. See mn_policy.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

#include "schedule/policy_chunk.h"
#include "schedule/policy_dispatch.h"
#include "schedule/policy_histogram.h"
#include "schedule/policy_memory.h"
#include "schedule/policy_split_collate.h"

PyDoc_STRVAR(chunk_doc,
"policy_chunk(cost_ns, overhead_ns, batch, idle, /)\n--\n\n"
"Samples a task, in [1, batch], for samples of cost_ns each; idle is how many\n"
"workers have nothing to do while this batch is waited for.");

static PyObject *
policy_chunk(PyObject *module, PyObject *args)
{
    (void)module;
    long long cost, overhead, batch, idle;
    if (!PyArg_ParseTuple(args, "LLLL:policy_chunk", &cost, &overhead, &batch, &idle)) {
        return NULL;
    }
    return PyLong_FromLongLong(mn_chunk_size(cost, overhead, batch, idle));
}

PyDoc_STRVAR(chunk_next_doc,
"policy_chunk_next(costs_ns, overhead_ns, limit, /)\n--\n\n"
"Length of the task that begins at costs_ns[0], of at most limit samples.");

static PyObject *
policy_chunk_next(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *list;
    long long overhead, limit;
    if (!PyArg_ParseTuple(args, "O!LL:policy_chunk_next", &PyList_Type, &list, &overhead,
                          &limit)) {
        return NULL;
    }
    Py_ssize_t n = PyList_GET_SIZE(list);
    int64_t *costs = PyMem_New(int64_t, n > 0 ? (size_t)n : 1);
    if (costs == NULL) {
        return PyErr_NoMemory();
    }
    PyObject *result = NULL;
    for (Py_ssize_t i = 0; i < n; i++) {
        costs[i] = PyLong_AsLongLong(PyList_GET_ITEM(list, i));
        if (costs[i] == -1 && PyErr_Occurred()) {
            goto done;
        }
    }
    result = PyLong_FromLongLong(mn_chunk_next(costs, n, overhead, limit));
done:
    PyMem_Free(costs);
    return result;
}

PyDoc_STRVAR(period_doc,
"policy_period(consumer_ns, mean_sample_ns, batch_size, workers, /)\n--\n\n"
"The predicted time between two batches, in nanoseconds.");

static PyObject *
policy_period(PyObject *module, PyObject *args)
{
    (void)module;
    long long consumer, mean, batch;
    unsigned int workers;
    if (!PyArg_ParseTuple(args, "LLLI:policy_period", &consumer, &mean, &batch, &workers)) {
        return NULL;
    }
    return PyLong_FromLongLong(mn_dispatch_period(consumer, mean, batch, workers));
}

PyDoc_STRVAR(memory_doc,
"policy_memory(limit, used, reserve, bytes, is_head, /)\n"
"--\n\n"
"Whether a task that will occupy bytes may start.");

static PyObject *
policy_memory(PyObject *module, PyObject *args)
{
    (void)module;
    long long limit, used, reserve, bytes;
    int is_head;
    if (!PyArg_ParseTuple(args, "LLLLp:policy_memory", &limit, &used, &reserve, &bytes, &is_head)) {
        return NULL;
    }
    struct mn_memory m = {.limit = limit, .used = used, .reserve = reserve};
    return PyBool_FromLong(mn_memory_may(&m, bytes, is_head != 0));
}

PyDoc_STRVAR(split_doc,
"policy_split(on, walls_ns, send_ns, /)\n--\n\n"
"Whether batches that one worker could make are split over several, given the answer so far,\n"
"what samples have cost, and what sending one costs (negative: it cannot be done).");

static PyObject *
policy_split(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *list;
    long long send;
    int on;
    if (!PyArg_ParseTuple(args, "pO!L:policy_split", &on, &PyList_Type, &list, &send)) {
        return NULL;
    }
    struct mn_histogram *h = PyMem_Malloc(sizeof(*h));
    if (h == NULL) {
        return PyErr_NoMemory();
    }
    mn_histogram_init(h);
    Py_ssize_t n = PyList_GET_SIZE(list);
    double sum = 0.0;
    for (Py_ssize_t i = 0; i < n && !PyErr_Occurred(); i++) {
        long long ns = PyLong_AsLongLong(PyList_GET_ITEM(list, i));
        mn_histogram_add(h, ns);
        sum += (double)ns;
    }
    bool split = mn_split_worth(on != 0, h, n > 0 ? (int64_t)(sum / (double)n) : 0, send);
    PyMem_Free(h);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(split);
}

static PyMethodDef functions[] = {
    {"policy_split", policy_split, METH_VARARGS, split_doc},
    {"policy_chunk", policy_chunk, METH_VARARGS, chunk_doc},
    {"policy_chunk_next", policy_chunk_next, METH_VARARGS, chunk_next_doc},
    {"policy_period", policy_period, METH_VARARGS, period_doc},
    {"policy_memory", policy_memory, METH_VARARGS, memory_doc},
    {NULL, NULL, 0, NULL},
};

static int
policy_exec(PyObject *module)
{
    return mn_policy_add_cost(module) < 0 || mn_policy_add_dispatch(module) < 0
                   || mn_policy_add_ready(module) < 0 || mn_policy_add_autoscale(module) < 0
               ? -1
               : 0;
}

static PyModuleDef_Slot policy_slots[] = {
    {Py_mod_exec, policy_exec},
    {0, NULL},
};

static struct PyModuleDef policy_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "minato._policy",
    .m_doc = PyDoc_STR("The policies of the engine, one by one, for tests and simulations."),
    .m_methods = functions,
    .m_slots = policy_slots,
};

PyMODINIT_FUNC
PyInit__policy(void);

PyMODINIT_FUNC
PyInit__policy(void)
{
    return PyModuleDef_Init(&policy_module);
}
