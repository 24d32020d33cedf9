/* mn_autoscale.c - see mn_autoscale.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "engine/mn_autoscale.h"

#include <errno.h>
#include <stdlib.h>

#include "engine/mn_engine_state.h"
#include "os/mn_limits.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"

/* ---- what the system reports on workers, processors and memory ----
 *
 * It reads files of /proc, so it runs without the mutex; mn_autoscale.c decides on the results.
 */

/* Free memory is measured this often (some milliseconds each time), and after every change of the
 * number of workers. */
#define FREE_MEMORY_NS UINT64_C(5000000000)

/* Returns the thread that does the work. */
static pid_t
thread_of(const struct mn_worker *k)
{
    uint32_t tid = mn_a32_load_relaxed(&k->tid);
    return (pid_t)(tid != 0 ? tid : mn_worker_pid(k));
}

static uint64_t
queued_of(const struct mn_worker *k)
{
    uint64_t ns = 0;
    bool there = mn_a32_load_acquire(&k->state) == MN_WORKER_READY;
    return there && mn_cputime_queued(thread_of(k), &ns) == 0 ? ns : 0;
}

/* Returns the process of the worker that has made the most samples; 0 without one. */
static pid_t
busiest(const struct mn_engine *e)
{
    uint64_t most = 0;
    pid_t pid = 0;
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        const struct mn_worker *k = mn_worker_at(&e->shm, w);
        uint64_t rows = mn_a64_load_relaxed(&k->rows_done);
        if (mn_a32_load_relaxed(&k->tid) == 0 && rows >= most
            && mn_a32_load_acquire(&k->state) == MN_WORKER_READY) {
            most = rows;
            pid = (pid_t)mn_worker_pid(k);
        }
    }
    return pid;
}

static uint64_t
cpu_of(const struct mn_worker *k)
{
    uint64_t ns = 0;
    return mn_cputime_process(thread_of(k), &ns) == 0 ? ns : 0;
}

/* Measures how much CPU time workers with a flagged sample have used since the first look at
 * them. */
static void
look_at_flagged(struct mn_engine *e, uint64_t now)
{
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        struct mn_flag *f = &e->autoscale->flags[w];
        if (f->since_ns == 0 || f->standby >= 0
            || (f->seen_ns != 0 && now - f->seen_ns < MN_AUTOSCALE_NAP_NS)) {
            continue;
        }
        uint64_t cpu_ns = cpu_of(mn_worker_at(&e->shm, w));
        if (f->seen_ns == 0) {
            f->cpu_ns = cpu_ns;
            f->first_ns = now;
        }
        f->used_ns = cpu_ns > f->cpu_ns ? cpu_ns - f->cpu_ns : 0; /* none if it has exited */
        f->seen_ns = now;
    }
}

void
mn_autoscale_read_facts(struct mn_engine *e, uint64_t now)
{
    struct mn_facts *f = &e->autoscale->facts;
    look_at_flagged(e, now);
    if (f->at_ns != 0
        && (now - e->autoscale->last_ns < MN_AUTOSCALE_INTERVAL_NS
            || now - f->at_ns < MN_AUTOSCALE_INTERVAL_NS / 4)) {
        return;
    }
    f->at_ns = now;
    f->queued_ns = 0;
    f->own_ns = mn_process_cpu_ns();
    f->cores_milli = 1000 * (int32_t)mn_cpu_count("");
    (void)mn_cputime_machine(&f->machine_busy, &f->machine_total);
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        f->queued_ns += queued_of(mn_worker_at(&e->shm, w));
    }
    /* The policy considers more workers after it was starved twice in a row, so measure memory
     * after the first time. Both fields are only glanced at: the next look sees what changes
     * meanwhile. */
    bool more = e->active < e->cfg.max_workers && e->autoscale->policy.starved != 0;
    if (more && (now - f->memory_ns >= FREE_MEMORY_NS || f->memory_for != e->active)) {
        pid_t pid = busiest(e);
        f->memory_ns = now;
        f->memory_for = e->active;
        f->available = mn_mem_available("");
        f->private_bytes = pid != 0 ? mn_mem_private(pid) : 0;
    }
}

