/* The exception of a failed operator. Part of minato._ops and of minato._core.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops_raise.h"

#include <errno.h>

PyObject *
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
