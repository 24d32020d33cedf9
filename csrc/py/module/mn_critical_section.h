/* mn_critical_section.h - objects that several threads use, with or without the GIL.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A method of an object with state runs in a critical section of the object. Without the GIL that
 * gives one object the guarantee that the GIL gives all. No other thread is in one of its methods,
 * except where the method releases the thread state or calls Python. With the GIL it does nothing.
 * Lists and dictionaries of the program may be changed by other threads while we read them. So they
 * are read by functions that return our own references.
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

/* Defines a method's version that runs in a critical section of its object; the method table names
 * that one. */
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

/* The same for a method that reports: it reads memory that close() frees, and makes objects
 * meanwhile. Up to Python 3.11, making an object may collect garbage at once. That may collect the
 * iterator, which closes the engine. */
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

/* The same for a method with METH_FASTCALL. */
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
