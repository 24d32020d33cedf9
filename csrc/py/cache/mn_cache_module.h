/* mn_cache_module.h - state of the module minato._cache and what its files share.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_CACHE_MODULE_H
#define MN_CACHE_MODULE_H

#include "py/module/mn_python.h" /* first */

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

/* The client of a Store. */
struct mn_cache *
mn_cache_of_store(PyObject *store);

extern PyType_Spec mn_cache_store_spec, mn_cache_entry_spec;
extern PyMethodDef mn_cache_store_functions[], mn_cache_entry_functions[];

#endif
