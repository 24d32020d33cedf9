/* The policies as Python objects, for tests, statistics and benchmarks/simulate.py.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The engine calls the policies in C; these objects drive the same code from Python. Each
 * holds its own memory, works under the GIL, and refers to no other object.
 */
#ifndef MN_POLICY_H
#define MN_POLICY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

struct mn_histogram;

/* Adds PolicyCost (with the slow timeout), PolicyDispatch, PolicyMemory, PolicyReady,
 * PolicyWorkers, policy_chunk, policy_chunk_next and policy_period to the module. 0, or -1
 * with an exception set. */
int
mn_policy_add_types(PyObject *module);

/* -- shared by the mn_policy_*.c files only ------------------------------------------- */

/* Adds one heap type made from spec. 0 or -1. */
int
mn_policy_add_type(PyObject *module, PyType_Spec *spec);

int
mn_policy_add_cost(PyObject *module);

int
mn_policy_add_dispatch(PyObject *module);

int
mn_policy_add_deciders(PyObject *module);

/* tp_dealloc of a type whose instances have no memory of their own. */
void
mn_policy_dealloc(PyObject *self);

#endif /* MN_POLICY_H */
