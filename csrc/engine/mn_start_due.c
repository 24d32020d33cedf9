/* mn_start_due.c - starts what the plan says should start now: makes blocks, queues tasks.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The run queues are kept short, because a queued task can no longer be reordered. A worker that
 * takes a queue below its low water mark notifies the engine, which dispatches again
 * (mn_ctl.low_water). The user's thread dispatches too, whenever it plans, waits or takes a batch.
 *
 * A batch is refused if it can never be made. It is also refused if the caller waits for it while
 * no memory that it needs can come back. It is delivered in its place as an error, and the other
 * batches go on. Balanced scheduling only; all functions need the engine's mutex.
 */
#include "engine/mn_engine_state.h"

#include <errno.h>
#include <stdlib.h>

#include "base/mn_base.h"
#include "engine/mn_batches.h"
#include "engine/mn_shared_costs.h"
#include "os/mn_thread.h"

/* Threads of the program may release retained memory while the program waits for its next batch. */
#define KEPT_NS UINT64_C(1000000000)

/* ---- blocks ------------------------------------------------------------------------------- */

static int
make_block(struct mn_engine *e, struct mn_planned *q)
{
    bool in_parts = q->batch.whole && q->ntasks > 1; /* one more task collates them */
    struct mn_form whole = {.kind = in_parts ? MN_KIND_PART : MN_KIND_BATCH};
    mn_plan_tries(e->plan, q);
    return mn_batch_make(e, mn_batch_of(q), q->batch.whole ? &whole : &e->form, q->row0, q->ntasks);
}

/* Returns whether memory will be freed although the head is not delivered. */
static bool
more_comes_back(struct mn_engine *e)
{
    for (const struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (b->planned.state == MN_BATCH_ABANDONED
            || (!e->delivery->head_first && b->planned.state < MN_BATCH_TAKEN
                && b->planned.sequence != UINT64_MAX)) {
            return true;
        }
    }
    uint64_t now = mn_now_ns();
    e->stuck_ns = e->stuck_ns == 0 ? now : e->stuck_ns;
    return e->arena.kept_bytes != 0 && now - e->stuck_ns < KEPT_NS;
}

/* Makes the block of a batch that has none. Returns MN_OK; MN_EMPTY: not now; MN_CLOSED: it cannot
 * be made, is delivered as an error, and its tasks are no longer planned. */
static int
begin(struct mn_engine *e, struct mn_planned *q)
{
    bool head = q->sequence == mn_plan_view(e->plan)->order.head;
    bool begun = q->block_off != 0;
    if (begun || make_block(e, q) == 0) {
        if (!begun) {
            mn_plan_begun(e->plan, q, q->block_off);
        }
        e->stuck_ns = head ? 0 : e->stuck_ns;
        return MN_OK;
    }
    if (mn_arena_lent(&e->arena) != 0) {
        return MN_EMPTY; /* it comes back in a moment, and may be what is missing */
    }
    if (e->refusal.need <= e->refusal.all && (!head || more_comes_back(e))) {
        return MN_EMPTY;
    }
    e->stuck_ns = 0;
    mn_plan_refuse(e->plan, q, &e->refusal);
    e->crew.wakes.all_sleepers = true; /* also a caller that takes the batch that is done first */
    return MN_CLOSED;
}

/* Puts a task on a run queue. Returns what begin() returns, or MN_EMPTY if the queue is full. */
static int
start(struct mn_engine *e, const struct mn_plan_start *s, uint32_t queue, uint32_t *task)
{
    int rc = begin(e, s->batch);
    if (rc != MN_OK) {
        return rc;
    }
    *task = mn_block_tasks(mn_block_at(&e->shm, s->batch->block_off))[s->task];
    mn_task_at(&e->shm, *task)->why = (uint32_t)s->why;
    /* if that fails, the task stays planned and its block exists already */
    return mn_tasks_publish(&e->tasks, *task, queue) == MN_OK ? MN_OK : MN_EMPTY;
}

/* ---- what each worker does now, and what waits on its own queue ----
 *
 * The plan decides by numbers (struct mn_worker_view in mn_plan.h), which are read from the mapping
 * here, where workers write them. No value read there is used as an index unchecked. No task is
 * given to an entry that has no worker according to the crew.
 */

/* A worker that has not taken a task from its own queue for this long is stopped. */
#define TAKES_NOTHING_NS UINT64_C(200000000)

int
mn_worker_views_open(struct mn_engine *e)
{
    struct mn_worker_views *v = &e->views;
    v->view = calloc(e->shm.ctl->nworkers, sizeof(*v->view));
    v->rest = calloc(e->shm.ctl->nworkers, sizeof(*v->rest));
    v->sent_ns = calloc(e->shm.ctl->ntasks, sizeof(*v->sent_ns));
    return v->view != NULL && v->rest != NULL && v->sent_ns != NULL ? 0 : -ENOMEM;
}

void
mn_worker_views_close(struct mn_engine *e)
{
    free(e->views.view);
    free(e->views.rest);
    free(e->views.sent_ns);
}

/* Returns whether the worker exists and accepts tasks. An entry without a worker may claim so, so
 * the crew is asked, too. */
