/* mn_worker_views.c - see mn_worker_views.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_worker_views.h"

#include <errno.h>
#include <stdlib.h>

/* A worker that has not taken a task from its own queue for this long is stopped. */
#define TAKES_NOTHING_NS UINT64_C(200000000)

int
mn_worker_views_open(struct mn_worker_views *v, const struct mn_shm *shm,
                     const struct mn_crew *crew)
{
    v->crew = crew;
    v->shm = shm;
    v->view = calloc(shm->ctl->nworkers, sizeof(*v->view));
    v->rest = calloc(shm->ctl->nworkers, sizeof(*v->rest));
    v->sent_ns = calloc(shm->ctl->ntasks, sizeof(*v->sent_ns));
    return v->view != NULL && v->rest != NULL && v->sent_ns != NULL ? 0 : -ENOMEM;
}

void
mn_worker_views_close(struct mn_worker_views *v)
{
    free(v->view);
    free(v->rest);
    free(v->sent_ns);
}

/* Returns whether the worker exists and accepts tasks. An entry without a worker may claim so, so
 * the crew is asked, too. */
static bool
is_usable(const struct mn_crew *crew, uint32_t w)
{
    const struct mn_worker *k = mn_worker_at(&crew->shm, w);
    return mn_crew_is_wanted(crew, w) && mn_a32_load_acquire(&k->state) == MN_WORKER_READY
           && mn_a32_load_relaxed(&k->exit_request) == 0 /* written by the trainer */
           && !k->retired;
}

static struct mn_worker_view
look_at(struct mn_worker_views *views, uint32_t w, uint64_t now)
{
    const struct mn_shm *shm = views->shm;
    struct mn_worker_rest *rest = &views->rest[w];
    const struct mn_worker *k = mn_worker_at(shm, w);
    uint64_t hint, end = mn_runqueue_own_entries(shm, MN_QUEUE_WORKER + w, &hint);
    uint64_t since = mn_a64_load_relaxed(&k->since_ns);
    struct mn_worker_view v = {.usable = is_usable(views->crew, w), .running_ns = -1};
    for (uint64_t at = hint; at < end; at++) {
        uint32_t task;
        if (mn_runqueue_waits(shm, MN_QUEUE_WORKER + w, at, &task)) {
            v.queued++;
            v.left_ns += task < shm->ctl->ntasks ? views->sent_ns[task] : 0;
        }
    }
    uint64_t running = mn_a64_load_relaxed(&k->running);
    if (running != 0) {
        v.running_ns = since != 0 && since < now ? (int64_t)(now - since) : 0;
        /* A task that has run for longer than expected is taken to last as long again. */
        int64_t whole = running <= shm->ctl->ntasks ? views->sent_ns[running - 1] : 0;
        v.present_ns = whole > v.running_ns ? whole - v.running_ns : v.running_ns;
        v.left_ns += v.present_ns;
    }
    bool rests = running == 0 && v.queued != 0;
    if (!rests || rest->hint != hint || rest->since_ns == 0) { /* it has taken a task meanwhile */
        rest->since_ns = rests ? now : 0;
        rest->hint = hint;
    }
    if (rests && now - rest->since_ns > TAKES_NOTHING_NS) { /* stopped: as if busy since */
        v.running_ns = (int64_t)(now - rest->since_ns);
        v.left_ns += v.running_ns;
    }
    return v;
}

void
mn_worker_views_look(struct mn_worker_views *v, uint64_t now_ns)
{
    v->looked_ns = now_ns;
    for (uint32_t w = 0; w < v->shm->ctl->nworkers; w++) {
        v->view[w] = look_at(v, w, now_ns);
    }
}

void
mn_worker_views_sent(struct mn_worker_views *v, uint32_t w, uint32_t task, int64_t cost_ns)
{
    v->sent_ns[task] = cost_ns;
    v->view[w].queued++;
    v->view[w].left_ns += cost_ns;
}

uint32_t
mn_worker_views_withdraw(struct mn_worker_views *v, struct mn_tasks *tasks, uint32_t w,
                         uint32_t queue)
{
    uint64_t at, end = mn_runqueue_own_entries(v->shm, MN_QUEUE_WORKER + w, &at);
    uint32_t task, moved = 0;
    for (; at < end; at++) {
        if (mn_runqueue_withdraw(v->shm, MN_QUEUE_WORKER + w, at, &task)) {
            mn_tasks_put(tasks, task, queue);
            moved++;
        }
    }
    v->view[w] = look_at(v, w, v->looked_ns);
    if (queue >= MN_QUEUE_WORKER) {
        uint32_t to = queue - MN_QUEUE_WORKER;
        v->view[to] = look_at(v, to, v->looked_ns);
    }
    return moved;
}

uint64_t
mn_worker_views_queued(const struct mn_shm *shm, bool own)
{
    const struct mn_queue *q = mn_queue_at(shm, MN_QUEUE_NORMAL);
    uint64_t hint = mn_a64_load_seqcst(&q->hint); /* [P4]; the difference is an estimate */
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by the trainer */
    uint64_t queued = tail > hint ? tail - hint : 0;
    for (uint32_t w = 0; own && w < shm->ctl->nworkers; w++) {
        queued += mn_runqueue_waiting(shm, MN_QUEUE_WORKER + w);
    }
    return queued;
}

int64_t
mn_worker_views_running_ns(const struct mn_shm *shm, uint64_t block_off, uint64_t now_ns)
{
    int64_t longest = -1;
    for (uint32_t w = 0; w < shm->ctl->nworkers; w++) {
        uint32_t task;
        uint64_t since;
        if (mn_worker_at_work(mn_worker_at(shm, w), shm->ctl->ntasks, &task, &since)
            && since < now_ns && mn_task_at(shm, task)->block_off == block_off) {
            int64_t ns = (int64_t)(now_ns - since);
            longest = ns > longest ? ns : longest;
        }
    }
    return longest;
}
