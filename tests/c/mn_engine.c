/* mn_engine: many worker threads on one engine, and the engine's guarantees about memory.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The workers are threads on the trainer's mapping, so that ThreadSanitizer sees every access of
 * both sides. Deaths are in mn_worker.c.
 */
#define _GNU_SOURCE
#include "mn_rig.h"

#include "engine/mn_engine_snapshot.h"
#include "engine/mn_autoscale.h"
#include "engine/mn_shared_costs.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"
#include "workers/mn_tasks_and_retries.h"

#define MIB (UINT64_C(1) << 20)
#define WAIT_NS INT64_C(60000000000)

/* window 0: static scheduling. */
static struct mn_engine *
open_engine(uint32_t workers, uint64_t limit, uint32_t window, bool in_order)
{
    struct mn_engine_config cfg = {.workers = workers,
                                   .max_retries = 1,
                                   .respawn = true,
                                   .memory_limit = limit,
                                   .arena_bytes = 256 * MIB,
                                   .window = window,
                                   .in_order = in_order};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    return e;
}

static uint64_t
used(struct mn_engine *e)
{
    mn_mutex_lock(&e->mutex);
    uint64_t n = mn_arena_used(&e->arena);
    mn_mutex_unlock(&e->mutex);
    return n;
}

/* ---- plain: no engine thread; this thread is trainer, engine and worker in turn ---- */

static void
attach(struct mn_engine *e, uint32_t number, struct rig_worker *w, const struct rig *r)
{
    memset(w, 0, sizeof(*w));
    w->scale = r->scale;
    w->env_max = r->env_max;
    CHECK_EQ(mn_worker_attach(&w->side, &e->shm, number), 0);
}

/* Runs everything that is queued. */
static uint32_t
run_all(struct rig_worker *w)
{
    uint32_t task, n = 0;
    while (mn_worker_try(&w->side, &task) == MN_OK) {
        CHECK_EQ(rig_run(w, task), 0);
        n++;
    }
    return n;
}

/* Balanced: runs and dispatches until the batch is done, and reads it. */
static void
take_now(struct rig *r, struct rig_worker *w, struct rig_block *b)
{
    uint64_t sequence;
    int turns = 0;
    while (mn_engine_next(r->e, 0, &sequence, &b->off) == MN_NEXT_TIMEOUT) {
        run_all(w);
        (void)rig_step(r->e);
        CHECK(++turns < 20000);
    }
    CHECK_EQ(sequence, b->sequence);
    rig_check(r, b);
}

static void
attach_refuses_another_layout(void)
{
    struct mn_engine *e = open_engine(1, 0, 0, true);
    struct mn_worker_side side;
    e->shm.ctl->sizes++;
    CHECK_EQ(mn_worker_attach(&side, &e->shm, 0), -EPROTO);
    e->shm.ctl->sizes--;
    e->shm.ctl->magic++;
    CHECK_EQ(mn_worker_attach(&side, &e->shm, 0), -EPROTO);
    mn_engine_close(e);
}

/* A read of /proc takes long on a busy machine, and next() must not wait for it. */
static struct mn_engine *locked;
static uint32_t cpu_looks;

int
__wrap_mn_cputime_process(pid_t pid, uint64_t *ns);

int
__wrap_mn_cputime_process(pid_t pid, uint64_t *ns)
{
    CHECK(pid != 0 && locked == NULL);
    cpu_looks++;
    *ns = 1000;
    return 0;
}

static void
slow_samples_are_watched_without_the_mutex(void)
{
    struct mn_engine_config cfg = {.workers = 1, .min_workers = 1, .max_workers = 2,
                                   .arena_bytes = 64 * MIB, .window = 1, .straggler_ns = 1000};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    struct mn_worker *k = mn_worker_at(&e->shm, 0);
    uint64_t now = UINT64_C(1000000000);
    mn_worker_set_owner(k, 1, (uint32_t)getpid());
    mn_a64_store_relaxed(&k->since_ns, now);
    mn_a32_store_seqcst(&k->state, MN_WORKER_READY);
    while (mn_a32_load_relaxed(&mn_worker_at(&e->shm, 1)->state) == MN_WORKER_EMPTY) {
        now += 40000000;
        CHECK(now < UINT64_C(2000000000));
        mn_autoscale_read_facts(e, now);
        mn_mutex_lock(&e->mutex);
        locked = e;
        mn_autoscale_tick(e, now);
        locked = NULL;
        mn_mutex_unlock(&e->mutex);
    }
    CHECK_EQ(mn_a32_load_relaxed(&mn_worker_at(&e->shm, 1)->state), MN_WORKER_WANTED);
    CHECK(cpu_looks >= 2); /* it was watched for a while */
    mn_engine_close(e);
}

/* Of three workers two have died and will not be replaced. */
static void
the_last_worker_is_not_asked_to_leave(void)
{
    struct mn_engine_config cfg = {.workers = 3, .min_workers = 1, .max_workers = 4,
                                   .arena_bytes = 64 * MIB, .window = 1};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    for (uint32_t w = 0; w < 3; w++) {
        mn_a32_store_seqcst(&mn_worker_at(&e->shm, w)->state,
                            w == 1 ? MN_WORKER_READY : MN_WORKER_EXITED);
    }
    (void)rig_step(e);
    CHECK_EQ(mn_crew_live(&e->crew), 1);
    mn_mutex_lock(&e->mutex);
    mn_autoscale_move(e, 1);
    mn_mutex_unlock(&e->mutex);
    CHECK_EQ(mn_a32_load_relaxed(&mn_worker_at(&e->shm, 1)->exit_request), MN_EXIT_NOT);
    mn_engine_close(e);
}

/* Every descriptor queued at once on one worker's queue. */
static void
more_tasks_than_descriptors(void)
{
    struct mn_engine *e = open_engine(2, 0, 0, true);
    struct rig r = {.e = e, .scale = 8};
    struct rig_worker w;
    struct rig_block *b = calloc(e->shm.ctl->ntasks + 1, sizeof(*b)), none;
    attach(e, 1, &w, &r);
    rig_form(&r, 1);
    for (uint32_t turn = 0; turn < 3; turn++) {
        uint32_t n = 0;
        while (n < e->shm.ctl->ntasks) {
            CHECK_EQ(rig_submit(&r, 1, MN_QUEUE_WORKER + 1, &b[n++]), 0);
        }
        CHECK_EQ(rig_submit(&r, 1, MN_QUEUE_WORKER + 1, &none), -EAGAIN);
        CHECK_EQ(run_all(&w), n);
        for (uint32_t i = 0; i < n; i++) {
            rig_check(&r, &b[i]);
            mn_engine_retire(e, b[i].off);
        }
    }
    CHECK_EQ(used(e), 0);
    free(b);
    mn_engine_close(e);
}

/* Between claim and start, a task must not appear to have the age of the task before it, or of the
 * idle time since. Else it would count as a straggler, or its worker as busy. */
