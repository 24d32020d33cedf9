/* mn_seed_words.h - Seeder._words(), and how methods of Seeder read their numbers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * All need the GIL.
 */
#ifndef MN_SEED_WORDS_H
#define MN_SEED_WORDS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Converters for PyArg_Parse; its "K" code would wrap silently. out: a uint64_t, a uint32_t.
 * 1, or 0 with an exception. */
int
mn_seed_arg_u64(PyObject *obj, void *out);

int
mn_seed_arg_domain(PyObject *obj, void *out);

extern const char mn_seed_words_doc[];

/* The static method itself: words of one stream, for probes and tests. */
PyObject *
mn_seed_py_words(PyObject *type, PyObject *args, PyObject *kwargs);

#endif
