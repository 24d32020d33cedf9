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
    PyObject *set_epoch;  /* int -> dataset of that epoch: tells the dataset; or None */
    uint64_t user_epoch;  /* the last it was told, + 1 */
    PyObject *layouts;    /* dict: offset -> Layout */
    PyObject *indices;    /* unpickled indices of the block with this serial */
    uint32_t indices_of;
    bool goes_on;         /* behind a sample that has failed: Python takes care of that one */
    bool thread;          /* of the trainer: it sees to its own entry (workers/mn_thread_entry.h) */
    bool holding;         /* a task is RUNNING under us */
    uint32_t task;
    uint32_t collate;     /* claimed when its block's last part was done, or MN_NO_TASK */
    struct mn_worker_clock clock;
};

/* Begins the task that was claimed. What Python has to do, to be answered with finish(); NULL
 * with an exception that ends the worker; NULL and no exception: done, claim the next, or in a
 * thread, it is over. */
PyObject *
mn_worker_run_task(struct mn_state *st, struct mn_worker_object *o);

/* Writes the samples, a list, as the first rows of the block in hand. 1: done, and of each the
 * objects that are no row data are a list appended to objects; 0: some do not fit, or there are
 * no rows for them; -1: an exception. */
int
mn_worker_place_rows(struct mn_state *st, struct mn_worker_object *o, PyObject *samples,
                     PyObject *objects);

/* The indices of a batch, those of spare samples at the end. */
PyObject *
mn_worker_indices(struct mn_worker_object *o, struct mn_block *b);

/* The task in hand is done, and its result where it belongs. */
void
mn_worker_finish_task(struct mn_worker_object *o);

#endif
