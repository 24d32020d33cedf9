/* mn_python.h - Python.h, and what objects that several threads use need of it in each version.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A method of an object with state runs in a critical section of the object. Without the GIL that
 * gives one object the guarantee that the GIL gives all. No other thread is in one of its methods,
 * except where the method releases the thread state or calls Python. With the GIL it does nothing.
 * Lists and dictionaries of the program may be changed by other threads while we read them. So they
 * are read by functions that return our own references.
 */
#ifndef MN_PYTHON_H
#define MN_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#if PY_VERSION_HEX < 0x030D0000
#define Py_BEGIN_CRITICAL_SECTION(object) {
#define Py_END_CRITICAL_SECTION() }

static inline PyObject *
PyList_GetItemRef(PyObject *list, Py_ssize_t i)
{
    return Py_XNewRef(PyList_GetItem(list, i));
}
#endif

/* Slots of a module: what fills it, whether other interpreters may load it, and that it needs no
 * GIL. */
#if PY_VERSION_HEX >= 0x030D0000
#define MN_MODULE_SLOTS(exec, interpreters)                                              \
    {{Py_mod_exec, exec}, {Py_mod_multiple_interpreters, interpreters},                  \
     {Py_mod_gil, Py_MOD_GIL_NOT_USED}, {0, NULL}}
#elif PY_VERSION_HEX >= 0x030C0000
#define MN_MODULE_SLOTS(exec, interpreters)                                              \
    {{Py_mod_exec, exec}, {Py_mod_multiple_interpreters, interpreters}, {0, NULL}}
#else
#define MN_MODULE_SLOTS(exec, interpreters) {{Py_mod_exec, exec}, {0, NULL}}
#endif

/* Sets an exception as PyErr_Format() does; -1. */
#define MN_RAISE(...) (PyErr_Format(__VA_ARGS__), -1)

/* Statements that are executed without the GIL. */
#define MN_DO_WITHOUT_GIL(...)                                                          \
    do {                                                                                \
        PyThreadState *state_ = PyEval_SaveThread();                                    \
        __VA_ARGS__;                                                                    \
        PyEval_RestoreThread(state_);                                                   \
    } while (0)

/* The result of a call that is made without the GIL. */
#define MN_WITHOUT_GIL(call)                                                            \
    ({                                                                                  \
        PyThreadState *state_ = PyEval_SaveThread();                                    \
        __typeof__(call) result_ = (call);                                              \
        PyEval_RestoreThread(state_);                                                   \
        result_;                                                                        \
    })

/* Returns None; NULL for a negative number, which says that an exception is set. */
static inline PyObject *
mn_none_unless(int rc)
{
    return rc < 0 ? NULL : Py_NewRef(Py_None);
}

/* Ends tp_dealloc: frees an object that refers to nothing any more but its type. */
static inline void
mn_free_object(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

#endif
