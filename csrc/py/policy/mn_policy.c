/* Helpers that the policies' types share. See mn_policy.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/policy/mn_policy.h"

int
mn_policy_add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type == NULL) {
        return -1;
    }
    int rc = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return rc;
}

void
mn_policy_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}
