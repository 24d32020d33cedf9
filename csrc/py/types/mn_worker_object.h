/* mn_worker_object.h - the Worker object, for the two files that implement it.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_WORKER_OBJECT_H
#define MN_WORKER_OBJECT_H

#include "workers/mn_worker_clock.h"
#include "py/module/mn_state.h"

struct mn_worker_object {
    PyObject_HEAD
    struct mn_worker_side side;
    PyObject *segment;
    PyObject *dataset;
    PyObject *seeder;     /* or None */
    PyObject *open_layout; /* bytes -> Layout */
    PyObject *load_index; /* bytes -> object */
    PyObject *set_epoch;  /* int -> dataset of that epoch: sets the dataset's epoch; or None */
    uint64_t user_epoch;  /* 1 + the last epoch that was set */
    PyObject *layouts;    /* dict: offset -> Layout */
    PyObject *indices;    /* unpickled indices of the block with this serial */
    uint32_t indices_of;
    bool goes_on;         /* continue after a sample that has failed: Python handles that sample */
    bool thread;          /* a thread of the trainer: it manages its own entry
                           * (workers/mn_thread_entry.h) */
    bool holding;         /* `task` is RUNNING under us */
    uint32_t task;
    uint32_t collate;     /* claimed when its block's last part was done, or MN_NO_TASK */
    struct mn_worker_clock clock;
};

/* Begins the task that was claimed. Returns what Python must do, to be answered with finish(); NULL
 * with an exception that ends the worker. NULL without an exception: done, claim the next; or, in a
 * thread, it is over. */
PyObject *
mn_worker_run_task(struct mn_state *st, struct mn_worker_object *o);

/* Writes the samples, a list, as the first rows of the current block. Returns 1: done; for each
 * sample a list of its objects that are not row data is appended to objects. 0: some do not fit, or
 * there are no rows for them. -1: an exception. */
int
mn_worker_place_rows(struct mn_state *st, struct mn_worker_object *o, PyObject *samples,
                     PyObject *objects);

/* Returns the indices of a batch, those of spare samples at the end. */
PyObject *
mn_worker_indices(struct mn_worker_object *o, struct mn_block *b);

/* Ends the current task, whose result is in its place. */
void
mn_worker_finish_task(struct mn_worker_object *o);

#endif
