/* mn_native_worker.h - a native worker's loop: samples made by C functions, no GIL, no Python.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A native worker is a thread of the trainer. It has an entry, claims tasks and writes rows like a
 * worker process (workers/mn_tasks_and_retries.h). Each row is one call of a dataset's struct
 * mn_native_pipeline (minato/ops.h), straight into the row's fields. The pipeline defines the
 * layout of the rows: field i of a block is its field i.
 *
 * A native worker manages its own entry (workers/mn_tasks_and_retries.h).
 */
#ifndef MN_NATIVE_WORKER_H
#define MN_NATIVE_WORKER_H

#include <minato/ops.h>

#include "py/seeding/mn_seed_mix.h"
#include "workers/mn_tasks_and_retries.h"

#define MN_NATIVE_TEXT 512 /* bytes of an error text; equal to MN_OPS_TEXT, for the same texts */

struct mn_native {
    const struct mn_native_pipeline *pipeline;
    struct mn_seed_share share; /* the part of the epoch that this process makes */
    uint64_t stream; /* number of the seeds from which sample keys are made
                      * (py/seeding/mn_seed_mix.h) */
    /* Of a subset: the pipeline's index of each of its samples. NULL: all samples, in order. */
    const int64_t *indices;
    int64_t n_indices;
};

enum mn_native_event {
    MN_NATIVE_STOP,   /* the loader closes */
    MN_NATIVE_PYTHON, /* a task was claimed that this loop cannot run */
    MN_NATIVE_FAILED, /* a row of the claimed task failed: see the failure */
};

struct mn_native_failure {
    uint32_t row;
    int rc; /* negative errno, as in minato/ops.h */
    char text[MN_NATIVE_TEXT];
};

/* Returns whether this loop can serve such a pipeline; else *why is a sentence. */
int
mn_native_check(const struct mn_native_pipeline *p, const char **why);

/* Runs tasks until one needs Python. That task is then RUNNING under the caller, which must make it
 * DONE (mn_worker_account, mn_worker_done) before the next call. */
enum mn_native_event
mn_native_serve(const struct mn_native *n, struct mn_worker_side *w,
                struct mn_worker_clock *clock, uint32_t *task,
                struct mn_native_failure *failure);

#endif
