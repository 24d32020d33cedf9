/* minato._ops: the extension module of the native operators.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops.h"

#include <errno.h>
#include <string.h>

#include "ops/mn_jpeg.h"

/* ---- crops of JPEG photos ---- */

static void
free_library(PyObject *capsule)
{
    PyMem_Free(PyCapsule_GetPointer(capsule, MN_OPS_JPEG_LIBRARY));
}

/* Functions of the module (mn_ops.c). */
static PyObject *
mn_ops_jpeg_library(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *path;
    MN_OPS_NEW_TEXT(text);
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
                          : PyCapsule_New(library, MN_OPS_JPEG_LIBRARY, free_library);
        if (capsule == NULL) {
            PyMem_Free(library);
        }
    }
    Py_DECREF(path);
    return capsule;
}

static PyObject *
mn_ops_jpeg_size(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer file;
    uint32_t width, height;
    if (!PyArg_ParseTuple(args, "y*", &file)) {
        return NULL;
    }
    int rc = MN_WITHOUT_GIL(mn_jpeg_measure(file.buf, (size_t)file.len, &width, &height));
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
    uint64_t most = MN_JPEG_LONGEST, right = (uint64_t)job->window_left + job->window_width,
             bottom = (uint64_t)job->window_top + job->window_height;
    return job->width != 0 && job->height != 0 && job->window_width != 0
           && job->window_height != 0 && (uint64_t)job->left + job->width <= most
           && (uint64_t)job->top + job->height <= most && job->to_width <= most
           && job->to_height <= most && right <= job->to_width && bottom <= job->to_height
           && (job->item == 1 || job->item == 2 || job->item == 4)
           && (size_t)table == 3 * 256 * job->item
           && (size_t)out == 3 * job->item * job->window_width * job->window_height;
}

static PyObject *
mn_ops_jpeg_crop(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    Py_buffer file, table, out;
    struct mn_jpeg_job job;
    int flip, tall_down_first, scaled, level = -1, rc = -EINVAL;
    if (!PyArg_ParseTuple(args, "Oy*(IIII)(II)(IIII)pppy*w*|i", &capsule, &file, &job.left,
                          &job.top, &job.width, &job.height, &job.to_width, &job.to_height,
                          &job.window_left, &job.window_top, &job.window_width,
                          &job.window_height, &flip, &tall_down_first, &scaled, &table,
                          &out, &level)) {
        return NULL;
    }
    job.flip = flip;
    job.tall_down_first = tall_down_first;
    job.scaled = scaled;
    job.table = table.buf;
    job.item = (size_t)table.len / (3 * 256);
    const struct mn_jpeg_library *library = PyCapsule_GetPointer(capsule, MN_OPS_JPEG_LIBRARY);
    const struct mn_kernels *kernels =
        level < 0 ? mn_kernels_best() : mn_kernels_get(level);
    if (library != NULL && (kernels == NULL || !makes_sense(&job, table.len, out.len))) {
        PyErr_SetString(PyExc_ValueError,
                        "the region, the window, the table and the output do not fit together");
    }
    else if (library != NULL) {
        rc = MN_WITHOUT_GIL(mn_jpeg_crop(library, kernels, file.buf, (size_t)file.len, &job,
                                         out.buf));
    }
    PyBuffer_Release(&file);
    PyBuffer_Release(&table);
    PyBuffer_Release(&out);
    if (rc == -ENOMEM) {
        return PyErr_NoMemory();
    }
    return rc < 0 ? NULL : PyBool_FromLong(rc == 0);
}

static PyObject *
mn_ops_jpeg_baseline(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *capsule;
    Py_buffer file;
    uint8_t *made = NULL;
    size_t n = 0;
    int rc = -EINVAL;
    if (!PyArg_ParseTuple(args, "Oy*", &capsule, &file)) {
        return NULL;
    }
    const struct mn_jpeg_library *library = PyCapsule_GetPointer(capsule, MN_OPS_JPEG_LIBRARY);
    if (library != NULL) {
        rc = MN_WITHOUT_GIL(mn_jpeg_baseline(library, file.buf, (size_t)file.len, &made, &n));
    }
    PyBuffer_Release(&file);
    if (rc == -ENOMEM) {
        return PyErr_NoMemory();
    }
    if (rc != 0) {
        return rc < 0 ? NULL : Py_NewRef(Py_None);
    }
    PyObject *bytes = PyBytes_FromStringAndSize((const char *)made, (Py_ssize_t)n);
    free(made);
    return bytes;
}