/* If few samples are made in one interval, their number says little. The interval then lasts until
 * each worker has made two on average, but at most this many intervals. */
#define INTERVALS_MOST 8u
/* Of the cores: our fair share, whatever other programs use. */
#define FAIR_PERMILLE 500
/* A flagged sample is watched for this time to see whether it waits or computes. A shorter one
 * would be over before an added worker had started. */
#define WATCH_FLAG_NS UINT64_C(100000000)
#define NAP_MOST_NS INT64_C(100000000)

int
mn_autoscale_open(struct mn_autoscale **out, uint32_t workers,
                  const struct mn_autoscale_saved *saved)
{
    *out = calloc(1, sizeof(**out));
    if (*out == NULL) {
        return -ENOMEM;
    }
    (*out)->flags = calloc(workers, sizeof(*(*out)->flags));
    if ((*out)->flags == NULL) {
        free(*out);
        *out = NULL;
        return -ENOMEM;
    }
    if (saved != NULL) {
        (*out)->policy = saved->policy;
    }
    return 0;
}

struct mn_autoscale_saved
mn_autoscale_save(const struct mn_engine *e)
{
    return (struct mn_autoscale_saved){e->active, e->autoscale->policy};
}

void
mn_autoscale_close(struct mn_autoscale *s)
{
    if (s != NULL) {
        free(s->flags);
        free(s);
    }
}

void
mn_autoscale_saw(struct mn_engine *e, int64_t ready, int64_t window)
{
    struct mn_autoscale *s = e->autoscale;
    s->occupancy_sum += (uint64_t)(ready >= window ? 1000 : 1000 * ready / window);
    s->occupancy_n++;
}

/* Writes to the log of decisions. in: the inputs of the decision; NULL: a standby worker was added
 * or removed. */
static void
note(struct mn_autoscale *s, uint64_t now, int32_t from, int32_t to, int32_t reason,
     const struct mn_scaler_input *in)
{
    struct mn_decision *d = &s->log[s->nlog++ % MN_AUTOSCALE_LOG];
    *d = (struct mn_decision){.at_ns = now, .from = from, .to = to, .reason = reason};
    if (in != NULL) {
        d->occupancy = in->occupancy_permille;
        d->cpu = in->cpu_permille;
        d->wait = in->wait_permille;
        d->rate_milli = in->rate_milli;
    }
}

/* ---- starting and ending workers ---------------------------------------------------- */

static int32_t
start_one(struct mn_engine *e)
{
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        if (!e->crew.members[w].wanted && mn_a32_load_acquire(&k->state) == MN_WORKER_EMPTY
            && !k->retired) {
            mn_crew_ask_to_exit(&e->crew, w, MN_EXIT_NOT);
            mn_crew_want(&e->crew, w);
            return (int32_t)w;
        }
    }
    return -1;
}

static bool
is_standby(const struct mn_autoscale *s, uint32_t workers, int32_t w)
{
    for (uint32_t i = 0; i < workers; i++) {
        if (s->flags[i].since_ns != 0 && s->flags[i].standby == w) {
            return true;
        }
    }
    return false;
}

static void
ask_to_exit(struct mn_engine *e, uint32_t w)
{
    mn_crew_ask_to_exit(&e->crew, w, MN_EXIT_SHRINK);
    e->crew.wakes.all_sleepers = true;
}

/* Asks the worker with the highest number that was not asked yet to exit. */
static bool
end_one(struct mn_engine *e)
{
    for (uint32_t w = e->cfg.max_workers; w-- > 0;) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        uint32_t st = mn_a32_load_acquire(&k->state);
        bool there = st == MN_WORKER_STARTING || st == MN_WORKER_READY;
        if (there && mn_a32_load_relaxed(&k->exit_request) == 0 /* written by the trainer */
            && !is_standby(e->autoscale, e->cfg.max_workers, (int32_t)w)) {
            ask_to_exit(e, w);
            return true;
        }
    }
    return false;
}

