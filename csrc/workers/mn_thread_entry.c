/* mn_thread_entry.c - see mn_thread_entry.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "workers/mn_thread_entry.h"

#include <signal.h>
#include <unistd.h>

#include "os/mn_thread.h"

bool
mn_entry_over(const struct mn_worker_side *w)
{
    const struct mn_ctl *c = w->shm.ctl;
    return mn_a32_load_seqcst(&c->stop) != 0 || mn_a32_load_seqcst(&c->dismissed) != 0;
}

static void
come(struct mn_worker_side *w)
{
    w->lease_off = w->lease_end = w->used_end = 0; /* those of its last life were taken back */
    mn_a32_store_relaxed(&w->me->tid, mn_thread_number());
    mn_worker_set_owner(w->me, mn_worker_starts(w->me) + 1, (uint32_t)getpid());
    mn_a32_store_relaxed(&w->me->exit_status, 0);
    w->me->began = 1;
    mn_a32_store_seqcst(&w->me->state, MN_WORKER_READY); /* [R1] */
}

/* Returns whether there is nothing to do here before another thread moves the entry. */
static bool
must_wait(const struct mn_worker_side *w)
{
    uint32_t state = mn_a32_load_seqcst(&w->me->state);
    return !mn_entry_over(w) && (state == MN_WORKER_EMPTY || state == MN_WORKER_EXITED);
}

bool
mn_entry_await(struct mn_worker_side *w)
{
    struct mn_worker *me = w->me;
    while (!mn_entry_over(w)) {
        uint32_t state = mn_a32_load_acquire(&me->state);
        if (state == MN_WORKER_READY || state == MN_WORKER_WANTED) {
            return true;
        }
        if (state == MN_WORKER_SWEPT) {
            mn_a32_store_seqcst(&me->state, MN_WORKER_EMPTY);
            continue;
        }
        /* EMPTY or EXITED: no thread's entry is ever STARTING. */
        mn_event_prepare_wait(&me->event);
        if (must_wait(w)) {
            (void)mn_event_commit_wait(&me->event, MN_WORKER_IDLE_NS);
        }
        else {
            mn_event_cancel_wait(&me->event);
        }
    }
    return false;
}

bool
mn_entry_begin(struct mn_worker_side *w)
{
    if (!mn_entry_await(w)) {
        return false;
    }
    if (mn_a32_load_acquire(&w->me->state) == MN_WORKER_WANTED) {
        come(w);
    }
    return true;
}

void
mn_entry_die(struct mn_worker_side *w, int32_t status)
{
    mn_a32_store_relaxed(&w->me->exit_status, (uint32_t)status);
    mn_a32_store_seqcst(&w->me->state, MN_WORKER_EXITED); /* [S1] */
    mn_event_notify(&w->shm.ctl->engine);
}

void
mn_entry_leave(struct mn_worker_side *w)
{
    bool ended = mn_a32_load_seqcst(&w->me->exit_request) == MN_EXIT_ENDED;
    if (ended) {
        mn_a32_store_seqcst(&w->me->exit_request, 0); /* so that it counts as a death */
    }
    mn_entry_die(w, ended ? -SIGTERM : 0);
}
