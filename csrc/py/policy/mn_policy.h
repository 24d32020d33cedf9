/* The policies as Python objects, for tests and the simulator: minato._policy.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine calls the policies in C; these objects drive the same code from Python. Each has its
 * own memory, works under the GIL, and refers to no other object. The module is built only in a
 * source tree (setup.py); no wheel has it.
 */
#ifndef MN_POLICY_H
#define MN_POLICY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Adds one heap type made from spec. Returns 0 or -1. */
int
mn_policy_add_type(PyObject *module, PyType_Spec *spec);

/* tp_dealloc of a type whose instances have no memory of their own. */
void
mn_policy_dealloc(PyObject *self);

/* Adds PolicyCost, with the slow timeout. */
int
mn_policy_add_cost(PyObject *module);

/* Adds PolicyDispatch. */
int
mn_policy_add_dispatch(PyObject *module);

/* Adds PolicyReady. */
int
mn_policy_add_ready(PyObject *module);

/* Adds PolicyAutoscale. */
int
mn_policy_add_autoscale(PyObject *module);

#endif