/* Returns the number of workers that exist or will, and were not asked to exit, without standby
 * workers. It is smaller than active where an entry was given up because its workers died or could
 * not be started. */
static uint32_t
staying(const struct mn_engine *e)
{
    uint32_t n = 0;
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        const struct mn_member *m = &e->crew.members[w];
        n += m->wanted && !m->asked
             && !is_standby(e->autoscale, e->cfg.max_workers, (int32_t)w);
    }
    return n;
}

static void
move_to(struct mn_engine *e, int32_t target)
{
    bool wake = false;
    while ((int32_t)e->active < target && start_one(e) >= 0) {
        e->active++;
        wake = true;
    }
    uint32_t left = (int32_t)e->active > target ? staying(e) : 0;
    while ((int32_t)e->active > target && left > e->cfg.min_workers && end_one(e)) {
        e->active--;
        left--;
    }
    mn_plan_set_active(e->plan, e->active);
    if (wake) {
        e->crew.wakes.executor = true; /* it looks at the worker table */
    }
}

uint32_t
mn_autoscale_bound(const struct mn_engine *e, uint32_t workers)
{
    uint32_t least = e->cfg.min_workers, most = e->cfg.max_workers;
    return workers < least ? least : workers < most ? workers : most;
}

void
mn_autoscale_move(struct mn_engine *e, int32_t target)
{
    move_to(e, (int32_t)mn_autoscale_bound(e, target < 0 ? 0 : (uint32_t)target));
}

/* ---- the number of workers ---------------------------------------------------------- */

static int32_t
permille(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : (int32_t)(part >= whole ? 1000 : part * 1000 / whole);
}

static uint64_t
rows_done(struct mn_engine *e)
{
    uint64_t rows = 0;
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        rows += mn_a64_load_relaxed(&mn_worker_at(&e->shm, w)->rows_done); /* statistics */
    }
    return rows;
}

/* Returns whether it is time to decide. If the caller has asked for nothing for a while, it starts
 * a new interval instead. The caller saves a model, or is between two epochs. That says nothing
 * about workers. */
static bool
is_time(struct mn_engine *e, uint64_t now, bool *sign)
{
    struct mn_autoscale *s = e->autoscale;
    uint64_t took = now - s->last_ns;
    if (took < MN_AUTOSCALE_INTERVAL_NS) {
        return false;
    }
    uint64_t since = mn_a64_load_relaxed(&e->shm.ctl->waiting_since_ns);
    if (s->occupancy_n == 0 && since != 0 && since + MN_AUTOSCALE_INTERVAL_NS <= now) {
        mn_autoscale_saw(e, e->delivery->ready(e), mn_plan_window(e->plan).batches);
    }
    *sign = s->occupancy_n != 0;
    return took >= INTERVALS_MOST * MN_AUTOSCALE_INTERVAL_NS
           || (*sign && rows_done(e) - s->rows >= 2 * (uint64_t)e->active);
}

/* Time spent so far on the worker's current task, which is in no sum yet. */
static uint64_t
begun_of(const struct mn_worker *k, uint64_t now)
{
    uint64_t since = mn_a64_load_relaxed(&k->since_ns); /* a glance */
    return since != 0 && since < now ? now - since : 0;
}

