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
    struct mn_posted *posted; /* layouts that workers can read, kept alive; by mn_engine_submit.c */
    pid_t pid;                /* process it belongs to; in a forked child it is inert */
    unsigned int inside;      /* threads in here without the GIL; close() waits for them */
};

/* What is the same for every batch of an epoch. */
struct mn_epoch {
    PyObject_HEAD
    uint64_t number;
    uint64_t base_seed;
    uint64_t user_epoch; /* 1 + what DataLoader.set_epoch was told; 0: nothing */
    bool seeded;         /* before each sample */
    bool splits;         /* batches that one worker could make, over several */
    PyObject *dumps;     /* of indices that are no list of machine integers */
    bool planned;        /* of the batch that was planned last, if there is one: */
    uint64_t last_number, last_position, last_sequence;
};

/* A batch in flight, as Python has it. */
struct mn_block_object {
    PyObject_HEAD
    PyObject *engine;  /* whose it is */
    PyObject *layout;  /* of the rows that the trainer itself has placed; NULL: as was posted */
    uint64_t sequence; /* of a planned batch; MN_UNPLANNED */
    uint64_t off;      /* 0: it cannot be made */
    uint32_t serial;   /* of the block there: later ones have another */
};

#define MN_UNPLANNED UINT64_MAX

/* The engine, or NULL with an exception when it is closed or another process's. */
struct mn_engine *
mn_engine_get(PyObject *self);

/* A Block of the engine. NULL with an exception. */
PyObject *
mn_block_new(PyObject *engine, uint64_t sequence, uint64_t off, PyObject *layout);

/* The Block, if it is one of this engine, in flight or not. NULL with an exception. */
struct mn_block_object *
mn_block_of(PyObject *engine, PyObject *block);

/* The engine, and where the block of a batch in flight lies. NULL with an exception for whatever
 * else may be said to be one. */
struct mn_engine *
mn_engine_of_block(PyObject *self, PyObject *block, uint64_t *block_off);

/* The same of a batch no task of which is in anybody's hands. */
struct mn_engine *
mn_engine_of_done(PyObject *self, PyObject *block, uint64_t *block_off);

/* The Epoch. NULL with an exception. */
struct mn_epoch *
mn_epoch_of(PyObject *engine, PyObject *epoch);

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

/* mn_engine_submit.c: static scheduling, and the layouts that rows may follow */

/* Where workers read the layout; 0: it was not posted. */
uint32_t
mn_engine_posted(PyObject *self, PyObject *layout);

void
mn_engine_forget_posted(PyObject *self);

extern const char mn_engine_post_doc[];
PyObject *
mn_engine_py_post(PyObject *self, PyObject *args);
extern const char mn_engine_submit_doc[];
PyObject *
mn_engine_py_submit(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *
mn_engine_py_resume(PyObject *self, PyObject *args);

/* mn_engine_plan.c: balanced scheduling */
extern const char mn_engine_plan_doc[];
PyObject *
mn_engine_py_plan(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
extern const char mn_engine_set_form_doc[];
PyObject *
mn_engine_py_set_form(PyObject *self, PyObject *layout);
PyObject *
mn_engine_py_plan_end(PyObject *self, PyObject *ignored);
PyObject *
mn_engine_py_plan_clear(PyObject *self, PyObject *ignored);
extern const char mn_engine_next_doc[];
PyObject *
mn_engine_py_next(PyObject *self, PyObject *args);
extern const char mn_engine_refused_doc[];
PyObject *
mn_engine_py_refused(PyObject *self, PyObject *block);
PyObject *
mn_engine_py_taken(PyObject *self, PyObject *block);

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
mn_engine_py_take(PyObject *self, PyObject *const *args, Py_ssize_t nargs);
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

/* mn_engine_snapshot.c: methods that report */
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
mn_engine_py_wait_begins(PyObject *self, PyObject *ignored);
PyObject *
mn_engine_py_wait_ends(PyObject *self, PyObject *got);
PyObject *
mn_engine_py_delivered(PyObject *self, PyObject *ignored);
extern const char mn_engine_spans_doc[];
PyObject *
mn_engine_py_spans(PyObject *self, PyObject *block);

#endif
