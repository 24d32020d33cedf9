/* mn_critical_section.h - objects that several threads use, also where there is no GIL.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A method of an object that has state of its own runs in a critical section of the object.
 * Without the GIL that says for one object what the GIL says for all: nobody else is in a
 * method of it, but where the method lets go of its thread or calls Python. With the GIL it is
 * nothing. What other threads may change while we look, lists and dictionaries of the program's,
 * is read by functions that return references of our own.
 */
#ifndef MN_CRITICAL_SECTION_H
#define MN_CRITICAL_SECTION_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#if PY_VERSION_HEX < 0x030D0000
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }

static inline PyObject *
PyList_GetItemRef(PyObject *list, Py_ssize_t i)
{
    return Py_XNewRef(PyList_GetItem(list, i));
}
#endif

/* Of a method: the same in a critical section of its object, to be named in the table. */
#define MN_ALONE(method) method##_alone
#define MN_FAST_ALONE(method) (PyCFunction)(void (*)(void))method##_alone

#define MN_METHOD_ALONE(method)                                                         \
    static PyObject *method##_alone(PyObject *self, PyObject *arg)                      \
    {                                                                                   \
        PyObject *result;                                                               \
        Py_BEGIN_CRITICAL_SECTION(self);                                                \
        result = method(self, arg);                                                     \
        Py_END_CRITICAL_SECTION();                                                      \
        return result;                                                                  \
    }

/* Of one that reports: it reads memory that close() ends, and makes objects as it goes. Up to 3.11
 * making one may collect garbage at once, and that may be the iterator, which closes the engine. */
#if PY_VERSION_HEX >= 0x030C0000
#define MN_REPORT_ALONE(method) MN_METHOD_ALONE(method)
#else
#define MN_REPORT_ALONE(method)                                                         \
    static PyObject *method##_alone(PyObject *self, PyObject *arg)                      \
    {                                                                                   \
        int collects = PyGC_Disable();                                                  \
        PyObject *result = method(self, arg);                                           \
        if (collects) {                                                                 \
            (void)PyGC_Enable();                                                        \
        }                                                                               \
        return result;                                                                  \
    }
#endif

/* Of one with METH_FASTCALL. */
#define MN_FAST_METHOD_ALONE(method)                                                    \
    static PyObject *method##_alone(PyObject *self, PyObject *const *args,              \
                                    Py_ssize_t nargs)                                   \
    {                                                                                   \
        PyObject *result;                                                               \
        Py_BEGIN_CRITICAL_SECTION(self);                                                \
        result = method(self, args, nargs);                                             \
        Py_END_CRITICAL_SECTION();                                                      \
        return result;                                                                  \
    }

#endif
