/* mn_layout.h - the structure of a sample as a flat program; shared by encode and decode.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A layout describes the samples of a dataset: nested dicts, lists, tuples and named tuples whose
 * leaves have one dtype and shape each. Every leaf but OBJECT is a field: in a batch its rows lie
 * one after another. A sample that differs in any way does not fit and travels as it is; torch's
 * own default_collate then decides (and words the errors).
 */
#ifndef MN_LAYOUT_H
#define MN_LAYOUT_H

#include "py/module/mn_state.h"

#define MN_LAYOUT_MAX_FIELDS 64
#define MN_LAYOUT_MAX_NODES 256
#define MN_LAYOUT_MAX_DIMS 32

enum mn_node_kind {
    MN_NODE_DICT,
    MN_NODE_LIST,
    MN_NODE_TUPLE,
    MN_NODE_NAMED,
    MN_NODE_TENSOR,
    MN_NODE_ARRAY,
    MN_NODE_INT,
    MN_NODE_BOOL,
    MN_NODE_FLOAT,
    MN_NODE_SCALAR,
    MN_NODE_OBJECT,
};

struct mn_node {
    enum mn_node_kind kind;
    uint32_t end;      /* index after the last node of this subtree */
    uint32_t children; /* number of direct children */
    uint32_t field;
    struct mn_dl_dtype dtype;
    int ndim;
    int64_t *shape;
    uint64_t bytes;    /* of one row */
    uint32_t itemsize;
    PyObject *extra;   /* DICT: keys; NAMED: class; ARRAY: dtype; SCALAR: type; OBJECT: true if a
                        * batch has them in a tuple */
};

struct mn_layout {
    PyObject_HEAD
    PyObject *description; /* bytes from which workers open it; NULL: it is a worker's */
    uint32_t nnodes;
    uint32_t nfields;
    uint32_t nobjects;
    struct mn_node nodes[MN_LAYOUT_MAX_NODES];
    uint64_t row_bytes[MN_LAYOUT_MAX_FIELDS], all_bytes; /* of each field, and of all */
};

/* Writes sample as row of block. Returns 1: written; 0: it does not fit, nothing to undo; -1: an
 * exception. Appends objects that are not row data to objects (a list). */
int
mn_layout_encode(struct mn_state *st, struct mn_layout *l, PyObject *sample,
                 const struct mn_shm *shm, struct mn_block *block, uint32_t row,
                 PyObject *objects);

/* Writes the samples, a list, as the first n rows of block. Returns as mn_layout_encode() does. For
 * each sample of a layout with object leaves, appends the list of its objects to objects. */
int
mn_layout_encode_list(struct mn_state *st, struct mn_layout *l, PyObject *samples,
                      const struct mn_shm *shm, struct mn_block *block, uint32_t n,
                      PyObject *objects);

/* Returns the batch that default_collate would make of the block's first nrows rows. objects: per
 * row the list that encode filled, or NULL. copy: no arena memory is handed out. */
PyObject *
mn_layout_decode(struct mn_state *st, struct mn_layout *l, struct mn_engine *e,
                 uint64_t block_off, uint32_t nrows, PyObject *objects, bool copy);

/* Returns one row as the sample that it was. */
PyObject *
mn_layout_row(struct mn_state *st, struct mn_layout *l, struct mn_engine *e,
              uint64_t block_off, uint32_t row, PyObject *objects);

#endif
