/* mn_cache_module.c - minato._cache: the cache that processes share, for minato/cache.
 * SPDX-License-Identifier: Apache-2.0
 *
 * plain() and unchanged() are the parts of minato/cache/depends.py that run for each sample.
 * plain() digests plain values, such as the list of a dataset's paths, at memory speed. Two values
 * have one digest if they are equal and of the same types all the way down. The digest has 128 bits
 * and tells values of programs apart; it does not resist an attacker.
 * unchanged() compares objects by identity. So it only finds what was replaced, at each use.
 */
#include "py/cache/mn_cache_module.h"

#include <string.h>

#define DEPTH 100 /* of containers in each other; a list may hold itself */

struct digest {
    uint64_t a, b;
};

static void
add_word(struct digest *d, uint64_t word)
{
    unsigned __int128 x = (unsigned __int128)(d->a ^ word) * UINT64_C(0x9e3779b97f4a7c15);
    unsigned __int128 y = (unsigned __int128)(d->b + word) * UINT64_C(0xd6e8feb86659fd93);
    d->a = (uint64_t)x + (uint64_t)(y >> 64) + UINT64_C(0x243f6a8885a308d3);
    d->b = ((uint64_t)y ^ (uint64_t)(x >> 64)) + UINT64_C(0x13198a2e03707344);
}

/* tag: the type; with the length it keeps neighbours apart. */
static void
add_bytes(struct digest *d, char tag, const void *data, size_t bytes)
{
    const char *at = data;
    uint64_t word;
    add_word(d, (uint64_t)bytes << 8 | (unsigned char)tag);
    for (; bytes >= sizeof(word); bytes -= sizeof(word), at += sizeof(word)) {
        memcpy(&word, at, sizeof(word));
        add_word(d, word);
    }
    if (bytes > 0) {
        word = 0;
        memcpy(&word, at, bytes);
        add_word(d, word);
    }
}

/* 1: added; 0: not a plain value; -1: an error is set. */
static int
add(struct digest *d, PyObject *value, int depth);

static int
add_int(struct digest *d, PyObject *value)
{
    int large;
    long long small = PyLong_AsLongLongAndOverflow(value, &large);
    if (!large) {
        add_bytes(d, 'i', &small, sizeof(small));
        return 1;
    }
    PyObject *digits = PyNumber_ToBase(value, 16);
    if (digits == NULL) {
        return -1;
    }
    add_bytes(d, 'I', PyUnicode_DATA(digits), (size_t)PyUnicode_GET_LENGTH(digits));
    Py_DECREF(digits);
    return 1;
}

static int
add_list(struct digest *d, PyObject *list, int depth)
{
    Py_ssize_t length = PyList_GET_SIZE(list);
    add_word(d, (uint64_t)length << 8 | '[');
    for (Py_ssize_t i = 0; i < length; i++) {
        PyObject *item = PyList_GetItemRef(list, i);
        int added = item == NULL ? -1 : add(d, item, depth);
        Py_XDECREF(item);
        if (added != 1) {
            return added;
        }
    }
    return 1;
}

static int
add_dict(struct digest *d, PyObject *dict, int depth)
{
    int added = 1;
    Py_BEGIN_CRITICAL_SECTION(dict);
    PyObject *key, *value;
    Py_ssize_t at = 0;
    add_word(d, (uint64_t)PyDict_GET_SIZE(dict) << 8 | '{');
    while (added == 1 && PyDict_Next(dict, &at, &key, &value)) {
        added = add(d, key, depth);
        added = added == 1 ? add(d, value, depth) : added;
    }
    Py_END_CRITICAL_SECTION();
    return added;
}

/* The order of a set is not its own: the digests of its items are added up. */
static int
add_set(struct digest *d, PyObject *set, int depth)
{
    struct digest sum = {0, 0};
    PyObject *items = PySequence_List(set);
    if (items == NULL) {
        return -1;
    }
    int added = 1;
    for (Py_ssize_t i = 0; added == 1 && i < PyList_GET_SIZE(items); i++) {
        struct digest one = {0, 0};
        added = add(&one, PyList_GET_ITEM(items, i), depth);
        sum.a += one.a;
        sum.b += one.b;
    }
    Py_DECREF(items);
    add_bytes(d, PyFrozenSet_CheckExact(set) ? 'Z' : 'S', &sum, sizeof(sum));
    return added;
}

