/* minato._ops.Photos: the samples of a folder of JPEG photos, and its capsule for C threads.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops.h"

#include <string.h>

#include "ops/mn_photos.h"

struct mn_ops_photos {
    PyObject_HEAD
    struct mn_photos photos;
    Py_ssize_t n;
    PyObject *library;
    Py_buffer targets, table;
};

static struct mn_ops_photos *
self_of(PyObject *object)
{
    return (struct mn_ops_photos *)(void *)object;
}

static int
take_paths(struct mn_ops_photos *self, PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    self->photos.paths = calloc((size_t)n + 1, sizeof(char *));
    if (self->photos.paths == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (; self->n < n; self->n++) {
        PyObject *bytes = NULL;
        if (!PyUnicode_FSConverter(PyList_GET_ITEM(list, self->n), &bytes)) {
            return -1;
        }
        self->photos.paths[self->n] = strdup(PyBytes_AS_STRING(bytes));
        Py_DECREF(bytes);
        if (self->photos.paths[self->n] == NULL) {
            PyErr_NoMemory();
            return -1;
        }
    }
    return 0;
}

/* Reads (random, tall_down_first, scaled, size, width, height, scale, ratio, log_ratio, flip).
 * Returns 0 or -1 with an exception. */
static int
take_part(PyObject *tuple, struct mn_photo_part *part)
{
    int random, tall, scaled;
    if (!PyArg_ParseTuple(tuple, "pppIII(dd)(dd)(dd)d", &random, &tall, &scaled, &part->size,
                          &part->width, &part->height, &part->scale[0], &part->scale[1],
                          &part->ratio[0], &part->ratio[1], &part->log_ratio[0],
                          &part->log_ratio[1], &part->flip)) {
        return -1;
    }
    part->random = random;
    part->tall_down_first = tall;
    part->scaled = scaled;
    bool sound = part->width != 0 && part->height != 0 && part->width <= MN_JPEG_LONGEST
                 && part->height <= MN_JPEG_LONGEST
                 && (random || (part->size >= part->width && part->size >= part->height));
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a sample's size must be from 1 to 65535 pixels");
    }
    return sound ? 0 : -1;
}

/* Takes what the type's documentation says. Returns 0 or -1 with an exception. */
static int
take(struct mn_ops_photos *self, PyObject *args)
{
    PyObject *library, *list, *part;
    int kind;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "OO!y*y*CKO!", &library, &PyList_Type, &list, &self->targets,
                          &self->table, &kind, &most, &PyTuple_Type, &part)) {
        return -1;
    }
    self->library = Py_NewRef(library);
    self->photos.library = PyCapsule_GetPointer(library, MN_OPS_JPEG_LIBRARY);
    if (self->photos.library == NULL || take_paths(self, list) < 0
        || take_part(part, &self->photos.part) < 0) {
        return -1;
    }
    size_t item = (size_t)self->table.len / (3 * 256);
    if ((size_t)self->table.len != 3 * 256 * item || (item != 1 && item != 2 && item != 4)
        || self->targets.len != self->n * (Py_ssize_t)sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "the paths, the targets and the table do not fit");
        return -1;
    }
    self->photos.kernels = mn_kernels_best();
    self->photos.table = self->table.buf;
    self->photos.targets = self->targets.buf;
    self->photos.most_pixels = most;
    mn_photos_describe(&self->photos, self->n, item, (char)kind);
    return 0;
}

static PyObject *
new_photos(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *object = type->tp_alloc(type, 0);
    if (object != NULL && take(self_of(object), args) < 0) {
        Py_CLEAR(object);
    }
    return object;
}

static void
dealloc(PyObject *object)
{
    struct mn_ops_photos *self = self_of(object);
    PyTypeObject *type = Py_TYPE(object);
    for (Py_ssize_t i = 0; i < self->n; i++) {
        free(self->photos.paths[i]);
    }
    free(self->photos.paths);
    PyBuffer_Release(&self->targets);
    PyBuffer_Release(&self->table);
    Py_XDECREF(self->library);
    type->tp_free(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(job_doc,
             "job(part, width, height, key_hi, key_lo) -> (region, size, window, flip)\n\n"
             "What the sample with this key shows of a photo of this size; part as in Photos.");

static PyObject *
job(PyObject *Py_UNUSED(type), PyObject *args)
{
    struct mn_photo_part part;
    struct mn_jpeg_job j = {0};
    PyObject *tuple;
    unsigned int width, height;
    unsigned long long hi, lo;
    if (!PyArg_ParseTuple(args, "O!IIKK", &PyTuple_Type, &tuple, &width, &height, &hi, &lo)
        || take_part(tuple, &part) < 0) {
        return NULL;
    }
    if (width == 0 || height == 0) {
        PyErr_SetString(PyExc_ValueError, "a photo has at least one pixel");
        return NULL;
    }
    mn_photo_set_job(&part, width, height, hi, lo, &j);
    return Py_BuildValue("(IIII)(II)(IIII)N", j.left, j.top, j.width, j.height, j.to_width,
                         j.to_height, j.window_left, j.window_top, j.window_width,
                         j.window_height, PyBool_FromLong(j.flip));
}

PyDoc_STRVAR(native_doc, "native() -> capsule of struct mn_native_pipeline (minato/ops.h)");

static PyObject *
native(PyObject *object, PyObject *Py_UNUSED(args))
{
    return mn_ops_native_capsule(object, &self_of(object)->photos.native);
}

static PyMethodDef methods[] = {
    {"job", job, METH_VARARGS | METH_STATIC, job_doc},
    {"native", native, METH_NOARGS, native_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_photos},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Photos(library, paths, targets (int64), table, kind, most_pixels, (random, "
                "tall_down_first, scaled, size, width, height, scale, ratio, log_ratio, flip))"},
    {0, NULL},
};

PyType_Spec mn_ops_photos_spec = {
    .name = "minato._ops.Photos",
    .basicsize = sizeof(struct mn_ops_photos),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = type_slots,
};