static void
only_begun_tasks_have_an_age(void)
{
    struct mn_engine *e = open_engine(2, 0, 0, true);
    struct rig r = {.e = e, .scale = 100000};
    struct mn_worker_clock clock = {0};
    struct rig_worker w;
    struct rig_block b[2];
    uint32_t task;
    attach(e, 0, &w, &r);
    rig_form(&r, 1);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(rig_submit(&r, 1, MN_QUEUE_WORKER, &b[i]), 0);
        CHECK_EQ(mn_worker_try(&w.side, &task), MN_OK);
        CHECK_EQ(mn_a64_load_relaxed(&w.side.me->since_ns), 0);
        mn_worker_begin(&w.side, &clock);
        CHECK(mn_a64_load_relaxed(&w.side.me->since_ns) != 0);
        mn_worker_account(&w.side, &clock, task);
        CHECK_EQ(rig_run(&w, task), 0);
        CHECK_EQ(mn_a64_load_relaxed(&w.side.me->since_ns), 0);
        rig_check(&r, &b[i]);
    }
    mn_engine_close(e);
}

/* Where the limit leaves no memory for rows, samples travel in envelopes. No later batch takes the
 * memory that these will need. */
static void
batches_may_go_without_rows(void)
{
    struct mn_engine *e = open_engine(1, 2 * MIB, 0, true);
    uint64_t row_bytes = 400 * 1024, off[4];
    struct mn_plan_batch batch = {.nrows = 3};
    struct mn_form form = {MN_KIND_BATCH, 64, 1, &row_bytes};
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(mn_engine_submit(e, &batch, &form, MN_QUEUE_WORKER, &off[i]), 0);
        const struct mn_block *b = mn_block_at(&e->shm, off[i]);
        CHECK_EQ(b->layout, i == 0 || i == 3 ? 64 : 0);
        CHECK_EQ(b->nfields, i == 0 || i == 3 ? 1 : 0);
        if (i == 1) {
            rig_abandon(e, off[0]); /* its rows are not for the next: one before it waits */
        }
        if (i == 2) {
            rig_abandon(e, off[1]);
            rig_abandon(e, off[2]);
        }
    }
    rig_abandon(e, off[3]);
    CHECK_EQ(used(e), 0);
    CHECK_EQ(e->tasks.nfree, e->shm.ctl->ntasks);
    mn_engine_close(e);
}

static void
abandoned_blocks_come_back(void)
{
    struct mn_engine *e = open_engine(2, 0, 0, true);
    struct rig r = {.e = e, .scale = 100000};
    struct rig_worker w;
    struct rig_block b, c;
    uint32_t task;
    attach(e, 0, &w, &r);
    rig_form(&r, 1);
    CHECK_EQ(rig_submit(&r, 5, MN_QUEUE_WORKER, &b), 0);
    rig_abandon(e, b.off); /* not started */
    CHECK_EQ(used(e), 0);
    CHECK_EQ(mn_worker_try(&w.side, &task), MN_EMPTY);
    CHECK_EQ(rig_submit(&r, 5, MN_QUEUE_WORKER, &b), 0);
    CHECK_EQ(mn_worker_try(&w.side, &task), MN_OK);
    rig_abandon(e, b.off); /* a worker runs it */
    CHECK(used(e) != 0);
    CHECK(!rig_step(e));
    CHECK_EQ(rig_submit(&r, 5, MN_QUEUE_WORKER, &c), 0);
    uint64_t running = mn_a64_load_relaxed(&w.side.me->running);
    mn_a64_store_relaxed(&w.side.me->running, 0); /* just before it reports that it is done */
    CHECK(!rig_step(e));
    mn_a64_store_relaxed(&w.side.me->running, running);
    CHECK_EQ(rig_run(&w, task), 0);
    CHECK(rig_step(e));
    CHECK_EQ(e->flight.n, 1);
    CHECK_EQ(run_all(&w), 1);
    rig_check(&r, &c);
    rig_abandon(e, c.off); /* done already */
    CHECK_EQ(used(e), 0);
    CHECK_EQ(e->tasks.nfree, e->shm.ctl->ntasks);
    mn_engine_close(e);
}

/* Other processes may have the mapping, too: its pages go with the engine all the same. */
static void
closing_gives_the_pages_back(void)
{
    struct mn_engine *e = open_engine(1, 0, 4, true);
    int fd = dup(e->file.fd);
    struct rig r = {.e = e, .scale = 100000};
    struct rig_worker w;
    struct rig_block b;
    attach(e, 0, &w, &r);
    rig_form(&r, 1);
    CHECK_EQ(rig_plan(&r, 100, &b), MN_OK);
    take_now(&r, &w, &b);
    CHECK(mn_test_resident(fd) > MIB);
    mn_engine_close(e);
    CHECK(mn_test_resident(fd) < MIB);
    close(fd);
}

/* ---- what goes back while the engine is open: the test sets the time ---- */

/* A load of equal ranges: the oldest is freed and a new one is allocated. */
struct load {
    struct mn_engine *e;
    uint64_t now_ns, bytes, off[16];
    uint32_t n, oldest;
};

static uint64_t
take(struct mn_engine *e, uint64_t bytes)
{
    uint64_t off;
    CHECK_EQ(mn_arena_alloc(&e->arena, bytes, &off), 0);
    memset(mn_at(&e->shm, off), 1, bytes);
    return off;
}

static void
load_open(struct load *l, struct mn_engine *e, uint64_t bytes, uint32_t n)
{
    *l = (struct load){.e = e, .now_ns = 1, .bytes = bytes, .n = n};
    for (uint32_t i = 0; i < n; i++) {
        l->off[i] = take(e, bytes);
    }
}

static void
load_close(struct load *l)
{
    for (uint32_t i = 0; i < l->n; i++) {
        mn_arena_free(&l->e->arena, l->off[i], l->bytes);
    }
}

/* Advances the clock and runs the steps that are due. */
static void
pass_time(struct load *l, uint64_t ns)
{
    for (uint64_t end = l->now_ns + ns; l->now_ns < end;) {
        l->now_ns += 50000000 < end - l->now_ns ? 50000000 : end - l->now_ns;
        mn_mutex_lock(&l->e->mutex);
        while (mn_arena_trim(&l->e->arena, l->now_ns)) {
        }
        mn_engine_unlock(l->e);
    }
}

static void
load_for(struct load *l, uint64_t ns, uint64_t step_ns)
{
    for (uint64_t end = l->now_ns + ns; l->now_ns < end;) {
        mn_arena_free(&l->e->arena, l->off[l->oldest], l->bytes);
        pass_time(l, step_ns / 2); /* its place is free for half of the step */
        l->off[l->oldest] = take(l->e, l->bytes);
        l->oldest = (l->oldest + 1) % l->n;
        pass_time(l, step_ns - step_ns / 2);
    }
}

#define SECOND UINT64_C(1000000000)

