/* mn_forming.h - batches formed of whichever samples are ready first (batching="ready").
 * SPDX-License-Identifier: Apache-2.0
 *
 * A part of the plan, present where such batches were asked for; called under the engine's
 * mutex.  What is planned are the sampler's batches, here *units*: cut, started and made like
 * any other, so that nothing is paid for a sample alone.  The rows of a task are ready when it
 * has ended, one way or another.  policy_ready.h says of which a batch is formed; as a rule
 * that is one unit, which is then delivered as it lies.  Else it is a list of runs of rows from
 * several units, to be gathered by whoever takes it.
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

#include "engine/mn_engine_config.h"
#include "schedule/policy_ready.h"

struct mn_engine;
struct mn_plan;

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

/* Forms the next batch if it can be, and else notes whether one could be mixed. Whether there
 * is one. */
bool
mn_forming_form(struct mn_engine *e);

/* Whether there is a batch, or one could be mixed and mn_forming_form does not know it yet: there
 * is something to look at. */
bool
mn_forming_any(struct mn_engine *e);

/* How long from now on a batch that could be mixed is not, if nothing happens; INT64_MAX. */
int64_t
mn_forming_nap(const struct mn_engine *e);

/* Batches that could be formed of what is ready, with the one that is. */
int64_t
mn_forming_ready(const struct mn_forming *f);

/* Sequence of the first unit that would be in the next batch if all were ready. */
uint64_t
mn_forming_head(const struct mn_plan *p);

/* Why a unit cannot be made. */
struct mn_refusal
mn_forming_refused(const struct mn_forming *f, uint64_t sequence);

/* The batch that is formed was read: units of which nothing is left are retired. */
void
mn_forming_taken(struct mn_engine *e);

/* Forgets all units, and drops the blocks of those that have left the plan. */
void
mn_forming_clear(struct mn_engine *e);

#endif
