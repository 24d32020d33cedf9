/* mn_engine_object.c - helpers of an Engine's methods, and how they wait.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/types/mn_engine_object.h"

#include "engine/mn_engine_snapshot.h"
#include "os/mn_clock.h"
#include "os/mn_proc.h"

/* The longest sleep of next() before it checks for signals. A backstop: a signal to the main thread
 * ends the sleep by itself. */
#define SIGNAL_LOOK_NS (INT64_C(500) * 1000 * 1000)

struct mn_engine *
mn_engine_get(PyObject *self)
{
    struct mn_engine_object *o = (struct mn_engine_object *)self;
    if (o->engine == NULL || o->pid != mn_proc_self()) {
        PyErr_SetString(PyExc_RuntimeError,
                        o->engine == NULL ? "the engine is closed"
                                          : "the engine belongs to another process");
        return NULL;
    }
    return o->engine;
}

int
mn_engine_goes_on(PyObject *self)
{
    struct mn_engine *e = mn_engine_get(self);
    if (e != NULL && mn_engine_is_stopped(e)) {
        PyErr_SetString(PyExc_RuntimeError, "the loader was shut down; make a new iterator");
        return -1;
    }
    return e != NULL ? 0 : -1;
}

uint64_t
mn_engine_until(double seconds)
{
    bool endless = !(seconds >= 0 && seconds <= 1e9);
    return endless ? UINT64_MAX : mn_now_ns() + (uint64_t)(seconds * 1e9);
}

int64_t
mn_engine_slice(uint64_t until)
{
    uint64_t now = until == UINT64_MAX ? 0 : mn_now_ns();
    uint64_t left = until > now ? until - now : 0;
    return left < (uint64_t)SIGNAL_LOOK_NS ? (int64_t)left : SIGNAL_LOOK_NS;
}
