/* mn_autoscale.h - how many workers there are: grows, shrinks, and stands in for slow ones.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Part of the engine, run by its thread under its mutex; exists when the number of workers may
 * move between two bounds.  The decisions are those of policy_autoscale.h and policy_slow.h; this
 * file measures their inputs and carries them out through the workers' entries:
 *   more     an EMPTY entry becomes WANTED, the zygote forks
 *   fewer    leave is set in the entry of a worker, which exits when it has nothing in hand
 *   standby  a worker more while a flagged sample keeps its own one busy, if it can help:
 *            a core is idle, or the flagged sample waits rather than computes; it leaves when
 *            that sample is done.  Nothing is ever run twice.
 */
#ifndef MN_AUTOSCALE_H
#define MN_AUTOSCALE_H

#include <stdint.h>

#include "schedule/policy_autoscale.h"

struct mn_engine;

#define MN_AUTOSCALE_LOG 64u
/* Decisions are this far apart: some tens of batches of ordinary jobs, and the effect of a
 * worker more shows. */
#define MN_AUTOSCALE_INTERVAL_NS UINT64_C(250000000)
/* The engine thread looks again after so long at the least. */
#define MN_AUTOSCALE_NAP_NS INT64_C(5000000)

enum mn_standby_reason { MN_STANDBY_ADMITTED = -1, MN_STANDBY_RETIRED = -2 };

/* One change of the number of workers, or of the reason not to. */
struct mn_decision {
    uint64_t at_ns;
    int32_t from, to;
    int32_t reason; /* enum mn_scaler_reason, or enum mn_standby_reason */
    int32_t occupancy, cpu, wait; /* permille, what it was decided on */
    int64_t rate_milli;
};

/* What one iterator leaves to the next. */
struct mn_autoscale_keep {
    uint32_t active;
    struct mn_scaler policy;
};

struct mn_flag {
    uint64_t since_ns; /* of the flagged task; 0: none */
    uint64_t first_ns; /* when its worker's CPU time was read for the first time, */
    uint64_t cpu_ns;   /* what that was, */
    uint64_t seen_ns;  /* when it was read last (0: not yet), */
    uint64_t used_ns;  /* and what had been used between the two */
    int32_t standby;   /* entry admitted for it, -1 none */
};

/* What the system says. Files are read for it, some of which take it milliseconds. */
struct mn_facts {
    uint64_t at_ns;
    uint64_t machine_busy, machine_total;
    uint64_t queued_ns;     /* of workers that are there: on no core, though they could run */
    uint64_t own_ns;        /* CPU time of the trainer's process */
    int32_t cores_milli;
    uint64_t memory_ns;     /* when the two below were found, */
    uint32_t memory_for;    /* and beside how many workers */
    uint64_t available;     /* bytes */
    uint64_t private_bytes; /* of the worker that has done most */
};

struct mn_autoscale {
    struct mn_scaler policy;
    struct mn_facts facts; /* the engine thread's, as all else here but for the log */
    uint64_t last_ns;
    uint64_t machine_busy, machine_total;
    uint64_t rows, given, busy_ns, cpu_ns, queued_ns, begun_ns;
    uint64_t own_ns;
    uint64_t occupancy_sum, occupancy_n;
    struct mn_flag *flags; /* one a worker entry */
    uint64_t stragglers;   /* samples flagged so far */
    struct mn_decision log[MN_AUTOSCALE_LOG];
    uint32_t nlog;         /* in all; the ring holds the last ones */
};

/* workers: at most. keep: NULL, or what mn_autoscale_keep gave; its count is the caller's to
 * start with. */
int
mn_autoscale_open(struct mn_autoscale **out, uint32_t workers,
                  const struct mn_autoscale_keep *keep);

/* Mutex held. */
struct mn_autoscale_keep
mn_autoscale_keep(const struct mn_engine *e);

void
mn_autoscale_close(struct mn_autoscale *s);

/* Asks the system what the next tick may need, without the mutex: whoever takes a batch must
 * not wait for that. The engine thread. mn_autoscale_look.c. */
void
mn_autoscale_look(struct mn_engine *e, uint64_t now_ns);

/* Looks at the clock and does what is due. Mutex held. */
void
mn_autoscale_tick(struct mn_engine *e, uint64_t now_ns);

/* The nearest number of workers within the bounds. */
uint32_t
mn_autoscale_bound(const struct mn_engine *e, uint32_t workers);

/* Brings the number of workers to this, within the bounds, as if it had been
 * decided; decisions go on from there. Mutex held. */
void
mn_autoscale_move(struct mn_engine *e, int32_t target);

/* How long the engine thread may sleep until the next tick. */
int64_t
mn_autoscale_nap(struct mn_engine *e);

/* The consumer asked for a batch: how full the queue was. */
void
mn_autoscale_saw(struct mn_engine *e, int64_t ready, int64_t window);

#endif
