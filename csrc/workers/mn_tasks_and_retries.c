/* mn_tasks_and_retries.c - see mn_tasks_and_retries.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_tasks_and_retries.h"

#include <errno.h>
#include <stdlib.h>

#include "base/mn_error.h"

int
mn_tasks_open(struct mn_tasks *t, const struct mn_shm *shm, uint32_t max_retries)
{
    uint32_t n = shm->ctl->ntasks;
    *t = (struct mn_tasks){.shm = *shm, .max_retries = max_retries};
    t->free = calloc(n, sizeof(*t->free));
    t->gens = calloc(n, sizeof(*t->gens));
    t->lost = calloc(n, sizeof(*t->lost));
    t->results = calloc(n, sizeof(*t->results));
    t->heads = calloc(shm->ctl->nqueues, sizeof(*t->heads));
    if (!t->free || !t->gens || !t->lost || !t->results || !t->heads) {
        return -ENOMEM;
    }
    for (uint32_t i = 0; i < n; i++) {
        t->free[i] = n - 1 - i;
    }
    t->nfree = n;
    return 0;
}

void
mn_tasks_close(struct mn_tasks *t)
{
    free(t->free);
    free(t->gens);
    free(t->lost);
    free(t->results);
    free(t->heads);
    *t = (struct mn_tasks){0};
}

/* Writes what workers read of the task. They may have overwritten what was written before. */
static void
fill(struct mn_tasks *t, uint32_t task)
{
    struct mn_task *d = mn_task_at(&t->shm, task);
    const struct mn_result *r = &t->results[task];
    d->block_off = r->block_off;
    d->row0 = r->row0;
    d->nrows = r->nrows;
    d->kind = r->kind;
    d->flags = 0;
    d->env_off = d->env_len = 0;
}

static uint32_t
take(struct mn_tasks *t, uint64_t block_off, uint32_t kind, uint32_t row0, uint32_t nrows)
{
    uint32_t task = t->free[--t->nfree];
    struct mn_result *r = &t->results[task];
    r->block_off = block_off;
    r->row0 = row0;
    r->nrows = nrows;
    r->kind = kind;
    r->flags = 0;
    r->accepted = false;
    r->retries_left = t->max_retries;
    r->queue = MN_NO_QUEUE;
    fill(t, task);
    mn_task_at(&t->shm, task)->why = 0;
    return task;
}

uint32_t
mn_tasks_take(struct mn_tasks *t, uint64_t block_off, uint32_t kind, uint32_t row0,
              uint32_t nrows)
{
    uint32_t task = take(t, block_off, kind, row0, nrows);
    /* Relaxed: on no queue, so no worker looks at it. */
    mn_a64_store_relaxed(&mn_task_at(&t->shm, task)->word,
                         mn_task_word(0, 0, 0, MN_TASK_PLANNED));
    return task;
}

/* seq_cst, like every word that other threads look at, although no part of its block is on a queue
 * yet if the task is new. */
static void
await_parts(struct mn_tasks *t, uint32_t task)
{
    mn_task_at(&t->shm, task)->queue = t->results[task].queue = MN_NO_QUEUE;
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(++t->gens[task], 0, 0, MN_TASK_WAITING));
}

uint32_t
mn_tasks_take_collate(struct mn_tasks *t, uint64_t block_off, uint32_t nrows)
{
    uint32_t task = take(t, block_off, MN_KIND_COLLATE, 0, nrows);
    await_parts(t, task);
    return task;
}

void
mn_tasks_give(struct mn_tasks *t, uint32_t task)
{
    t->results[task].block_off = 0;
    /* Relaxed: no other thread may touch a task that no worker has. */
    mn_a64_store_relaxed(&mn_task_at(&t->shm, task)->word, 0);
    t->free[t->nfree++] = task;
}

int
mn_tasks_publish(struct mn_tasks *t, uint32_t task, uint32_t queue)
{
    struct mn_result *r = &t->results[task];
    uint32_t attempt = t->max_retries - r->retries_left;
    int rc = mn_runqueue_publish(&t->shm, &t->heads[queue], queue, task, ++t->gens[task], attempt);
    if (rc == MN_OK) {
        r->queue = queue;
    }
    return rc;
}

