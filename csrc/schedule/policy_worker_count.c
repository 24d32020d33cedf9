/* How many workers there should be: see policy_worker_count.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_worker_count.h"

#include "base/mn_base.h"

/* A task that only waits still takes some CPU to start and report. */
#define LEAST_NEED_MILLI 50
#define MOSTLY_WAITING 500
/* A worker busier than this has no reserve for variation. */
#define BUSY_ENOUGH 800
/* And busier than this it is the limit itself. */
#define BUSY_MOST 950

const char *
mn_scaler_text(enum mn_scaler_reason reason)
{
    switch (reason) {
    case MN_SCALER_STEADY:
        return "the prefetch window is neither empty nor full";
    case MN_SCALER_SETTLING:
        return "the effect of the last change, or of a first sign of need, does not show yet";
    case MN_SCALER_GROW_IDLE_CORES:
        return "the program is starved, tasks are waiting and cores are idle";
    case MN_SCALER_GROW_WAITING:
        return "the program is starved, and tasks spend their time waiting, not computing";
    case MN_SCALER_SHRINK_FULL:
        return "the prefetch window stays full: fewer workers suffice";
    case MN_SCALER_UNDO_GROWTH:
        return "the workers added last did not raise the rate";
    case MN_SCALER_STARVED_NO_TASKS:
        return "the program is starved, but no task waits for a worker";
    case MN_SCALER_STARVED_CPU_BUSY:
        return "the program is starved, but the cores are busy: more workers cannot help";
    case MN_SCALER_STARVED_AT_MAX:
        return "the program is starved, but autoscale allows no more workers";
    case MN_SCALER_STARVED_AT_CEILING:
        return "the program is starved, but more workers did not help before";
    case MN_SCALER_FULL_AT_MIN:
        return "the prefetch window is full, and the minimum number of workers is reached";
    case MN_SCALER_FULL_AT_FLOOR:
        return "the prefetch window is full, but the program was starved with fewer workers before";
    case MN_SCALER_OUT_OF_RANGE:
        return "the number of workers was outside its limits";
    case MN_SCALER_STARVED_NO_MEMORY:
        return "the program is starved, but there is no memory for another worker";
    case MN_SCALER_FULL_BUSY:
        return "the prefetch window is full, but fewer workers would be busy all the time";
    }
    return "unknown";
}

static struct mn_scaler_decision
decide(int32_t target, enum mn_scaler_reason reason)
{
    struct mn_scaler_decision d = {target, reason, mn_scaler_text(reason)};
    return d;
}

static struct mn_scaler_decision
change(struct mn_scaler *w, int32_t target, enum mn_scaler_reason reason)
{
    w->settle = MN_SCALER_SETTLE;
    w->starved = 0;
    w->full = 0;
    return decide(target, reason);
}

/* Returns whether the growth under judgement has failed to pay. */
static bool
growth_failed(const struct mn_scaler *w, const struct mn_scaler_input *in)
{
    int64_t added = in->workers - w->grown_from;
    int64_t gain = in->speed_milli - w->grown_speed;
    int64_t hoped = w->grown_speed / w->grown_from * added;
    return added > 0 && gain < hoped / 4;
}

/* Returns how many more workers the idle CPU can feed. */
static int64_t
affordable(const struct mn_scaler_input *in)
{
    int64_t busy = in->cpu_permille < 0 ? 0 : in->cpu_permille;
    int64_t idle = busy >= 1000 ? 0 : in->cores_milli * (1000 - busy) / 1000;
    int64_t need = 1000 - in->wait_permille;
    return idle / (need < LEAST_NEED_MILLI ? LEAST_NEED_MILLI : need);
}

