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
    struct mn_posted *posted; /* layouts that workers read, kept alive: mn_engine_type_plan.c */
    pid_t pid;                /* process that owns it; in a forked child it does nothing */
    unsigned int inside;      /* threads in its functions without the GIL; close() waits for them */
};

/* Values that are the same for every batch of an epoch. */
struct mn_epoch {
    PyObject_HEAD
    uint64_t number;
    uint64_t base_seed;
    uint64_t user_epoch; /* 1 + the argument of DataLoader.set_epoch; 0: not called */
    uint32_t seeded;     /* enum mn_block_seeded */
    bool splits;         /* split batches that one worker could make */
    PyObject *dumps;     /* for indices that are not a list of machine integers */
    bool planned;        /* the next three are those of the batch planned last */
    uint64_t last_number, last_position, last_sequence;
};

/* A batch in flight, as Python sees it. */
struct mn_block_object {
    PyObject_HEAD
    PyObject *engine;  /* its engine */
    PyObject *layout;  /* of rows that the trainer itself has placed; NULL: the posted one */
    uint64_t sequence; /* of a planned batch; or MN_UNPLANNED */
    uint64_t off;      /* 0: it cannot be made */
    uint32_t serial;   /* of the block there: later blocks have another */
};

#define MN_UNPLANNED UINT64_MAX

/* Returns the engine; NULL with an exception if it is closed or belongs to another process. */
struct mn_engine *
mn_engine_get(PyObject *self);

/* Makes a Block of the engine. Returns NULL with an exception. */
PyObject *
mn_block_new(PyObject *engine, uint64_t sequence, uint64_t off, PyObject *layout);

/* Returns the Block if it belongs to this engine, in flight or not. NULL with an exception. */
struct mn_block_object *
mn_block_of(PyObject *engine, PyObject *block);

/* Returns the engine, and where the block of a batch in flight lies. NULL with an exception for any
 * other object. */
struct mn_engine *
mn_engine_of_block(PyObject *self, PyObject *block, uint64_t *block_off);

/* Does the same for a batch of which no worker has a task. */
struct mn_engine *
mn_engine_of_done(PyObject *self, PyObject *block, uint64_t *block_off);

/* Returns the Epoch. NULL with an exception. */
struct mn_epoch *
mn_epoch_of(PyObject *engine, PyObject *epoch);

/* Returns whether to continue a wait. -1 with an exception: another thread has begun to close the
 * engine, or a signal handler has closed it, and it may be gone. Needs the GIL. */
int
mn_engine_goes_on(PyObject *self);

/* Returns when a wait of `seconds` ends, by the monotonic clock; never for a negative number. */
uint64_t
mn_engine_until(double seconds);

/* Returns how long to sleep before the next check of signals and the clock. 0: the time is over, no
 * matter how the earlier sleeps have ended. */
int64_t
mn_engine_slice(uint64_t until);

/* Returns where workers read the layout; 0: it was not posted. */
uint32_t
mn_engine_posted(PyObject *self, PyObject *layout);

void
mn_engine_forget_posted(PyObject *self);

/* ---- methods, which mn_engine_type.c puts into the type -------------------------------- */

/* Declares mn_engine_py_<name>, which takes no argument, one, or a tuple of them, and its
 * docstring. The table of mn_engine_type.c says which, and documents some itself. */
#define MN_ENGINE_METHOD(name)                                                          \
    extern const char mn_engine_##name##_doc[];                                         \
    PyObject *mn_engine_py_##name(PyObject *self, PyObject *arg)
#define MN_ENGINE_FAST_METHOD(name)                                                     \
    extern const char mn_engine_##name##_doc[];                                         \
    PyObject *mn_engine_py_##name(PyObject *self, PyObject *const *args, Py_ssize_t nargs)

/* mn_engine_type_plan.c: static scheduling, the layouts that rows may follow, ... */
MN_ENGINE_METHOD(post);
MN_ENGINE_FAST_METHOD(submit);
MN_ENGINE_METHOD(resume);

/* ... and balanced scheduling */
MN_ENGINE_FAST_METHOD(plan);
MN_ENGINE_METHOD(set_form);
MN_ENGINE_METHOD(plan_end);
MN_ENGINE_METHOD(plan_clear);
MN_ENGINE_METHOD(next);
MN_ENGINE_METHOD(refused);
MN_ENGINE_METHOD(taken);
MN_ENGINE_METHOD(formed);
MN_ENGINE_METHOD(displaced);
MN_ENGINE_METHOD(gather);
MN_ENGINE_METHOD(place);
MN_ENGINE_METHOD(scheduler);
MN_ENGINE_METHOD(timing);

/* mn_engine_type_take.c */
MN_ENGINE_METHOD(decode);
MN_ENGINE_FAST_METHOD(take);
MN_ENGINE_METHOD(row);

/* mn_pagelock_type.c: pages that a device may read */
MN_ENGINE_METHOD(set_driver);
MN_ENGINE_METHOD(lock_pages);
MN_ENGINE_METHOD(unlock_pages);
MN_ENGINE_METHOD(page_locks);

/* mn_engine_type_snapshot.c: methods that report */
MN_ENGINE_METHOD(envelopes);
MN_ENGINE_METHOD(form);
MN_ENGINE_METHOD(reports);
MN_ENGINE_METHOD(lost);
MN_ENGINE_METHOD(workers);
MN_ENGINE_METHOD(kill_worker);
MN_ENGINE_METHOD(zygote_replaced);
MN_ENGINE_METHOD(retire_worker);
MN_ENGINE_METHOD(end_worker);
MN_ENGINE_METHOD(end_late);
MN_ENGINE_METHOD(move_to);
MN_ENGINE_METHOD(let_go);
MN_ENGINE_METHOD(note_failed);
MN_ENGINE_METHOD(set_title);
MN_ENGINE_METHOD(dismiss);
MN_ENGINE_METHOD(health);
MN_ENGINE_METHOD(deaths);
MN_ENGINE_METHOD(memory);
MN_ENGINE_METHOD(waits);
MN_ENGINE_METHOD(wait_begins);
MN_ENGINE_METHOD(wait_ends);
MN_ENGINE_METHOD(delivered);
MN_ENGINE_METHOD(spans);

#endif
