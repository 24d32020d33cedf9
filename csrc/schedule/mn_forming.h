/* mn_forming.h - batches formed of the samples that are ready first (batching="ready").
 * SPDX-License-Identifier: Apache-2.0
 *
 * A part of the plan that exists only in ready mode. The plan holds the sampler's batches, called
 * *units* here. They are cut, started and made like any other batch, so that single samples have no
 * extra cost. The rows of a task are ready when the task has ended, in whatever way.
 * policy_ready.h says which rows form a batch. As a rule they are one unit, which is then
 * delivered as it lies. Else the batch is a list of runs of rows from several units, which the
 * code that takes it must gather.
 *
 * A unit whose tasks have all ended leaves the plan, which goes on to the next unit. The unit's
 * block stays until its last row was taken. So the head of the plan is the first unit that is not
 * made yet. Only it may exceed the memory limit, and it never waits for other units.
 *
 * Batches that a worker collates cannot be mixed: all rows of a unit are ready when it has ended.
 * For them, forming only says which batch comes next.
 *
 * Places count the rows of an epoch in the order in which they were planned. In an epoch that is
 * resumed in the middle, some rows were delivered already. Then a unit may be shorter than a
 * batch, and a batch may consist of several units.
 */
#ifndef MN_FORMING_H
#define MN_FORMING_H

#include "schedule/mn_plan.h"
#include "schedule/policy_ready.h"

/* A planned batch, until its last row was taken. */
struct mn_unit {
    uint64_t sequence;
    uint64_t block_off; /* 0: it had none at the last look, or is refused */
    int64_t first;      /* place of its row 0 */
    uint32_t nrows;
    uint32_t left;      /* rows not taken yet */
    uint32_t unmarked;  /* rows not known to be ready */
    bool ended;         /* all of its tasks have ended, and it has left the plan */
    struct mn_refusal refusal;
};

/* Neighbouring rows of one unit. */
struct mn_run {
    uint64_t sequence;
    uint64_t block_off;
    uint32_t row0;
    uint32_t nrows;
};

struct mn_forming {
    struct mn_ready policy;
    void *memory;
    int64_t *places;       /* [batch] */
    struct mn_run *runs;   /* [batch]; of the batch that is formed and not taken */
    uint32_t nruns;        /* 0: no batch is formed */
    struct mn_unit *units; /* [capacity]; the live ones from oldest on, in the order of planning */
    uint32_t oldest, nunits, capacity;
    int64_t planned;       /* places assigned so far */
    bool mixes;            /* units may be delivered in parts */
    uint64_t could_ns;     /* since when a batch could be mixed; 0: none could */
};

/* Returns NULL if memory is short. */
struct mn_forming *
mn_forming_open(uint32_t batch, uint32_t bound, bool mixes);

void
mn_forming_close(struct mn_forming *f);

/* Makes space for one more unit. Returns 0 or -ENOMEM. */
int
mn_forming_room(struct mn_forming *f);

/* Adds the batch that the plan added last. mn_forming_room() must have made space for it. */
void
mn_forming_add(struct mn_plan *p, uint64_t sequence, uint32_t nrows);

/* Declares that no more batches are planned in this epoch. */
void
mn_forming_end(struct mn_plan *p);

/* Marks rows of a unit as ready; the policy may not yet accept all of them. wall_ns[row * step]:
 * what they took, or NULL if none is slow. */
void
mn_forming_mark(struct mn_plan *p, struct mn_unit *u, uint32_t row0, uint32_t nrows,
                const uint64_t *wall_ns, size_t step);

/* Returns the next unit after the given one (NULL: the first) that may be useful now and has rows
 * not known to be ready. NULL: there is none. */
struct mn_unit *
mn_forming_unmarked(struct mn_plan *p, const struct mn_unit *after);

/* Forms a batch of ready rows if possible: one unit as it lies, or mixed. Returns whether it
 * did. */
bool
mn_forming_form(struct mn_plan *p, bool mix);

/* Returns whether a batch could be mixed now. */
bool
mn_forming_could_mix(const struct mn_forming *f);

/* Returns how long to wait then for a batch that needs no mixing. */
int64_t
mn_forming_patience_ns(const struct mn_plan *p);

/* Returns how many batches could be formed of the ready rows, including the formed one. */
int64_t
mn_forming_ready(const struct mn_forming *f);

/* Returns the sequence of the first unit that would be in the next batch if all rows were ready. */
uint64_t
mn_forming_head(const struct mn_plan *p);

/* Returns why a unit cannot be made. */
struct mn_refusal
mn_forming_refused(const struct mn_forming *f, uint64_t sequence);

/* Records that a run of the formed batch was read. Returns its unit, whose `left` has decreased. */
struct mn_unit *
mn_forming_take_run(struct mn_plan *p, uint32_t run);

/* Records that all runs of the formed batch were read. */
void
mn_forming_taken(struct mn_plan *p);

/* Forgets all units. */
void
mn_forming_clear(struct mn_forming *f);

#endif
