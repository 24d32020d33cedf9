/* The plan alone: no engine, no worker, a fake clock.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <string.h>

#include "base/mn_base.h"
#include "mn_test.h"
#include "schedule/mn_plan_state.h"

#define MS UINT64_C(1000000)
#define WORKERS 3u
#define ROWS 8u
#define SAMPLES 4096
#define ROW_BYTES UINT64_C(1000)
#define BATCH_BYTES (ROWS * ROW_BYTES)

/* Stands in for the engine and its workers. */
struct world {
    struct mn_plan *p;
    struct mn_costs costs;
    struct mn_plan_facts f;
    struct mn_worker_view view[WORKERS];
    uint64_t begun, planned_rows;
};

static const uint64_t row_bytes[1] = {ROW_BYTES};

/* How long the world claims that a batch has run; less than 0: it does not. */
static int64_t said_ns;

static int64_t
says(void *arg, uint64_t block_off)
{
    (void)arg;
    (void)block_off;
    return said_ns;
}

/* Of all batches, only the one that was started first still runs. */
static int64_t
head_runs(void *arg, uint64_t block_off)
{
    (void)arg;
    return block_off == 64 ? 1000 * (int64_t)MS : -1;
}

static void
open_world(struct world *w, bool learns, const struct mn_plan_config *how)
{
    memset(w, 0, sizeof(*w));
    said_ns = -1;
    struct mn_plan_config cfg = *how;
    cfg.workers = cfg.max_workers = WORKERS;
    cfg.own_tasks = 64;
    cfg.parts = 63;
    CHECK_EQ(mn_costs_init(&w->costs, SAMPLES), 0);
    cfg.costs = learns ? &w->costs : NULL;
    CHECK_EQ(mn_plan_open(&w->p, &cfg), 0);
    w->p->pace.rows_of = (struct mn_plan_rows){1, row_bytes, 1};
    w->f = (struct mn_plan_facts){.now_ns = 1000 * MS,
                                  .free_tasks = UINT32_MAX,
                                  .memory_limit = 1 << 30,
                                  .workers = w->view,
                                  .running_ns = says};
    for (uint32_t i = 0; i < WORKERS; i++) {
        w->view[i] = (struct mn_worker_view){.usable = true, .running_ns = -1};
    }
}

static void
close_world(struct world *w)
{
    mn_plan_close(w->p);
    mn_costs_fini(&w->costs);
}

static int
add(struct world *w, uint32_t nrows, const uint8_t *begins)
{
    int64_t index[65] = {0};
    for (uint32_t i = 0; i < nrows; i++) {
        index[i] = (int64_t)(w->planned_rows + i) % SAMPLES;
    }
    struct mn_plan_batch b = {.sequence = w->p->view.order.next,
                              .number = w->p->view.order.next,
                              .nrows = nrows,
                              .integers = true,
                              .index = index,
                              .index_bytes = nrows * sizeof(*index) + 3, /* odd, as of a pickle */
                              .begins = begins};
    int rc = mn_plan_add(w->p, &b);
    w->planned_rows += rc == MN_OK ? nrows : 0;
    return rc;
}

static void
add_some(struct world *w, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        CHECK_EQ(add(w, ROWS, NULL), MN_OK);
    }
}

/* Starts the batch, if it has not started. */
static void
begin(struct world *w, struct mn_planned *q)
{
    if (q->block_off == 0) {
        mn_plan_tries(w->p, q);
        mn_plan_begun(w->p, q, 64 * ++w->begun);
        w->f.memory_used += (int64_t)mn_plan_rows_bytes(w->p, q->batch.nrows);
    }
}

/* Starts what may start for any worker. Returns how many tasks. */
static uint32_t
start_all(struct world *w)
{
    uint32_t n = 0;
    struct mn_plan_start s;
    while (mn_plan_next_task(w->p, &w->f, &s)) {
        begin(w, s.batch);
        mn_plan_started(w->p, &s);
        CHECK(++n <= w->planned_rows); /* a task has at least one row */
    }
    return n;
}

/* Delivers the head and frees its memory. */
static void
deliver(struct world *w)
{
    struct mn_planned *q = mn_plan_at(w->p, w->p->view.order.head);
    CHECK(q != NULL);
    if (q->block_off != 0) {
        w->f.memory_used -= (int64_t)mn_plan_rows_bytes(w->p, q->batch.nrows);
        mn_plan_done(w->p, q);
    }
    mn_plan_taken(w->p, q->sequence);
}

/* ---- for any worker ---- */

