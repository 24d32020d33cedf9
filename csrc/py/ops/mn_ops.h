/* minato._ops: what the files of this extension module share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The module knows buffers, not NumPy: arrays come in through the buffer protocol, so it
 * needs no NumPy headers. Everything that computes or reads runs without the GIL.
 */
#ifndef MN_OPS_H
#define MN_OPS_H

#include "py/module/mn_python.h" /* first */

#include "ops/mn_pipeline.h"
#include "py/ops/mn_ops_raise.h"

/* Declares a struct mn_text for the words of an error. */
#define MN_OPS_NEW_TEXT(text)          \
    char text##_chars[MN_OPS_TEXT] = ""; \
    struct mn_text text = {text##_chars, sizeof(text##_chars)}

#define MN_OPS_JPEG_LIBRARY "minato.jpeg_library" /* capsule of struct mn_jpeg_library */

struct mn_ops_state {
    PyTypeObject *pipeline_type;
};

struct mn_ops_pipeline {
    PyObject_HEAD
    struct mn_pipeline *pipeline;
    PyObject *capsules; /* of users' operators: kept alive */
};

extern struct PyModuleDef mn_ops_module;
extern PyType_Spec mn_ops_pipeline_spec;
extern PyType_Spec mn_ops_cases_spec;
extern PyType_Spec mn_ops_photos_spec;

static inline PyObject *
mn_ops_raise(int rc, const struct mn_text *text)
{
    return mn_ops_raise_chars(rc, text->chars);
}

/* Reads an array of four axes of a supported dtype; *buffer must be released. `writable` also
 * requires C contiguity. Returns 0 or -1 with an exception. */
int
mn_ops_volume(PyObject *array, int writable, Py_buffer *buffer, struct mn_op_volume *volume);

static inline void
mn_ops_drop_owner(PyObject *capsule)
{
    Py_XDECREF((PyObject *)PyCapsule_GetContext(capsule));
}

/* Returns the capsule of a pipeline that is part of `owner`, which the capsule keeps alive. NULL
 * with an exception. */
static inline PyObject *
mn_ops_native_capsule(PyObject *owner, struct mn_native_pipeline *native)
{
    PyObject *capsule = PyCapsule_New(native, MN_NATIVE_CAPSULE, mn_ops_drop_owner);
    if (capsule != NULL && PyCapsule_SetContext(capsule, Py_NewRef(owner)) < 0) {
        Py_CLEAR(capsule);
    }
    return capsule;
}

/* Returns a path as C functions take it, to be freed. NULL with an exception. */
char *
mn_ops_copy_path(PyObject *path);

#endif
