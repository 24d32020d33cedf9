/* mn_engine_object.h - the Engine object, for the two files that implement it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_OBJECT_H
#define MN_ENGINE_OBJECT_H

#include <sys/types.h>

#include "py/mn_state.h"

struct mn_engine_object {
    PyObject_HEAD
    struct mn_engine *engine; /* NULL: closed */
    pid_t pid;                /* process it belongs to; in a forked child it is inert */
};

/* The engine, or NULL with an exception when it is closed or another process's. */
struct mn_engine *
mn_engine_get(PyObject *self);

/* mn_engine_look.c: methods that report */
extern const char mn_engine_envelopes_doc[];
PyObject *
mn_engine_envelopes(PyObject *self, PyObject *block);
extern const char mn_engine_reports_doc[];
PyObject *
mn_engine_reports(PyObject *self, PyObject *block);
extern const char mn_engine_lost_doc[];
PyObject *
mn_engine_lost(PyObject *self, PyObject *block);
extern const char mn_engine_workers_doc[];
PyObject *
mn_engine_workers(PyObject *self, PyObject *ignored);
PyObject *
mn_engine_retire_worker(PyObject *self, PyObject *number);
extern const char mn_engine_health_doc[];
PyObject *
mn_engine_health(PyObject *self, PyObject *ignored);
extern const char mn_engine_memory_doc[];
PyObject *
mn_engine_memory(PyObject *self, PyObject *ignored);

#endif