/* Ranges of an epoch were retained and released, except one in the middle and the highest. */
static void
what_a_load_does_not_need_goes_back(void)
{
    struct mn_engine *e = open_engine(1, 0, 4, true);
    int fd = dup(e->file.fd);
    struct load l;
    uint64_t kept[100], keep = MIB;
    load_open(&l, e, MIB, 4);
    uint64_t before = mn_test_resident(fd);
    for (int i = 0; i < 100; i++) {
        kept[i] = take(e, keep);
    }
    load_for(&l, 3 * SECOND, SECOND / 20);
    CHECK(mn_test_resident(fd) >= before + 100 * keep);
    for (int i = 0; i < 99; i++) {
        if (i != 50) {
            mn_arena_free(&e->arena, kept[i], keep);
        }
    }
    load_for(&l, SECOND * 5 / 8, SECOND / 20);
    CHECK(mn_test_resident(fd) >= before + 100 * keep); /* it might have been needed again */
    load_for(&l, SECOND, SECOND / 20);
    CHECK(mn_test_resident(fd) <= before + 2 * keep + MN_TRIM_SPARE);
    load_for(&l, 25 * SECOND, SECOND / 20);
    CHECK(mn_test_resident(fd) <= before + 2 * keep);
    CHECK_EQ(mn_arena_warm(&e->arena), 0);
    for (uint64_t i = 0; i < keep; i++) { /* the neighbours of freed ranges are whole */
        CHECK(((char *)mn_at(&e->shm, kept[50]))[i] == 1);
    }
    mn_arena_free(&e->arena, kept[50], keep);
    mn_arena_free(&e->arena, kept[99], keep);
    load_close(&l);
    mn_engine_close(e);
    close(fd);
}

/* At any pace, up to steps of some seconds, its own pages are not taken away. */
static void
a_steady_load_keeps_its_pages(void)
{
    static const uint64_t steps[] = {SECOND / 25, SECOND / 3, SECOND, 4 * SECOND, 8 * SECOND};
    for (size_t i = 0; i < sizeof(steps) / sizeof(*steps); i++) {
        struct mn_engine *e = open_engine(1, 0, 4, true);
        struct load l;
        load_open(&l, e, 8 * MIB, 5);
        load_for(&l, 20 * steps[i] + 20 * SECOND, steps[i]);
        CHECK_EQ(e->arena.trimmed_bytes, 0);
        load_close(&l);
        mn_engine_close(e);
    }
}

/* Between two epochs, or while a program does something else. */
static void
a_pause_gives_memory_back_later(void)
{
    struct mn_engine *e = open_engine(1, 0, 4, true);
    int fd = dup(e->file.fd);
    struct load l;
    load_open(&l, e, 8 * MIB, 8);
    load_for(&l, 2 * SECOND, SECOND / 20);
    load_close(&l);
    l.n = 0;
    pass_time(&l, 7 * SECOND);
    CHECK_EQ(e->arena.trimmed_bytes, 0);
    pass_time(&l, 3 * SECOND);
    CHECK_EQ(e->arena.trimmed_bytes, 64 * MIB - MN_TRIM_SPARE);
    pass_time(&l, 200 * SECOND);
    CHECK_EQ(e->arena.trimmed_bytes, 64 * MIB);
    CHECK(mn_test_resident(fd) < MIB);
    mn_engine_close(e);
    close(fd);
}

/* Warm memory counts: over the limit it is returned sooner, without a spare. */
static void
warm_memory_counts_against_the_limit(void)
{
    struct mn_engine *e = open_engine(1, 32 * MIB, 4, true);
    struct load l;
    load_open(&l, e, MIB, 2);
    uint64_t off = take(e, 28 * MIB), more;
    load_for(&l, SECOND, SECOND / 20);
    more = take(e, 8 * MIB);
    mn_arena_free(&e->arena, off, 28 * MIB);
    load_for(&l, SECOND * 5 / 8, SECOND / 20);
    CHECK(used(e) + mn_arena_warm(&e->arena) <= 32 * MIB);
    CHECK(e->arena.trimmed_bytes != 0);
    mn_arena_free(&e->arena, more, 8 * MIB);
    load_close(&l);
    mn_engine_close(e);
}

/* The head starts, no matter what else uses memory: none of that comes back before the head is
 * delivered. Here the program retains batches, and a later, smaller batch was started early. */
static void
head_over_the_limit_starts(void)
{
    struct mn_shared_costs costs;
    CHECK_EQ(mn_shared_costs_init(&costs, 100000), 0);
    for (int64_t i = 0; i < 4100; i++) {
        mn_costs_observe(&costs.costs, i, NULL, i == 3950 ? 3000000000 : 1000);
    }
    struct mn_engine_config cfg = {.workers = 1, .memory_limit = 4 * MIB, .window = 8,
                                   .arena_bytes = 256 * MIB, .in_order = true,
                                   .costs = &costs};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    struct rig r = {.e = e, .scale = 2000};
    struct rig_worker w;
    struct rig_block b[3];
    attach(e, 0, &w, &r);
    rig_form(&r, 1);
    CHECK_EQ(rig_plan(&r, 100, &b[0]), MN_OK);
    CHECK_EQ(rig_plan(&r, 3800, &b[1]), MN_OK);
    CHECK_EQ(rig_plan(&r, 100, &b[2]), MN_OK);
    for (uint32_t i = 0; i < 3; i++) {
        take_now(&r, &w, &b[i]);
        mn_engine_taken(e, b[i].sequence, b[i].off, false);
    }
    mn_engine_close(e);
    mn_shared_costs_fini(&costs);
}

/* ---- batches that cannot be made ---- */

/* Takes a batch that must be an error. */
static void
take_refused(struct rig *r, const struct rig_block *b, enum mn_refusal_why why)
{
    uint64_t sequence, off = 1;
    CHECK_EQ(mn_engine_next(r->e, WAIT_NS, &sequence, &off), MN_OK);
    CHECK_EQ(sequence, b->sequence);
    CHECK_EQ(off, 0);
    struct mn_refusal refusal = mn_engine_refused(r->e, sequence);
    CHECK_EQ(refusal.why, why);
    mn_engine_taken(r->e, sequence, off, false);
}

/* The program retains what fills the arena, and waits for more. */
static void
kept_batches_leave_no_room_for_the_next(void)
{
    struct mn_engine_config cfg = {.workers = 1, .max_retries = 1, .respawn = true, .window = 4,
                                   .arena_bytes = 32 * MIB, .in_order = true};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    struct rig r = {.e = e, .scale = 20000};
    struct rig_worker w;
    struct rig_block b[2];
    struct rig_range kept;
    attach(e, 0, &w, &r);
    rig_form(&r, 1);
    uint32_t rows = (uint32_t)(24 * MIB / (r.row_bytes[0][1] + r.row_bytes[0][2]));
    CHECK_EQ(rig_plan(&r, rows, &b[0]), MN_OK);
    CHECK_EQ(rig_plan(&r, rows, &b[1]), MN_OK);
    take_now(&r, &w, &b[0]);
    CHECK(rig_retain(&r, &b[0], &kept));
    mn_engine_taken(e, b[0].sequence, b[0].off, false);
    take_refused(&r, &b[1], MN_REFUSED_ROWS);
    mn_engine_release(e, kept.off, kept.bytes);
    CHECK_EQ(rig_plan(&r, rows, &b[1]), MN_OK);
    take_now(&r, &w, &b[1]);
    mn_engine_taken(e, b[1].sequence, b[1].off, false);
    mn_engine_close(e);
}