/* Fills in what has changed since the last look. Returns false on the first one. */
static bool
measure(struct mn_engine *e, uint64_t now, struct mn_scaler_input *in)
{
    struct mn_autoscale *s = e->autoscale;
    uint64_t busy = s->facts.machine_busy, total = s->facts.machine_total;
    uint64_t worker_ns = 0, cpu_ns = 0, rows = rows_done(e);
    uint64_t own_ns = s->facts.own_ns, queued_ns = s->facts.queued_ns, begun_ns = 0;
    uint64_t given = mn_a64_load_relaxed(&e->shm.ctl->given);
    for (uint32_t w = 0; w < e->cfg.max_workers; w++) {
        struct mn_worker *k = mn_worker_at(&e->shm, w);
        worker_ns += mn_a64_load_relaxed(&k->busy_ns);
        cpu_ns += mn_a64_load_relaxed(&k->cpu_ns);
        begun_ns += begun_of(k, now);
    }
    bool first = s->last_ns == 0;
    uint64_t took = now - s->last_ns;
    if (!first) {
        uint64_t spent = worker_ns - s->busy_ns, on_cpu = cpu_ns - s->cpu_ns;
        int32_t others = permille(busy - s->machine_busy, total - s->machine_total);
        /* A quota may leave fewer cores than there are CPUs: then idle CPUs are no help. We may
         * take our share of what other programs use: we count half of it as ours. */
        int32_t ours = permille(on_cpu + own_ns - s->own_ns,
                                took * (uint64_t)in->cores_milli / 1000);
        int32_t all = others < ours + FAIR_PERMILLE ? others : ours + FAIR_PERMILLE;
        in->cpu_permille = ours > all ? ours : all;
        /* A task that waits for a core would leave none to an added worker. Workers that have
         * exited took their part of the sum with them: then there is no news. */
        uint64_t queued = queued_ns > s->queued_ns ? queued_ns - s->queued_ns : 0;
        in->wait_permille = 1000 - permille(on_cpu + queued, spent);
        in->rate_milli = (int64_t)((rows - s->rows) * UINT64_C(1000000000000) / took);
        double speed = spent == 0 ? 0
                                  : (double)(rows - s->rows) * 1e12 * (double)in->workers
                                        / (double)spent;
        in->speed_milli = speed < 1e18 ? (int64_t)speed : 0; /* not a measurable speed */
        uint64_t held = spent + begun_ns;
        in->busy_permille = permille(held > s->begun_ns ? held - s->begun_ns : 0,
                                     took * (uint64_t)in->workers);
        in->taken_milli = (int64_t)((given - s->given) * UINT64_C(1000000000000) / took);
        in->occupancy_permille =
            s->occupancy_n != 0 ? (int32_t)(s->occupancy_sum / s->occupancy_n) : 0;
    }
    s->last_ns = now;
    s->machine_busy = busy;
    s->machine_total = total;
    s->rows = rows;
    s->given = given;
    s->own_ns = own_ns;
    s->busy_ns = worker_ns;
    s->cpu_ns = cpu_ns;
    s->queued_ns = queued_ns;
    s->begun_ns = begun_ns;
    s->occupancy_sum = s->occupancy_n = 0;
    return !first;
}

/* Returns the number of tasks that only lack a free worker. If a worker has been idle since the
 * last look, something else holds back what has not started: memory, or the end of the epoch. */
static int64_t
backlog(struct mn_engine *e, const struct mn_scaler_input *in)
{
    const struct mn_plan *p = e->plan;
    int64_t queued = (int64_t)mn_worker_views_queued(e, mn_plan_view(p)->by_piece);
    bool idle = (int64_t)in->workers * (1000 - in->busy_permille) >= 1000;
    return idle ? queued : queued + (int64_t)mn_plan_waiting(p);
}

/* Returns how many more workers fit into memory, judged by the private memory of the worker that
 * has made the most samples. Half of the available memory is left to the trainer. Threads take next
 * to nothing. */
static int32_t
fitting_workers(const struct mn_facts *f)
{
    uint64_t fit = f->private_bytes == 0 || f->available == 0
                       ? INT32_MAX
                       : f->available / 2 / f->private_bytes;
    return fit < INT32_MAX ? (int32_t)fit : INT32_MAX;
}

