/* mn_seed_words.c - see mn_seed_words.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/seeding/mn_seed_words.h"

#include <stdint.h>

#include "py/seeding/mn_seed_mix.h"

int
mn_seed_arg_u64(PyObject *obj, void *out)
{
    PyObject *index = PyNumber_Index(obj);
    if (index == NULL) {
        return 0;
    }
    unsigned long long value = PyLong_AsUnsignedLongLong(index);
    Py_DECREF(index);
    if (value == (unsigned long long)-1 && PyErr_Occurred()) {
        return 0;
    }
    *(uint64_t *)out = value;
    return 1;
}

int
mn_seed_arg_domain(PyObject *obj, void *out)
{
    uint64_t value = 0;
    if (!mn_seed_arg_u64(obj, &value)) {
        return 0;
    }
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "domain must fit 32 bits");
        return 0;
    }
    *(uint32_t *)out = (uint32_t)value;
    return 1;
}

const char mn_seed_words_doc[] =
    "(words, seed) of one stream: n words of 4 bytes (wide: 8), and its 63-bit seed.";

PyObject *
mn_seed_py_words(PyObject *Py_UNUSED(type), PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"base_seed", "epoch", "position", "domain", "stream",
                            "n",         "vector", "wide",    NULL};
    uint64_t base_seed, epoch, position, number;
    uint32_t domain;
    Py_ssize_t n;
    int vector = 1, wide = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&O&n|pp", names, mn_seed_arg_u64,
                                     &base_seed, mn_seed_arg_u64, &epoch, mn_seed_arg_u64,
                                     &position, mn_seed_arg_domain, &domain, mn_seed_arg_u64,
                                     &number, &n, &vector, &wide)) {
        return NULL;
    }
    if (n < 0 || n > 1 << 20) {
        PyErr_SetString(PyExc_ValueError, "n out of range");
        return NULL;
    }
    struct mn_seed_stream s =
        mn_seed_stream_make(mn_seed_key_make(base_seed, epoch, position, domain), number);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * (wide ? 8 : 4));
    if (bytes == NULL) {
        return NULL;
    }
    void *data = PyBytes_AS_STRING(bytes);
    const struct mn_seed_isa *isa = mn_seed_isa_pick(vector);
    if (wide) {
        isa->wide(&s, data, (size_t)n);
    }
    else {
        isa->words(&s, data, (size_t)n);
    }
    return Py_BuildValue("(NK)", bytes, (unsigned long long)s.seed);
}