/* ---- batches formed of ready samples ---- */

static struct mn_engine *
forming_engine(struct rig *r, struct rig_worker *w, uint32_t workers, uint32_t batch,
               uint32_t window)
{
    struct mn_engine_config cfg = {.workers = workers,
                                   .arena_bytes = 64 * MIB,
                                   .window = window,
                                   .ready_batch = batch,
                                   .ready_bound = 2,
                                   .ready_mixes = true};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    *r = (struct rig){.e = e, .scale = 8};
    for (uint32_t i = 0; i < workers; i++) {
        attach(e, i, &w[i], r);
    }
    rig_form(r, 1);
    return e;
}

/* Looks until a batch is formed. A mixed batch waits for some real time first. */
static void
form_now(struct mn_engine *e, struct rig_worker *w)
{
    uint64_t sequence, off;
    uint64_t deadline = mn_test_clock_ns() + 60000000000u;
    while (mn_engine_next(e, 0, &sequence, &off) == MN_NEXT_TIMEOUT) {
        run_all(w);
        CHECK(mn_test_clock_ns() < deadline);
    }
    const struct mn_run *runs;
    CHECK(mn_delivery_runs(e, &runs) != 0);
    CHECK_EQ(runs[0].sequence, sequence);
    CHECK_EQ(runs[0].block_off, off);
}

/* Checks that every row of the formed batch is right and occurs once. */
static uint32_t
check_runs(struct rig *r, const struct rig_block *b, uint32_t nblocks, uint8_t *seen)
{
    const struct mn_run *run;
    uint32_t rows = 0, nruns = mn_delivery_runs(r->e, &run);
    for (const struct mn_run *end = run + nruns; run < end; run++) {
        CHECK(run->sequence < nblocks);
        const struct mn_block *block = mn_block_at(&r->e->shm, run->block_off);
        CHECK_EQ(block->number, b[run->sequence].number);
        for (uint32_t row = run->row0; row < run->row0 + run->nrows; row++) {
            CHECK(seen[b[run->sequence].position + row]++ == 0);
        }
        rows += run->nrows;
    }
    return rows;
}

static void
take_formed(struct mn_engine *e)
{
    const struct mn_run *runs;
    CHECK(mn_delivery_runs(e, &runs) != 0);
    mn_engine_taken(e, runs[0].sequence, runs[0].block_off, false);
}

/* A task that ends just after the look whether its batch is done. */
static struct rig_worker *late;
static uint32_t late_task;

enum mn_block_status
__real_mn_engine_poll(struct mn_engine *e, uint64_t block_off);

enum mn_block_status
__wrap_mn_engine_poll(struct mn_engine *e, uint64_t block_off);

enum mn_block_status
__wrap_mn_engine_poll(struct mn_engine *e, uint64_t block_off)
{
    enum mn_block_status status = __real_mn_engine_poll(e, block_off);
    if (late != NULL) {
        struct rig_worker *w = late;
        late = NULL;
        CHECK_EQ(status, MN_BLOCK_BUSY);
        CHECK_EQ(rig_run(w, late_task), 0);
    }
    return status;
}

static void
what_is_delivered_has_left_the_plan(void)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = forming_engine(&r, w, 2, 4, 8);
    struct rig_block b;
    CHECK_EQ(rig_plan(&r, 4, &b), MN_OK);
    CHECK_EQ(mn_worker_try(&w[0].side, &late_task), MN_OK);
    run_all(&w[1]);
    late = &w[0];
    form_now(e, &w[1]);
    CHECK(late == NULL);
    CHECK_EQ(e->plan->view.order.head, 1);
    CHECK(mn_plan_at(e->plan, 0) == NULL);
    take_formed(e);
    mn_engine_plan_clear(e);
    CHECK_EQ(e->flight.n, 0);
    mn_engine_close(e);
}

/* A batch of rows from two units; one of them is then half taken, the other not made. */
static void
mixed_batches_keep_what_is_left_of_others(void)
{
    struct rig r;
    struct rig_worker w[3];
    struct mn_engine *e = forming_engine(&r, w, 3, 4, 8);
    struct rig_block b[2];
    uint8_t seen[8] = {0};
    uint32_t slow[2];
    for (uint32_t i = 0; i < 2; i++) {
        CHECK_EQ(rig_plan(&r, 4, &b[i]), MN_OK);
        CHECK_EQ(mn_worker_try(&w[i].side, &slow[i]), MN_OK);
        CHECK_EQ(mn_task_at(&e->shm, slow[i])->nrows, 1); /* no costs are known */
        run_all(&w[2]);
    }
    form_now(e, &w[2]);
    const struct mn_run *runs;
    CHECK_EQ(mn_delivery_runs(e, &runs), 2);
    CHECK(mn_engine_progress(e).ready != 0); /* although no planned batch is done */
    CHECK_EQ(check_runs(&r, b, 2, seen), 4);
    take_formed(e);
    CHECK_EQ(e->flight.n, 2);
    mn_engine_plan_clear(e);
    CHECK_EQ(rig_run(&w[0], slow[0]), 0);
    CHECK_EQ(rig_run(&w[1], slow[1]), 0);
    while (rig_step(e)) {
    }
    CHECK_EQ(e->flight.n, 0);
    CHECK_EQ(used(e), 0);
    CHECK_EQ(e->tasks.nfree, e->shm.ctl->ntasks);
    mn_engine_close(e);
}

/* Samples that wait for others keep their descriptors. A sample that finds none is an error in the
 * batch that waits for it, and does not hang. */
static void
descriptors_that_are_all_out(void)
{
    struct rig r;
    struct rig_worker w;
    struct mn_engine *e = forming_engine(&r, &w, 1, 4097, 4098);
    struct rig_block b;
    CHECK(e->tasks.nfree >= 4096);
    e->tasks.nfree = 4096; /* as if the others were in use */
    for (uint32_t i = 0; i < 4097; i++) {
        uint64_t sequence, off;
        CHECK_EQ(rig_plan_more(&r, 1, &b), MN_OK);
        run_all(&w);
        if (i < 4096) {
            CHECK(mn_engine_next(e, 0, &sequence, &off) != MN_OK);
        }
    }
    mn_engine_plan_end(e);
    form_now(e, &w);
    CHECK_EQ(mn_engine_refused(e, 0).why, MN_REFUSED_NOT);
    CHECK_EQ(mn_engine_refused(e, 4096).why, MN_REFUSED_TASKS);
    take_formed(e);
    CHECK_EQ(rig_plan(&r, 1, &b), MN_OK);
    form_now(e, &w);
    CHECK_EQ(mn_engine_refused(e, b.sequence).why, MN_REFUSED_NOT);
    take_formed(e);
    CHECK_EQ(e->flight.n, 0);
    mn_engine_close(e);
}

/* ---- waiting for memory ---- */

