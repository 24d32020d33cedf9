/* mn_named_tuples.h - results of minato._core with many fields: tuples whose items have names.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_NAMED_TUPLES_H
#define MN_NAMED_TUPLES_H

#include "py/module/mn_state.h"

/* Makes one of the types of mn_state, from values as for Py_BuildValue, in parentheses. Returns
 * NULL with an exception. */
PyObject *
mn_named_tuple(PyTypeObject *type, const char *format, ...);

/* Makes a task that Python must handle. Takes over both objects. Either may be NULL with an
 * exception; then so is the result. */
PyObject *
mn_task_tuple(const struct mn_state *st, const struct mn_task *t, const struct mn_block *b,
              PyObject *indices, PyObject *extras);

#endif
