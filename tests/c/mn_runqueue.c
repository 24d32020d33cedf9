/* mn_runqueue: each task is claimed once, whichever worker claims, stalls or dies.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The run queues are made by hand with small rings, so that they wrap all the time.
 */
#define _GNU_SOURCE
#include "mn_test.h"

#include "base/mn_base.h"
#include "os/mn_thread.h"
#include "workers/mn_tasks_and_retries.c"

#define TASKS 48u
#define WORKERS 4u
#define QUEUES (MN_QUEUE_WORKER + WORKERS)
#define RING 16u

struct runqueue {
    struct mn_ctl ctl;
    struct mn_worker workers[WORKERS];
    struct mn_task tasks[TASKS];
    struct mn_queue queues[QUEUES];
    mn_a64 rings[QUEUES][RING];
    mn_a32 claimed[TASKS]; /* generation in which it was last claimed */
    mn_a32 dying;
};

struct trainer {
    struct runqueue *b;
    struct mn_shm shm;
    struct mn_queue_head heads[QUEUES];
    uint32_t gens[TASKS];
};

static struct trainer
make_board(uint32_t gen)
{
    struct runqueue *b = mn_test_shared(sizeof(*b));
    struct trainer t = {.b = b, .shm = {(char *)b, &b->ctl}};
    b->ctl.nworkers = WORKERS;
    b->ctl.ntasks = TASKS;
    b->ctl.nqueues = QUEUES;
    b->ctl.workers_off = offsetof(struct runqueue, workers);
    b->ctl.tasks_off = offsetof(struct runqueue, tasks);
    b->ctl.queues_off = offsetof(struct runqueue, queues);
    for (uint32_t i = 0; i < QUEUES; i++) {
        b->queues[i].ring_off = offsetof(struct runqueue, rings) + i * sizeof(b->rings[0]);
        b->queues[i].mask = RING - 1;
    }
    for (uint32_t i = 0; i < TASKS; i++) {
        t.gens[i] = gen;
        mn_a32_store_relaxed(&b->claimed[i], gen);
    }
    return t;
}

static void
drop_board(struct trainer *t)
{
    CHECK(munmap(t->b, sizeof(*t->b)) == 0);
}

static int
publish(struct trainer *t, uint32_t queue, uint32_t task)
{
    int rc = mn_runqueue_publish(&t->shm, &t->heads[queue], queue, task, t->gens[task] + 1, 0);
    t->gens[task] += rc == MN_OK;
    return rc;
}

static enum mn_task_status
status(const struct trainer *t, uint32_t task)
{
    return mn_word_status(mn_a64_load_acquire(&t->b->tasks[task].word));
}

static void
own_lane_then_express_then_normal(void)
{
    struct trainer t = make_board(0);
    const uint32_t order[] = {5, 6, 3, 4, 1, 2};
    uint32_t task;
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 1), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 2), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_EXPRESS, 3), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_EXPRESS, 4), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_WORKER + 1, 5), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_WORKER + 1, 6), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_WORKER + 2, 7), MN_OK);
    for (uint32_t i = 0; i < 6; i++) {
        CHECK_EQ(mn_runqueue_claim(&t.shm, 1, &task), MN_OK);
        CHECK_EQ(task, order[i]);
        uint64_t word = mn_a64_load_relaxed(&t.b->tasks[task].word);
        CHECK(word == mn_task_word(1, 1, 0, MN_TASK_RUNNING));
    }
    CHECK_EQ(mn_runqueue_claim(&t.shm, 1, &task), MN_EMPTY);
    CHECK_EQ(mn_runqueue_claim(&t.shm, 2, &task), MN_OK);
    CHECK_EQ(task, 7);
    drop_board(&t);
}

static void
entries_of_the_past_claim_nothing(void)
{
    struct trainer t = make_board(UINT32_MAX - 1);
    uint32_t task;
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 9), MN_OK);
    CHECK(mn_runqueue_cancel(&t.shm, 9));
    CHECK(!mn_runqueue_cancel(&t.shm, 9));
    CHECK_EQ(mn_runqueue_claim(&t.shm, 0, &task), MN_EMPTY);
    for (uint32_t i = 0; i < 5; i++) { /* its generation passes zero */
        CHECK_EQ(publish(&t, MN_QUEUE_EXPRESS, 9), MN_OK);
        mn_a64_store_relaxed(&t.b->queues[MN_QUEUE_NORMAL].hint, 0);
        CHECK_EQ(mn_runqueue_claim(&t.shm, 3, &task), MN_OK);
        CHECK_EQ(task, 9);
        CHECK_EQ(mn_runqueue_claim(&t.shm, 3, &task), MN_EMPTY);
        CHECK(!mn_runqueue_cancel(&t.shm, 9)); /* it is running */
        mn_a64_store_relaxed(&t.b->tasks[9].word, 0);
    }
    /* Queued again, but for another worker: the old entry on the shared queue is void. */
    CHECK_EQ(publish(&t, MN_QUEUE_WORKER + 2, 9), MN_OK);
    mn_a64_store_relaxed(&t.b->queues[MN_QUEUE_NORMAL].hint, 0);
    CHECK_EQ(mn_runqueue_claim(&t.shm, 3, &task), MN_EMPTY);
    CHECK_EQ(mn_runqueue_claim(&t.shm, 2, &task), MN_OK);
    drop_board(&t);
}