/* Wants more than there is, as mn_worker_lease does, but does not wait for it. */
static void
want_room(struct rig_worker *w, uint64_t bytes)
{
    w->side.me->want_bytes = bytes;
    w->side.me->used_end = w->side.used_end;
    mn_a32_store_seqcst(&w->side.me->lease_state, MN_LEASE_WANT);
}

static uint32_t
lease_of(const struct rig_worker *w)
{
    return mn_a32_load_acquire(&w->side.me->lease_state);
}

static struct mn_engine *
two_workers(struct rig *r, struct rig_worker *w, uint64_t limit)
{
    struct mn_engine *e = open_engine(2, limit, 4, true);
    *r = (struct rig){.e = e, .scale = 100};
    for (uint32_t i = 0; i < 2; i++) {
        attach(e, i, &w[i], r);
        mn_a32_store_release(&w[i].side.me->state, MN_WORKER_READY);
    }
    rig_form(r, 0);
    return e;
}

/* Of these batches the first is done. The worker of the second waits for memory past the limit, and
 * the other worker may go on without memory. */
static void
second_waits_for_room(struct rig *r, struct rig_worker *w, uint32_t batches)
{
    struct rig_block b[4];
    uint32_t task;
    CHECK(batches <= 4);
    for (uint32_t i = 0; i < batches; i++) {
        CHECK_EQ(rig_plan(r, 1, &b[i]), MN_OK);
    }
    CHECK_EQ(mn_worker_try(&w[1].side, &task), MN_OK); /* the head */
    CHECK_EQ(rig_run(&w[1], task), 0);
    CHECK_EQ(mn_worker_try(&w[0].side, &task), MN_OK);
    want_room(&w[0], 8 * MIB);
    mn_a64_store_seqcst(&r->e->shm.ctl->wanted, MN_WANT_CHANGE); /* the trainer sleeps */
    (void)rig_step(r->e);
}

/* A worker gets no memory past the limit while another worker may go on without. */
static void
room_is_not_given_past_the_limit_beside_idle_workers(void)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = two_workers(&r, w, MIB);
    uint32_t task;
    second_waits_for_room(&r, w, 3);
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_WANT); /* the third is queued */
    CHECK_EQ(mn_worker_try(&w[1].side, &task), MN_OK);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_WANT);
    CHECK_EQ(rig_run(&w[1], task), 0);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_GRANTED);
    mn_engine_close(e);
}

/* It is checked twice just between two tasks, and runs a long one in between. */
static void
room_is_not_given_past_the_limit_beside_a_worker_that_goes_on(void)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = two_workers(&r, w, MIB);
    uint32_t task;
    second_waits_for_room(&r, w, 4);
    CHECK(e->idle_ns != 0);
    e->idle_ns -= UINT64_C(3000000000); /* this long ago */
    CHECK_EQ(mn_worker_try(&w[1].side, &task), MN_OK);
    mn_worker_begin(&w[1].side, &(struct mn_worker_clock){0});
    (void)rig_step(e);
    CHECK_EQ(rig_run(&w[1], task), 0);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_WANT);
    mn_engine_close(e);
}

/* One worker each on two batches of these forms, the first of which is the head. */
static struct mn_engine *
at_two_batches(struct rig *r, struct rig_worker *w, const struct mn_form *head,
               const struct mn_form *second)
{
    struct rig_block b[2];
    uint32_t task;
    struct mn_engine *e = two_workers(r, w, 3 * MIB);
    for (uint32_t i = 0; i < 2; i++) {
        mn_engine_set_form(e, i == 0 ? head : second);
        CHECK_EQ(rig_plan(r, 2, &b[i]), MN_OK);
        do {
            CHECK_EQ(mn_worker_try(&w[i].side, &task), MN_OK);
        } while (e->flight.by_task[task]->planned.sequence != i);
    }
    return e;
}

/* The second batch's worker gets the free memory minus a reserve. The head's worker gets all. */
static void
room_is_left(const struct mn_form *head, const struct mn_form *second, uint64_t left)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = at_two_batches(&r, w, head, second);
    uint64_t free_bytes = e->arena.limit - used(e);
    CHECK(free_bytes > left && free_bytes % 4096 == 0);
    want_room(&w[1], free_bytes - left + 1);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[1]), MN_LEASE_WANT);
    want_room(&w[0], free_bytes);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_GRANTED);
    CHECK_EQ(lease_of(&w[1]), MN_LEASE_WANT);
    mn_engine_close(e);

    e = at_two_batches(&r, w, head, second);
    want_room(&w[1], free_bytes - left);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[1]), MN_LEASE_GRANTED);
    mn_engine_close(e);
}

/* The memory of a batch's rows is left to a head that has none, whose worker may ask for it later.
 * Before any batch was made, it is assumed to be what this batch will take. */
static void
room_is_left_for_the_head(void)
{
    uint64_t row_bytes[1] = {MIB / 4};
    struct mn_form rows = {
        .kind = MN_KIND_ROWS, .layout = 1, .nfields = 1, .row_bytes = row_bytes};
    struct mn_form none = {.kind = MN_KIND_SAMPLES};
    room_is_left(&none, &rows, MIB / 2);
    room_is_left(&none, &none, 2 * MIB);
    room_is_left(&rows, &rows, 0);
}

/* An idle worker that never takes a queued task does not hold up the others for good. */
static void
room_is_given_past_the_limit_beside_stopped_workers(void)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = two_workers(&r, w, MIB);
    struct rig_block b[2];
    uint32_t task;
    r.number = 1;
    CHECK_EQ(rig_plan(&r, 1, &b[0]), MN_OK);
    CHECK_EQ(rig_plan(&r, 1, &b[1]), MN_OK);
    CHECK_EQ(mn_worker_try(&w[0].side, &task), MN_OK);
    CHECK_EQ(rig_run(&w[0], task), 0);
    CHECK_EQ(rig_plan(&r, 1, &b[0]), MN_OK);
    CHECK_EQ(mn_worker_try(&w[0].side, &task), MN_OK);
    want_room(&w[0], 8 * MIB);
    mn_a64_store_seqcst(&e->shm.ctl->wanted, MN_WANT_CHANGE);
    uint64_t stop = mn_test_clock_ns() + (uint64_t)WAIT_NS;
    while (lease_of(&w[0]) == MN_LEASE_WANT) {
        CHECK(mn_test_clock_ns() < stop);
        (void)rig_step(e);
        sched_yield();
    }
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_GRANTED);
    mn_engine_close(e);
}

/* The next epoch's first batch has a smaller number than the last ones of this epoch. */
static void
room_goes_by_the_order_over_epochs(void)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = two_workers(&r, w, MIB);
    struct rig_block b[2];
    uint32_t task;
    r.number = 900;
    CHECK_EQ(rig_plan(&r, 1, &b[0]), MN_OK);
    r.number = 0;
    CHECK_EQ(rig_plan(&r, 1, &b[1]), MN_OK);
    CHECK_EQ(mn_worker_try(&w[1].side, &task), MN_OK);
    CHECK_EQ(mn_worker_try(&w[0].side, &task), MN_OK);
    want_room(&w[0], 8 * MIB);
    want_room(&w[1], 8 * MIB);
    (void)rig_step(e);
    CHECK_EQ(lease_of(&w[0]), MN_LEASE_WANT);
    CHECK_EQ(lease_of(&w[1]), MN_LEASE_GRANTED);
    mn_engine_close(e);
}