static void
schedule(struct mn_engine *e, uint64_t now, bool sign)
{
    struct mn_scaler_input in = {.workers = (int32_t)e->active,
                                 .min_workers = (int32_t)e->cfg.min_workers,
                                 .max_workers = (int32_t)e->cfg.max_workers,
                                 .cores_milli = e->autoscale->facts.cores_milli,
                                 .fitting = INT32_MAX};
    if (!measure(e, now, &in) || !sign) {
        return;
    }
    in.backlog = backlog(e, &in);
    if (in.occupancy_permille <= MN_SCALER_STARVED && in.workers < in.max_workers) {
        in.fitting = fitting_workers(&e->autoscale->facts);
    }
    struct mn_scaler_decision d = mn_scaler_update(&e->autoscale->policy, &in);
    const struct mn_autoscale *s = e->autoscale;
    bool news = d.target != in.workers
                || (d.reason > MN_SCALER_SETTLING
                    && (s->nlog == 0
                        || s->log[(s->nlog - 1) % MN_AUTOSCALE_LOG].reason
                               != (int32_t)d.reason));
    if (news) {
        note(e->autoscale, now, in.workers, d.target, (int32_t)d.reason, &in);
    }
    move_to(e, d.target);
}

/* ---- slow samples ------------------------------------------------------------------- */

static int64_t
straggler_after(struct mn_engine *e)
{
    if (e->cfg.straggler_ns != 0) {
        return e->cfg.straggler_ns < 0 ? INT64_MAX : e->cfg.straggler_ns;
    }
    return e->cfg.costs != NULL ? mn_plan_view(e->plan)->known.timeout_ns : INT64_MAX;
}

/* Returns whether a flagged sample was watched for long enough and a core is free for the standby
 * worker. The core may be an idle one, or the one that the sample does not use. */
static bool
can_help(const struct mn_engine *e, const struct mn_flag *f)
{
    uint64_t watched = f->seen_ns - f->first_ns;
    bool waits = f->used_ns < watched / 2;
    return watched >= WATCH_FLAG_NS
           && (waits || 1000 * (int64_t)e->active < e->autoscale->facts.cores_milli);
}

static void
retire_standby(struct mn_engine *e, struct mn_flag *f, uint64_t now)
{
    if (f->standby >= 0) {
        ask_to_exit(e, (uint32_t)f->standby);
        note(e->autoscale, now, (int32_t)e->active + 1, (int32_t)e->active,
             MN_STANDBY_RETIRED, NULL);
    }
    f->since_ns = 0;
    f->standby = -1;
}

static void
watch_worker(struct mn_engine *e, uint32_t w, int64_t limit, uint64_t now)
{
    struct mn_worker *k = mn_worker_at(&e->shm, w);
    struct mn_flag *f = &e->autoscale->flags[w];
    uint64_t since = mn_a64_load_relaxed(&k->since_ns); /* a glance */
    if (f->since_ns != 0 && since != f->since_ns) {
        retire_standby(e, f, now);
    }
    if (since == 0 || since > now || (int64_t)(now - since) <= limit) {
        return;
    }
    if (f->since_ns == 0) {
        *f = (struct mn_flag){.since_ns = since, .standby = -1};
        e->autoscale->stragglers++;
    }
    else if (f->standby < 0 && can_help(e, f)) {
        f->standby = start_one(e);
        if (f->standby >= 0) {
            note(e->autoscale, now, (int32_t)e->active, (int32_t)e->active + 1,
                 MN_STANDBY_ADMITTED, NULL);
            e->crew.wakes.executor = true; /* it looks at the worker table */
        }
    }
}

void
mn_autoscale_tick(struct mn_engine *e, uint64_t now)
{
    if (mn_a32_load_acquire(&e->shm.ctl->stop) != 0) {
        return;
    }
    int64_t limit = straggler_after(e);
    for (uint32_t w = 0; w < e->cfg.max_workers && limit != INT64_MAX; w++) {
        watch_worker(e, w, limit, now);
    }
    bool sign = false;
    if (is_time(e, now, &sign)) {
        schedule(e, now, sign);
    }
}

int64_t
mn_autoscale_nap(struct mn_engine *e)
{
    int64_t limit = straggler_after(e);
    int64_t nap = limit == INT64_MAX ? NAP_MOST_NS : limit / 4;
    return nap < MN_AUTOSCALE_NAP_NS ? MN_AUTOSCALE_NAP_NS : nap > NAP_MOST_NS ? NAP_MOST_NS : nap;
}