static void
the_window_is_filled_and_no_more(void)
{
    struct world w;
    open_world(&w, false, &(struct mn_plan_config){.window = 2, .in_order = true});
    add_some(&w, 5);
    CHECK(start_all(&w) != 0);
    CHECK_EQ(w.p->view.order.begun, 2);
    CHECK(mn_plan_at(w.p, 1)->sent[mn_plan_at(w.p, 1)->ntasks - 1]);
    deliver(&w);
    CHECK(start_all(&w) != 0);
    CHECK_EQ(w.p->view.order.begun, 3);
    close_world(&w);
}

/* An idle worker starts something past the window, but not at once. */
static void
what_idles_waits_first(void)
{
    struct world w;
    open_world(&w, false, &(struct mn_plan_config){.window = 1, .in_order = true});
    add_some(&w, 3);
    (void)start_all(&w);
    CHECK_EQ(w.p->view.order.begun, 1);
    w.f.now_ns += (uint64_t)mn_plan_patience_ns(0) - 1;
    CHECK_EQ(start_all(&w), 0);
    CHECK(mn_plan_nap(w.p, w.f.now_ns, INT64_MAX) == 1);
    w.f.queued = 1; /* no worker is idle */
    w.f.now_ns += 1;
    CHECK_EQ(start_all(&w), 0);
    w.f.queued = 0;
    CHECK(start_all(&w) != 0);
    CHECK(w.p->view.starts[MN_DISPATCH_AHEAD] != 0);
    close_world(&w);
}

/* It need not wait if a straggler holds up the head. */
static void
behind_a_slow_sample_nothing_waits(void)
{
    struct world w;
    open_world(&w, true, &(struct mn_plan_config){.window = 1, .in_order = true});
    for (int64_t i = 0; i < 100; i++) {
        mn_costs_observe(&w.costs, i, NULL, (int64_t)MS);
    }
    said_ns = 15 * (int64_t)MS;
    add_some(&w, 40);
    (void)start_all(&w);
    uint64_t before = w.p->view.order.begun;
    CHECK(before != 40);
    CHECK_EQ(start_all(&w), 0); /* a busy machine takes a core away for as long */
    said_ns = 1000 * (int64_t)MS;
    CHECK(start_all(&w) != 0);
    CHECK(w.p->view.order.begun > before);
    close_world(&w);
}

/* Starts what may start while the head's task has run for a second. Returns how many batches. */
static uint64_t
start_behind_a_straggler(uint64_t batch_bytes, int64_t consumer_ns)
{
    struct world w;
    uint64_t bytes[1] = {batch_bytes / ROWS};
    open_world(&w, true, &(struct mn_plan_config){.window = 2, .in_order = true});
    w.p->pace.rows_of.row_bytes = bytes;
    w.p->view.consumer_ns = consumer_ns;
    w.f.memory_limit = INT64_MAX;
    for (int64_t i = 0; i < 100; i++) {
        mn_costs_observe(&w.costs, i, NULL, (int64_t)MS);
    }
    w.f.running_ns = head_runs;
    add_some(&w, 200);
    for (int i = 0; i < 100; i++) { /* the engine asks again whenever a worker has nothing to do */
        (void)start_all(&w);
        w.f.now_ns += 100 * MS;
    }
    uint64_t begun = w.p->view.order.begun;
    close_world(&w);
    return begun;
}

static void
finished_batches_are_as_many_as_the_window_has(void)
{
    CHECK_EQ(start_behind_a_straggler(UINT64_C(40) << 20, 0), 1 + 2);
    CHECK_EQ(start_behind_a_straggler(UINT64_C(8) << 20, 0), 1 + 2);
    CHECK_EQ(start_behind_a_straggler(UINT64_C(8) << 20, 1), 1 + 2 + 4);
    CHECK_EQ(start_behind_a_straggler(UINT64_C(8) << 20, 1000 * (int64_t)MS), 2);
    CHECK_EQ(start_behind_a_straggler(ROWS, 0), 200);
}

/* Samples that were slow once and are fast now do not fill the memory. */
static void
finished_early_batches_are_half_a_window(void)
{
    struct world w;
    uint64_t bytes[1] = {UINT64_C(40) << 20};
    open_world(&w, true, &(struct mn_plan_config){.window = 2, .in_order = true});
    w.p->pace.rows_of.row_bytes = bytes;
    w.p->view.consumer_ns = 20 * (int64_t)MS;
    w.f.memory_limit = INT64_MAX;
    w.f.running_ns = head_runs; /* all others have ended */
    for (int64_t i = 0; i < SAMPLES; i++) {
        mn_costs_observe(&w.costs, i, NULL, (i % 4 == 3 ? 1000 : 1) * (int64_t)MS);
    }
    for (int i = 0; i < 200; i++) {
        CHECK_EQ(add(&w, 1, NULL), MN_OK);
    }
    struct mn_plan_start s;
    uint32_t early = 0;
    w.f.ready = 2; /* the program is the slow part */
    while (mn_plan_next_task(w.p, &w.f, &s)) {
        begin(&w, s.batch);
        mn_plan_started(w.p, &s);
        early += s.batch->sequence >= 2;
    }
    CHECK_EQ(early, 1);
    close_world(&w);
}

