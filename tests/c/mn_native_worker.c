/* mn_native_worker: threads that serve a native pipeline while workers come and go.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every sample is run once, with its own key, and its bytes are where the layout says. A failed
 * sample is delivered with its text. All threads end by a stop and by a dismissal.
 */
#define _GNU_SOURCE
#include "mn_rig.h"

#include "os/mn_thread.h"
#include "py/types/mn_native_worker.c"
#include "py/seeding/mn_seed_mix.c"

#define MIB (UINT64_C(1) << 20)
#define WAIT_NS INT64_C(20000000000)
#define THREADS 5u
#define WINDOW 6u
#define POSITIONS (1u << 20)
#define EPOCH UINT64_C(77)
#define BAD 61u /* one sample in this many fails */

static const uint64_t row_bytes[2] = {3000, 8};

struct plant {
    struct mn_engine *e;
    struct mn_native_pipeline pipeline;
    uint64_t epoch;
    mn_a32 *runs; /* [POSITIONS] */
    mn_a32 failures;
    struct thread {
        struct plant *plant;
        struct mn_thread thread;
        struct mn_worker_side side;
        struct mn_worker_clock clock;
    } threads[THREADS];
};

static int
run_sample(void *state, int64_t index, uint64_t hi, uint64_t lo, void **out, char *err,
           size_t errlen)
{
    struct plant *p = state;
    mn_a32_add_relaxed(&p->runs[index], 1);
    CHECK_EQ(hi, 5);
    CHECK_EQ(lo, EPOCH << 32 | (uint64_t)index);
    if ((uint64_t)index % BAD == BAD - 1) {
        (void)snprintf(err, errlen, "no %lld", (long long)index);
        return -EIO;
    }
    for (uint32_t f = 0; f < 2; f++) {
        rig_fill(out[f], row_bytes[f], rig_row_key((uint64_t)index, f));
    }
    return 0;
}

static void
work(void *arg)
{
    struct thread *t = arg;
    struct mn_native n = {.pipeline = &t->plant->pipeline, .stream = 4};
    struct mn_native_failure failure;
    uint32_t task;
    for (;;) {
        enum mn_native_event event = mn_native_serve(&n, &t->side, &t->clock, &task, &failure);
        if (event == MN_NATIVE_STOP) {
            return;
        }
        CHECK_EQ(event, MN_NATIVE_FAILED);
        struct mn_block *b = mn_block_at(&t->side.shm, mn_task_at(&t->side.shm, task)->block_off);
        char text[64];
        (void)snprintf(text, sizeof(text), "no %llu",
                       (unsigned long long)(b->position + failure.row));
        CHECK_EQ(failure.rc, -EIO);
        CHECK(strcmp(failure.text, text) == 0);
        mn_a32_add_relaxed(&t->plant->failures, 1);
        /* A failed row comes with a message; this one says that there was no memory for it. */
        mn_task_at(&t->side.shm, task)->flags = MN_FLAG_NO_ROOM;
        mn_worker_account(&t->side, &t->clock, task);
        (void)mn_worker_done(&t->side, task);
    }
}

static void
open_plant(struct plant *p, uint32_t wanted)
{
    struct mn_engine_config cfg = {.workers = THREADS,
                                   .arena_bytes = 256 * MIB,
                                   .window = WINDOW,
                                   .in_order = true};
    struct mn_form form = {
        .kind = MN_KIND_ROWS, .layout = 1, .nfields = 2, .row_bytes = row_bytes};
    memset(p, 0, sizeof(*p));
    CHECK_EQ(mn_engine_open(&p->e, &cfg), 0);
    for (uint32_t w = wanted; w < THREADS; w++) {
        mn_a32_store_release(&mn_worker_at(&p->e->shm, w)->state, MN_WORKER_EMPTY);
    }
    CHECK_EQ(mn_engine_start(p->e, -1, -1), 0);
    mn_engine_set_form(p->e, &form);
    p->runs = calloc(POSITIONS, sizeof(*p->runs));
    CHECK(p->runs != NULL);
    p->epoch = EPOCH;
    p->pipeline = (struct mn_native_pipeline){
        .abi = MN_OPS_ABI, .size = sizeof(p->pipeline), .state = p, .length = POSITIONS,
        .n_fields = 2, .seed = 5, .run = run_sample, .epoch = &p->epoch};
    for (int f = 0; f < 2; f++) {
        p->pipeline.fields[f] = (struct mn_native_field){
            .kind = 'u', .itemsize = 1, .ndim = 1, .shape = {(int64_t)row_bytes[f]},
            .bytes = row_bytes[f]};
    }
    const char *why;
    CHECK_EQ(mn_native_check(&p->pipeline, &why), 0);
    for (uint32_t w = 0; w < THREADS; w++) {
        struct thread *t = &p->threads[w];
        t->plant = p;
        CHECK_EQ(mn_worker_attach(&t->side, &p->e->shm, w), 0);
        CHECK_EQ(mn_thread_start(&t->thread, "native", work, t), 0);
    }
}

static void
close_plant(struct plant *p)
{
    for (uint32_t w = 0; w < THREADS; w++) {
        CHECK_EQ(mn_thread_join(&p->threads[w].thread), 0);
    }
    mn_engine_close(p->e);
    free(p->runs);
}

