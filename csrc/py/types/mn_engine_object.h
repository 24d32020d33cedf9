/* mn_engine_object.h - the Engine object, for the files that implement it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_ENGINE_OBJECT_H
#define MN_ENGINE_OBJECT_H

#include <sys/types.h>

#include "py/module/mn_state.h"

struct mn_engine_object {
    PyObject_HEAD
    struct mn_engine *engine; /* NULL: closed */
    PyObject *costs;          /* CostModel or None: outlives the engine */
    PyObject *layout;         /* the form's, alive as long as it is set */
    pid_t pid;                /* process it belongs to; in a forked child it is inert */
    unsigned int inside;      /* threads in here without the GIL; close() waits for them */
};

/* The engine, or NULL with an exception when it is closed or another process's. */
struct mn_engine *
mn_engine_get(PyObject *self);

/* The engine, and the batch in flight that block names, whoever says so. NULL with an exception. */
struct mn_engine *
mn_engine_of_block(PyObject *self, PyObject *block, uint64_t *block_off);

/* Whether to go on waiting: -1 with an exception when another thread has begun to close the
 * engine, or a signal's handler has closed it: then it may be gone. With the GIL. */
int
mn_engine_goes_on(PyObject *self);

/* When a wait of so many seconds is over, by the monotonic clock; never for a negative number. */
uint64_t
mn_engine_until(double seconds);

/* How long to sleep before signals are looked for and the clock again; 0: the time is over,
 * however the sleeps before have ended. */
int64_t
mn_engine_slice(uint64_t until);

/* mn_engine_plan.c: balanced scheduling */
extern const char mn_engine_plan_doc[];
PyObject *
mn_engine_py_plan(PyObject *self, PyObject *args, PyObject *kwargs);
PyObject *
mn_engine_py_set_form(PyObject *self, PyObject *args);
PyObject *
mn_engine_py_plan_end(PyObject *self, PyObject *ignored);
PyObject *
mn_engine_py_plan_clear(PyObject *self, PyObject *ignored);
extern const char mn_engine_next_doc[];
PyObject *
mn_engine_py_next(PyObject *self, PyObject *args);
extern const char mn_engine_refused_doc[];
PyObject *
mn_engine_py_refused(PyObject *self, PyObject *sequence);
PyObject *
mn_engine_py_taken(PyObject *self, PyObject *args);

extern const char mn_engine_formed_doc[];
PyObject *
mn_engine_py_formed(PyObject *self, PyObject *ignored);
extern const char mn_engine_displaced_doc[];
PyObject *
mn_engine_py_displaced(PyObject *self, PyObject *ignored);
extern const char mn_engine_gather_doc[];
PyObject *
mn_engine_py_gather(PyObject *self, PyObject *layout);
extern const char mn_engine_place_doc[];
PyObject *
mn_engine_py_place(PyObject *self, PyObject *args);
extern const char mn_engine_scheduler_doc[];
PyObject *
mn_engine_py_scheduler(PyObject *self, PyObject *ignored);
extern const char mn_engine_timing_doc[];
PyObject *
mn_engine_py_timing(PyObject *self, PyObject *ignored);

/* mn_engine_take.c */
extern const char mn_engine_decode_doc[];
PyObject *
mn_engine_py_decode(PyObject *self, PyObject *args);
extern const char mn_engine_take_doc[];
PyObject *
mn_engine_py_take(PyObject *self, PyObject *args);
PyObject *
mn_engine_py_row(PyObject *self, PyObject *args);

/* mn_pagelock_type.c: pages that a device may read */
extern const char mn_engine_set_driver_doc[];
PyObject *
mn_engine_py_set_driver(PyObject *self, PyObject *args);
extern const char mn_engine_lock_pages_doc[];
PyObject *
mn_engine_py_lock_pages(PyObject *self, PyObject *args);
PyObject *
mn_engine_py_unlock_pages(PyObject *self, PyObject *ignored);
extern const char mn_engine_page_locks_doc[];
PyObject *
mn_engine_py_page_locks(PyObject *self, PyObject *ignored);

/* mn_engine_look.c: methods that report */
extern const char mn_engine_envelopes_doc[];
PyObject *
mn_engine_py_envelopes(PyObject *self, PyObject *args);
extern const char mn_engine_form_doc[];
PyObject *
mn_engine_py_form(PyObject *self, PyObject *block);
extern const char mn_engine_reports_doc[];
PyObject *
mn_engine_py_reports(PyObject *self, PyObject *block);
extern const char mn_engine_lost_doc[];
PyObject *
mn_engine_py_lost(PyObject *self, PyObject *block);
extern const char mn_engine_workers_doc[];
PyObject *
mn_engine_py_workers(PyObject *self, PyObject *ignored);
extern const char mn_engine_kill_worker_doc[];
PyObject *
mn_engine_py_kill_worker(PyObject *self, PyObject *args);
PyObject *
mn_engine_py_retire_worker(PyObject *self, PyObject *number);
extern const char mn_engine_end_worker_doc[];
PyObject *
mn_engine_py_end_worker(PyObject *self, PyObject *number);
extern const char mn_engine_move_to_doc[];
PyObject *
mn_engine_py_move_to(PyObject *self, PyObject *workers);
extern const char mn_engine_let_go_doc[];
PyObject *
mn_engine_py_let_go(PyObject *self, PyObject *number);
extern const char mn_engine_dismiss_doc[];
extern const char mn_engine_note_failed_doc[];

PyObject *
mn_engine_py_note_failed(PyObject *self, PyObject *arg);

PyObject *
mn_engine_py_dismiss(PyObject *self, PyObject *ignored);
extern const char mn_engine_health_doc[];
PyObject *
mn_engine_py_health(PyObject *self, PyObject *ignored);
extern const char mn_engine_memory_doc[];
PyObject *
mn_engine_py_memory(PyObject *self, PyObject *ignored);
extern const char mn_engine_waits_doc[];
PyObject *
mn_engine_py_waits(PyObject *self, PyObject *ignored);
PyObject *
mn_engine_py_asked(PyObject *self, PyObject *ignored);
PyObject *
mn_engine_py_given(PyObject *self, PyObject *got);
PyObject *
mn_engine_py_handed(PyObject *self, PyObject *ignored);
extern const char mn_engine_spans_doc[];
PyObject *
mn_engine_py_spans(PyObject *self, PyObject *block);

#endif
