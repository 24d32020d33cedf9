/* mn_claims.c - see mn_claims.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_claims.h"

#define LOOK_NS UINT64_C(1000000000)
/* Looks in a row at which the same is found. */
#define LOOKS 3u

/* Whether the worker's entry says that it runs the task. */
static bool
says_so(const struct mn_engine *e, uint32_t worker, uint32_t task)
{
    return mn_a64_load_relaxed(&mn_worker_at(&e->shm, worker)->running) == (uint64_t)task + 1;
}

static bool
anybody_says_so(const struct mn_engine *e, uint32_t task)
{
    uint32_t w = 0;
    while (w < e->shm.ctl->nworkers && !says_so(e, w, task)) {
        w++;
    }
    return w < e->shm.ctl->nworkers;
}

/* Whether it is on no queue though it says so: an entry of a queue names the generation, which is
 * the trainer's own. */
static bool
is_of_no_queue(const struct mn_engine *e, uint32_t task, uint64_t word)
{
    return mn_word_status(word) == MN_TASK_QUEUED && mn_word_gen(word) != e->tasks.gens[task];
}

static bool
is_doubtful(const struct mn_engine *e, uint32_t task, uint64_t word)
{
    uint32_t worker = mn_word_worker(word);
    switch (mn_word_status(word)) {
    case MN_TASK_RUNNING:
        return worker < e->shm.ctl->nworkers && !says_so(e, worker, task);
    case MN_TASK_QUEUED:
        return is_of_no_queue(e, task, word) || anybody_says_so(e, task);
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

static bool
is_there(const struct mn_engine *e, uint32_t worker)
{
    uint32_t state = mn_a32_load_acquire(&mn_worker_at(&e->shm, worker)->state);
    return state == MN_WORKER_STARTING || state == MN_WORKER_READY;
}

static void
end_all_named(struct mn_engine *e, uint32_t task, uint64_t word)
{
    bool running = mn_word_status(word) == MN_TASK_RUNNING;
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        bool named = says_so(e, w, task) || (running && w == mn_word_worker(word));
        if (named && is_there(e, w)) {
            mn_crew_damaged(&e->crew, w, MN_DAMAGE_WORD);
        }
    }
}

/* As soon as all who were to be ended are gone, and unless one of them had it. */
static bool
take_back(struct mn_engine *e, struct mn_claims *c)
{
    c->ending = mn_tasks_word(&e->tasks, c->task) == c->word;
    for (uint32_t w = 0; c->ending && w < e->shm.ctl->nworkers; w++) {
        if (mn_crew_is_damaged(&e->crew, w)) {
            return false;
        }
    }
    bool queued = mn_word_status(c->word) == MN_TASK_QUEUED;
    if (!c->ending || (queued && !mn_runqueue_cancel(&e->shm, c->task))) {
        c->ending = false;
        return false;
    }
    c->ending = false;
    struct mn_death death = e->crew.death; /* of who was ended for it last */
    /* How often it was tried is not known where the word is wrong: it is not made again. */
    uint64_t word = is_of_no_queue(e, c->task, c->word)
                        ? mn_task_word(0, 0, 0xff, MN_TASK_QUEUED)
                        : c->word;
    mn_tasks_take_back(&e->tasks, c->task, word, &death);
    e->crew.wakes.workers++;
    return true;
}

bool
mn_claims_look(struct mn_engine *e, uint64_t now_ns)
{
    struct mn_claims *c = &e->claims;
    if (c->ending) {
        return take_back(e, c);
    }
    if (!e->crew.executor->processes || now_ns - c->looked_ns < LOOK_NS
        || mn_a64_load_relaxed(&e->shm.ctl->wanted) == MN_WANT_NONE /* a look */) {
        return false;
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
        c->ending = true;
        end_all_named(e, task, word);
    }
    return false;
}