/* Like the scheduler, but at any time: one more worker, or one less if two are left. */
static void
churn(struct plant *p, uint64_t *dice)
{
    struct mn_engine *e = p->e;
    mn_mutex_lock(&e->mutex);
    uint32_t worker = (uint32_t)(mn_test_random(dice) % THREADS);
    struct mn_worker *k = mn_worker_at(&e->shm, worker);
    uint32_t state = mn_a32_load_acquire(&k->state), staying = 0;
    for (uint32_t w = 0; w < THREADS; w++) {
        struct mn_worker *other = mn_worker_at(&e->shm, w);
        staying += mn_a32_load_acquire(&other->state) == MN_WORKER_READY
                   && mn_a32_load_relaxed(&other->exit_request) == 0;
    }
    if (state == MN_WORKER_EMPTY) {
        mn_a32_store_release(&k->exit_request, 0);
        mn_crew_want(&e->crew, worker);
    }
    else if (state == MN_WORKER_READY && staying > 1) {
        mn_a32_store_seqcst(&k->exit_request, MN_EXIT_SHRINK);
    }
    mn_mutex_unlock(&e->mutex);
    mn_event_notify(&k->event);
}

static void
check_block(const struct plant *p, uint64_t off, uint64_t position, uint32_t nrows)
{
    struct mn_block *b = mn_block_at(&p->e->shm, off);
    CHECK_EQ(b->position, position);
    for (uint32_t row = 0; row < nrows; row++) {
        uint64_t at = position + row;
        if (at % BAD == BAD - 1) {
            CHECK_EQ(mn_block_reports(b)[row].status, MN_ROW_ENVELOPE);
            CHECK_EQ(mn_a32_load_relaxed(&p->runs[at]), 1);
        }
        else if (mn_block_reports(b)[row].status == MN_ROW_WRITTEN) {
            CHECK_EQ(mn_a32_load_relaxed(&p->runs[at]), 1);
            for (uint32_t f = 0; f < 2; f++) {
                const char *field = mn_at(&p->e->shm, mn_block_fields(b)[f]);
                CHECK(rig_holds(field + row * row_bytes[f], row_bytes[f],
                                rig_row_key(at, f)));
            }
        }
        else { /* after a failed one of its task */
            CHECK_EQ(mn_a32_load_relaxed(&p->runs[at]), 0);
        }
    }
}

static void
every_sample_once(void)
{
    struct plant p;
    uint64_t dice = mn_test_seed(), stop = mn_test_stop_ns(), planned = 0, position = 0;
    uint64_t first[WINDOW], sequence, off;
    uint32_t rows[WINDOW];
    open_plant(&p, 2);
    for (uint64_t read = 0; mn_test_clock_ns() < stop || read < planned; read++) {
        while (planned < read + WINDOW && mn_test_clock_ns() < stop
               && position + 32 < POSITIONS) {
            uint32_t n = (uint32_t)(mn_test_random(&dice) % 20) + 1;
            int64_t index[20];
            for (uint32_t i = 0; i < n; i++) {
                index[i] = (int64_t)(position + i);
            }
            struct mn_plan_batch b = {.sequence = planned, .number = planned,
                                      .position = position, .nrows = n, .index = index,
                                      .index_kind = MN_INDEX_INT64,
                                      .index_bytes = n * sizeof(*index)};
            CHECK_EQ(mn_engine_plan(p.e, &b), MN_OK);
            mn_engine_plan_end(p.e); /* no more will be planned */
            first[planned % WINDOW] = position;
            rows[planned++ % WINDOW] = n;
            position += n;
        }
        if (read >= planned) {
            break;
        }
        churn(&p, &dice);
        CHECK_EQ(mn_engine_next(p.e, WAIT_NS, &sequence, &off), MN_OK);
        CHECK_EQ(sequence, read);
        check_block(&p, off, first[read % WINDOW], rows[read % WINDOW]);
        mn_engine_taken(p.e, sequence, off, false);
    }
    CHECK(planned > 20 && mn_a32_load_relaxed(&p.failures) > 0);
    printf("  %llu batches, %llu samples\n", (unsigned long long)planned,
           (unsigned long long)position);
    mn_engine_stop(p.e);
    close_plant(&p);
}

/* While some wait to be wanted, some for tasks, and the engine goes on. */
static void
dismissed_threads_end(void)
{
    for (int turn = 0; turn < 20; turn++) {
        struct plant p;
        uint64_t dice = (uint64_t)turn;
        open_plant(&p, 1 + (uint32_t)turn % THREADS);
        for (int i = 0; i < turn % 7; i++) {
            churn(&p, &dice);
        }
        mn_a32_store_seqcst(&p.e->shm.ctl->dismissed, 1);
        for (uint32_t w = 0; w < THREADS; w++) {
            mn_event_notify(&mn_worker_at(&p.e->shm, w)->event);
        }
        close_plant(&p);
    }
}

static const struct mn_test tests[] = {
    MN_TEST("thread", every_sample_once),
    MN_TEST("thread", dismissed_threads_end),
};

MN_TEST_MAIN(tests)
