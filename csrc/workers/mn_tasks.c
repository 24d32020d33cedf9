/* mn_tasks.c - see mn_tasks.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_tasks.h"

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

/* What workers are told of it. They may have written over what they were told before. */
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
    fill(t, task);
    mn_task_at(&t->shm, task)->why = 0;
    /* Relaxed: nobody looks at its block yet. */
    mn_a32_store_relaxed(&r->published, MN_PUBLISHED_NOT);
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

uint32_t
mn_tasks_take_collate(struct mn_tasks *t, uint64_t block_off, uint32_t nrows)
{
    uint32_t task = take(t, block_off, MN_KIND_COLLATE, 0, nrows);
    struct mn_task *d = mn_task_at(&t->shm, task);
    d->queue = UINT32_MAX;
    mn_a32_store_relaxed(&t->results[task].published, MN_PUBLISHED); /* to workers, by its word */
    /* Relaxed: no part of its block is on a queue, so no worker looks at it. */
    mn_a64_store_relaxed(&d->word, mn_task_word(++t->gens[task], 0, 0, MN_TASK_WAITING));
    return task;
}

void
mn_tasks_give(struct mn_tasks *t, uint32_t task)
{
    /* Relaxed: nobody else may touch a task that is in no worker's hands. */
    mn_a64_store_relaxed(&mn_task_at(&t->shm, task)->word, 0);
    t->free[t->nfree++] = task;
}

int
mn_tasks_publish(struct mn_tasks *t, uint32_t task, uint32_t queue)
{
    mn_a32 *published = &t->results[task].published;
    uint32_t before = mn_a32_load_relaxed(published);
    mn_a32_store_seqcst(published, MN_PUBLISHED_NOW); /* before a worker may be done with it */
    int rc = mn_runqueue_publish(&t->shm, &t->heads[queue], queue, task, ++t->gens[task], 0);
    mn_a32_store_seqcst(published, rc == MN_OK ? MN_PUBLISHED : before);
    return rc;
}

/* Nobody will make it: its batch is delivered as an error. */
static void
give_up(struct mn_tasks *t, uint32_t task, uint64_t word, const struct mn_death *death)
{
    t->lost[task] = *death;
    mn_a32_store_seqcst(&t->results[task].published, MN_PUBLISHED_LOST); /* before its word */
    mn_a64_store_seqcst(&mn_task_at(&t->shm, task)->word,
                        mn_task_word(mn_word_gen(word), 0, mn_word_attempt(word), MN_TASK_LOST));
}

void
mn_tasks_take_back(struct mn_tasks *t, uint32_t task, uint64_t word,
                   const struct mn_death *death)
{
    uint32_t attempt = mn_word_attempt(word);
    fill(t, task); /* an envelope of its worker's goes with the lease */
    t->results[task].flags = 0;
    t->results[task].accepted = false; /* what comes of it now is looked at anew */
    if (attempt < t->max_retries
        && mn_runqueue_publish(&t->shm, &t->heads[MN_QUEUE_EXPRESS], MN_QUEUE_EXPRESS, task,
                            ++t->gens[task], attempt + 1)
               == MN_OK) {
        t->retries++;
        return;
    }
    give_up(t, task, word, death);
}

void
mn_tasks_put(struct mn_tasks *t, uint32_t task, uint32_t queue)
{
    if (mn_tasks_publish(t, task, queue) != MN_OK) {
        /* The queues have room for all tasks there are: what is full is damaged. */
        struct mn_death nobody = {0, 0, MN_STATUS_DAMAGED + MN_DAMAGE_WORD};
        mn_tasks_take_back(t, task, mn_task_word(t->gens[task], 0, 0xff, MN_TASK_QUEUED),
                           &nobody);
    }
}

bool
mn_tasks_mend_queues(struct mn_tasks *t)
{
    bool any = false;
    for (uint32_t q = 0; q < t->shm.ctl->nqueues; q++) {
        any |= mn_runqueue_mend(&t->shm, &t->heads[q], q);
    }
    return any;
}

void
mn_tasks_sweep(struct mn_tasks *t, uint32_t worker, bool only_it, const struct mn_death *death)
{
    for (uint32_t i = 0; i < t->shm.ctl->ntasks; i++) {
        struct mn_task *d = mn_task_at(&t->shm, i);
        uint64_t word = mn_tasks_word(t, i);
        enum mn_task_status st = mn_word_status(word);
        if (st == MN_TASK_RUNNING && mn_word_worker(word) == worker) {
            mn_tasks_take_back(t, i, word, death);
        }
        else if (st == MN_TASK_QUEUED && d->queue == MN_QUEUE_WORKER + worker
                 && mn_runqueue_cancel(&t->shm, i)) {
            if (only_it) {
                mn_tasks_take_back(t, i, mn_task_word(mn_word_gen(word), 0, 0xff, st), death);
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
    if (block->ntasks < 2) {
        return;
    }
    const uint32_t *tasks = mn_block_tasks(block);
    uint32_t last = block->ntasks - 1, done = 0;
    while (done < last
           && mn_word_status(mn_tasks_word(t, tasks[done])) == MN_TASK_DONE) {
        done++;
    }
    uint64_t word = mn_a64_load_relaxed(&mn_task_at(&t->shm, tasks[last])->word);
    if (done == last && mn_word_status(word) == MN_TASK_WAITING
        && mn_runqueue_cancel(&t->shm, tasks[last])
        && mn_tasks_publish(t, tasks[last], MN_QUEUE_EXPRESS) != MN_OK) {
        give_up(t, tasks[last], word, death);
    }
}