/* Gives up a task that no worker will make: its batch is delivered as an error. */
static void
give_up(struct mn_tasks *t, uint32_t task, const struct mn_death *death)
{
    t->lost[task] = *death;
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(t->gens[task], 0, 0, MN_TASK_LOST));
}

/* Returns whether the parts of a collate task's block are all done. */
static bool
parts_done(const struct mn_tasks *t, struct mn_block *block)
{
    const uint32_t *tasks = mn_block_tasks(block);
    uint32_t done = 0;
    while (done + 1 < block->ntasks
           && mn_word_status(mn_tasks_word(t, tasks[done])) == MN_TASK_DONE) {
        done++;
    }
    return done + 1 == block->ntasks;
}

void
mn_tasks_take_back(struct mn_tasks *t, uint32_t task, const struct mn_death *death)
{
    struct mn_result *r = &t->results[task];
    bool waits = r->kind == MN_KIND_COLLATE
                 && !parts_done(t, mn_block_at(&t->shm, r->block_off));
    fill(t, task); /* its worker's envelope is freed with the lease */
    r->flags = 0;
    r->accepted = false; /* its new result is checked again */
    if (r->retries_left == 0) {
        give_up(t, task, death);
        return;
    }
    r->retries_left--;
    t->retries++;
    if (waits) {
        await_parts(t, task);
    }
    else if (mn_tasks_publish(t, task, MN_QUEUE_EXPRESS) != MN_OK) {
        give_up(t, task, death);
    }
}

void
mn_tasks_reject(struct mn_tasks *t, uint32_t task, uint64_t word)
{
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(mn_word_gen(word), mn_word_worker(word),
                                     mn_word_attempt(word), MN_TASK_RUNNING));
}

void
mn_tasks_abandon(struct mn_tasks *t, uint32_t task)
{
    t->results[task].retries_left = 0;
    (void)mn_runqueue_cancel(&t->shm, task);
}

void
mn_tasks_put(struct mn_tasks *t, uint32_t task, uint32_t queue)
{
    if (mn_tasks_publish(t, task, queue) != MN_OK) {
        /* The queues have space for all tasks there are: a full queue is damaged. */
        struct mn_death no_worker = {0, 0, MN_STATUS_DAMAGED + MN_DAMAGE_WORD, MN_NO_ROW};
        give_up(t, task, &no_worker);
    }
}

void
mn_tasks_sweep(struct mn_tasks *t, uint32_t worker, bool only_it, const struct mn_death *death,
               uint64_t late)
{
    for (uint32_t i = 0; i < t->shm.ctl->ntasks; i++) {
        if (t->results[i].block_off == 0) {
            continue;
        }
        uint64_t word = mn_tasks_word(t, i);
        enum mn_task_status st = mn_word_status(word);
        uint32_t by = mn_word_worker(word);
        bool runs_it = st == MN_TASK_RUNNING
                       && (by == worker || (by == MN_TASK_NOBODY
                                            && !mn_other_entry_names_task(&t->shm, i, worker)));
#ifdef MN_BUG_SWEEP
        runs_it = false;
#endif
        if (runs_it) {
            if (word == late) {
                t->results[i].retries_left = 0;
            }
            mn_tasks_take_back(t, i, death);
        }
        else if (st == MN_TASK_QUEUED && t->results[i].queue == MN_QUEUE_WORKER + worker
                 && mn_runqueue_cancel(&t->shm, i)) {
            if (only_it) {
                give_up(t, i, death);
            }
            else {
                mn_tasks_put(t, i, MN_QUEUE_EXPRESS);
            }
        }
    }
}

void
mn_tasks_publish_collate(struct mn_tasks *t, struct mn_block *block,
                         const struct mn_death *death)
{
    if (block->ntasks < 2 || !parts_done(t, block)) {
        return;
    }
    uint32_t last = mn_block_tasks(block)[block->ntasks - 1];
    if (mn_word_status(mn_tasks_word(t, last)) == MN_TASK_WAITING
        && mn_runqueue_cancel(&t->shm, last)
        && mn_tasks_publish(t, last, MN_QUEUE_EXPRESS) != MN_OK) {
        give_up(t, last, death);
    }
}