/* A large batch that would be the last of the window waits while the program has two batches. */
static void
last_of_the_window_awaits_a_release(void)
{
    struct world w;
    uint64_t bytes[1] = {UINT64_C(5) << 20};
    uint64_t batch = ROWS * bytes[0];
    open_world(&w, false, &(struct mn_plan_config){.window = 2, .in_order = true});
    w.p->pace.rows_of.row_bytes = bytes;
    add_some(&w, 9);
    CHECK(start_all(&w) != 0);
    deliver(&w);
    w.f.memory_kept = (int64_t)(2 * batch);
    CHECK_EQ(start_all(&w), 0);
    CHECK(w.p->view.unreleased);
    w.f.now_ns += (uint64_t)mn_plan_patience_ns(batch) - 1;
    CHECK_EQ(start_all(&w), 0);
    CHECK_EQ(mn_plan_nap(w.p, w.f.now_ns, INT64_MAX), 1);
    w.f.now_ns += 1; /* a worker has idled for long */
    CHECK(start_all(&w) != 0);
    deliver(&w);
    deliver(&w);
    CHECK(start_all(&w) != 0); /* the head is not the last of the window */
    CHECK_EQ(w.p->view.order.begun, w.p->view.order.head + 1);
    w.f.now_ns += (uint64_t)mn_plan_patience_ns(batch);
    CHECK(start_all(&w) != 0);
    for (int64_t kept = 1; kept < 4; kept += 2) { /* it was released, or the program retains many */
        deliver(&w);
        w.f.memory_kept = kept * (int64_t)batch;
        CHECK(start_all(&w) != 0);
    }
    close_world(&w);
}

static void
the_head_alone_passes_the_limit(void)
{
    struct world w;
    open_world(&w, false, &(struct mn_plan_config){.window = 4, .in_order = true});
    w.f.memory_limit = BATCH_BYTES / 2;
    add_some(&w, 4);
    for (uint64_t n = 0; n < 4; n++) {
        w.f.formed = true; /* the one before is not delivered yet */
        CHECK_EQ(start_all(&w), 0);
        w.f.formed = false;
        CHECK(start_all(&w) != 0);
        CHECK_EQ(w.p->view.order.begun, n + 1);
        CHECK(n == 3 || w.p->view.held);
        deliver(&w);
    }
    CHECK_EQ(w.f.memory_used, 0);
    close_world(&w);
}

/* Starts what may start. Returns whether the batch `sequence` was early; no other may be. */
static bool
is_early(struct world *w, uint64_t sequence)
{
    struct mn_plan_start s;
    bool early = false;
    while (mn_plan_next_task(w->p, &w->f, &s)) {
        begin(w, s.batch);
        mn_plan_started(w->p, &s);
        early = early || (s.batch->sequence == sequence && s.why == MN_DISPATCH_EARLY);
        CHECK(s.batch->sequence == sequence || s.why != MN_DISPATCH_EARLY);
    }
    return early;
}

/* Samples that are known to be slow start before their turn, and no others. */
static void
what_is_known_to_be_slow_is_early(void)
{
    struct world w;
    open_world(&w, true, &(struct mn_plan_config){.window = 2, .in_order = true});
    uint64_t slow = 7 * ROWS + 3;
    for (int64_t i = 0; i < SAMPLES; i++) {
        mn_costs_observe(&w.costs, i, NULL, (i == (int64_t)slow ? 1000 : 20) * (int64_t)MS);
    }
    add_some(&w, 20);
    CHECK(is_early(&w, 7));
    CHECK(mn_plan_at(w.p, 6)->block_off == 0);
    close_world(&w);
}

/* Samples of many bytes start early in the first epoch, although they were planned before bytes
 * were known to predict costs. */
