/* How many workers there should be.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Inputs, averaged by the caller over the interval since the last update
 *   occupancy  share of the prefetch window that was ready: 0 starved, 1000 full
 *   backlog    tasks that only lack a free worker
 *   busy       share of their time that the workers had a task
 *   fitting    number of additional workers that fit into memory
 *   cpu        utilisation of the cores that may be used (affinity and cgroup aware)
 *   cores      how many those are, in thousandths (a quota may be 1500)
 *   wait       share of task time spent waiting: wall minus CPU, over wall
 *   taken      batches that the caller took per second, in thousandths
 *   speed      samples per second, in thousandths, while workers had a task: the rate if all were
 *              always busy. A pause of the caller does not change it
 *
 * Rule
 *   Starved (occupancy <= MN_SCALER_STARVED, MN_SCALER_STARVED_FOR updates in a row): grow, if more
 *   workers can help: tasks are waiting, and there is CPU for them. A new worker needs a
 *   core for 1 - wait of its time, so idle cores / (1 - wait) more of them can help. At
 *   CPU saturation the answer is therefore no. (A published rule answers saturation with
 *   more workers: it adds the utilisation's excess over a threshold to the count.)
 *   Never grow beyond what fits into memory: the out-of-memory killer is worse than a slow
 *   loader. Grow by a quarter at most, so that the effect can be judged. Grow by twice that where
 *   tasks mostly wait: an extra worker then costs next to nothing, and a useless one is undone.
 *   Full (occupancy >= MN_SCALER_FULL, MN_SCALER_FULL_FOR updates in a row): shrink half the way to
 *   the need, by at least one. The need is the largest busy share meanwhile, and a quarter to
 *   spare. The first update does not count, because the window may have been filling. Do not shrink
 *   if the remaining workers would be busy all the time: the caller would soon be starved. Between
 *   the two thresholds: change nothing.
 *
 * Hysteresis
 *   Growing needs fewer updates than shrinking: a stalled accelerator costs more than an
 *   idle process.
 *   Every change is followed by MN_SCALER_SETTLE updates without one.
 *   Growth is judged when it has settled: with k of n added, the speed should rise by k/n.
 *   It has failed if the speed rises by less than a quarter of that in MN_SCALER_TRIALS updates
 *   in a row. Then a lock, a disk or a licence is the limit. The count goes back to n, which
 *   becomes the ceiling. One update is not enough. The first actions of a new worker (imports,
 *   opening files) may take long, and a ceiling set because of them would stay.
 *   When the caller is starved soon after a shrink, the count before it is restored and
 *   becomes the floor.
 *   Ceiling and floor are forgotten when another workload shows. The sign is a move by
 *   more than a quarter from the value when they were found. It is a move of speed (starved),
 *   or of what the caller took on average since the window was full.
 *   On constant input this ends. Every step is in one direction until a bound is met, and a step
 *   back sets the bound that prevents the step forth.
 */
#ifndef MN_POLICY_WORKER_COUNT_H
#define MN_POLICY_WORKER_COUNT_H

#include <stdbool.h>
#include <stdint.h>

#define MN_SCALER_STARVED 250
#define MN_SCALER_FULL 900
#define MN_SCALER_STARVED_FOR 2
#define MN_SCALER_FULL_FOR 6
#define MN_SCALER_SETTLE 2
#define MN_SCALER_TRIALS 3

enum mn_scaler_reason {
    MN_SCALER_STEADY = 0,
    MN_SCALER_SETTLING,
    MN_SCALER_GROW_IDLE_CORES, /* starved, tasks compute, cores are idle */
    MN_SCALER_GROW_WAITING,    /* starved, tasks mostly wait: more of them fit on the cores */
    MN_SCALER_SHRINK_FULL,
    MN_SCALER_UNDO_GROWTH,
    MN_SCALER_STARVED_NO_TASKS,
    MN_SCALER_STARVED_CPU_BUSY,
    MN_SCALER_STARVED_AT_MAX,
    MN_SCALER_STARVED_AT_CEILING,
    MN_SCALER_FULL_AT_MIN,
    MN_SCALER_FULL_AT_FLOOR,
    MN_SCALER_OUT_OF_RANGE,    /* the count was outside [min, max] */
    MN_SCALER_STARVED_NO_MEMORY,
    MN_SCALER_FULL_BUSY,
};

struct mn_scaler_input {
    int32_t workers;
    int32_t min_workers;
    int32_t max_workers;
    int32_t occupancy_permille;
    int32_t cpu_permille;
    int32_t cores_milli;
    int32_t wait_permille;
    int32_t busy_permille;
    int32_t fitting;
    int64_t backlog;
    int64_t rate_milli; /* samples per second; not an input, only reported with decisions */
    int64_t taken_milli;
    int64_t speed_milli;
};

struct mn_scaler_decision {
    int32_t target;
    enum mn_scaler_reason reason;
    const char *text; /* one sentence, constant */
};

/* Zeroed memory is the state before the first update. */
struct mn_scaler {
    int32_t starved;
    int32_t full;
    int32_t settle;
    int32_t busy_most;   /* while full, from the second update on */
    int64_t taken_sum;   /* while full: sum over `full` updates */
    int32_t grown_from;  /* growth to be judged: the count before it, or 0 */
    int64_t grown_speed;
    int32_t trials;      /* updates in which growth has not paid */
    int32_t shrunk_from; /* count before the last shrink, until starved, or 0 */
    int64_t shrunk_taken;
    int32_t ceiling;     /* 0: none */
    int64_t ceiling_speed;
    int32_t floor;       /* 0: none */
    int64_t floor_taken;
};

/* One update. The caller carries out target and passes the count that it has reached to the
 * next. */
struct mn_scaler_decision
mn_scaler_update(struct mn_scaler *w, const struct mn_scaler_input *in);

/* Returns one constant sentence that states the reason. */
const char *
mn_scaler_text(enum mn_scaler_reason reason);

#endif
