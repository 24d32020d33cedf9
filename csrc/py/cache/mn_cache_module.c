/* mn_cache_module.c - minato._cache: the cache that processes share, for minato/cache.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/cache/mn_cache_module.h"

static int
cache_exec(PyObject *module)
{
    struct mn_cache_state *st = PyModule_GetState(module);
    st->refused = PyErr_NewExceptionWithDoc(
        "minato._cache.Refused", "Why there can be no cache in a folder.", PyExc_RuntimeError,
        NULL);
    return st->refused == NULL || PyModule_AddObjectRef(module, "Refused", st->refused) < 0
                   || mn_cache_add_entry(module, st) < 0 || mn_cache_add_store(module, st) < 0
                   || PyModule_AddIntConstant(module, "LAYOUT", MN_CACHE_LAYOUT) < 0
                   || PyModule_AddIntConstant(module, "MAGIC", (long)MN_CACHE_MAGIC) < 0
                   || PyModule_AddIntConstant(module, "BYTES_MIN", MN_CACHE_BYTES_MIN) < 0
                   || PyModule_AddIntConstant(module, "PART_MAX", MN_CACHE_SEGMENT_MAX) < 0
               ? -1
               : 0;
}

static int
cache_traverse(PyObject *module, visitproc visit, void *arg)
{
    struct mn_cache_state *st = PyModule_GetState(module);
    Py_VISIT(st->store_type);
    Py_VISIT(st->entry_type);
    Py_VISIT(st->refused);
    return 0;
}

static int
cache_clear(PyObject *module)
{
    struct mn_cache_state *st = PyModule_GetState(module);
    Py_CLEAR(st->store_type);
    Py_CLEAR(st->entry_type);
    Py_CLEAR(st->refused);
    return 0;
}

static void
cache_free(void *module)
{
    (void)cache_clear(module);
}

static PyMethodDef cache_methods[] = {
    {"fill", mn_cache_fill, METH_VARARGS, mn_cache_fill_doc},
    {"parts", mn_cache_parts, METH_O, mn_cache_parts_doc},
    {"plain", mn_cache_plain, METH_O, mn_cache_plain_doc},
    {"drop", mn_cache_drop, METH_VARARGS, mn_cache_drop_doc},
    {"sweep", mn_cache_sweep, METH_VARARGS, mn_cache_sweep_doc},
    {"unchanged", mn_cache_unchanged, METH_O, mn_cache_unchanged_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot cache_slots[] = {
    {Py_mod_exec, cache_exec},
#ifdef Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
#ifdef Py_MOD_GIL_NOT_USED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* cache/mn_cache.h: any thread may call it */
#endif
    {0, NULL},
};

static struct PyModuleDef cache_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "minato._cache",
    .m_doc = PyDoc_STR("The cache that processes of a user share."),
    .m_size = sizeof(struct mn_cache_state),
    .m_methods = cache_methods,
    .m_slots = cache_slots,
    .m_traverse = cache_traverse,
    .m_clear = cache_clear,
    .m_free = cache_free,
};

PyMODINIT_FUNC
PyInit__cache(void);

PyMODINIT_FUNC
PyInit__cache(void)
{
    return PyModuleDef_Init(&cache_module);
}