/* Letters of the buffer protocol. */
static const struct {
    char format;
    int dtype;
} formats[] = {
    {'B', MN_DTYPE_U8},  {'h', MN_DTYPE_I16}, {'H', MN_DTYPE_U16}, {'i', MN_DTYPE_I32},
    {'l', MN_DTYPE_I32}, {'f', MN_DTYPE_F32}, {'d', MN_DTYPE_F64},
};

#define N_FORMATS (sizeof(formats) / sizeof(formats[0]))

char *
mn_ops_copy_path(PyObject *path)
{
    PyObject *bytes = NULL;
    if (!PyUnicode_FSConverter(path, &bytes)) {
        return NULL;
    }
    char *copy = strdup(PyBytes_AS_STRING(bytes));
    Py_DECREF(bytes);
    if (copy == NULL) {
        PyErr_NoMemory();
    }
    return copy;
}

static int
dtype_of(const Py_buffer *buffer)
{
    const char *format = buffer->format;
    if (format == NULL) {
        return MN_DTYPE_U8;
    }
    if (*format == '@' || *format == '=' || *format == '<') {
        format++; /* all the same here: the build requires little-endian */
    }
    for (size_t i = 0; i < N_FORMATS; i++) {
        if (format[0] == formats[i].format && format[1] == '\0'
            && (size_t)buffer->itemsize == mn_dtype_size(formats[i].dtype)) {
            return formats[i].dtype;
        }
    }
    return MN_DTYPE_NONE;
}

static int
check_volume(const Py_buffer *buffer)
{
    if (buffer->ndim != MN_VOLUME_DIMS) {
        return MN_RAISE(PyExc_ValueError,
                        "a volume has 4 axes (channel, depth, height, width), got %d",
                        buffer->ndim);
    }
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        if (buffer->shape[axis] == 0) {
            return MN_RAISE(PyExc_ValueError, "axis %d of the volume is empty", axis);
        }
    }
    if (dtype_of(buffer) == MN_DTYPE_NONE) {
        return MN_RAISE(PyExc_TypeError,
                        "a volume is uint8, int16, uint16, int32, float32 or float64, not an "
                        "array of buffer format '%s'",
                        buffer->format);
    }
    return 0;
}

int
mn_ops_volume(PyObject *array, int writable, Py_buffer *buffer, struct mn_op_volume *volume)
{
    int flags = PyBUF_FORMAT | (writable ? PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE
                                         : PyBUF_STRIDED_RO);
    if (PyObject_GetBuffer(array, buffer, flags) < 0) {
        return -1;
    }
    if (check_volume(buffer) < 0) {
        PyBuffer_Release(buffer);
        return -1;
    }
    volume->data = buffer->buf;
    volume->dtype = dtype_of(buffer);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        volume->shape[axis] = buffer->shape[axis];
    }
    mn_strides_of(volume->strides, volume->shape, mn_dtype_size(volume->dtype));
    for (int axis = 0; buffer->strides != NULL && axis < MN_VOLUME_DIMS; axis++) {
        volume->strides[axis] = buffer->strides[axis]; /* ctypes gives none */
    }
    return 0;
}

/* -- Functions ------------------------------------------------------------------------- */

PyDoc_STRVAR(uniform_doc, "uniform(key_hi, key_lo, number, draw) -> float in [0, 1)");

static PyObject *
uniform(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned long long hi, lo;
    unsigned int number, draw;
    if (!PyArg_ParseTuple(args, "KKII", &hi, &lo, &number, &draw)) {
        return NULL;
    }
    return PyFloat_FromDouble(mn_draw_uniform(hi, lo, number, draw));
}

