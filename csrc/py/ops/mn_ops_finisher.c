/* minato._ops.Finisher: the kernel that finishes samples, on one CUDA device.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops.h"

#include <errno.h>

#include "cuda/mn_driver.h"

struct mn_ops_finisher {
    PyObject_HEAD
    struct mn_driver driver;
};

static struct mn_ops_finisher *
self_of(PyObject *object)
{
    return (struct mn_ops_finisher *)(void *)object;
}

/* An error of the driver is never the fault of an argument or a file. */
static PyObject *
raise_text(int rc, const struct mn_text *text)
{
    PyErr_SetString(rc == -EINVAL ? PyExc_ValueError : PyExc_RuntimeError, text->chars);
    return NULL;
}

static PyObject *
new_finisher(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    const char *library, *image;
    Py_ssize_t length;
    int ordinal, rc;
    char chars[MN_OPS_TEXT] = "";
    struct mn_text text = {chars, sizeof(chars)};
    if (!PyArg_ParseTuple(args, "siy#", &library, &ordinal, &image, &length)) {
        return NULL;
    }
    PyObject *object = type->tp_alloc(type, 0);
    if (object == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mn_driver_open(&self_of(object)->driver, library, ordinal, image,
                        (size_t)length, &text);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        Py_DECREF(object);
        return raise_text(rc, &text);
    }
    return object;
}

/* No tp_traverse: it refers only to its type. */
static void
dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

/* Reads (samples, channels, depth, height, width). */
static int
take_shape(struct mn_finish *job, const unsigned long long *shape)
{
    unsigned long long voxels = 1;
    for (int axis = 1; axis < 5; axis++) {
        if (shape[axis] == 0 || shape[axis] > MN_FINISH_VOXELS / voxels) {
            PyErr_SetString(PyExc_ValueError,
                            "a volume needs at least 1 voxel, and fewer than 2^32");
            return -1;
        }
        voxels *= shape[axis];
    }
    if (shape[0] > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many samples");
        return -1;
    }
    job->samples = (uint32_t)shape[0];
    job->voxels = (uint32_t)voxels;
    job->depth = (uint32_t)shape[2];
    job->height = (uint32_t)shape[3];
    job->width = (uint32_t)shape[4];
    return 0;
}

PyDoc_STRVAR(run_doc,
             "run(stream, which, dtypes, shape, source, target, recipes, steps, windows=0, "
             "cases=0, n_cases=0)\n\n"
             "Starts to finish the images (which 0) or labels (1) of a batch in the order of this "
             "CUstream. Arguments: dtypes before and after, shape (samples, channels, depth, "
             "height, width), addresses on the device, and the steps of each recipe. Without a "
             "source, samples are windows of the cases. The memory must live until the stream has "
             "passed it.");

static PyObject *
run(PyObject *object, PyObject *args)
{
    unsigned long long stream, shape[5], source, target, recipes, windows = 0, cases = 0;
    struct mn_finish job = {0};
    char chars[MN_OPS_TEXT] = "";
    struct mn_text text = {chars, sizeof(chars)};
    int rc;
    if (!PyArg_ParseTuple(args, "Ki(ii)(KKKKK)KKKI|KKI", &stream, &job.which, &job.from, &job.to,
                          &shape[0], &shape[1], &shape[2], &shape[3], &shape[4], &source,
                          &target, &recipes, &job.steps, &windows, &cases, &job.n_cases)
        || take_shape(&job, shape) < 0) {
        return NULL;
    }
    job.source = (const unsigned char *)(uintptr_t)source;
    job.target = (unsigned char *)(uintptr_t)target;
    job.recipes = (const uint64_t *)(uintptr_t)recipes;
    job.windows = (const int64_t *)(uintptr_t)windows;
    job.cases = (const struct mn_resident *)(uintptr_t)cases;
    Py_BEGIN_ALLOW_THREADS
    rc = mn_driver_finish(&self_of(object)->driver, (void *)(uintptr_t)stream, &job, &text);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return raise_text(rc, &text);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, run_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_finisher},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Finisher(library, ordinal, image): loads the image for one device."},
    {0, NULL},
};

PyType_Spec mn_ops_finisher_spec = {
    .name = "minato._ops.Finisher",
    .basicsize = sizeof(struct mn_ops_finisher),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};