static void
what_has_many_bytes_is_early(void)
{
    struct world w;
    open_world(&w, true, &(struct mn_plan_config){.window = 2, .in_order = true});
    int64_t index[SAMPLES], bytes[SAMPLES], last = SAMPLES - 1;
    for (int64_t i = 0; i < SAMPLES; i++) {
        index[i] = i;
        bytes[i] = (i == 7 * ROWS + 3 ? 50 : 1 + i % 3) << 20;
    }
    CHECK_EQ(mn_costs_tell_bytes(&w.costs, index, bytes, SAMPLES), 0);
    mn_costs_observe(&w.costs, last, NULL, 20 * bytes[last]);
    add_some(&w, 20);
    mn_plan_learned(w.p, false);
    for (int64_t i = last - 1; i > last - 40; i--) {
        mn_costs_observe(&w.costs, i, NULL, 20 * bytes[i]);
    }
    mn_plan_learned(w.p, false);
    CHECK(is_early(&w, 7));
    CHECK(mn_plan_at(w.p, 6)->block_off == 0);
    close_world(&w);
}

/* A batch that cannot be made leaves nothing to start, and the others go on. */
static void
what_is_refused_is_in_nobodys_way(void)
{
    struct world w;
    open_world(&w, false, &(struct mn_plan_config){.window = 2, .in_order = true});
    add_some(&w, 3);
    struct mn_refusal why = {MN_REFUSED_ROWS, 2, 1};
    mn_plan_refuse(w.p, mn_plan_at(w.p, 0), &why);
    CHECK_EQ(w.p->refused, 1);
    CHECK(start_all(&w) != 0);
    CHECK(mn_plan_at(w.p, 0)->block_off == 0 && mn_plan_at(w.p, 1)->block_off != 0);
    deliver(&w);
    CHECK_EQ(w.p->refused, 0);
    CHECK_EQ(w.p->view.order.head, 1);
    close_world(&w);
}

static void
the_program_is_asked_once_for_more(void)
{
    struct world w;
    open_world(&w, false, &(struct mn_plan_config){.window = 4, .in_order = true});
    add_some(&w, 1);
    CHECK(!mn_plan_idles(w.p, 0));
    (void)start_all(&w);
    CHECK(mn_plan_idles(w.p, 0));
    CHECK(!mn_plan_starving(w.p, &w.f));
    w.f.now_ns += (uint64_t)mn_plan_patience_ns(0);
    CHECK(mn_plan_starving(w.p, &w.f));
    CHECK(!mn_plan_idles(w.p, 0)); /* the plan has been asked already */
    add_some(&w, 1);
    (void)start_all(&w);
    CHECK(mn_plan_idles(w.p, 0));
    mn_plan_end(w.p);
    CHECK(!mn_plan_idles(w.p, 0)); /* there is no more */
    close_world(&w);
}

/* ---- for each worker ---- */

/* Groups of two batches, declared by the dataset. */
static void
add_groups(struct world *w, uint32_t groups)
{
    uint8_t begins[ROWS] = {0};
    for (uint32_t i = 0; i < 2 * groups; i++) {
        begins[0] = i % 2 == 0;
        CHECK_EQ(add(w, ROWS, begins), MN_OK);
    }
}

static void
open_shares(struct world *w)
{
    open_world(w, true,
               &(struct mn_plan_config){
                   .window = 8, .in_order = true, .group_neighbours = true});
    for (int64_t i = 0; i < SAMPLES; i++) {
        mn_costs_observe(&w->costs, i, NULL, 2 * (int64_t)MS);
    }
}

/* Starts tasks for a worker until it has enough, and returns the chain of the last. */
static uint32_t
start_for(struct world *w, struct mn_plan_round *r, uint32_t n, uint64_t *chain)
{
    uint32_t started = 0;
    struct mn_plan_start s;
    while (mn_plan_worker_wants(r, n, false)
           && mn_plan_next_for_worker(w->p, r, n, &s) == MN_PLAN_START) {
        begin(w, s.batch);
        *chain = w->p->shares.of[n].chain;
        w->view[n].left_ns += mn_plan_started_for(w->p, &s, n);
        w->view[n].queued++;
        started++;
    }
    return started;
}

static void
each_worker_has_its_own_group(void)
{
    struct world w;
    open_shares(&w);
    add_groups(&w, WORKERS);
    mn_plan_settle(w.p);
    CHECK(w.p->view.by_piece);
    struct mn_plan_round r;
    uint64_t chain[WORKERS];
    mn_plan_round_begin(w.p, &w.f, &r);
    for (uint32_t i = 0; i < WORKERS; i++) {
        CHECK(start_for(&w, &r, i, &chain[i]) != 0);
        for (uint32_t k = 0; k < i; k++) {
            CHECK(chain[k] != chain[i]);
        }
    }
    close_world(&w);
}

/* Workers come one after the other. The first one takes one task, and no second one that would wait
 * behind it while others idle. */
