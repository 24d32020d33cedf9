/* mn_worker_lease.c - waits for memory for a result outside of rows. See mn_worker.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <errno.h>

#include "base/mn_fault.h"
#include "base/mn_error.h"
#include "workers/mn_worker.h"

/* How often it checks meanwhile whether the trainer still lives. */
#define POLL_NS (INT64_C(200) * 1000 * 1000)

/* Returns whether the trainer is gone, which would end this worker. Threads of it are gone, too. */
static bool
orphaned(const struct mn_worker_side *w)
{
    return w->trainer != NULL && mn_lifeline_is_cut(w->trainer);
}

/* Returns the trainer's answer, or WANT if there will be none. */
static uint32_t
await_lease(struct mn_worker_side *w)
{
    struct mn_worker *me = w->me;
    int slept = 0;
    for (;;) {
        mn_event_prepare_wait(&me->lease_event);
        uint32_t st = mn_a32_load_seqcst(&me->lease_state); /* [L4] */
        if (st != MN_LEASE_WANT || mn_worker_stopped(w)
            || mn_a32_load_seqcst(&w->shm.ctl->dismissed) != 0
            || (slept == -ETIMEDOUT && orphaned(w))) {
            mn_event_cancel_wait(&me->lease_event);
            return st;
        }
        slept = mn_event_commit_wait(&me->lease_event, POLL_NS);
    }
}

int
mn_worker_lease(struct mn_worker_side *w, uint64_t bytes, uint64_t *off)
{
    bytes = (bytes + MN_PAGE - 1) & ~(uint64_t)(MN_PAGE - 1);
    if (bytes > w->lease_end - w->used_end) {
        struct mn_worker *me = w->me;
        me->want_bytes = bytes;
        me->used_end = w->used_end;
        mn_a32_store_seqcst(&me->lease_state, MN_LEASE_WANT); /* [L1] */
        MN_FAULT("worker.lease.want");
        mn_event_notify(&w->shm.ctl->engine);
        uint32_t st = await_lease(w);
        if (st == MN_LEASE_WANT) {
            return MN_CLOSED;
        }
        MN_FAULT("worker.lease.granted");
        w->lease_off = w->used_end = me->lease_off;
        w->lease_end = me->lease_off + me->lease_len;
        mn_a32_store_relaxed(&me->lease_state, MN_LEASE_IDLE); /* ours again */
        if (st == MN_LEASE_REFUSED) {
            return -ENOMEM;
        }
    }
    *off = w->used_end;
    w->used_end += bytes;
    return 0;
}
