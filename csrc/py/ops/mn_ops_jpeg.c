/* minato._ops: crops of JPEG photos.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops.h"

#include <errno.h>

#include "ops/mn_jpeg.h"

#define LIBRARY "minato.jpeg_library"

static void
free_library(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, LIBRARY));
}

PyObject *
mn_ops_jpeg_library(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    char chars[MN_OPS_TEXT];
    struct mn_text text = {chars, sizeof(chars)};
    if (!PyArg_ParseTuple(args, "O&", PyUnicode_FSConverter, &path)) {
        return NULL;
    }
    struct mn_jpeg_library *library = PyMem_Malloc(sizeof(*library));
    PyObject *capsule = NULL;
    if (library == NULL) {
        PyErr_NoMemory();
    }
    else {
        int rc = mn_jpeg_open(library, PyBytes_AS_STRING(path), &text);
        capsule = rc != 0 ? mn_ops_raise(rc, &text)
                          : PyCapsule_New(library, LIBRARY, free_library);
        if (capsule == NULL) {
            PyMem_Free(library);
        }
    }
    Py_DECREF(path);
    return capsule;
}

PyObject *
mn_ops_jpeg_size(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer file;
    uint32_t width, height;
    int rc;
    if (!PyArg_ParseTuple(args, "y*", &file)) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mn_jpeg_measure(file.buf, (size_t)file.len, &width, &height);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&file);
    if (rc != 0) {
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(II)", width, height);
}

/* Returns whether a job asks for at least a pixel, within what there is. */
static int
makes_sense(const struct mn_jpeg_job *job, Py_ssize_t table, Py_ssize_t out)
{
    uint64_t most = 65535, right = (uint64_t)job->window_left + job->window_width,
             bottom = (uint64_t)job->window_top + job->window_height;
    return job->width != 0 && job->height != 0 && job->window_width != 0
           && job->window_height != 0 && (uint64_t)job->left + job->width <= most
           && (uint64_t)job->top + job->height <= most && job->to_width <= most
           && job->to_height <= most && right <= job->to_width && bottom <= job->to_height
           && (job->item == 1 || job->item == 2 || job->item == 4)
           && (size_t)table == 3 * 256 * job->item
           && (size_t)out == 3 * job->item * job->window_width * job->window_height;
}

PyObject *
mn_ops_jpeg_crop(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    Py_buffer file, table, out;
    struct mn_jpeg_job job;
    int flip, down_first, level = -1, rc = -EINVAL;
    if (!PyArg_ParseTuple(args, "Oy*(IIII)(II)(IIII)ppy*w*|i", &capsule, &file, &job.left,
                          &job.top, &job.width, &job.height, &job.to_width, &job.to_height,
                          &job.window_left, &job.window_top, &job.window_width,
                          &job.window_height, &flip, &down_first, &table, &out, &level)) {
        return NULL;
    }
    job.flip = flip;
    job.down_first = down_first;
    job.table = table.buf;
    job.item = (size_t)table.len / (3 * 256);
    const struct mn_jpeg_library *library = PyCapsule_GetPointer(capsule, LIBRARY);
    const struct mn_kernels *kernels =
        level < 0 ? mn_kernels_best() : mn_kernels_get(level);
    if (library != NULL && (kernels == NULL || !makes_sense(&job, table.len, out.len))) {
        PyErr_SetString(PyExc_ValueError,
                        "the region, the window, the table and the output do not fit together");
    }
    else if (library != NULL) {
        Py_BEGIN_ALLOW_THREADS
        rc = mn_jpeg_crop(library, kernels, file.buf, (size_t)file.len, &job, out.buf);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&file);
    PyBuffer_Release(&table);
    PyBuffer_Release(&out);
    if (rc == -ENOMEM) {
        return PyErr_NoMemory();
    }
    return rc < 0 ? NULL : PyBool_FromLong(rc == 0);
}