struct waiter {
    struct mn_worker_side *side;
    int rc;
};

static void
waiter_main(void *arg)
{
    struct waiter *t = arg;
    uint64_t off;
    t->rc = mn_worker_lease(t->side, MIB, &off);
}

static void
await_sleep(struct mn_event *event)
{
    uint64_t stop = mn_test_clock_ns() + (uint64_t)WAIT_NS;
    while (mn_a32_load_acquire(&event->word) != MN_EVENT_ASLEEP) {
        CHECK(mn_test_clock_ns() < stop);
        sched_yield();
    }
}

/* One wake-up is for one task: a worker that waits for memory would sleep on. */
static void
waiting_for_room_takes_no_ring_of_idle_workers(void)
{
    struct rig r;
    struct rig_worker w[2];
    struct mn_engine *e = two_workers(&r, w, MIB);
    struct waiter waiter = {&w[0].side, 1};
    struct mn_thread thread;
    CHECK_EQ(mn_thread_start(&thread, "waiter", waiter_main, &waiter), 0);
    await_sleep(&w[0].side.me->lease_event);
    struct rig_block b;
    CHECK_EQ(rig_plan(&r, 1, &b), MN_OK);
    mn_event_prepare_wait(&w[1].side.me->event); /* idle, about to sleep */
    mn_crew_wake(&e->crew, &(struct mn_wakes){.workers = 1});
    CHECK_EQ(mn_a32_load_acquire(&w[1].side.me->event.word), MN_EVENT_AWAKE);
    mn_engine_dismiss(e); /* ends it, too */
    CHECK_EQ(mn_thread_join(&thread), 0);
    CHECK_EQ(waiter.rc, MN_CLOSED);
    mn_engine_close(e);
}

/* ---- threads ---- */

#define HELD 24u
#define WINDOW 12u
#define POSITIONS (1u << 22)

struct crew {
    struct rig rig;
    struct rig_worker workers[RIG_WORKERS];
    struct mn_thread threads[RIG_WORKERS];
    uint32_t n;
    uint64_t seed;
    struct rig_block flight[WINDOW];
    uint32_t nflight;
    struct rig_range held[HELD];
    uint32_t nheld;
    uint64_t taken, abandoned, refused;
};

static void
worker_main(void *arg)
{
    rig_work(arg);
}

static void
start_crew(struct crew *c, uint32_t n, struct mn_engine *e, uint64_t scale, uint64_t env_max)
{
    memset(c, 0, sizeof(*c));
    c->n = n;
    c->seed = mn_test_seed();
    c->rig = (struct rig){.e = e, .scale = scale, .env_max = env_max};
    rig_form(&c->rig, 1);
    for (uint32_t i = 0; i < e->shm.ctl->ntasks; i++) {
        e->tasks.gens[i] = UINT32_MAX - i % 64; /* soon past zero */
    }
    mn_a32 *rows = calloc(POSITIONS, sizeof(*rows));
    CHECK(rows != NULL);
    CHECK_EQ(mn_engine_start(e, -1, -1), 0);
    for (uint32_t i = 0; i < n; i++) {
        attach(e, i, &c->workers[i], &c->rig);
        c->workers[i].done_rows = rows;
        CHECK_EQ(mn_thread_start(&c->threads[i], "worker", worker_main, &c->workers[i]), 0);
    }
}

/* Retains one more range and frees others, after checking their contents. */
static void
hold_some(struct crew *c, const struct rig_block *b)
{
    if (c->nheld < HELD && rig_retain(&c->rig, b, &c->held[c->nheld])) {
        c->nheld++;
    }
    while (c->nheld == HELD || (c->nheld != 0 && mn_test_random(&c->seed) % 2 == 0)) {
        uint32_t i = (uint32_t)(mn_test_random(&c->seed) % c->nheld);
        struct rig_range range = c->held[i];
        CHECK(rig_sum(&c->rig, &range) == range.sum);
        mn_engine_release(c->rig.e, range.off, range.bytes);
        c->held[i] = c->held[--c->nheld];
    }
}

static void
forget(struct crew *c, uint32_t i)
{
    memmove(&c->flight[i], &c->flight[i + 1], (--c->nflight - i) * sizeof(c->flight[0]));
}

/* Checks a done batch, retains some of it. */
static void
look_at(struct crew *c, const struct rig_block *b)
{
    rig_check(&c->rig, b);
    for (uint32_t row = 0; row < b->nrows; row++) {
        CHECK_EQ(mn_a32_load_relaxed(&c->workers[0].done_rows[b->position + row]), 1);
    }
    if (mn_test_random(&c->seed) % 3 == 0) {
        hold_some(c, b);
    }
    c->taken++;
}

static uint32_t
some_rows(uint64_t r)
{
    return (uint32_t)(r % 8 == 0 ? r / 8 % 200 : r / 8 % 20);
}

/* Checks that nothing of the arena is in use except what is retained. */
static void
end_crew(struct crew *c)
{
    struct mn_engine *e = c->rig.e;
    uint64_t stop = mn_test_clock_ns() + (uint64_t)WAIT_NS, bytes = 0;
    for (bool busy = true; busy; sched_yield()) { /* workers still run abandoned ones */
        mn_mutex_lock(&e->mutex);
        busy = e->flight.n != 0;
        mn_mutex_unlock(&e->mutex);
        CHECK(mn_test_clock_ns() < stop);
    }
    mn_engine_stop(e);
    for (uint32_t i = 0; i < c->n; i++) {
        CHECK_EQ(mn_thread_join(&c->threads[i]), 0);
    }
    free(c->workers[0].done_rows);
    CHECK_EQ(e->tasks.nfree, e->shm.ctl->ntasks);
    rig_has_no_records(e);
    bool held = c->nheld != 0;
    mn_engine_close(e);
    for (uint32_t i = 0; i < c->nheld; i++) {
        bytes += mn_page_round(c->held[i].bytes);
    }
    CHECK(!held || used(e) == bytes);
    while (c->nheld != 0) {
        struct rig_range range = c->held[--c->nheld];
        CHECK(rig_sum(&c->rig, &range) == range.sum);
        mn_engine_release(e, range.off, range.bytes);
    }
    printf("  taken %llu abandoned %llu refused %llu rows %llu\n", (unsigned long long)c->taken,
           (unsigned long long)c->abandoned, (unsigned long long)c->refused,
           (unsigned long long)c->rig.position);
}

/* Static scheduling: queues of their own, any order of taking, batches abandoned one by one. */