static bool
is_usable(const struct mn_crew *crew, uint32_t w)
{
    const struct mn_worker *k = mn_worker_at(&crew->shm, w);
    return crew->members[w].wanted && mn_a32_load_acquire(&k->state) == MN_WORKER_READY
           && mn_a32_load_relaxed(&k->exit_request) == 0 /* written by the trainer */
           && !k->retired;
}

static struct mn_worker_view
look_at_worker(struct mn_engine *e, uint32_t w)
{
    const struct mn_shm *shm = &e->shm;
    struct mn_worker_views *views = &e->views;
    uint64_t now = views->looked_ns;
    struct mn_worker_rest *rest = &views->rest[w];
    const struct mn_worker *k = mn_worker_at(shm, w);
    uint64_t hint, end = mn_runqueue_own_entries(shm, MN_QUEUE_WORKER + w, &hint);
    uint64_t since = mn_a64_load_relaxed(&k->since_ns);
    struct mn_worker_view v = {.usable = is_usable(&e->crew, w), .running_ns = -1};
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

/* Records that a task expected to take cost_ns was put on the worker's own queue. */
static void
note_sent(struct mn_worker_views *v, uint32_t w, uint32_t task, int64_t cost_ns)
{
    v->sent_ns[task] = cost_ns;
    v->view[w].queued++;
    v->view[w].left_ns += cost_ns;
}

/* Moves the tasks that wait on a worker's own queue to another queue. Returns their number. */
static uint32_t
withdraw(struct mn_engine *e, uint32_t w, uint32_t queue)
{
    uint64_t at, end = mn_runqueue_own_entries(&e->shm, MN_QUEUE_WORKER + w, &at);
    uint32_t task, moved = 0;
    for (; at < end; at++) {
        if (mn_runqueue_withdraw(&e->shm, MN_QUEUE_WORKER + w, at, &task)) {
            mn_tasks_put(&e->tasks, task, queue);
            moved++;
        }
    }
    e->views.view[w] = look_at_worker(e, w);
    if (queue >= MN_QUEUE_WORKER) {
        uint32_t to = queue - MN_QUEUE_WORKER;
        e->views.view[to] = look_at_worker(e, to);
    }
    return moved;
}

uint64_t
mn_worker_views_queued(const struct mn_engine *e, bool own)
{
    const struct mn_shm *shm = &e->shm;
    const struct mn_queue *q = mn_queue_at(shm, MN_QUEUE_NORMAL);
    uint64_t hint = mn_a64_load_seqcst(&q->hint); /* [P4]; the difference is an estimate */
    uint64_t tail = mn_a64_load_relaxed(&q->tail); /* written by the trainer */
    uint64_t queued = tail > hint ? tail - hint : 0;
    for (uint32_t w = 0; own && w < shm->ctl->nworkers; w++) {
        queued += mn_runqueue_waiting(shm, MN_QUEUE_WORKER + w);
    }
    return queued;
}

/* Returns for how long the batch's longest running task has run; -1: none is running. */
static int64_t
running_ns(void *arg, uint64_t block_off)
{
    const struct mn_shm *shm = &((struct mn_engine *)arg)->shm;
    uint64_t now_ns = mn_now_ns();
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

/* ---- facts for the plan ------------------------------------------------------------------- */

static void
look_at_memory(const struct mn_engine *e, struct mn_plan_facts *f)
{
    f->free_tasks = e->tasks.nfree;
    f->memory_limit = (int64_t)e->arena.limit;
    f->memory_used = (int64_t)mn_arena_used(&e->arena);
    bool waits = e->waits.given_ns == 0 && !e->waits.served;
    f->memory_kept = waits ? 0 : (int64_t)e->arena.kept_bytes;
    f->result_bytes = e->flight.mean_envelope_bytes;
    const struct mn_run *runs;
    f->formed = mn_delivery_runs(e, &runs) != 0;
}

static struct mn_plan_facts
facts(struct mn_engine *e)
{
    struct mn_plan_facts f = {.now_ns = mn_now_ns(), .running_ns = running_ns, .arg = e};
    look_at_memory(e, &f);
    return f;
}

/* Returns the number of queued tasks below which a claiming worker notifies the engine; 0: it never
 * does. depth: tasks that should be queued. */
static uint32_t
low_water(const struct mn_plan *p, uint64_t depth)
{
    return mn_plan_waiting(p) != 0 ? (uint32_t)(depth / 2 + 1) : 0;
}

/* ---- for any worker ------------------------------------------------------------------------ */

static int
start_for_any(struct mn_engine *e, const struct mn_plan_start *s)
{
    uint32_t task;
    int rc = start(e, s, MN_QUEUE_NORMAL, &task);
    if (rc == MN_OK) {
        mn_plan_started(e->plan, s);
    }
    return rc;
}

static uint32_t
start_tasks(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    uint64_t depth = mn_plan_dispatch_begins(p);
    uint32_t started = 0;
    struct mn_plan_facts f = facts(e);
    f.queued = mn_worker_views_queued(e, false);
    f.ready = f.queued < depth ? e->delivery->ready(e) : 0;
    while (f.queued < depth) {
        struct mn_plan_start s;
        int rc = mn_plan_next_task(p, &f, &s) ? start_for_any(e, &s) : MN_FULL;
        if (rc == MN_EMPTY && !s.in_order && mn_plan_next_in_order(p, &f, &s)) {
            rc = start_for_any(e, &s);
        }
        if (rc != MN_OK && rc != MN_CLOSED) {
            break;
        }
        f.queued += rc == MN_OK;
        started += rc == MN_OK;
        look_at_memory(e, &f);
    }
    uint32_t mark = low_water(p, depth);
    if (mn_a32_load_relaxed(&e->shm.ctl->low_water) != mark) { /* ours; every claim reads it */
        mn_a32_store_seqcst(&e->shm.ctl->low_water, mark);
    }
    return started;
}

/* ---- for each worker ------------------------------------------------------------------------ */

/* Starts the worker's next task, or moves tasks that wait on another worker's queue to its own.
 * Returns false if there is nothing for it now, or no memory. */
static bool
start_for(struct mn_engine *e, struct mn_plan_round *r, uint32_t w)
{
    int rc;
    do { /* again after a batch that cannot be made: it is an error now */
        struct mn_plan_start s;
        enum mn_plan_step step = mn_plan_next_for_worker(e->plan, r, w, &s);
        if (step == MN_PLAN_NOTHING) {
            return false;
        }
        if (step == MN_PLAN_MOVE) {
            if (withdraw(e, s.helps, MN_QUEUE_WORKER + w) != 0) {
                return true;
            }
            rc = MN_CLOSED; /* the other worker has started all of it */
        }
        else {
            uint32_t task;
            rc = start(e, &s, MN_QUEUE_WORKER + w, &task);
            if (rc == MN_OK) {
                note_sent(&e->views, w, task, mn_plan_started_for(e->plan, &s, w));
            }
        }
        look_at_memory(e, &r->facts);
    } while (rc == MN_CLOSED);
    return rc == MN_OK;
}

static uint32_t
start_shares(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    struct mn_ctl *c = e->shm.ctl;
    uint32_t started = 0;
    struct mn_plan_facts f = facts(e);
    e->views.looked_ns = f.now_ns;
    for (uint32_t w = 0; w < c->nworkers; w++) {
        e->views.view[w] = look_at_worker(e, w);
    }
    f.workers = e->views.view;
    f.ready = e->delivery->ready(e);
    struct mn_plan_round r;
    mn_plan_round_begin(p, &f, &r);
    for (int pass = 0; pass < 2; pass++) { /* idle workers come first */
        for (uint32_t w = 0; w < c->nworkers; w++) {
            while (mn_plan_worker_wants(&r, w, pass == 0) && start_for(e, &r, w)) {
                started++;
            }
        }
    }
    const struct mn_costs_view *known = &mn_plan_view(p)->known;
    mn_a64_store_relaxed(&c->opening_ns, (uint64_t)known->opening_ns); /* a statistic */
    mn_a64_store_relaxed(&c->group_milli,
                         known->opening_ns > 0 ? (uint64_t)(1000.0 * known->group) : 0);
    uint32_t mark = low_water(p, r.depth);
    for (uint32_t w = 0; w < c->nworkers; w++) {
        mn_a32_store_seqcst(&mn_worker_at(&e->shm, w)->low_own, mark);
    }
    mn_a32_store_seqcst(&c->low_water, 0);
    return started;
}

/* Neighbours are no longer kept together: tasks on workers' own queues move to the common one. */
static uint32_t
end_shares(struct mn_engine *e)
{
    uint32_t moved = 0;
    mn_a64_store_relaxed(&e->shm.ctl->group_milli, 0);
    for (uint32_t w = 0; w < e->shm.ctl->nworkers; w++) {
        mn_a32_store_seqcst(&mn_worker_at(&e->shm, w)->low_own, 0);
        moved += withdraw(e, w, MN_QUEUE_EXPRESS);
    }
    return moved;
}

uint32_t
mn_start_due(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    if (mn_plan_unsettled(p)) {
        mn_shared_costs_lock(e->cfg.costs);
        mn_plan_settle(p);
        mn_shared_costs_unlock(e->cfg.costs);
    }
    uint32_t moved = mn_plan_shares_ended(p) ? end_shares(e) : 0;
    uint32_t started = mn_plan_view(p)->by_piece ? start_shares(e) : start_tasks(e);
    if (mn_plan_view(p)->unreleased) {
        e->arena.room_waits = true; /* a release wakes the engine thread */
    }
    return moved + started;
}

/* ---- nothing to start ------------------------------------------------------------------------ */

bool
mn_start_due_starving(struct mn_engine *e)
{
    if (!mn_plan_idles(e->plan, mn_worker_views_queued(e, mn_plan_view(e->plan)->by_piece))) {
        return false;
    }
    struct mn_plan_facts f = facts(e);
    f.ready = e->delivery->ready(e);
    bool starving = mn_plan_starving(e->plan, &f);
    if (starving && e->cfg.costs != NULL) {
        mn_batches_learn_waiting(e);
    }
    return starving;
}