/* An unclaimed entry is never overwritten; a cancelled one makes room. */
static void
full_lanes_refuse(void)
{
    struct trainer t = make_board(0);
    uint32_t task;
    for (uint32_t i = 0; i < RING; i++) {
        CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, i), MN_OK);
    }
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 20), MN_FULL);
    CHECK_EQ(status(&t, 20), MN_TASK_FREE);
    CHECK(mn_runqueue_cancel(&t.shm, 5));
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 20), MN_FULL); /* the oldest is still there */
    CHECK(mn_runqueue_cancel(&t.shm, 0));
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 20), MN_OK);
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 21), MN_FULL);
    for (uint32_t i = 1; i < RING; i++) {
        if (i != 5) {
            CHECK_EQ(mn_runqueue_claim(&t.shm, 2, &task), MN_OK);
            CHECK_EQ(task, i);
        }
    }
    CHECK_EQ(mn_runqueue_claim(&t.shm, 2, &task), MN_OK);
    CHECK_EQ(task, 20);
    CHECK_EQ(mn_runqueue_claim(&t.shm, 2, &task), MN_EMPTY);
    drop_board(&t);
}

static void
late_hints_catch_up(void)
{
    struct trainer t = make_board(0);
    uint32_t task;
    for (uint32_t i = 0; i < 5 * RING; i++) {
        CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 1), MN_OK);
        CHECK(mn_runqueue_cancel(&t.shm, 1)); /* no worker scans meanwhile */
    }
    CHECK_EQ(mn_a64_load_relaxed(&t.b->queues[MN_QUEUE_NORMAL].hint), 0);
    CHECK_EQ(publish(&t, MN_QUEUE_NORMAL, 2), MN_OK);
    CHECK_EQ(mn_runqueue_claim(&t.shm, 0, &task), MN_OK);
    CHECK_EQ(task, 2);
    CHECK_EQ(mn_a64_load_relaxed(&t.b->queues[MN_QUEUE_NORMAL].hint), 5 * RING + 1);
    drop_board(&t);
}

/* ---- threads: everything published is claimed or cancelled, once ---- */

struct claimer {
    struct trainer *t;
    uint32_t number;
    mn_a32 *stop;
    uint64_t claims;
};

static void
claimer_main(void *arg)
{
    struct claimer *c = arg;
    struct runqueue *b = c->t->b;
    uint32_t task;
    while (mn_a32_load_acquire(c->stop) == 0) {
        if (mn_runqueue_claim(&c->t->shm, c->number, &task) != MN_OK) {
            sched_yield();
            continue;
        }
        struct mn_task *t = &b->tasks[task];
        uint64_t word = mn_a64_load_relaxed(&t->word);
        CHECK_EQ(mn_word_status(word), MN_TASK_RUNNING);
        CHECK_EQ(mn_word_worker(word), c->number);
        /* Plain fields of the descriptor are ours from the claim on. */
        CHECK_EQ(t->env_len, mn_word_gen(word));
        CHECK(t->row0 < MN_QUEUE_WORKER || t->row0 == MN_QUEUE_WORKER + c->number); /* its queue */
        t->wall_ns = mn_word_gen(word);
        uint32_t before = mn_a32_load_relaxed(&b->claimed[task]);
        CHECK(before != mn_word_gen(word));
        mn_a32_store_relaxed(&b->claimed[task], mn_word_gen(word));
        c->claims++;
        uint64_t done = mn_task_word(mn_word_gen(word), c->number, 0, MN_TASK_DONE);
        CHECK(mn_a64_cas_seqcst(&t->word, &word, done));
    }
}

