/* mn_index.h - what a sampler gave for a batch, on its way to workers and there.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_INDEX_H
#define MN_INDEX_H

#include <Python.h>

#include "workers/mn_records.h"

/* Indices as the core takes them: a list of exact ints that fit 64 bits as those, which sets
 * *nrows, anything else as dumps(indices): bytes, or (n, bytes), which begin with n machine
 * integers and set *nrows. Returns the bytes that *index points into, or NULL with an exception. */
PyObject *
mn_fill_index(uint32_t *kind, const void **index, uint64_t *bytes, uint32_t *nrows,
              PyObject *indices, PyObject *dumps);

/* Of so many indices the last are spares; nrows is the rest. 0 with an exception where there
 * are fewer. */
int
mn_split_spares(uint32_t *nrows, uint32_t spares);

/* An argument; where it does not fit, an exception is set. */
uint32_t
mn_as_uint32(PyObject *number);

/* Machine integers of a block as a list of int, those of spare samples at the end. */
PyObject *
mn_index_list(struct mn_block *b);

/* Of a block of another kind than MN_INDEX_INT64: what dumps gave, as bytes. */
PyObject *
mn_index_pickle(struct mn_block *b);

#endif
