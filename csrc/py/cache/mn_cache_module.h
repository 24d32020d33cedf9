/* mn_cache_module.h - state of the module minato._cache and what its files share.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_CACHE_MODULE_H
#define MN_CACHE_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cache/mn_cache.h"

struct mn_cache_state {
    PyTypeObject *store_type;
    PyTypeObject *entry_type;
    PyObject *refused; /* exception: why there can be no cache */
};

/* An entry that find() returned; it keeps its store. */
struct mn_cache_entry_object {
    PyObject_HEAD
    PyObject *store;
    struct mn_cache_found found;
};

/* 0 for 0, else -1 with OSError, MemoryError or Refused. */
int
mn_cache_raise(struct mn_cache_state *st, int rc, const char *folder);

int
mn_cache_add_store(PyObject *module, struct mn_cache_state *st);

/* The client of a Store. */
struct mn_cache *
mn_cache_of_store(PyObject *store);

/* fill(parts, targets): what Entry.copy() does, from buffers. */
extern const char mn_cache_fill_doc[];
PyObject *
mn_cache_fill(PyObject *module, PyObject *args);

/* parts(bytes): how a cache of that size is laid out. */
extern const char mn_cache_parts_doc[];
PyObject *
mn_cache_parts(PyObject *module, PyObject *arg);

/* plain(value): the digest of a plain value. */
extern const char mn_cache_plain_doc[];
PyObject *
mn_cache_plain(PyObject *module, PyObject *value);

/* unchanged(records): whether names still stand for the same objects. */
extern const char mn_cache_unchanged_doc[];
PyObject *
mn_cache_unchanged(PyObject *module, PyObject *records);

/* sweep(folder, name): removes what killed processes have left in memory. */
extern const char mn_cache_sweep_doc[];
PyObject *
mn_cache_sweep(PyObject *module, PyObject *args);

/* drop(folder, name, used): removes a file. */
extern const char mn_cache_drop_doc[];
PyObject *
mn_cache_drop(PyObject *module, PyObject *args);

int
mn_cache_add_entry(PyObject *module, struct mn_cache_state *st);

#endif
