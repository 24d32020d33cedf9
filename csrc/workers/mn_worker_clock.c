/* mn_worker_clock.c - see mn_worker_clock.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_worker_clock.h"

#include "os/mn_clock.h"

/* Tasks cheaper than this are not worth a read of the thread's CPU clock (a system call). */
#define CPU_CLOCK_WORTH_NS UINT64_C(20000)

/* Reads the clock once more for each wait: a small part of what the wake-up costs. */
void
mn_worker_waited(struct mn_worker_clock *clock)
{
    clock->cpu_begin_ns = mn_thread_cpu_ns();
}

void
mn_worker_begin(struct mn_worker_side *w, struct mn_worker_clock *clock)
{
    clock->begin_ns = clock->lap_ns = mn_now_ns();
    mn_a64_store_relaxed(&w->me->since_ns, clock->begin_ns);
    mn_a64_store_relaxed(&w->me->row, w->held.row0);
}

uint64_t
mn_worker_lap(struct mn_worker_clock *clock)
{
    uint64_t before = clock->lap_ns;
    clock->lap_ns = mn_now_ns();
    return clock->lap_ns - before;
}

void
mn_worker_account(struct mn_worker_side *w, struct mn_worker_clock *clock, uint32_t task)
{
    struct mn_worker *me = w->me;
    struct mn_task *t = mn_task_at(&w->shm, task);
    t->wall_ns = mn_now_ns() - clock->begin_ns;
    t->cpu_ns = 0;
    if (clock->cpu_begin_ns != 0) {
        uint64_t cpu = mn_thread_cpu_ns();
        t->cpu_ns = cpu - clock->cpu_begin_ns;
        clock->cpu_begin_ns = t->wall_ns > CPU_CLOCK_WORTH_NS ? cpu : 0;
    }
    else if (t->wall_ns > CPU_CLOCK_WORTH_NS) {
        clock->cpu_begin_ns = mn_thread_cpu_ns(); /* counts from the next task on */
    }
    /* Relaxed: written here alone. */
    mn_a64_store_relaxed(&me->busy_ns, mn_a64_load_relaxed(&me->busy_ns) + t->wall_ns);
    mn_a64_store_relaxed(&me->cpu_ns, mn_a64_load_relaxed(&me->cpu_ns) + t->cpu_ns);
    uint64_t rows = w->held.kind != MN_KIND_COLLATE ? w->held.nrows : 0; /* counted by its parts */
    mn_a64_store_relaxed(&me->rows_done, mn_a64_load_relaxed(&me->rows_done) + rows);
}