static void
everything_is_claimed_once(void)
{
    uint64_t seed = mn_test_seed(), stop = mn_test_stop_ns();
    uint64_t published = 0, cancelled = 0, reaped = 0, full = 0, claims = 0;
    struct trainer t = make_board(UINT32_MAX - 3);
    struct claimer claimers[WORKERS];
    struct mn_thread threads[WORKERS];
    mn_a32 end = 0;
    for (uint32_t i = 0; i < WORKERS; i++) {
        claimers[i] = (struct claimer){&t, i, &end, 0};
        CHECK_EQ(mn_thread_start(&threads[i], "claimer", claimer_main, &claimers[i]), 0);
    }
    while (mn_test_clock_ns() < stop || reaped + cancelled < published) {
        uint64_t r = mn_test_random(&seed);
        uint32_t task = (uint32_t)(r % TASKS), queue = (uint32_t)(r / 64 % QUEUES);
        enum mn_task_status st = status(&t, task);
        if (st == MN_TASK_DONE) {
            CHECK_EQ(t.b->tasks[task].wall_ns, t.gens[task]);
            mn_a64_store_relaxed(&t.b->tasks[task].word, 0);
            reaped++;
        }
        else if (st == MN_TASK_QUEUED && r / 4096 % 4 == 0 && mn_runqueue_cancel(&t.shm, task)) {
            mn_a64_store_relaxed(&t.b->tasks[task].word, 0);
            cancelled++;
        }
        else if (st == MN_TASK_FREE && mn_test_clock_ns() < stop) {
            t.b->tasks[task].env_len = (uint32_t)(t.gens[task] + 1);
            t.b->tasks[task].row0 = queue;
            int rc = publish(&t, queue, task);
            published += rc == MN_OK;
            full += rc == MN_FULL;
        }
        if (r % 1024 == 7) { /* a stale hint costs time and nothing else */
            mn_a64_store_relaxed(&t.b->queues[queue].hint, 0);
        }
    }
    mn_a32_store_release(&end, 1);
    for (uint32_t i = 0; i < WORKERS; i++) {
        CHECK_EQ(mn_thread_join(&threads[i]), 0);
        claims += claimers[i].claims;
    }
    printf("  published %llu cancelled %llu full %llu\n", (unsigned long long)published,
           (unsigned long long)cancelled, (unsigned long long)full);
    CHECK_EQ(claims, reaped);
    CHECK(published > 100);
    drop_board(&t);
}

/* ---- processes: a dead claimer owns its task by name, or does not ---- */

static uint64_t dice;
static const char *label;

static void
die_here(const char *name)
{
    if (strcmp(name, label) == 0 && mn_test_random(&dice) % 8 == 0) {
        (void)raise(SIGKILL);
    }
}

static void
claim_until_dead(void *arg)
{
    struct claimer *c = arg;
    uint32_t task;
    mn_fault_hook = die_here;
    dice += c->number;
    for (;;) {
        if (mn_runqueue_claim(&c->t->shm, c->number, &task) == MN_OK) {
            struct mn_task *t = &c->t->b->tasks[task];
            uint64_t word = mn_a64_load_relaxed(&t->word);
            mn_a64_store_relaxed(&c->t->b->workers[c->number].running, 0);
            CHECK(mn_a64_cas_seqcst(&t->word, &word, (word & ~UINT64_C(0xff)) | MN_TASK_DONE));
        }
        else {
            sched_yield();
        }
    }
}

/* Reaps done tasks and publishes them again, so that claimers are not starved. */
static void
feed(struct trainer *t)
{
    for (uint32_t i = 0; i < TASKS; i++) {
        enum mn_task_status st = status(t, i);
        if (st == MN_TASK_DONE || st == MN_TASK_FREE) {
            mn_a64_store_relaxed(&t->b->tasks[i].word, 0);
            (void)publish(t, MN_QUEUE_NORMAL, i);
        }
    }
}

static void
dead_claimers_own_by_name(const char *where, uint32_t owned)
{
    uint64_t stop = mn_test_stop_ns();
    struct trainer t = make_board(UINT32_MAX - 3);
    label = where;
    dice = mn_test_seed();
    for (uint32_t round = 0; mn_test_clock_ns() < stop; round++) {
        struct claimer c = {.t = &t, .number = round % WORKERS};
        pid_t pid = mn_test_fork(claim_until_dead, &c);
        int got;
        while ((got = waitpid(pid, &(int){0}, WNOHANG)) == 0) {
            feed(&t);
            sched_yield();
        }
        CHECK_EQ(got, pid);
        uint32_t running = 0;
        uint64_t said = mn_a64_load_relaxed(&t.b->workers[c.number].running);
        CHECK(said != 0); /* also before the claim */
        for (uint32_t i = 0; i < TASKS; i++) {
            uint64_t word = mn_a64_load_acquire(&t.b->tasks[i].word);
            if (mn_word_status(word) == MN_TASK_RUNNING) {
                CHECK_EQ(mn_word_worker(word), c.number);
                CHECK_EQ(said, i + 1);
                mn_a64_store_relaxed(&t.b->tasks[i].word, 0);
                running++;
            }
        }
        CHECK_EQ(running, owned);
    }
    drop_board(&t);
}

static void
killed_before_and_after_the_claim(void)
{
    dead_claimers_own_by_name("runqueue.claim.before", 0);
    dead_claimers_own_by_name("runqueue.claim.after", 1);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", own_lane_then_express_then_normal),
    MN_TEST("plain", entries_of_the_past_claim_nothing),
    MN_TEST("plain", full_lanes_refuse),
    MN_TEST("plain", late_hints_catch_up),
    MN_TEST("thread", everything_is_claimed_once),
    MN_TEST("fork", killed_before_and_after_the_claim),
};

MN_TEST_MAIN(tests)