static int
add(struct digest *d, PyObject *value, int depth)
{
    PyTypeObject *type = Py_TYPE(value);
    if (type == &PyUnicode_Type) {
        int kind = (int)PyUnicode_KIND(value);
        add_bytes(d, (char)('0' + kind), PyUnicode_DATA(value),
                  (size_t)PyUnicode_GET_LENGTH(value) * (size_t)kind);
        return 1;
    }
    if (type == &PyLong_Type) {
        return add_int(d, value);
    }
    if (type == &PyFloat_Type) {
        double number = PyFloat_AS_DOUBLE(value);
        add_bytes(d, 'f', &number, sizeof(number));
        return 1;
    }
    if (type == &PyBytes_Type) {
        add_bytes(d, 'b', PyBytes_AS_STRING(value), (size_t)PyBytes_GET_SIZE(value));
        return 1;
    }
    if (value == Py_None || value == Py_Ellipsis || type == &PyBool_Type) {
        char one = value == Py_None ? 'N' : value == Py_True ? 'T' : value == Py_False ? 'F' : '.';
        add_word(d, (uint64_t)one);
        return 1;
    }
    if (type == &PyComplex_Type) {
        Py_complex number = PyComplex_AsCComplex(value);
        add_bytes(d, 'c', &number, sizeof(number));
        return 1;
    }
    if (depth == DEPTH) {
        return 0;
    }
    if (type == &PyTuple_Type) {
        int added = 1;
        add_word(d, (uint64_t)PyTuple_GET_SIZE(value) << 8 | '(');
        for (Py_ssize_t i = 0; added == 1 && i < PyTuple_GET_SIZE(value); i++) {
            added = add(d, PyTuple_GET_ITEM(value, i), depth + 1);
        }
        return added;
    }
    if (type == &PyList_Type) {
        return add_list(d, value, depth + 1);
    }
    if (type == &PyDict_Type) {
        return add_dict(d, value, depth + 1);
    }
    return type == &PySet_Type || type == &PyFrozenSet_Type ? add_set(d, value, depth + 1) : 0;
}

static const char plain_doc[] =
    PyDoc_STR("plain(value) -> bytes | None\n\nThe digest, 16 bytes, of numbers, text, bytes, "
              "None, ..., and of tuples, lists, dicts and sets of them. None for other values.");

static PyObject *
plain(PyObject *Py_UNUSED(module), PyObject *value)
{
    struct digest d = {0, 0};
    int added = add(&d, value, 0);
    if (added != 1) {
        return added < 0 ? NULL : Py_NewRef(Py_None);
    }
    for (int i = 0; i < 4; i++) {
        add_word(&d, 0);
    }
    return PyBytes_FromStringAndSize((const char *)&d, sizeof(d));
}

/* The object that a record of unchanged() names; borrowed. NULL: nothing, or an error is set. */
static PyObject *
named(PyObject *holder, PyObject *name)
{
    if (PyCell_Check(holder)) {
        return PyCell_GET(holder);
    }
    if (PyFunction_Check(holder)) {
        return name == Py_None ? PyFunction_GetCode(holder) : PyFunction_GetDefaults(holder);
    }
    PyObject *names = PyType_Check(holder) ? ((PyTypeObject *)holder)->tp_dict : holder;
    return PyDict_GetItemWithError(names, name);
}

static int
is_unchanged(PyObject *record)
{
    PyObject *holder = PyTuple_GET_ITEM(record, 0), *name = PyTuple_GET_ITEM(record, 1);
    PyObject *value = PyTuple_GET_ITEM(record, 2);
    if (PyType_Check(holder) && name == Py_None) {
        return PyDict_GET_SIZE(((PyTypeObject *)holder)->tp_dict) == PyLong_AsSsize_t(value);
    }
    if (PyTuple_Check(name)) { /* a name that was missing */
        return named(holder, PyTuple_GET_ITEM(name, 0)) == NULL;
    }
    PyObject *found = named(holder, name);
    return found == value || (found == NULL && value == Py_None);
}

static const char unchanged_doc[] = PyDoc_STR(
    "unchanged(records) -> bool\n\nWhether in each (holder, name, value) the holder, a dict, "
    "class, cell or function, has that same object.");

static PyObject *
unchanged(PyObject *Py_UNUSED(module), PyObject *records)
{
    if (!PyList_CheckExact(records)) {
        return PyErr_Format(PyExc_TypeError, "records must be a list");
    }
    int same = 1;
    for (Py_ssize_t i = 0; same && i < PyList_GET_SIZE(records); i++) {
        PyObject *record = PyList_GetItemRef(records, i);
        if (record == NULL) {
            return NULL;
        }
        same = is_unchanged(record);
        Py_DECREF(record);
    }
    return PyErr_Occurred() ? NULL : PyBool_FromLong(same);
}

static int
add_type(PyObject *module, PyTypeObject **type, PyType_Spec *spec, PyMethodDef *functions)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type == NULL || PyModule_AddType(module, *type) < 0
               ? -1
               : PyModule_AddFunctions(module, functions);
}

static int
cache_exec(PyObject *module)
{
    struct mn_cache_state *st = PyModule_GetState(module);
    st->refused = PyErr_NewExceptionWithDoc(
        "minato._cache.Refused", "Why there can be no cache in a folder.", PyExc_RuntimeError,
        NULL);
    return st->refused == NULL || PyModule_AddObjectRef(module, "Refused", st->refused) < 0
                   || add_type(module, &st->entry_type, &mn_cache_entry_spec,
                               mn_cache_entry_functions) < 0
                   || add_type(module, &st->store_type, &mn_cache_store_spec,
                               mn_cache_store_functions) < 0
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
    {"plain", plain, METH_O, plain_doc},
    {"unchanged", unchanged, METH_O, unchanged_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot cache_slots[] = /* cache/mn_cache.h: any thread may call it */
    MN_MODULE_SLOTS(cache_exec, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED);

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
