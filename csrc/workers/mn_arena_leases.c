/* mn_arena_leases.c - see mn_arena_leases.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_arena_leases.h"

#include <errno.h>
#include <stdlib.h>

#include "base/mn_assert.h"
#include "base/mn_fault.h"

MN_STATIC_ASSERT(MN_PAGE == MN_ARENA_PAGE, "leases are whole pages");

/* Small enough that idle workers do not use up a small limit. Large enough that a worker with
 * envelopes of a few kilobytes asks once in hundreds of batches. */
#define GRAIN_MOST (UINT64_C(4) << 20)
#define GRAIN_LEAST (16u * MN_PAGE)

int
mn_arena_leases_open(struct mn_arena_leases *l, const struct mn_shm *shm, struct mn_arena *arena)
{
    uint64_t grain = mn_page_round(arena->limit / 16 / shm->ctl->nworkers);
    grain = grain > GRAIN_MOST ? GRAIN_MOST : grain < GRAIN_LEAST ? GRAIN_LEAST : grain;
    *l = (struct mn_arena_leases){.shm = *shm, .arena = arena, .grain = grain};
    l->at = calloc(shm->ctl->nworkers, sizeof(*l->at));
    return l->at != NULL ? 0 : -ENOMEM;
}

void
mn_arena_leases_close(struct mn_arena_leases *l)
{
    for (uint32_t w = 0; l->at != NULL && w < l->shm.ctl->nworkers; w++) {
        mn_ranges_fini(&l->at[w].owed);
    }
    free(l->at);
    *l = (struct mn_arena_leases){0};
}

bool
mn_arena_leases_wanted(const struct mn_arena_leases *l, uint32_t worker)
{
    struct mn_worker *k = mn_worker_at(&l->shm, worker);
    return mn_a32_load_seqcst(&k->lease_state) == MN_LEASE_WANT; /* [L2], before a sleep */
}

bool
mn_arena_leases_sound(const struct mn_arena_leases *l, uint32_t worker, uint64_t used_end,
                      uint64_t want)
{
    const struct mn_arena_lease *x = &l->at[worker];
    if (want == 0 || want > INT64_MAX) {
        return false;
    }
    return x->len == 0
           || (used_end >= x->off && used_end - x->off <= x->len && used_end % MN_PAGE == 0);
}

int
mn_arena_leases_take(struct mn_arena_leases *l, uint32_t worker, uint64_t off, uint64_t bytes)
{
    return mn_ranges_cut(&l->at[worker].owed, off, bytes);
}

void
mn_arena_leases_end(struct mn_arena_leases *l, uint32_t worker, uint64_t used_end)
{
    struct mn_arena_lease *x = &l->at[worker];
    uint64_t left = x->off + x->len - used_end;
    /* If there is no memory to record this, or used_end is before what the worker has sent, the
     * worker continues to owe it. */
    if (x->len != 0 && left != 0 && mn_arena_leases_take(l, worker, used_end, left) == 0) {
        mn_arena_free(l->arena, used_end, left);
    }
    x->off = x->len = 0;
}

static void
answer(struct mn_arena_leases *l, uint32_t worker, uint64_t off, uint64_t len,
       enum mn_lease_state state)
{
    struct mn_worker *k = mn_worker_at(&l->shm, worker);
    k->lease_off = off;
    k->lease_len = len;
    MN_FAULT("lease.answer");
    mn_a32_store_seqcst(&k->lease_state, state); /* [L3] */
}

void
mn_arena_leases_refuse(struct mn_arena_leases *l, uint32_t worker)
{
    answer(l, worker, 0, 0, MN_LEASE_REFUSED);
}

void
mn_arena_leases_grant(struct mn_arena_leases *l, uint32_t worker, uint64_t len)
{
    struct mn_arena_lease *x = &l->at[worker];
    uint64_t off;
    if (mn_arena_alloc(l->arena, len, &off) < 0) {
        mn_arena_leases_refuse(l, worker);
        return;
    }
    if (mn_ranges_add(&x->owed, off, len) < 0) {
        mn_arena_free(l->arena, off, len);
        mn_arena_leases_refuse(l, worker);
        return;
    }
    x->off = off;
    x->len = len;
    answer(l, worker, off, len, MN_LEASE_GRANTED);
}

void
mn_arena_leases_forget(struct mn_arena_leases *l, uint32_t worker)
{
    struct mn_arena_lease *x = &l->at[worker];
    mn_arena_free_ranges(l->arena, &x->owed);
    x->off = x->len = 0;
}