static struct mn_scaler_decision
when_dry(struct mn_scaler *w, const struct mn_scaler_input *in)
{
    int32_t n = in->workers;
    if (w->shrunk_from > n) {
        /* The shrink went too far; it is undone without a trial. */
        w->floor = w->shrunk_from;
        w->floor_taken = w->shrunk_taken;
    }
    w->shrunk_from = 0;
    if (in->backlog <= 0) {
        return decide(n, MN_SCALER_STARVED_NO_TASKS);
    }
    if (n >= in->max_workers) {
        return decide(n, MN_SCALER_STARVED_AT_MAX);
    }
    /* A ceiling belongs to a workload; a very different speed means another workload. */
    if (w->ceiling != 0 && mn_moved(w->ceiling_speed, in->speed_milli, 4)) {
        w->ceiling = 0;
    }
    if (w->ceiling != 0 && n >= w->ceiling) {
        return decide(n, MN_SCALER_STARVED_AT_CEILING);
    }
    int64_t add = affordable(in);
    if (add < 1) {
        return decide(n, MN_SCALER_STARVED_CPU_BUSY);
    }
    if (in->fitting < 1) {
        return decide(n, MN_SCALER_STARVED_NO_MEMORY);
    }
    bool waiting = in->wait_permille >= MOSTLY_WAITING;
    int64_t most = waiting ? n : n / 4 > 1 ? n / 4 : 1;
    int64_t top = w->ceiling != 0 && w->ceiling < in->max_workers ? w->ceiling
                                                                  : in->max_workers;
    add = add < most ? add : most;
    add = add < in->backlog ? add : in->backlog;
    add = w->floor > n ? w->floor - n : add;
    add = add < in->fitting ? add : in->fitting;
    add = add < top - n ? add : top - n;
    w->grown_from = w->floor > n ? 0 : n;
    w->grown_speed = in->speed_milli;
    w->trials = 0;
    return change(w, n + (int32_t)add,
                  waiting ? MN_SCALER_GROW_WAITING : MN_SCALER_GROW_IDLE_CORES);
}

static struct mn_scaler_decision
when_full(struct mn_scaler *w, const struct mn_scaler_input *in)
{
    int32_t n = in->workers;
    if (n <= in->min_workers) {
        return decide(n, MN_SCALER_FULL_AT_MIN);
    }
    int64_t taken = w->taken_sum / w->full;
    if (w->floor != 0 && mn_moved(w->floor_taken, taken, 4)) {
        w->floor = 0; /* another workload */
    }
    if (w->floor != 0 && n <= w->floor) {
        return decide(n, MN_SCALER_FULL_AT_FLOOR);
    }
    if ((int64_t)n * w->busy_most >= (int64_t)(n - 1) * BUSY_MOST) {
        return decide(n, MN_SCALER_FULL_BUSY);
    }
    w->shrunk_from = n;
    w->shrunk_taken = taken;
    int32_t least = w->floor > in->min_workers ? w->floor : in->min_workers;
    int32_t need = (int32_t)(((int64_t)n * w->busy_most + BUSY_ENOUGH - 1) / BUSY_ENOUGH);
    int32_t to = n - (n - need) / 2;
    to = to < n ? to : n - 1;
    return change(w, to > least ? to : least, MN_SCALER_SHRINK_FULL);
}

/* Judges the last growth: it has paid as soon as one update says so. Returns true if that settles
 * this update, with the decision in *out. */
static bool
judge(struct mn_scaler *w, const struct mn_scaler_input *in,
      struct mn_scaler_decision *out)
{
    int32_t from = w->grown_from;
    bool failed = from >= in->min_workers && in->occupancy_permille <= MN_SCALER_STARVED
                  && growth_failed(w, in);
    if (failed && ++w->trials < MN_SCALER_TRIALS) {
        *out = decide(in->workers, MN_SCALER_SETTLING);
        return true;
    }
    w->grown_from = 0;
    if (failed) {
        w->ceiling = from;
        w->ceiling_speed = in->speed_milli;
        *out = change(w, from, MN_SCALER_UNDO_GROWTH);
    }
    return failed;
}

struct mn_scaler_decision
mn_scaler_update(struct mn_scaler *w, const struct mn_scaler_input *in)
{
    struct mn_scaler_decision undo;
    int32_t n = in->workers;
    if (n < in->min_workers || n > in->max_workers) {
        int32_t to = n < in->min_workers ? in->min_workers : in->max_workers;
        return change(w, to, MN_SCALER_OUT_OF_RANGE);
    }
    if (w->settle > 0) {
        w->settle--;
        return decide(n, MN_SCALER_SETTLING);
    }
    if (w->grown_from > 0 && judge(w, in, &undo)) {
        return undo;
    }
    bool starved = in->occupancy_permille <= MN_SCALER_STARVED;
    bool full = in->occupancy_permille >= MN_SCALER_FULL;
    w->starved = starved ? w->starved + 1 : 0;
    w->full = full ? w->full + 1 : 0;
    w->taken_sum = (w->full > 1 ? w->taken_sum : 0) + in->taken_milli;
    if (w->full <= 1) {
        w->busy_most = 0; /* the window may have been filling: that is over */
    } else if (w->busy_most < in->busy_permille) {
        w->busy_most = in->busy_permille;
    }
    if (w->starved >= MN_SCALER_STARVED_FOR) {
        return when_dry(w, in);
    }
    if (w->full >= MN_SCALER_FULL_FOR) {
        return when_full(w, in);
    }
    return decide(n, starved || full ? MN_SCALER_SETTLING : MN_SCALER_STEADY);
}
