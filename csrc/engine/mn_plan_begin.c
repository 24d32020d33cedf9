/* mn_plan_begin.c - the blocks of planned batches: made, refused, and seen done.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A batch that can never be made, or that everybody waits for while nothing that would make
 * room for it can come back, is delivered in its place as an error. The others go on.
 */
#include <stdlib.h>

#include "base/mn_error.h"
#include "engine/mn_engine_internal.h"
#include "engine/mn_forming.h"
#include "engine/mn_plan_internal.h"
#include "os/mn_clock.h"

/* Threads of the program may let go of what they keep, while it waits for its next batch. */
#define KEPT_NS UINT64_C(1000000000)

/* Whether it is made in parts, which one more task collates. */
static bool
in_parts(const struct mn_planned *q)
{
    return q->batch.whole && q->ntasks > 1;
}

uint64_t
mn_form_bytes(const struct mn_form *f, uint32_t nrows)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < f->nfields; i++) {
        bytes += mn_page_round(f->row_bytes[i] * nrows);
    }
    return bytes;
}

static int
start_block(struct mn_engine *e, struct mn_planned *q)
{
    struct mn_plan *p = e->plan;
    const struct mn_plan_batch *b = &q->batch;
    struct mn_submit s = {.sequence = q->sequence,
                          .number = b->number,
                          .epoch = b->epoch,
                          .position = b->position,
                          .base_seed = b->base_seed,
                          .nrows = b->nrows,
                          .spares = b->spares,
                          .kind = in_parts(q) ? (uint32_t)MN_KIND_PART
                                  : b->whole  ? (uint32_t)MN_KIND_BATCH
                                              : p->form.kind,
                          .queue = MN_QUEUE_NORMAL,
                          .seeded = b->seeded,
                          .apart = p->forming != NULL,
                          .user_epoch = b->user_epoch,
                          .index_kind = b->index_kind,
                          .index = b->index,
                          .index_bytes = b->index_bytes};
    if (!b->whole) {
        s.layout = p->form.layout;
        s.nfields = p->form.nfields;
        s.row_bytes = p->form.row_bytes;
        uint64_t bytes = mn_form_bytes(&p->form, b->nrows);
        p->batch_bytes = bytes > p->batch_bytes ? bytes : p->batch_bytes;
    }
    return mn_batch_make(e, &s, q->row0, q->ntasks, &q->block_off);
}

static bool
is_of(const struct mn_dispatch_task *t, void *sequence)
{
    return (uint64_t)t->batch == *(const uint64_t *)sequence;
}

/* Whether something will be freed though the head is not delivered. */
static bool
more_comes_back(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    for (const struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        if (b->abandoned || (!p->in_order && !b->detached && b->sequence != UINT64_MAX)) {
            return true;
        }
    }
    uint64_t now = mn_now_ns();
    p->stuck_ns = p->stuck_ns == 0 ? now : p->stuck_ns;
    return e->arena.kept_bytes != 0 && now - p->stuck_ns < KEPT_NS;
}

int
mn_plan_begin(struct mn_engine *e, struct mn_planned *q)
{
    struct mn_plan *p = e->plan;
    bool head = q->sequence == p->head;
    bool begins = q->block_off == 0;
    if (!begins || start_block(e, q) == 0) {
        p->unmade += begins;
        p->stuck_ns = head ? 0 : p->stuck_ns;
        p->begun = q->sequence >= p->begun ? q->sequence + 1 : p->begun;
        return MN_OK;
    }
    if (mn_arena_lent(&e->arena) != 0) {
        return MN_EMPTY; /* it comes back in a moment, and may be what is missing */
    }
    if (e->refusal.need <= e->refusal.all && (!head || more_comes_back(e))) {
        return MN_EMPTY;
    }
    p->stuck_ns = 0;
    q->refusal = e->refusal;
    p->refused++;
    p->begun = q->sequence >= p->begun ? q->sequence + 1 : p->begun;
    uint64_t sequence = q->sequence;
    mn_dispatch_drop(&p->dispatch, is_of, &sequence);
    mn_pieces_forget(p, q);
    e->crew.wakes.everybody = true; /* also a caller that waits for whatever is done first */
    return MN_CLOSED;
}

struct mn_refusal
mn_engine_refused(struct mn_engine *e, uint64_t sequence)
{
    mn_mutex_lock(&e->mutex);
    const struct mn_planned *q = mn_plan_at(e->plan, sequence);
    struct mn_refusal r = e->plan->forming != NULL
                              ? mn_forming_refused(e->plan->forming, sequence)
                          : q != NULL ? q->refusal
                                      : (struct mn_refusal){MN_REFUSED_NOT, 0, 0};
    mn_mutex_unlock(&e->mutex);
    return r;
}

/* ---- seen done --------------------------------------------------------------------- */

bool
mn_planned_done(struct mn_engine *e, struct mn_planned *q)
{
    if (!q->done) { /* each look at a block is many cache lines of others */
        bool made = q->block_off != 0 && mn_engine_poll(e, q->block_off) != MN_BLOCK_BUSY
                    && mn_batch_accept(e, mn_batch_find(e, q->block_off)) != MN_BLOCK_BUSY;
        q->done = made || q->refusal.why != MN_REFUSED_NOT;
        e->plan->unmade -= made;
    }
    return q->done;
}

static int
by_time(const void *a, const void *b)
{
    uint64_t x = ((const struct mn_found *)a)->done_ns, y = ((const struct mn_found *)b)->done_ns;
    return (x > y) - (x < y);
}

/* Looks at all that have begun, once for as many as are found done. */
static void
find_done(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    p->nfound = p->found_at = 0;
    for (uint64_t n = p->head; n < p->begun; n++) {
        struct mn_planned *q = mn_plan_at(p, n);
        if (q != NULL && mn_planned_done(e, q)) {
            uint64_t ns = q->block_off != 0 ? mn_engine_done_ns(e, q->block_off) : 0;
            p->found[p->nfound++] = (struct mn_found){n, ns};
        }
    }
    if (p->nfound > 1) {
        qsort(p->found, p->nfound, sizeof(*p->found), by_time);
    }
}

/* The sequence of the batch to deliver next, or UINT64_MAX. */
static uint64_t
first_done(struct mn_engine *e)
{
    struct mn_plan *p = e->plan;
    if (p->in_order) {
        struct mn_planned *q = mn_plan_at(p, p->head);
        return q != NULL && mn_planned_done(e, q) ? p->head : UINT64_MAX;
    }
    for (int turn = 0; turn < 2; turn++) {
        while (p->found_at < p->nfound) {
            uint64_t sequence = p->found[p->found_at].sequence;
            if (mn_plan_at(p, sequence) != NULL) {
                return sequence;
            }
            p->found_at++; /* it was taken */
        }
        if (turn == 0) {
            find_done(e);
        }
    }
    return UINT64_MAX;
}

bool
mn_plan_pick(struct mn_engine *e, uint64_t *sequence, uint64_t *block_off)
{
    const struct mn_forming *f = e->plan->forming;
    if (f != NULL) {
        bool formed = mn_forming_form(e);
        *sequence = formed ? f->runs[0].sequence : 0;
        *block_off = formed ? f->runs[0].block_off : 0;
        return formed;
    }
    uint64_t first = first_done(e);
    if (first == UINT64_MAX) {
        return false;
    }
    *sequence = first;
    *block_off = mn_plan_block(e->plan, first);
    return true;
}

bool
mn_plan_any_done(struct mn_engine *e)
{
    return e->plan->forming != NULL ? mn_forming_any(e) : first_done(e) != UINT64_MAX;
}
