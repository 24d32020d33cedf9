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
    struct mn_posted *posted; /* layouts that workers read, kept alive: mn_engine_type_submit.c */
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

/* Where workers read the layout; 0: it was not posted. */
uint32_t
mn_engine_posted(PyObject *self, PyObject *layout);

void
mn_engine_forget_posted(PyObject *self);

/* ---- methods, which mn_engine_type.c makes the type's ------------------------------------ */

/* mn_engine_py_<name>, of no argument, one or a tuple of them, and what it is documented by: the
 * table of mn_engine_type.c says which, and documents some itself. */
#define MN_ENGINE_METHOD(name)                                                          \
    extern const char mn_engine_##name##_doc[];                                         \
    PyObject *mn_engine_py_##name(PyObject *self, PyObject *arg)
#define MN_ENGINE_FAST_METHOD(name)                                                     \
    extern const char mn_engine_##name##_doc[];                                         \
    PyObject *mn_engine_py_##name(PyObject *self, PyObject *const *args, Py_ssize_t nargs)

/* mn_engine_type_submit.c: static scheduling, and the layouts that rows may follow */
MN_ENGINE_METHOD(post);
MN_ENGINE_FAST_METHOD(submit);
MN_ENGINE_METHOD(resume);

/* mn_engine_type_plan.c: balanced scheduling */
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
MN_ENGINE_METHOD(kill_zygote);
MN_ENGINE_METHOD(zygote_replaced);
MN_ENGINE_METHOD(retire_worker);
MN_ENGINE_METHOD(end_worker);
MN_ENGINE_METHOD(move_to);
MN_ENGINE_METHOD(let_go);
MN_ENGINE_METHOD(note_failed);
MN_ENGINE_METHOD(dismiss);
MN_ENGINE_METHOD(health);
MN_ENGINE_METHOD(memory);
MN_ENGINE_METHOD(waits);
MN_ENGINE_METHOD(wait_begins);
MN_ENGINE_METHOD(wait_ends);
MN_ENGINE_METHOD(delivered);
MN_ENGINE_METHOD(spans);

#endif
