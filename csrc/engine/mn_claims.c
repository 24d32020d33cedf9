/* mn_claims.c - finds tasks and workers whose word, queue and entries contradict each other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A worker that writes to wrong addresses may change a task's word. The word then names another
 * worker, a worker that never existed, or no worker. Such a word makes sense, but no worker would
 * ever finish the task. However, each worker writes in its own entry which task it runs, and the
 * trainer knows where it has queued each task. So these are contradictions:
 *
 *     RUNNING  and the worker's entry does not name the task
 *     QUEUED   and an entry names the task, or no queue has an entry for it any more
 *     WAITING  and an entry names the task, or all tasks that it waits for are done
 *
 * In the same way, the entry of an idle worker may be overwritten. It then names a task of another
 * worker, or no valid task. Then batches and memory would wait for that worker. It is
 * killed.
 *
 * A contradiction must last for seconds before the trainer acts. A few instructions lie between a
 * claim and the writes to the word and the entry, and a process may be held up there. A process
 * that is stopped just there for longer is taken for damaged. At that point the trainer does not
 * know which side is wrong. So it kills every worker that is named, and takes the task back when
 * they are gone (mn_quarantine.c). If no worker is named, the worker that should have claimed a
 * WAITING task may be held up just before the claim. The task is published, and that worker then
 * finds it claimed or queued.
 *
 * The limit of this: a word that turns to QUEUED again before any other worker has passed its entry
 * is claimed at once. Two workers then write the same rows until the first one ends by its own
 * assertion.
 */
#include "engine/mn_engine_parts.h"


#define LOOK_NS UINT64_C(1000000000)
/* A contradiction is acted on when it was found at this many looks in a row. */
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
        return !mn_tasks_is_queued(&e->tasks, task, word) || mn_entry_names_task(&e->shm, task);
    case MN_TASK_WAITING:
        return mn_entry_names_task(&e->shm, task)
               || mn_tasks_parts_done(&e->tasks, block_of(e, task));
    default:
        return false;
    }
}

bool
mn_claims_bear_out(const struct mn_engine *e, uint32_t w, uint64_t running)
{
    if (running == 0 || running > e->shm.ctl->ntasks) {
        return running == 0;
    }
    uint64_t word = mn_tasks_word(&e->tasks, (uint32_t)(running - 1));
    return mn_word_status(word) == MN_TASK_RUNNING && mn_word_worker(word) == w;
}

/* Finds the first live worker whose entry no task word confirms, and what the entry says. Skips
 * workers that are being ended already. */
static bool
find_entry(const struct mn_engine *e, uint32_t *worker, uint64_t *running)
{
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        const struct mn_worker *k = mn_worker_at(&e->shm, w);
        *worker = w;
        *running = mn_a64_load_relaxed(&k->running); /* a glance: must stay the same */
        if (mn_a32_load_acquire(&k->state) == MN_WORKER_READY
            && !mn_claims_bear_out(e, w, *running) && !mn_crew_is_damaged(&e->crew, w)) {
            return true;
        }
    }
    return false;
}

/* Finds the first doubtful task, and its word. */
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
    if (mn_word_status(word) == MN_TASK_WAITING && !mn_entry_names_task(&e->shm, task)) {
        struct mn_death no_worker = {UINT32_MAX, 0, MN_STATUS_DAMAGED + MN_DAMAGE_WORD,
                                     MN_NO_ROW};
        mn_tasks_publish_collate(&e->tasks, block_of(e, task), &no_worker);
        e->crew.wakes.all_sleepers = true;
    }
    else {
        mn_quarantine_task(e, task, word, MN_DAMAGE_WORD);
    }
}

/* Records what was found. Returns whether it was found at enough looks in a row. */
static bool
again(struct mn_doubt *d, bool found, const struct mn_doubt *now)
{
    bool same = now->at == d->at && now->says == d->says;
    uint32_t looks = !found ? 0 : same ? d->looks + 1 : 1;
    *d = (struct mn_doubt){.at = now->at, .says = now->says, .looks = looks % LOOKS};
    return looks == LOOKS;
}

void
mn_claims_look(struct mn_engine *e, uint64_t now_ns)
{
    struct mn_claims *c = &e->claims;
    if (!e->crew.executor->processes || now_ns - c->looked_ns < LOOK_NS
        || mn_a64_load_relaxed(&e->shm.ctl->wanted) == MN_WANT_NONE /* a glance */) {
        return;
    }
    c->looked_ns = now_ns;
    struct mn_doubt task = {0}, entry = {0};
    if (again(&c->task, find(e, &task.at, &task.says), &task)) {
        settle(e, task.at, task.says);
    }
    if (again(&c->entry, find_entry(e, &entry.at, &entry.says), &entry)) {
        mn_crew_damaged(&e->crew, entry.at, MN_DAMAGE_WORD);
    }
}