static void
nothing_waits_before_costs_are_known(void)
{
    struct world w;
    open_world(&w, true,
               &(struct mn_plan_config){
                   .window = 8, .in_order = true, .group_neighbours = true});
    CHECK_EQ(add(&w, ROWS, NULL), MN_OK);
    mn_plan_settle(w.p);
    CHECK(w.p->view.by_piece);
    struct mn_plan_round r;
    uint64_t chain;
    mn_plan_round_begin(w.p, &w.f, &r);
    CHECK_EQ(start_for(&w, &r, 0, &chain), 1);
    close_world(&w);
}

/* Whether a worker is faster with two neighbours is tried once in some batches, but not in the one
 * that the caller waits for. */
static void
neighbours_are_tried_together_after_the_first_batch(void)
{
    struct world w;
    open_shares(&w);
    w.costs.locality.near.answer = w.costs.locality.home.answer = MN_CONTRAST_NO;
    add_some(&w, 6);
    CHECK(!w.p->view.by_piece);
    uint32_t tasks[6] = {ROWS, ROWS - 1, ROWS, ROWS, ROWS, ROWS - 1};
    for (uint64_t n = 0; n < 6; n++) {
        CHECK_EQ(mn_plan_at(w.p, n)->ntasks, tasks[n]);
    }
    close_world(&w);
}

/* The share of a worker that does not exist goes to any worker. */
static void
who_is_gone_has_no_share(void)
{
    struct world w;
    open_shares(&w);
    add_groups(&w, 1);
    struct mn_plan_round r;
    uint64_t chain;
    mn_plan_settle(w.p);
    mn_plan_round_begin(w.p, &w.f, &r);
    CHECK(start_for(&w, &r, 0, &chain) != 0);
    CHECK(w.p->shares.of[0].first != NULL);
    w.view[0].usable = false;
    mn_plan_round_begin(w.p, &w.f, &r);
    CHECK(w.p->shares.of[0].first == NULL);
    CHECK(start_for(&w, &r, 1, &chain) != 0);
    close_world(&w);
}

/* Nothing is left to start, and a worker's current task holds up its queue. */
static void
what_waits_behind_a_slow_one_moves(void)
{
    struct world w;
    open_shares(&w);
    add_groups(&w, 1);
    mn_plan_end(w.p);
    struct mn_plan_round r;
    struct mn_plan_start s;
    uint64_t chain;
    mn_plan_settle(w.p);
    mn_plan_round_begin(w.p, &w.f, &r);
    while (w.p->shares.piece_tasks != 0) {
        w.view[0] = (struct mn_worker_view){.usable = true, .running_ns = -1};
        CHECK(start_for(&w, &r, 0, &chain) != 0);
    }
    w.view[0].queued = 1;
    w.view[0].running_ns = 10 * (int64_t)MS;
    mn_plan_round_begin(w.p, &w.f, &r);
    CHECK_EQ(mn_plan_next_for_worker(w.p, &r, 1, &s), MN_PLAN_NOTHING);
    w.view[0].running_ns = 5000 * (int64_t)MS;
    CHECK_EQ(mn_plan_next_for_worker(w.p, &r, 1, &s), MN_PLAN_MOVE);
    CHECK_EQ(s.helps, 0);
    w.view[0].queued = 0; /* it has started the task meanwhile */
    CHECK_EQ(mn_plan_next_for_worker(w.p, &r, 1, &s), MN_PLAN_NOTHING);
    close_world(&w);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", the_window_is_filled_and_no_more),
    MN_TEST("plain", what_idles_waits_first),
    MN_TEST("plain", behind_a_slow_sample_nothing_waits),
    MN_TEST("plain", finished_batches_are_as_many_as_the_window_has),
    MN_TEST("plain", finished_early_batches_are_half_a_window),
    MN_TEST("plain", last_of_the_window_awaits_a_release),
    MN_TEST("plain", the_head_alone_passes_the_limit),
    MN_TEST("plain", what_is_known_to_be_slow_is_early),
    MN_TEST("plain", what_has_many_bytes_is_early),
    MN_TEST("plain", what_is_refused_is_in_nobodys_way),
    MN_TEST("plain", the_program_is_asked_once_for_more),
    MN_TEST("plain", each_worker_has_its_own_group),
    MN_TEST("plain", nothing_waits_before_costs_are_known),
    MN_TEST("plain", neighbours_are_tried_together_after_the_first_batch),
    MN_TEST("plain", who_is_gone_has_no_share),
    MN_TEST("plain", what_waits_behind_a_slow_one_moves),
};

MN_TEST_MAIN(tests)
