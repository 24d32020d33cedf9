/* A user's own operators for minato.ops, built against minato/ops.h alone.
 * SPDX-License-Identifier: Apache-2.0
 *
 * invert(p): with probability p negates the image, in place.
 * halve(): keeps each second voxel of the last axis: an operator that changes the shape.
 * broken(where): fails in plan or in run, to show how errors come back.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include <minato/ops.h>

struct invert {
    struct mn_operator operator;
    double p;
};

static int
run_invert(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
           size_t errlen)
{
    const struct invert *self = state;
    if (out->image.dtype != MN_DTYPE_F32) {
        snprintf(err, errlen, "the image must be float32");
        return -EINVAL;
    }
    if (mn_draw_uniform(in->key_hi, in->key_lo, in->number, 0) >= self->p) {
        return 0;
    }
    int64_t n = out->image.shape[0] * out->image.shape[1] * out->image.shape[2]
                * out->image.shape[3];
    float *voxels = out->image.data;
    for (int64_t i = 0; i < n; i++) {
        voxels[i] = -voxels[i];
    }
    return 0;
}

static int
plan_halve(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
           size_t errlen)
{
    (void)state;
    (void)err;
    (void)errlen;
    out->image.shape[3] = (in->image.shape[3] + 1) / 2;
    out->label.shape[3] = (in->label.shape[3] + 1) / 2;
    return 0;
}

static void
halve(const struct mn_op_volume *from, struct mn_op_volume *to, size_t voxel)
{
    int64_t rows = from->shape[0] * from->shape[1] * from->shape[2];
    const char *source = from->data;
    char *target = to->data;
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t x = 0; x < to->shape[3]; x++) {
            memcpy(target + (size_t)(row * to->shape[3] + x) * voxel,
                   source + (size_t)(row * from->shape[3] + 2 * x) * voxel, voxel);
        }
    }
}

static int
run_halve(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
          size_t errlen)
{
    (void)state;
    (void)err;
    (void)errlen;
    halve(&in->image, &out->image, (size_t)in->image.strides[3]);
    if (in->label.dtype != MN_DTYPE_NONE) {
        halve(&in->label, &out->label, (size_t)in->label.strides[3]);
    }
    return 0;
}

static int
plan_broken(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
            size_t errlen)
{
    const struct invert *self = state;
    if (self->p == 0) {
        snprintf(err, errlen, "no plan for %lld planes", (long long)in->image.shape[1]);
        return -EINVAL;
    }
    out->image.shape[0] = self->p == 2 ? -1 : 1;
    return 0;
}

static int
run_broken(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
           size_t errlen)
{
    (void)state;
    (void)in;
    (void)out;
    (void)err;
    (void)errlen;
    return -EIO;
}

static void
destroy(PyObject *capsule)
{
    struct mn_operator *operator = PyCapsule_GetPointer(capsule, MN_OPERATOR_CAPSULE);
    if (operator != NULL) {
        PyMem_Free(operator->state);
    }
}

static PyObject *
wrap(const char *name, double p,
     int (*plan)(void *, const struct mn_op_call *, struct mn_op_call *, char *, size_t),
     int (*run)(void *, const struct mn_op_call *, struct mn_op_call *, char *, size_t))
{
    struct invert *self = PyMem_Calloc(1, sizeof(*self));
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    self->p = p;
    self->operator= (struct mn_operator){.abi = MN_OPS_ABI,
                                          .size = sizeof(struct mn_operator),
                                          .name = name,
                                          .state = self,
                                          .plan = plan,
                                          .run = run};
    return PyCapsule_New(&self->operator, MN_OPERATOR_CAPSULE, destroy);
}

static PyObject *
make_invert(PyObject *module, PyObject *args)
{
    double p;
    (void)module;
    return PyArg_ParseTuple(args, "d", &p) ? wrap("invert", p, NULL, run_invert) : NULL;
}

static PyObject *
make_halve(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    return wrap("halve", 0, plan_halve, run_halve);
}

static PyObject *
make_broken(PyObject *module, PyObject *args)
{
    double where;
    (void)module;
    return PyArg_ParseTuple(args, "d", &where)
               ? wrap("broken", where, plan_broken, run_broken)
               : NULL;
}

static PyObject *
make_foreign(PyObject *module, PyObject *args)
{
    PyObject *capsule = make_invert(module, args);
    if (capsule != NULL) {
        struct mn_operator *operator = PyCapsule_GetPointer(capsule, MN_OPERATOR_CAPSULE);
        operator->abi = MN_OPS_ABI + 1;
    }
    return capsule;
}

static PyMethodDef methods[] = {
    {"invert", make_invert, METH_VARARGS, "invert(p)"},
    {"halve", make_halve, METH_NOARGS, "halve()"},
    {"broken", make_broken, METH_VARARGS, "broken(where)"},
    {"foreign", make_foreign, METH_VARARGS, "invert(p) of another ABI"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "mirror_operator", .m_methods = methods};

PyMODINIT_FUNC
PyInit_mirror_operator(void)
{
    return PyModuleDef_Init(&module);
}
