/* mn_autoscale_facts.c - what the system reports on workers, processors and memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It reads files of /proc, so it runs without the mutex; mn_autoscale.c decides on the results.
 */
#include "engine/mn_autoscale.h"
#include "engine/mn_engine_state.h"
#include "os/mn_clock.h"
#include "os/mn_limits.h"
#include "os/mn_proc.h"

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
    f->cores_milli = 1000 * (int32_t)mn_cpu_count();
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
        f->available = mn_mem_available();
        f->private_bytes = pid != 0 ? mn_mem_private(pid) : 0;
    }
}