PyDoc_STRVAR(sample_key_doc,
             "sample_key(keying, seed, epoch, index, sample_seed) -> (key_hi, key_lo)");

static PyObject *
sample_key(PyObject *Py_UNUSED(module), PyObject *args)
{
    unsigned int keying;
    unsigned long long seed, epoch, sample_seed;
    long long index;
    uint64_t hi, lo;
    if (!PyArg_ParseTuple(args, "IKKLK", &keying, &seed, &epoch, &index, &sample_seed)) {
        return NULL;
    }
    mn_native_key(keying, seed, epoch, index, sample_seed, &hi, &lo);
    return Py_BuildValue("(KK)", (unsigned long long)hi, (unsigned long long)lo);
}

PyDoc_STRVAR(jpeg_library_doc,
             "jpeg_library(path) -> capsule\n\n"
             "Opens a libjpeg-turbo. Raises OSError or ValueError.");
PyDoc_STRVAR(jpeg_size_doc,
             "jpeg_size(file) -> (width, height), or None: only Pillow decodes these bytes");
PyDoc_STRVAR(jpeg_crop_doc,
             "jpeg_crop(library, file, (left, top, width, height), (to_width, to_height),\n"
             "          (left, top, width, height), flip, tall_down_first, scaled, table, out,\n"
             "          level=-1)\n"
             "-> bool\n\n"
             "Resizes a region of a photo, and writes a window of the result. False: Pillow must\n"
             "decode these bytes. csrc/ops/mn_jpeg.h describes the arguments.");

PyDoc_STRVAR(jpeg_baseline_doc,
             "jpeg_baseline(library, file) -> bytes | None\n\n"
             "The same photo as a baseline file, without its APP and COM markers. None: it cannot\n"
             "be read without a warning.");

static PyMethodDef functions[] = {
    {"uniform", uniform, METH_VARARGS, uniform_doc},
    {"sample_key", sample_key, METH_VARARGS, sample_key_doc},
    {"jpeg_library", mn_ops_jpeg_library, METH_VARARGS, jpeg_library_doc},
    {"jpeg_size", mn_ops_jpeg_size, METH_VARARGS, jpeg_size_doc},
    {"jpeg_baseline", mn_ops_jpeg_baseline, METH_VARARGS, jpeg_baseline_doc},
    {"jpeg_crop", mn_ops_jpeg_crop, METH_VARARGS, jpeg_crop_doc},
    {NULL, NULL, 0, NULL},
};

/* -- The module ------------------------------------------------------------------------ */

static int
exec_module(PyObject *module)
{
    struct mn_ops_state *state = PyModule_GetState(module);
    PyType_Spec *specs[] = {&mn_ops_cases_spec, &mn_ops_photos_spec, &mn_ops_pipeline_spec};
    for (size_t i = 0; i < sizeof(specs) / sizeof(specs[0]); i++) {
        PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, specs[i], NULL);
        Py_XSETREF(state->pipeline_type, type); /* the last one */
        if (type == NULL || PyModule_AddType(module, type) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
traverse_module(PyObject *module, visitproc visit, void *arg)
{
    Py_VISIT(((struct mn_ops_state *)PyModule_GetState(module))->pipeline_type);
    return 0;
}

static int
clear_module(PyObject *module)
{
    Py_CLEAR(((struct mn_ops_state *)PyModule_GetState(module))->pipeline_type);
    return 0;
}

static PyModuleDef_Slot slots[] =
    MN_MODULE_SLOTS(exec_module, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED);

struct PyModuleDef mn_ops_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "minato._ops",
    .m_doc = "Native operators on volumes: the machinery behind minato.ops.",
    .m_size = sizeof(struct mn_ops_state),
    .m_methods = functions,
    .m_slots = slots,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
};

PyMODINIT_FUNC PyInit__ops(void);

PyMODINIT_FUNC
PyInit__ops(void)
{
    return PyModuleDef_Init(&mn_ops_module);
}
