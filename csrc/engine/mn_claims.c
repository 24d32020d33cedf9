/* mn_claims.c - see mn_claims.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_claims.h"

#include "engine/mn_quarantine.h"

#define LOOK_NS UINT64_C(1000000000)
/* Looks in a row at which the same is found. */
#define LOOKS 3u

static struct mn_block *
block_of(const struct mn_engine *e, uint32_t task)
{
    return mn_block_at(&e->shm, e->tasks.results[task].block_off);
}

static bool
is_doubtful(const struct mn_engine *e, uint32_t task, uint64_t word)
{
    uint32_t worker = mn_word_worker(word);
    switch (mn_word_status(word)) {
    case MN_TASK_RUNNING:
        return worker != MN_TASK_NOBODY && !mn_worker_says(mn_worker_at(&e->shm, worker), task);
    case MN_TASK_QUEUED:
        return !mn_tasks_is_queued(&e->tasks, task, word) || mn_anybody_says(&e->shm, task);
    case MN_TASK_WAITING:
        return mn_anybody_says(&e->shm, task) || mn_tasks_parts_done(&e->tasks, block_of(e, task));
    default:
        return false;
    }
}

/* The first of them, with its word. */
static bool
find(const struct mn_engine *e, uint32_t *task, uint64_t *word)
{
    for (const struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        struct mn_block *block = mn_block_at(&e->shm, b->block_off);
        for (uint32_t i = 0; i < block->ntasks; i++) {
            *task = mn_block_tasks(block)[i];
            *word = mn_tasks_word(&e->tasks, *task);
            if (is_doubtful(e, *task, *word)) {
                return true;
            }
        }
    }
    return false;
}

static void
settle(struct mn_engine *e, uint32_t task, uint64_t word)
{
    if (mn_word_status(word) == MN_TASK_WAITING && !mn_anybody_says(&e->shm, task)) {
        struct mn_death nobody = {UINT32_MAX, 0, MN_STATUS_DAMAGED + MN_DAMAGE_WORD};
        mn_tasks_publish_collate(&e->tasks, block_of(e, task), &nobody);
        e->crew.wakes.everybody = true;
    }
    else {
        mn_quarantine_task(e, task, word, MN_DAMAGE_WORD);
    }
}

void
mn_claims_look(struct mn_engine *e, uint64_t now_ns)
{
    struct mn_claims *c = &e->claims;
    if (!e->crew.executor->processes || now_ns - c->looked_ns < LOOK_NS
        || mn_a64_load_relaxed(&e->shm.ctl->wanted) == MN_WANT_NONE /* a look */) {
        return;
    }
    c->looked_ns = now_ns;
    uint32_t task = 0;
    uint64_t word = 0;
    bool found = find(e, &task, &word);
    c->looks = !found ? 0 : task == c->task && word == c->word ? c->looks + 1 : 1;
    c->task = task;
    c->word = word;
    if (c->looks == LOOKS) {
        c->looks = 0;
        settle(e, task, word);
    }
}
