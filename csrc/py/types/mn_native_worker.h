/* mn_native_worker.h - a native worker's loop: samples made by C functions, no GIL, no Python.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A native worker is a thread of the trainer. It has an entry, claims tasks and writes rows
 * as a worker process does (workers/mn_worker.h), and each row is one call of a dataset's
 * struct mn_native_pipeline (minato/ops.h), straight into the row's fields. The layout of
 * the rows is the pipeline's: field i of a block is its field i.
 *
 * Its entry is its own business (workers/mn_thread_entry.h).
 */
#ifndef MN_NATIVE_WORKER_H
#define MN_NATIVE_WORKER_H

#include <minato/ops.h>

#include "py/seeding/mn_seed_mix.h"
#include "workers/mn_worker_clock.h"

#define MN_NATIVE_TEXT 512 /* bytes of an error text, as MN_OPS_TEXT: the same words */

struct mn_native {
    const struct mn_native_pipeline *pipeline;
    struct mn_seed_share share; /* of the epoch, that this process makes */
    uint64_t stream; /* of the seeds that a sample's key comes from (py/seeding/mn_seed_mix.h) */
    /* Of a subset: the pipeline's index of each of its samples. NULL: all, as they are. */
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
    int rc; /* negative errno, as minato/ops.h has it */
    char text[MN_NATIVE_TEXT];
};

/* Whether this loop can serve such a pipeline; else why is a sentence. */
int
mn_native_check(const struct mn_native_pipeline *p, const char **why);

/* Runs tasks until one needs Python. The task is then RUNNING under the caller, who makes it
 * DONE (mn_worker_account, mn_worker_done) before the next call. */
enum mn_native_event
mn_native_serve(const struct mn_native *n, struct mn_worker_side *w,
                struct mn_worker_clock *clock, uint32_t *task,
                struct mn_native_failure *failure);

#endif /* MN_NATIVE_WORKER_H */
