/* From the results of minato/ops.h to exceptions.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_OPS_RAISE_H
#define MN_OPS_RAISE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define MN_OPS_TEXT 512 /* bytes of an error text */

/* Raises the exception for a result code: ValueError, MemoryError, IndexError or OSError with
 * errno. Returns NULL. */
PyObject *
mn_ops_raise_chars(int rc, const char *chars);

#endif
