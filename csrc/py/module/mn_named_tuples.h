/* mn_named_tuples.h - what calls of minato._core return that has more fields than a reader would
 * count: tuples whose items have names.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_NAMED_TUPLES_H
#define MN_NAMED_TUPLES_H

#include "py/module/mn_state.h"

/* One of a type of mn_state's, of values as Py_BuildValue takes them, in parentheses. */
PyObject *
mn_named_tuple(PyTypeObject *type, const char *format, ...);

/* A task that Python has to do something about. Takes over both objects, either of which may be
 * NULL, with an exception: then so is what it returns. */
PyObject *
mn_task_tuple(const struct mn_state *st, const struct mn_task *t, const struct mn_block *b,
              PyObject *indices, PyObject *extras);

#endif /* MN_NAMED_TUPLES_H */
