/* mn_forming.h - batches formed of whichever samples are ready first (batching="ready").
 * SPDX-License-Identifier: Apache-2.0
 *
 * A part of the plan, present where such batches were asked for.  What is planned are the
 * sampler's batches, here *units*: cut, started and made like any other, so that nothing is paid
 * for a sample alone.  The rows of a task are ready when it has ended, one way or another.
 * policy_ready.h says of which a batch is formed; as a rule that is one unit, which is then
 * delivered as it lies.  Else it is a list of runs of rows from several units, to be gathered by
 * whoever takes it.
 *
 * A unit all of whose tasks have ended leaves the plan, which goes on to the next, and its block
 * stays until its last row was taken.  So the head of the plan is the first unit that is not
 * made yet: it alone may pass the memory limit, and it is never one that waits for others.
 *
 * Batches that a worker collates cannot be mixed: all rows of a unit are ready when it has ended.
 * Then forming says which comes next, and nothing more.
 *
 * Places count the rows of an epoch in the order in which they were planned.  An epoch taken
 * up in the middle has rows that were delivered already, and then a unit may be shorter than a
 * batch, and a batch be of several.
 */
#ifndef MN_FORMING_H
#define MN_FORMING_H

#include "schedule/mn_plan.h"
#include "schedule/policy_ready.h"

/* A planned batch, until its last row was taken. */
struct mn_unit {
    uint64_t sequence;
    uint64_t block_off; /* 0: it had none when it was looked at, or is refused */
    int64_t first;      /* place of its row 0 */
    uint32_t nrows;
    uint32_t left;      /* not taken */
    uint32_t unmarked;  /* not known to be ready */
    bool ended;         /* all of its tasks, and it has left the plan */
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
    uint32_t nruns;        /* 0: there is none */
    struct mn_unit *units; /* [room], from oldest on the live ones, in the order of planning */
    uint32_t oldest, nunits, room;
    int64_t planned;       /* places given */
    bool mixes;            /* units may be delivered in parts */
    uint64_t could_ns;     /* since when a batch could be mixed; 0: it could not */
};

/* NULL without memory. */
struct mn_forming *
mn_forming_open(uint32_t batch, uint32_t bound, bool mixes);

void
mn_forming_close(struct mn_forming *f);

/* Makes room for one unit more. 0 or -ENOMEM. */
int
mn_forming_room(struct mn_forming *f);

/* The last batch of the plan was planned; there is room for it. */
void
mn_forming_add(struct mn_plan *p, uint64_t sequence, uint32_t nrows);

/* No more is planned in this epoch. */
void
mn_forming_end(struct mn_plan *p);

/* Rows of a unit are ready, as far as the policy may know. wall_ns[row * step]: what they took,
 * or NULL where none is slow. */
void
mn_forming_mark(struct mn_plan *p, struct mn_unit *u, uint32_t row0, uint32_t nrows,
                const uint64_t *wall_ns, size_t step);

/* The next unit after that (NULL: the first) that may be of use now, and of which not all is known
 * to be ready; NULL. */
struct mn_unit *
mn_forming_unmarked(struct mn_plan *p, const struct mn_unit *after);

/* Forms a batch of what is ready, if it can be: of one unit as it lies, or mixed. */
bool
mn_forming_form(struct mn_plan *p, bool mix);

/* Whether one could be mixed. */
bool
mn_forming_could_mix(const struct mn_forming *f);

/* For how long it is waited then for one that need not be. */
int64_t
mn_forming_patience_ns(const struct mn_plan *p);

/* Batches that could be formed of what is ready, with the one that is. */
int64_t
mn_forming_ready(const struct mn_forming *f);

/* Sequence of the first unit that would be in the next batch if all were ready. */
uint64_t
mn_forming_head(const struct mn_plan *p);

/* Why a unit cannot be made. */
struct mn_refusal
mn_forming_refused(const struct mn_forming *f, uint64_t sequence);

/* A run of the batch that is formed was read: the unit it is of, of which so much less is left. */
struct mn_unit *
mn_forming_take_run(struct mn_plan *p, uint32_t run);

/* All of them were. */
void
mn_forming_taken(struct mn_plan *p);

/* Forgets all units. */
void
mn_forming_clear(struct mn_forming *f);

#endif