static void
static_take(struct crew *c)
{
    struct mn_engine *e = c->rig.e;
    bool first = mn_test_random(&c->seed) % 2 == 0;
    for (;;) {
        for (uint32_t i = 0; i < (first ? 1 : c->nflight); i++) {
            if (mn_engine_poll(e, c->flight[i].off) == MN_BLOCK_DONE) {
                look_at(c, &c->flight[i]);
                mn_engine_retire(e, c->flight[i].off);
                forget(c, i);
                return;
            }
        }
        CHECK(mn_engine_wait(e, first ? c->flight[0].off : MN_WANT_ANY, WAIT_NS)
              != -ETIMEDOUT);
    }
}

static void
static_step(struct crew *c, bool more)
{
    uint64_t r = mn_test_random(&c->seed);
    if (more && c->nflight < WINDOW && r % 3 != 0) {
        uint32_t queue = MN_QUEUE_WORKER + (uint32_t)(r / 8 % c->n);
        if (r % 32 == 0) {
            mn_a64_store_relaxed(&mn_queue_at(&c->rig.e->shm, queue)->hint, 0);
        }
        rig_form(&c->rig, (uint32_t)(r / 4096 % 20));
        int rc = rig_submit(&c->rig, some_rows(r >> 20), queue, &c->flight[c->nflight]);
        CHECK(rc == 0 || rc == -ENOMEM || rc == -EAGAIN);
        c->nflight += rc == 0;
        c->refused += rc != 0;
    }
    else if (c->nflight != 0 && r % 11 == 0) {
        uint32_t i = (uint32_t)(r / 16 % c->nflight);
        rig_abandon(c->rig.e, c->flight[i].off);
        c->abandoned++;
        forget(c, i);
    }
    else if (c->nflight != 0) {
        static_take(c);
    }
}

static void
drive_static(uint32_t n, uint64_t limit, uint64_t scale, uint64_t env_max)
{
    static struct crew c;
    start_crew(&c, n, open_engine(n, limit, 0, true), scale, env_max);
    uint64_t stop = mn_test_stop_ns();
    bool more = true;
    while (more || c.nflight != 0) {
        more = more && c.rig.position < POSITIONS - 1000
               && (mn_test_clock_ns() < stop || c.taken < 10 || c.abandoned == 0);
        static_step(&c, more);
    }
    end_crew(&c);
}

static void
static_loads(void)
{
    drive_static(4, 0, 200, 0);
    drive_static(3, 64 * MIB, 12000, MIB);
    drive_static(4, 2 * MIB, 3000, 3 * MIB); /* envelopes exceed lease and limit */
}

/* Balanced scheduling: the plan decides what starts; epochs end early at random. */

static void
balanced_take(struct crew *c)
{
    uint64_t sequence, off;
    int rc = mn_engine_next(c->rig.e, WAIT_NS, &sequence, &off);
    CHECK_EQ(rc, MN_OK);
    for (uint32_t i = 0; i < c->nflight; i++) {
        if (c->flight[i].sequence == sequence) {
            CHECK(i == 0 || !c->rig.e->plan->cfg.in_order);
            c->flight[i].off = off;
            look_at(c, &c->flight[i]);
            mn_engine_taken(c->rig.e, sequence, off, false);
            forget(c, i);
            return;
        }
    }
    CHECK(!"a batch that is not in flight");
}

static void
balanced_step(struct crew *c, bool more)
{
    uint64_t r = mn_test_random(&c->seed);
    if (more && c->nflight < WINDOW && r % 3 != 0) {
        /* a form stays alive while batches may start with it: change it between epochs */
        CHECK_EQ(rig_plan(&c->rig, some_rows(r >> 20), &c->flight[c->nflight++]), MN_OK);
    }
    else if (r % 150 == 0) {
        mn_engine_plan_clear(c->rig.e);
        c->abandoned += c->nflight + 1;
        c->nflight = 0;
        c->rig.number = 0;
        rig_form(&c->rig, (uint32_t)(r / 4096 % 20));
    }
    else if (c->nflight != 0) {
        balanced_take(c);
    }
}

/* The answer to whether batches are split changes while some are planned and some have started. */
static void
change_split(struct crew *c, struct mn_shared_costs *shared)
{
    struct mn_costs *costs = &shared->costs;
    mn_mutex_lock(&shared->mutex);
    costs->send_ns = mn_test_random(&c->seed) % 2 == 0 ? 0 : MN_SPLIT_CANNOT;
    costs->split = costs->send_ns == 0;
    mn_mutex_unlock(&shared->mutex);
}

static void
drive_balanced(uint32_t n, uint64_t limit, uint64_t scale, uint64_t env_max, bool in_order,
               bool parts)
{
    static struct crew c;
    struct mn_shared_costs costs;
    CHECK_EQ(mn_shared_costs_init(&costs, POSITIONS), 0);
    struct mn_engine_config cfg = {.workers = n, .max_retries = 1, .respawn = true,
                                   .memory_limit = limit, .arena_bytes = 256 * MIB,
                                   .window = 4, .in_order = in_order, .costs = &costs};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    start_crew(&c, n, e, scale, env_max);
    c.rig.parts = parts;
    uint64_t stop = mn_test_stop_ns();
    bool more = true;
    while (more || c.nflight != 0) {
        more = more && c.rig.position < POSITIONS - 1000
               && (mn_test_clock_ns() < stop || c.taken < 10 || c.abandoned == 0);
        if (parts && mn_test_random(&c.seed) % 20 == 0) {
            change_split(&c, &costs);
        }
        balanced_step(&c, more);
    }
    mn_engine_plan_clear(e);
    c.abandoned++;
    end_crew(&c);
    mn_shared_costs_fini(&costs);
}

static void
balanced_loads(void)
{
    drive_balanced(4, 0, 200, 0, true, false);
    drive_balanced(4, 16 * MIB, 1000, 30000, true, true);
    drive_balanced(RIG_WORKERS, 64 * MIB, 1000, 3000, false, true);
    drive_balanced(RIG_WORKERS, 16 * MIB, 1000, 100000, false, false);
    drive_balanced(3, 64 * MIB, 12000, MIB, true, false);
    drive_balanced(4, 2 * MIB, 6000, 3 * MIB, true, false); /* over the limit */
}

/* Batches formed of ready rows: every row comes once and as it was written, for any timing of tasks
 * and looks; epochs end early at random. */

#define FORMED_ROWS 8u

/* Reads the formed batch; returns its rows. */
static uint32_t
formed_read(struct crew *c)
{
    struct mn_engine *e = c->rig.e;
    const struct mn_run *run;
    uint64_t row_bytes[RIG_FIELDS];
    uint32_t rows = 0, nruns = mn_delivery_runs(e, &run);
    for (const struct mn_run *end = run + nruns; run < end; run++) {
        struct mn_block *block = mn_block_at(&e->shm, run->block_off);
        rig_row_bytes(block->layout, c->rig.scale, row_bytes);
        for (uint32_t row = run->row0; row < run->row0 + run->nrows; row++, rows++) {
            uint64_t position = block->position + row;
            CHECK_EQ(mn_block_reports(block)[row].status, MN_ROW_WRITTEN);
            CHECK_EQ(mn_a32_add_relaxed(&c->workers[0].done_rows[position], 1000) / 1000, 0);
            for (uint32_t k = 0; k < block->nfields; k++) {
                const char *at = mn_at(&e->shm, mn_block_fields(block)[k]);
                CHECK(rig_holds(at + row * row_bytes[k], row_bytes[k], rig_row_key(position, k)));
            }
        }
    }
    return rows;
}

