/* mn_state.c - finding the module's state, system errors, and lists. See mn_state.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <string.h>

struct mn_state *
mn_state_of(PyObject *module)
{
    return PyModule_GetState(module);
}

struct mn_state *
mn_state_of_type(PyTypeObject *type)
{
    return PyType_GetModuleState(type);
}

int
mn_raise_errno(int rc, const char *what)
{
    if (rc >= 0) {
        return 0;
    }
    if (rc == -ENOMEM) {
        PyErr_Format(PyExc_MemoryError, "%s: out of memory", what);
    }
    else {
        PyObject *text = PyUnicode_FromFormat("%s: %s", what, strerror(-rc));
        PyObject *args = text == NULL ? NULL : Py_BuildValue("(iN)", -rc, text);
        if (args != NULL) {
            PyErr_SetObject(PyExc_OSError, args); /* becomes the subclass of that errno */
            Py_DECREF(args);
        }
    }
    return -1;
}

void
mn_list_add(PyObject **list, PyObject *item)
{
    if (item == NULL || PyList_Append(*list, item) < 0) {
        Py_CLEAR(*list);
    }
    Py_XDECREF(item);
}
