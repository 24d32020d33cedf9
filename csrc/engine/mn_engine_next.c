/* mn_engine_next.c - the caller's thread: plans, waits for its next batch, takes it. See
 * mn_engine.h, mn_plan.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>

#include "base/mn_base.h"
#include "engine/mn_autoscale.h"
#include "engine/mn_engine.h"
#include "engine/mn_engine_state.h"
#include "engine/mn_shared_costs.h"
#include "os/mn_thread.h"

/* ---- what the caller tells the plan ----------------------------------------------------- */

static void
start_due_and_unlock(struct mn_engine *e)
{
    e->crew.wakes.workers += mn_start_due(e);
    mn_engine_unlock(e);
}

uint64_t
mn_engine_next_sequence(const struct mn_engine *e)
{
    return mn_plan_view(e->plan)->order.next;
}

int
mn_engine_plan(struct mn_engine *e, const struct mn_plan_batch *b)
{
    struct mn_plan_batch own = *b;
    own.integers = b->index_kind != MN_INDEX_PICKLE;
    mn_mutex_lock(&e->mutex);
    mn_shared_costs_lock(e->cfg.costs);
    int rc = e->delivery->add(e, &own);
    mn_shared_costs_unlock(e->cfg.costs);
    start_due_and_unlock(e);
    return rc;
}

void
mn_engine_set_form(struct mn_engine *e, const struct mn_form *form)
{
    mn_mutex_lock(&e->mutex);
    e->form = *form;
    struct mn_plan_rows rows = {form->nfields, form->row_bytes, MN_ARENA_PAGE};
    mn_plan_set_rows(e->plan, &rows);
    mn_engine_unlock(e);
}

void
mn_engine_plan_end(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    e->delivery->end(e);
    mn_engine_unlock(e);
}

void
mn_engine_plan_clear(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    struct mn_plan_order order = mn_plan_view(e->plan)->order;
    for (uint64_t n = order.head; n < order.next; n++) {
        struct mn_planned *q = mn_plan_at(e->plan, n);
        if (q != NULL && q->block_off != 0) {
            mn_batch_abandon(e, mn_batch_of(q));
        }
    }
    e->delivery->clear(e);
    mn_plan_clear(e->plan);
    e->stuck_ns = 0;
    mn_waits_forget(&e->waits); /* do not count the caller's time between epochs */
    mn_engine_unlock(e);
}

void
mn_engine_retire(struct mn_engine *e, uint64_t block_off)
{
    mn_mutex_lock(&e->mutex);
    struct mn_batch *b = mn_batch_find(e, block_off);
    mn_assert(b != NULL);
    mn_batch_retire(e, b);
    mn_engine_unlock(e);
}

int
mn_engine_taken(struct mn_engine *e, uint64_t sequence, uint64_t block_off, bool pinned)
{
    mn_mutex_lock(&e->mutex);
    e->refs -= pinned; /* not the last: the engine is open */
    if (e->delivery->take(e, sequence, block_off) < 0) {
        mn_engine_unlock(e);
        return -EINVAL;
    }
    if (e->waits.served) { /* another batch was taken already: this one is prefetched */
        (void)mn_plan_prefetched(e->plan, 1);
    }
    e->waits.served = e->waits.spanned;
    start_due_and_unlock(e);
    return 0;
}

/* ---- the caller's wait ------------------------------------------------------------------ */

static bool
anything_done(struct mn_engine *e, uint64_t wanted)
{
    if (wanted != MN_WANT_ANY) {
        return mn_engine_has_done(e, wanted);
    }
    mn_mutex_lock(&e->mutex);
    bool done = mn_engine_has_done(e, wanted);
    mn_mutex_unlock(&e->mutex);
    return done;
}

/* Returns whether the user's thread has something to look at before it sleeps again. Needs the
 * mutex. */
static bool
trouble(struct mn_engine *e)
{
    return mn_a32_load_relaxed(&e->crew.lost) != 0 || (e->plan == NULL && e->crew.ndeaths != 0)
           || mn_crew_live(&e->crew) == 0 || mn_a32_load_acquire(&e->shm.ctl->stop) != 0;
}

int
mn_engine_wait(struct mn_engine *e, uint64_t block_off, int64_t timeout_ns)
{
    struct mn_ctl *c = e->shm.ctl;
    if (anything_done(e, block_off)) {
        return 0;
    }
    uint64_t until = 0;
    while (mn_event_spin(c->spin_ns, &until)) {
        if (anything_done(e, block_off)) {
            return 0;
        }
    }
    mn_a64_store_seqcst(&c->wanted, block_off); /* [W1] */
    mn_event_prepare_wait(&c->trainer);
    MN_FAULT("engine.wait");
    mn_mutex_lock(&e->mutex);
    e->crew.wakes.engine |= e->arena.room_waits; /* a worker that waits may go on now */
    bool over = mn_engine_has_done(e, block_off) || trouble(e);
    mn_engine_unlock(e);
    int rc = 0;
    if (over) {
        mn_event_cancel_wait(&c->trainer);
    }
    else {
        rc = mn_event_commit_wait(&c->trainer, timeout_ns);
    }
    mn_a64_store_relaxed(&c->wanted, MN_WANT_NONE); /* a late notification only wakes spuriously */
    return rc;
}

/* The head has not started: any finished task may change that, and one may have finished between
 * the look and the sleep. */
#define CHANGE_NS (INT64_C(5) * 1000 * 1000)

