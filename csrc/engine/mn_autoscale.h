/* mn_autoscale.h - the number of workers: grows it, shrinks it, and adds standby workers.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Part of the engine. The engine thread runs it under the engine's mutex. It exists only when the
 * number of workers may move between two bounds. policy_worker_count.h and mn_costs.h decide. This
 * file measures their inputs and carries out the decisions through the workers' entries:
 *   more     an EMPTY entry becomes WANTED, and the zygote forks a worker for it
 *   fewer    exit_request is set in a worker's entry; the worker exits once it has no task
 *   standby  an extra worker while a straggler keeps its own worker busy. It is added only
 *            if it can help: a core is idle, or the straggler waits instead of computing. It
 *            exits when the straggler is done. No sample is ever run twice.
 */
#ifndef MN_AUTOSCALE_H
#define MN_AUTOSCALE_H

#include <stdint.h>

#include "schedule/policy_worker_count.h"

struct mn_engine;

#define MN_AUTOSCALE_LOG 64u
/* Time between two decisions: some tens of batches of an ordinary job, long enough for the effect
 * of an added worker to show. */
#define MN_AUTOSCALE_INTERVAL_NS UINT64_C(250000000)
/* The engine thread looks again after this time at the latest. */
#define MN_AUTOSCALE_NAP_NS INT64_C(5000000)

enum mn_standby_reason { MN_STANDBY_ADMITTED = -1, MN_STANDBY_RETIRED = -2 };

/* One change of the number of workers, or the reason why it did not change. */
struct mn_decision {
    uint64_t at_ns;
    int32_t from, to;
    int32_t reason; /* enum mn_scaler_reason, or enum mn_standby_reason */
    int32_t occupancy, cpu, wait; /* permille; the inputs of the decision */
    int64_t rate_milli;
};

/* State that one iterator passes to the next. */
struct mn_autoscale_saved {
    uint32_t active;
    struct mn_scaler policy;
};

struct mn_flag {
    uint64_t since_ns; /* start of the flagged task; 0: no task is flagged */
    uint64_t first_ns; /* when its worker's CPU time was first read */
    uint64_t cpu_ns;   /* that CPU time */
    uint64_t seen_ns;  /* when the CPU time was last read; 0: not yet */
    uint64_t used_ns;  /* CPU time used between the two reads */
    int32_t standby;   /* entry of the standby worker added for it; -1: none */
};

/* Measurements of the system. They come from files, some of which take milliseconds to read. */
struct mn_facts {
    uint64_t at_ns;
    uint64_t machine_busy, machine_total;
    uint64_t queued_ns;     /* live workers: time they were runnable but on no core */
    uint64_t own_ns;        /* CPU time of the trainer's process */
    int32_t cores_milli;
    uint64_t memory_ns;     /* when the two fields below were measured */
    uint32_t memory_for;    /* number of workers at that measurement */
    uint64_t available;     /* bytes */
    uint64_t private_bytes; /* of the worker that has made the most samples */
};

struct mn_autoscale {
    struct mn_scaler policy;
    struct mn_facts facts; /* all fields but log belong to the engine thread */
    uint64_t last_ns;
    uint64_t machine_busy, machine_total;
    uint64_t rows, given, busy_ns, cpu_ns, queued_ns, begun_ns;
    uint64_t own_ns;
    uint64_t occupancy_sum, occupancy_n;
    struct mn_flag *flags; /* one for each worker entry */
    uint64_t stragglers;   /* samples flagged so far */
    struct mn_decision log[MN_AUTOSCALE_LOG];
    uint32_t nlog;         /* decisions so far; the ring holds the last MN_AUTOSCALE_LOG of them */
};

/* workers: the maximum. saved: NULL, or the result of mn_autoscale_save(), whose active field is
 * the number of workers that the caller starts with. Returns 0 or -ENOMEM. */
int
mn_autoscale_open(struct mn_autoscale **out, uint32_t workers,
                  const struct mn_autoscale_saved *saved);

/* Returns the state that the next iterator starts from. Mutex held. */
struct mn_autoscale_saved
mn_autoscale_save(const struct mn_engine *e);

void
mn_autoscale_close(struct mn_autoscale *s);

/* Reads from the system what the next tick may need. Called by the engine thread without the mutex,
 * because the thread that takes a batch must not wait for these reads. mn_autoscale.c. */
void
mn_autoscale_read_facts(struct mn_engine *e, uint64_t now_ns);

/* Carries out the decisions that are due at now_ns. Mutex held. */
void
mn_autoscale_tick(struct mn_engine *e, uint64_t now_ns);

/* Returns the number of workers within the bounds that is closest to the given one. */
uint32_t
mn_autoscale_bound(const struct mn_engine *e, uint32_t workers);

/* Moves the number of workers to target, within the bounds, as if the policy had decided so. Later
 * decisions start from there. Mutex held. */
void
mn_autoscale_move(struct mn_engine *e, int32_t target);

/* Returns how long the engine thread may sleep until the next tick. Mutex held. */
int64_t
mn_autoscale_nap(struct mn_engine *e);

/* Records how full the prefetch window was when the caller asked for a batch. Mutex held. */
void
mn_autoscale_saw(struct mn_engine *e, int64_t ready, int64_t window);

#endif
