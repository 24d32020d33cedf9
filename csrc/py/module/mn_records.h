/* mn_records.h - tuples whose items have names: what calls of minato._core return that has more
 * fields than a reader would count.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_RECORDS_H
#define MN_RECORDS_H

#include "py/module/mn_state.h"

/* A record of a type of mn_state's, of values as Py_BuildValue takes them, in parentheses. */
PyObject *
mn_record(PyTypeObject *type, const char *format, ...);

/* A task that Python has to do something about. Takes over both objects, either of which may be
 * NULL, with an exception: then so is what it returns. */
PyObject *
mn_task_record(const struct mn_state *st, const struct mn_task *t, const struct mn_block *b,
               PyObject *indices, PyObject *extras);

#endif /* MN_RECORDS_H */