/* Returns how long to sleep at most: until more may have to be planned, or a batch is mixed. */
static int64_t
nap_ns(const struct mn_engine *e, uint64_t want)
{
    int64_t lasts = mn_plan_lasts(e->plan);
    int64_t longest = e->delivery->nap(e);
    int64_t nap = want == MN_WANT_CHANGE || lasts < CHANGE_NS ? CHANGE_NS : lasts;
    return longest < nap ? longest : nap;
}

/* ---- the caller's stopwatch ------------------------------------------------------------- */

/* It belongs to the caller's thread; other threads look at it under the mutex
 * (mn_engine_progress). The values stored in the control page are statistics only: relaxed. */
static void
asked(struct mn_engine *e)
{
    uint64_t now = mn_now_ns();
    int64_t used = mn_waits_ask(&e->waits, now);
    mn_a64_store_relaxed(&e->shm.ctl->waiting_since_ns, now);
    if (used >= 0 && e->plan != NULL) {
        mn_plan_used(e->plan, used);
    }
}

static void
given(struct mn_engine *e, bool got)
{
    struct mn_ctl *c = e->shm.ctl;
    mn_waits_give(&e->waits, mn_now_ns(), got);
    mn_a64_store_relaxed(&c->wait_ns, e->waits.wait_ns);
    mn_a64_store_relaxed(&c->waiting_since_ns, 0);
    mn_a64_store_relaxed(&c->given, e->waits.n);
}

static void
begin_span(struct mn_engine *e)
{
    asked(e);
    e->waits.spanned = true;
    /* Prefetched batches count as not delivered: the first of them is what the caller gets now. */
    e->waits.served = e->plan != NULL && mn_plan_prefetched(e->plan, -1);
}

int64_t
mn_engine_span_begin(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    begin_span(e);
    int64_t consumer_ns = e->plan != NULL ? mn_plan_view(e->plan)->consumer_ns : 0;
    mn_mutex_unlock(&e->mutex);
    return consumer_ns;
}

void
mn_engine_span_end(struct mn_engine *e, bool got, bool held)
{
    struct mn_waits *w = &e->waits;
    mn_mutex_lock(&e->mutex);
    if (!w->spanned) {
        begin_span(e);
    }
    given(e, got);
    if (w->served && !got && held) {
        (void)mn_plan_prefetched(e->plan, 1);
    }
    w->spanned = w->asking = w->served = false;
    mn_mutex_unlock(&e->mutex);
}

/* ---- the next batch --------------------------------------------------------------------- */

#define WAIT INT32_MAX /* of look(): for what it says */

struct wait {
    uint64_t want;
    int64_t nap; /* at most */
};

/* Looks for the batch. ahead: beyond the one that the caller needs; that one is ready, so the
 * caller is not starved. Returns what mn_engine_next() returns, or WAIT. */
static int
look(struct mn_engine *e, bool first, bool ahead, uint64_t *sequence, uint64_t *block_off,
     struct wait *wait)
{
    bool got = e->delivery->pick(e, sequence, block_off);
    bool seen = e->autoscale != NULL && first && (got || !ahead);
    if (seen && !mn_plan_begins(e->plan)) { /* an empty window is normal at the start */
        struct mn_plan_window window = mn_plan_window(e->plan);
        int64_t before = (int64_t)window.prefetched + ahead;
        mn_autoscale_saw(e, e->delivery->ready(e) + before, window.batches);
    }
    mn_a64_store_relaxed(&e->shm.ctl->used_bytes, mn_arena_used(&e->arena)); /* statistics only */
    if (got) {
        e->held += mn_plan_view(e->plan)->held;
        return MN_NEXT_BATCH;
    }
    e->crew.wakes.workers += mn_start_due(e);
    uint64_t head = mn_plan_block(e->plan, mn_plan_view(e->plan)->order.head);
    wait->want = !e->delivery->head_first ? MN_WANT_ANY : head != 0 ? head : MN_WANT_CHANGE;
    bool starving = mn_start_due_starving(e);
    wait->nap = nap_ns(e, wait->want);
    return trouble(e) ? MN_NEXT_HEALTH : starving ? MN_NEXT_PLAN : ahead ? MN_NEXT_TIMEOUT : WAIT;
}

int
mn_engine_next(struct mn_engine *e, int64_t timeout_ns, uint64_t *sequence, uint64_t *block_off)
{
    bool spanned = e->waits.spanned, ahead = timeout_ns == 0;
    int64_t left = timeout_ns;
    uint64_t since = 0;
    for (bool first = true;; first = false) {
        struct wait wait;
        mn_mutex_lock(&e->mutex);
        if (first && !spanned) {
            asked(e);
        }
        since = !first ? since : spanned ? mn_now_ns() : e->waits.part_ns;
        int rc = look(e, first, ahead, sequence, block_off, &wait);
        if (rc != WAIT && !spanned) {
            given(e, rc == MN_NEXT_BATCH);
        }
        mn_engine_unlock(e);
        if (rc != WAIT) {
            return rc;
        }
        bool brief = left < 0 ? wait.nap != INT64_MAX : wait.nap < left;
        rc = mn_engine_wait(e, wait.want, brief ? wait.nap : left);
        if (rc < 0 && !(brief && rc == -ETIMEDOUT)) {
            if (!spanned) {
                mn_mutex_lock(&e->mutex);
                given(e, false);
                mn_mutex_unlock(&e->mutex);
            }
            return rc == -ETIMEDOUT ? MN_NEXT_TIMEOUT : rc;
        }
        if (timeout_ns >= 0) {
            int64_t gone = (int64_t)(mn_now_ns() - since);
            left = gone < timeout_ns ? timeout_ns - gone : 0;
        }
    }
}
