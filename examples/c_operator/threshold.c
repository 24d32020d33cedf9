/* An operator of your own for minato.ops: voxels below a threshold become 0.
 * SPDX-License-Identifier: Apache-2.0
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdio.h>

#include <minato/ops.h>

struct threshold {
    struct mn_operator operator;
    double least;
};

/* Called without the GIL, by several threads at once. There is no plan(), so it works in place:
 * `in` and `out` are the same. 0, or a negative errno and words for the user in `err`. */
static int
run(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err, size_t errlen)
{
    const struct threshold *self = state;
    const int64_t *shape = out->image.shape;
    (void)in;
    if (out->image.dtype != MN_DTYPE_F32) {
        snprintf(err, errlen, "the image must be float32; put ops.Cast() before it");
        return -EINVAL;
    }
    float *voxels = out->image.data;
    for (int64_t i = 0; i < shape[0] * shape[1] * shape[2] * shape[3]; i++) {
        if (voxels[i] < self->least) {
            voxels[i] = 0;
        }
    }
    return 0;
}

static void
destroy(PyObject *capsule)
{
    struct mn_operator *operator = PyCapsule_GetPointer(capsule, MN_OPERATOR_CAPSULE);
    if (operator != NULL) {
        PyMem_Free(operator->state);
    }
}

/* What Python calls: threshold(least) -> capsule */
static PyObject *
make(PyObject *module, PyObject *args)
{
    double least;
    (void)module;
    if (!PyArg_ParseTuple(args, "d", &least)) {
        return NULL;
    }
    struct threshold *self = PyMem_Calloc(1, sizeof(*self));
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    self->least = least;
    self->operator.abi = MN_OPS_ABI;
    self->operator.size = sizeof(struct mn_operator);
    self->operator.name = "threshold";
    self->operator.state = self;
    self->operator.run = run;
    PyObject *capsule = PyCapsule_New(&self->operator, MN_OPERATOR_CAPSULE, destroy);
    if (capsule == NULL) {
        PyMem_Free(self);
    }
    return capsule;
}

static PyMethodDef methods[] = {
    {"threshold", make, METH_VARARGS, "threshold(least)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "threshold_operator", .m_methods = methods};

PyMODINIT_FUNC
PyInit_threshold_operator(void)
{
    return PyModuleDef_Init(&definition);
}
