/* mn_index.h - the sampler's indices for a batch, on their way to workers.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_INDEX_H
#define MN_INDEX_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "workers/mn_records.h"

/* Converts indices for the core. A list of exact ints that fit 64 bits becomes machine integers,
 * and sets *nrows. Anything else goes through dumps(indices). That returns bytes, or (n, bytes),
 * which begin with n machine integers and set *nrows. Returns the bytes that *index points into, or
 * NULL with an exception. */
PyObject *
mn_fill_index(uint32_t *kind, const void **index, uint64_t *bytes, uint32_t *nrows,
              PyObject *indices, PyObject *dumps);

/* Subtracts the spares, which are the last indices, from *nrows. Returns 0 with an exception if
 * there are fewer indices. */
int
mn_split_spares(uint32_t *nrows, uint32_t spares);

/* Converts an argument; sets an exception if it does not fit. */
uint32_t
mn_as_uint32(PyObject *number);

/* Returns the machine integers of a block as a list of int, those of spare samples at the end. */
PyObject *
mn_index_list(struct mn_block *b);

/* Returns the result of dumps, as bytes, for a block of another kind than MN_INDEX_INT64. */
PyObject *
mn_index_pickle(struct mn_block *b);

#endif
