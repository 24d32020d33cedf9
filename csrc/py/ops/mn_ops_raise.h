/* From the results of minato/ops.h to exceptions.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_OPS_RAISE_H
#define MN_OPS_RAISE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>

#define MN_OPS_TEXT 512 /* bytes of an error text */

/* Raises the exception for a result code: ValueError, MemoryError, IndexError or OSError with
 * errno. Returns NULL. */
static inline PyObject *
mn_ops_raise_chars(int rc, const char *chars)
{
    /* Decoded as file names are: a path in the text need not be valid UTF-8. */
    PyObject *words = PyUnicode_DecodeFSDefault(chars);
    if (words == NULL) {
        return NULL;
    }
    if (rc == -ENOMEM || rc == -EINVAL || rc == -ERANGE) {
        PyErr_SetObject(rc == -ENOMEM   ? PyExc_MemoryError
                        : rc == -EINVAL ? PyExc_ValueError
                                        : PyExc_IndexError,
                        words);
    }
    else {
        PyObject *args = Py_BuildValue("(iO)", -rc, words);
        if (args != NULL) {
            PyErr_SetObject(PyExc_OSError, args); /* becomes the subclass of that errno */
            Py_DECREF(args);
        }
    }
    Py_DECREF(words);
    return NULL;
}

#endif