/* Counts batches in flight, except those of an abandoned epoch that workers still run. */
static uint32_t
wanted_in_flight(struct mn_engine *e)
{
    uint32_t n = 0;
    mn_mutex_lock(&e->mutex);
    for (const struct mn_batch *b = e->flight.first; b != NULL; b = b->next) {
        n += b->planned.state != MN_BATCH_ABANDONED;
    }
    mn_mutex_unlock(&e->mutex);
    return n;
}

static void
formed_epoch(struct crew *c, uint32_t batches)
{
    struct mn_engine *e = c->rig.e;
    struct rig_block b;
    uint64_t sequence, off;
    uint32_t left = batches * FORMED_ROWS, planned = 0;
    bool leave = mn_test_random(&c->seed) % 4 == 0;
    c->rig.number = 0;
    while (left != 0) {
        for (; planned < batches && planned * FORMED_ROWS < left + 4 * FORMED_ROWS; planned++) {
            CHECK_EQ(rig_plan(&c->rig, FORMED_ROWS, &b), MN_OK);
        }
        CHECK_EQ(mn_engine_next(e, WAIT_NS, &sequence, &off), MN_OK);
        uint32_t rows = formed_read(c);
        CHECK_EQ(rows, FORMED_ROWS);
        left -= rows;
        mn_engine_taken(e, sequence, off, false);
        c->taken++;
        if (leave && mn_test_random(&c->seed) % 16 == 0) {
            c->abandoned++;
            break;
        }
    }
    CHECK(left != 0 || wanted_in_flight(e) == 0);
    mn_engine_plan_clear(e);
}

static void
formed_of_what_is_ready(void)
{
    static struct crew c;
    struct mn_shared_costs costs;
    CHECK_EQ(mn_shared_costs_init(&costs, POSITIONS), 0);
    struct mn_engine_config cfg = {.workers = RIG_WORKERS, .max_retries = 1, .respawn = true,
                                   .arena_bytes = 256 * MIB, .window = 4, .costs = &costs,
                                   .ready_batch = FORMED_ROWS, .ready_bound = 3,
                                   .ready_mixes = true};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    start_crew(&c, RIG_WORKERS, e, 1000, 3000);
    uint64_t stop = mn_test_stop_ns();
    while (c.rig.position < POSITIONS - 1000
           && (mn_test_clock_ns() < stop || c.taken < 10 || c.abandoned == 0)) {
        formed_epoch(&c, 1 + (uint32_t)(mn_test_random(&c.seed) % 40));
    }
    end_crew(&c);
    mn_shared_costs_fini(&costs);
}

/* Batches are dropped from a thread of the program's choice. */
struct dropper {
    struct crew *c;
    mn_a64 mail; /* index + 1 of a range to free */
    mn_a32 stop;
};

static void
dropper_main(void *arg)
{
    struct dropper *d = arg;
    while (mn_a32_load_acquire(&d->stop) == 0) {
        uint64_t i = mn_a64_load_acquire(&d->mail);
        if (i != 0) {
            struct rig_range *range = &d->c->held[i - 1];
            mn_engine_release(d->c->rig.e, range->off, range->bytes);
            (void)mn_a64_xchg_acqrel(&d->mail, 0);
        }
        sched_yield();
    }
}

static void
await_empty(mn_a64 *mail)
{
    while (mn_a64_load_acquire(mail) != 0) {
        sched_yield();
    }
}

static void
ranges_come_back_from_another_thread(void)
{
    static struct crew c;
    struct dropper d = {.c = &c};
    struct mn_thread thread;
    struct rig_block b;
    start_crew(&c, 2, open_engine(2, 32 * MIB, 4, true), 20000, 0);
    CHECK_EQ(mn_thread_start(&thread, "dropper", dropper_main, &d), 0);
    uint64_t stop = mn_test_stop_ns(), sequence;
    for (uint64_t i = 0; mn_test_clock_ns() < stop; i++) {
        CHECK_EQ(rig_plan(&c.rig, 16, &b), MN_OK);
        CHECK_EQ(mn_engine_next(c.rig.e, WAIT_NS, &sequence, &b.off), MN_OK);
        rig_check(&c.rig, &b);
        await_empty(&d.mail);
        bool kept = rig_retain(&c.rig, &b, &c.held[i % HELD]);
        mn_engine_taken(c.rig.e, sequence, b.off, false);
        if (kept) {
            (void)mn_a64_xchg_acqrel(&d.mail, i % HELD + 1);
        }
        c.taken++;
    }
    await_empty(&d.mail);
    mn_a32_store_release(&d.stop, 1);
    CHECK_EQ(mn_thread_join(&thread), 0);
    CHECK_EQ(c.rig.e->arena.kept_bytes, 0);
    CHECK_EQ(used(c.rig.e), 0);
    c.abandoned = 1;
    end_crew(&c);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", attach_refuses_another_layout),
    MN_TEST("plain", slow_samples_are_watched_without_the_mutex),
    MN_TEST("plain", the_last_worker_is_not_asked_to_leave),
    MN_TEST("plain", more_tasks_than_descriptors),
    MN_TEST("plain", only_begun_tasks_have_an_age),
    MN_TEST("plain", batches_may_go_without_rows),
    MN_TEST("plain", abandoned_blocks_come_back),
    MN_TEST_ADVISED("plain", closing_gives_the_pages_back),
    MN_TEST_ADVISED("plain", what_a_load_does_not_need_goes_back),
    MN_TEST("plain", a_steady_load_keeps_its_pages),
    MN_TEST_ADVISED("plain", a_pause_gives_memory_back_later),
    MN_TEST("plain", warm_memory_counts_against_the_limit),
    MN_TEST("plain", head_over_the_limit_starts),
    MN_TEST("plain", kept_batches_leave_no_room_for_the_next),
    MN_TEST("plain", what_is_delivered_has_left_the_plan),
    MN_TEST("plain", mixed_batches_keep_what_is_left_of_others),
    MN_TEST("plain", descriptors_that_are_all_out),
    MN_TEST("plain", room_is_not_given_past_the_limit_beside_idle_workers),
    MN_TEST("plain", room_is_not_given_past_the_limit_beside_a_worker_that_goes_on),
    MN_TEST("plain", room_is_left_for_the_head),
    MN_TEST("plain", room_is_given_past_the_limit_beside_stopped_workers),
    MN_TEST("plain", room_goes_by_the_order_over_epochs),
    MN_TEST("thread", waiting_for_room_takes_no_ring_of_idle_workers),
    MN_TEST("thread", static_loads),
    MN_TEST("thread", balanced_loads),
    MN_TEST("thread", formed_of_what_is_ready),
    MN_TEST("thread", ranges_come_back_from_another_thread),
};

MN_TEST_MAIN(tests)
