/* mn_native_worker.c - see mn_native_worker.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/types/mn_native_worker.h"

#include <errno.h>
#include <stdio.h>

#include "base/mn_base.h"
#include "py/seeding/mn_seed_mix.h"
#include "workers/mn_tasks_and_retries.h"

int
mn_native_check(const struct mn_native_pipeline *p, const char **why)
{
    *why = NULL;
    if (p->abi != MN_OPS_ABI || p->size < sizeof(*p)) {
        *why = "it was built for another version of minato/ops.h";
    }
    else if (p->run == NULL || p->n_fields < 1 || p->n_fields > MN_NATIVE_FIELDS
             || p->keying > MN_KEYED_BY_SAMPLE) {
        *why = "it has no run function, too few or too many fields, or an unknown keying";
    }
    for (int32_t i = 0; *why == NULL && i < p->n_fields; i++) {
        const struct mn_native_field *f = &p->fields[i];
        uint64_t bytes = f->itemsize;
        bool sound = f->ndim >= 0 && f->ndim <= MN_NATIVE_DIMS && f->itemsize != 0;
        for (int32_t axis = 0; sound && axis < f->ndim; axis++) {
            sound = f->shape[axis] >= 0
                    && !__builtin_mul_overflow(bytes, (uint64_t)f->shape[axis], &bytes);
        }
        sound = sound && bytes == f->bytes;
        if (!sound || (f->ndim == 0 && (f->kind != 'i' || f->itemsize != 8))) {
            *why = "a field's shape, size or kind makes no sense";
        }
    }
    return *why == NULL ? 0 : -EINVAL;
}

/* ---- rows --------------------------------------------------------------------------- */

/* Returns the place of a sample in a subset. The index may count from the end; -1: not in it. */
static int64_t
place_of(const struct mn_native *n, int64_t index)
{
    int64_t place = index < 0 ? index + n->n_indices : index;
    return place < n->n_indices ? place : -1;
}

/* Returns whether the pipeline can make or refuse all of the task's samples. An index that a subset
 * lacks must be refused by the subset itself. */
static bool
are_known(const struct mn_native *n, const struct mn_task *t, struct mn_block *b)
{
    const int64_t *asked = (const int64_t *)mn_block_index(b);
    bool known = true;
    for (uint32_t row = t->row0; n->indices != NULL && row < t->row0 + t->nrows; row++) {
        known = known && place_of(n, asked[row]) >= 0;
    }
    return known;
}

static uint64_t
epoch_of(const struct mn_native_pipeline *p, const struct mn_block *b)
{
    if (p->epoch != NULL) {
        /* Relaxed: a number by itself. An epoch begins after it was set, by the run queue's [T1].
         * Python code writes the word as a whole. */
        return mn_a64_load_relaxed((const mn_a64 *)(const void *)p->epoch);
    }
    return b->user_epoch == 0 ? 0 : b->user_epoch - 1;
}

static int
do_row(const struct mn_native *n, const struct mn_worker_side *w, struct mn_block *b,
       uint32_t row, struct mn_native_failure *failure)
{
    const struct mn_native_pipeline *p = n->pipeline;
    int64_t asked = ((const int64_t *)mn_block_index(b))[row];
    if (n->indices != NULL) {
        asked = n->indices[place_of(n, asked)];
    }
    int64_t index = asked < 0 ? asked + p->length : asked;
    if (index < 0 || index >= p->length) {
        (void)snprintf(failure->text, sizeof(failure->text),
                       "sample %lld is not among the %lld of the dataset", (long long)asked,
                       (long long)p->length);
        return -ERANGE;
    }
    uint64_t seed = 0, hi, lo;
    if (p->keying == MN_KEYED_BY_SAMPLE) {
        struct mn_seed_key key =
            mn_seed_key_of_share(&n->share, b->base_seed, b->epoch, mn_seed_place(b, row),
                                 MN_SEED_SAMPLE);
        seed = mn_seed_stream_make(key, n->stream).seed;
    }
    mn_native_key(p->keying, p->seed, epoch_of(p, b), index, seed, &hi, &lo);
    void *out[MN_NATIVE_FIELDS];
    const uint64_t *fields = mn_block_fields(b);
    for (int32_t i = 0; i < p->n_fields; i++) {
        out[i] = (char *)mn_at(&w->shm, fields[i]) + p->fields[i].bytes * row;
    }
    failure->text[0] = '\0';
    return p->run(p->state, index, hi, lo, out, failure->text, sizeof(failure->text));
}

/* Returns MN_OK; MN_CLOSED: the loader closes and does not need the rest; MN_NATIVE_ASK_PYTHON; or
 * a sample's error. */
static int
do_rows(const struct mn_native *n, const struct mn_worker_side *w, const struct mn_task *t,
        struct mn_block *b, struct mn_worker_clock *clock, struct mn_native_failure *failure)
{
    struct mn_report *reports = mn_block_reports(b);
    for (uint32_t row = t->row0; row < t->row0 + t->nrows; row++) {
        if (mn_entry_over(w)) {
            return MN_CLOSED;
        }
        mn_a64_store_relaxed(&w->me->row, row);
        int rc = do_row(n, w, b, row, failure);
        if (rc == MN_NATIVE_ASK_PYTHON) {
            return rc;
        }
        reports[row].wall_ns = mn_worker_lap(clock);
        reports[row].status = rc == 0 ? MN_ROW_WRITTEN : MN_ROW_ENVELOPE;
        if (rc != 0) {
            failure->row = row;
            failure->rc = rc < 0 ? rc : -EINVAL;
            return failure->rc;
        }
    }
    return MN_OK;
}

/* ---- the loop ----------------------------------------------------------------------- */

enum mn_native_event
mn_native_serve(const struct mn_native *n, struct mn_worker_side *w,
                struct mn_worker_clock *clock, uint32_t *task,
                struct mn_native_failure *failure)
{
    while (mn_entry_begin(w)) {
        int rc = mn_worker_try(w, task);
        if (rc == MN_EMPTY) {
            rc = mn_worker_claim(w, MN_WORKER_IDLE_NS, task);
            mn_worker_waited(clock);
        }
        if (rc == MN_CLOSED && !mn_entry_over(w)) {
            mn_entry_leave(w);
        }
        if (rc != MN_OK) {
            continue;
        }
        const struct mn_task *t = &w->held;
        struct mn_block *b = mn_block_at(&w->shm, t->block_off);
        mn_worker_begin(w, clock);
        if (t->kind != MN_KIND_ROWS || b->index_kind != MN_INDEX_INT64
            || b->nfields != (uint32_t)n->pipeline->n_fields || !are_known(n, t, b)) {
            return MN_NATIVE_PYTHON;
        }
        rc = do_rows(n, w, t, b, clock, failure);
        if (rc == MN_CLOSED || mn_entry_over(w)) {
            break; /* Do not publish a result that will not be read. At exit it would wake a thread
                    * that dies when it takes the GIL, with torch's C++ frames on its stack. */
        }
        if (rc != MN_OK) {
            return rc == MN_NATIVE_ASK_PYTHON ? MN_NATIVE_PYTHON : MN_NATIVE_FAILED;
        }
        mn_worker_account(w, clock, *task);
        (void)mn_worker_done(w, *task);
    }
    return MN_NATIVE_STOP;
}
