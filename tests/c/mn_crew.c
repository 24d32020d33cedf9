/* Workers' table, tasks and leases without an engine: a fake zygote, no process.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <fcntl.h>

#include "base/mn_base.h"
#include "mn_test.h"
#include "workers/mn_crew.h"
#include "workers/mn_tasks_and_retries.c"

#define TASKS 8u
#define WORKERS 3u
#define QUEUES (MN_QUEUE_WORKER + WORKERS)
#define RING 32u
#define ROWS (UINT64_C(1) << 20)
#define MS UINT64_C(1000000)

struct table {
    struct mn_ctl ctl;
    struct mn_worker workers[WORKERS];
    struct mn_task tasks[TASKS];
    struct mn_queue queues[QUEUES];
    mn_a64 rings[QUEUES][RING];
    struct {
        struct mn_block block;
        uint32_t tasks[TASKS];
    } block;
    char pages[MN_PAGE]; /* so that records and rows begin on a page */
};

/* Stands in for a zygote: reaps swept workers, and makes wanted ones. */
static struct fake {
    struct mn_shm shm;
    int told; /* the read end of its pipe */
    uint32_t made, ended;
    bool gone;
    bool unready; /* workers that it makes never become READY */
} fake;

static void
fake_check_table(void)
{
    for (uint32_t w = 0; w < WORKERS; w++) {
        struct mn_worker *k = mn_worker_at(&fake.shm, w);
        uint32_t state = mn_a32_load_acquire(&k->state);
        bool again = state == MN_WORKER_SWEPT && k->respawn;
        if (again || state == MN_WORKER_WANTED) {
            fake.made++;
            k->began = !fake.unready;
            mn_a32_store_seqcst(&k->state, fake.unready ? MN_WORKER_STARTING : MN_WORKER_READY);
        }
    }
}

bool
__wrap_mn_proc_ended(int fd);
int
__wrap_mn_proc_kill_pidfd(int fd, int sig);

bool
__wrap_mn_proc_ended(int fd)
{
    CHECK_EQ(fd, fake.told);
    return fake.gone;
}

int
__wrap_mn_proc_kill_pidfd(int fd, int sig)
{
    CHECK(fd == fake.told && sig == SIGKILL);
    fake.gone = ++fake.ended == 2; /* another takes the place of the first at once */
    return 0;
}

struct bench {
    struct table *t;
    struct mn_shm shm;
    struct mn_crew crew;
    struct mn_tasks tasks;
    uint64_t now_ns;
};

static void
set_up(struct bench *s, uint32_t max_retries)
{
    memset(s, 0, sizeof(*s));
    struct table *t = s->t = mn_test_shared(sizeof(*t));
    s->shm = (struct mn_shm){(char *)t, &t->ctl};
    t->ctl.nworkers = WORKERS;
    t->ctl.ntasks = TASKS;
    t->ctl.nqueues = QUEUES;
    t->ctl.workers_off = offsetof(struct table, workers);
    t->ctl.tasks_off = offsetof(struct table, tasks);
    t->ctl.queues_off = offsetof(struct table, queues);
    for (uint32_t i = 0; i < QUEUES; i++) {
        t->queues[i].ring_off = offsetof(struct table, rings) + i * sizeof(t->rings[0]);
        t->queues[i].mask = RING - 1;
    }
    CHECK_EQ(mn_tasks_open(&s->tasks, &s->shm, max_retries), 0);
    CHECK_EQ(mn_crew_open(&s->crew, &s->shm, true), 0);
    int ends[2];
    CHECK_EQ(pipe2(ends, O_NONBLOCK | O_CLOEXEC), 0);
    fake = (struct fake){.shm = s->shm, .told = ends[0]};
    s->crew.zygote = ends[0]; /* any descriptor: it is the fake that looks at it */
    s->crew.command = ends[1];
    for (uint32_t w = 0; w < WORKERS; w++) {
        mn_crew_want(&s->crew, w);
    }
    fake_check_table();
}

static void
tear_down(struct bench *s)
{
    (void)close(fake.told);
    (void)close(s->crew.command);
    mn_crew_close(&s->crew);
    mn_tasks_close(&s->tasks);
    CHECK(munmap(s->t, sizeof(*s->t)) == 0);
}

/* Handles a dead worker as the engine does, and then makes the wake-ups. */
static struct mn_death
die(struct bench *s, uint32_t w, int32_t status, bool only_it)
{
    struct mn_worker *k = &s->t->workers[w];
    k->exit_status = status;
    CHECK(!mn_crew_exited(&s->crew, w));
    mn_a32_store_seqcst(&k->state, MN_WORKER_EXITED);
    CHECK(mn_crew_exited(&s->crew, w));
    struct mn_death death = mn_crew_record_death(&s->crew, w, s->now_ns);
    mn_tasks_sweep(&s->tasks, w, only_it, &death, 0);
    mn_crew_swept(&s->crew, w);
    CHECK_EQ(mn_a32_load_acquire(&k->state), MN_WORKER_SWEPT);
    struct mn_wakes due = mn_crew_take_wakes(&s->crew);
    CHECK(due.executor && due.all_sleepers);
    mn_crew_wake(&s->crew, &due);
    char byte;
    CHECK_EQ(read(fake.told, &byte, 1), 1);
    fake_check_table();
    due = mn_crew_take_wakes(&s->crew);
    CHECK(!due.executor && !due.all_sleepers && !due.engine && !due.leases && due.workers == 0);
    return death;
}

static enum mn_task_status
status_of(const struct bench *s, uint32_t task)
{
    return mn_word_status(mn_a64_load_acquire(&s->t->tasks[task].word));
}

static void
a_task_is_tried_by_others_and_then_lost(void)
{
    struct bench s;
    uint32_t claimed;
    set_up(&s, 2);
    uint32_t task = mn_tasks_take(&s.tasks, 64, MN_KIND_ROWS, 0, 5);
    CHECK_EQ(status_of(&s, task), MN_TASK_PLANNED);
    CHECK_EQ(mn_tasks_publish(&s.tasks, task, MN_QUEUE_NORMAL), MN_OK);
    for (uint32_t w = 0; w < 3; w++) {
        CHECK_EQ(mn_runqueue_claim(&s.shm, w, &claimed), MN_OK);
        CHECK_EQ(claimed, task);
        struct mn_death death = die(&s, w, -9, false);
        CHECK_EQ(death.worker, w);
        CHECK_EQ(death.status, -9);
        CHECK_EQ(status_of(&s, task), w < 2 ? MN_TASK_QUEUED : MN_TASK_LOST);
    }
    CHECK_EQ(mn_runqueue_claim(&s.shm, 0, &claimed), MN_EMPTY);
    CHECK_EQ(s.tasks.lost[task].worker, 2);
    CHECK_EQ(s.tasks.retries, 2);
    CHECK_EQ(s.crew.ndeaths, 3);
    mn_tasks_give(&s.tasks, task);
    CHECK_EQ(s.tasks.nfree, TASKS);
    tear_down(&s);
}

/* Tasks that wait on the dead worker's own queue go to others, or are lost if only it may run
 * them. */
static void
a_lane_of_the_dead_is_emptied(void)
{
    for (int only_it = 0; only_it < 2; only_it++) {
        struct bench s;
        uint32_t claimed, task[2];
        set_up(&s, 2);
        for (uint32_t i = 0; i < 2; i++) {
            task[i] = mn_tasks_take(&s.tasks, 64, MN_KIND_ROWS, i, 1);
            CHECK_EQ(mn_tasks_publish(&s.tasks, task[i], MN_QUEUE_WORKER + i), MN_OK);
        }
        die(&s, 0, 1, only_it);
        CHECK_EQ(status_of(&s, task[0]), only_it ? MN_TASK_LOST : MN_TASK_QUEUED);
        CHECK_EQ(status_of(&s, task[1]), MN_TASK_QUEUED); /* another worker's */
        CHECK_EQ(mn_runqueue_claim(&s.shm, 2, &claimed), only_it ? MN_EMPTY : MN_OK);
        tear_down(&s);
    }
}

/* Every other task is done and no worker is left to claim it: it is published, once. */
static void
a_collate_task_is_not_left_over(void)
{
    struct bench s;
    uint32_t claimed;
    struct mn_death death = {0, 1, 0, MN_NO_ROW};
    set_up(&s, 2);
    uint64_t at = offsetof(struct table, block);
    struct mn_block *block = &s.t->block.block;
    block->ntasks = 2;
    uint32_t *tasks = mn_block_tasks(block);
    tasks[0] = mn_tasks_take(&s.tasks, at, MN_KIND_PART, 0, 4);
    tasks[1] = mn_tasks_take_collate(&s.tasks, at, 4);
    CHECK_EQ(status_of(&s, tasks[1]), MN_TASK_WAITING);
    mn_tasks_publish_collate(&s.tasks, block, &death);
    CHECK_EQ(status_of(&s, tasks[1]), MN_TASK_WAITING); /* its part has not even started */
    CHECK_EQ(mn_tasks_publish(&s.tasks, tasks[0], MN_QUEUE_NORMAL), MN_OK);
    CHECK_EQ(mn_runqueue_claim(&s.shm, 0, &claimed), MN_OK);
    uint64_t word = mn_a64_load_acquire(&s.t->tasks[claimed].word);
    mn_a64_store_release(&s.t->tasks[claimed].word,
                         mn_task_word(mn_word_gen(word), 0, 0, MN_TASK_DONE));
    mn_tasks_publish_collate(&s.tasks, block, &death);
    mn_tasks_publish_collate(&s.tasks, block, &death);
    CHECK_EQ(mn_runqueue_claim(&s.shm, 1, &claimed), MN_OK);
    CHECK_EQ(claimed, tasks[1]);
    CHECK_EQ(mn_runqueue_claim(&s.shm, 2, &claimed), MN_EMPTY);
    tear_down(&s);
}

/* READY workers may be killed again and again, and are replaced after pauses. */
static void
a_row_of_deaths_makes_pauses(void)
{
    static const uint16_t pauses[] = {0, 100, 200, 400, 800, 1000, 1000};
    struct bench s;
    set_up(&s, 2);
    for (uint32_t row = 0; row < 2; row++) {
        for (uint32_t death = 0; death < 200; death++) {
            (void)die(&s, 1, -9, false);
            CHECK_EQ(s.t->workers[1].pause_ms, pauses[death < 6 ? death : 6]);
            CHECK_EQ(mn_crew_crash_loop(&s.crew), death + 1);
            s.now_ns += 50 * MS;
        }
        mn_a64_store_relaxed(&s.t->workers[1].tasks_done, 7 + row); /* it finished a task */
        (void)die(&s, 1, -9, false);
        CHECK_EQ(s.t->workers[1].pause_ms, 0);
        CHECK_EQ(mn_crew_crash_loop(&s.crew), 0);
    }
    CHECK_EQ(mn_crew_live(&s.crew), 3);
    mn_crew_retire(&s.crew, 0); /* the user ended it */
    (void)die(&s, 0, 0, false);
    CHECK_EQ(mn_crew_live(&s.crew), 2);
    tear_down(&s);
}

/* Neither few deaths in a long time nor many in a short time end it. A worker that becomes READY in
 * between begins a new series. */
static void
who_dies_while_starting_for_seconds_is_not_replaced(void)
{
    struct bench s;
    set_up(&s, 2);
    fake.unready = true;
    (void)die(&s, 1, 1, false); /* this one was READY */
    for (uint32_t death = 0; death < 20; death++) {
        (void)die(&s, 1, 1, false);
        s.now_ns += 149 * MS;
    }
    CHECK_EQ(mn_crew_live(&s.crew), 3);
    fake.unready = false;
    (void)die(&s, 1, 1, false); /* after 2980 ms, and the next one becomes READY */
    fake.unready = true;
    (void)die(&s, 1, 1, false);
    (void)die(&s, 1, 1, false);
    s.now_ns += 10000 * MS;
    (void)die(&s, 1, 1, false);
    CHECK_EQ(mn_crew_live(&s.crew), 3);
    CHECK_EQ(fake.made, 3 + 25);
    (void)die(&s, 1, 1, false);
    CHECK_EQ(mn_crew_live(&s.crew), 2);
    CHECK_EQ(fake.made, 3 + 25);
    tear_down(&s);
}

/* ... and so does a worker that has worked and was asked to exit, even if it dies long
 * afterwards. */
static void
who_has_worked_and_left_begins_another_row(void)
{
    struct bench s;
    set_up(&s, 2);
    fake.unready = true;
    for (uint32_t death = 0; death < 3; death++) {
        (void)die(&s, 1, 1, false); /* the first was READY */
    }
    s.t->workers[1].began = 1; /* this one becomes READY, too */
    mn_a64_store_relaxed(&s.t->workers[1].tasks_done, 100);
    mn_crew_ask_to_exit(&s.crew, 1, MN_EXIT_SHRINK);
    (void)die(&s, 1, 0, false);
    CHECK_EQ(mn_crew_live(&s.crew), 2);
    s.now_ns += 40000 * MS;
    mn_crew_want(&s.crew, 1);
    fake_check_table();
    (void)die(&s, 1, 1, false);
    CHECK_EQ(mn_crew_live(&s.crew), 3);
    tear_down(&s);
}

/* Usually another process has killed it, and one that kills at random hits several in a row. */
static void
who_is_killed_while_starting_is_replaced_for_longer(void)
{
    struct bench s;
    set_up(&s, 2);
    fake.unready = true;
    (void)die(&s, 1, -15, false); /* this one was READY */
    for (uint32_t death = 0; death < 30; death++) {
        (void)die(&s, 1, death % 2 == 0 ? -9 : -15, false);
        CHECK_EQ(mn_crew_live(&s.crew), 3);
        s.now_ns += 1000 * MS;
    }
    (void)die(&s, 1, -9, false);
    CHECK_EQ(mn_crew_live(&s.crew), 2);
    tear_down(&s);
}

/* The zygote has tried for seconds to make each of them. */
static void
who_cannot_be_made_is_given_up_by_count(void)
{
    struct bench s;
    set_up(&s, 2);
    fake.unready = true;
    (void)die(&s, 1, -9, false); /* this one was READY */
    for (uint32_t death = 0; death < 3; death++) {
        CHECK_EQ(mn_crew_live(&s.crew), 3);
        (void)die(&s, 1, MN_STATUS_NOT_STARTED + 11, false);
    }
    CHECK_EQ(mn_crew_live(&s.crew), 2);
    tear_down(&s);
}

static void
a_damaged_worker_is_told_to_leave_and_counted_once(void)
{
    struct bench s;
    set_up(&s, 2);
    s.crew.members[2].pid = 1234; /* as seen while it lived */
    mn_worker_set_owner(&s.t->workers[2], 1, 99);
    mn_crew_damaged(&s.crew, 2, MN_DAMAGE_TIMES);
    CHECK_EQ(s.crew.death.pid, 1234);
    mn_crew_damaged(&s.crew, 2, MN_DAMAGE_LEASE);
    CHECK(s.crew.members[2].damage != MN_SOUND && s.crew.members[1].damage == MN_SOUND);
    CHECK_EQ(mn_a32_load_acquire(&s.t->workers[2].exit_request), MN_EXIT_SHRINK);
    mn_a32_store_seqcst(&s.t->workers[2].state, MN_WORKER_EMPTY); /* says that there is no worker */
    CHECK_EQ(mn_crew_live(&s.crew), 3);
    s.crew.members[2].dead = true;
    struct mn_death death = die(&s, 2, 0, false);
    CHECK_EQ(death.status, MN_STATUS_DAMAGED + MN_DAMAGE_TIMES);
    CHECK_EQ(death.pid, 1234);
    CHECK_EQ(s.crew.ndeaths, 1);
    CHECK_EQ(s.crew.members[2].damage, MN_SOUND); /* there is a new worker now */
    CHECK_EQ(fake.made, 4);
    tear_down(&s);
}

static void
set_up_watch(struct bench *s, struct mn_mutex *guard, struct mn_watch *watch)
{
    set_up(s, 2);
    CHECK_EQ(mn_mutex_init(guard), 0);
    *watch = (struct mn_watch){.crew = &s->crew, .guard = guard};
}

static void
a_lost_executor_is_told_once(void)
{
    struct bench s;
    struct mn_mutex guard;
    struct mn_watch watch;
    set_up_watch(&s, &guard, &watch);
    mn_watch_look(&watch, 1000000000);
    CHECK(!mn_a32_load_relaxed(&s.crew.lost));
    fake.gone = true;
    mn_a32_store_seqcst(&s.t->ctl.stop, 1); /* it was told to stop */
    mn_watch_look(&watch, 1000000000);
    CHECK(!mn_a32_load_relaxed(&s.crew.lost));
    mn_a32_store_seqcst(&s.t->ctl.stop, 0);
    mn_event_prepare_wait(&s.t->ctl.trainer);
    mn_watch_look(&watch, 1000000000);
    CHECK(mn_a32_load_relaxed(&s.crew.lost) && !s.crew.hung);
    CHECK_EQ(mn_a32_load_acquire(&s.t->ctl.trainer.word), MN_EVENT_AWAKE);
    mn_mutex_fini(&guard);
    tear_down(&s);
}

static void
a_replaced_executor_is_watched_again(void)
{
    struct bench s;
    struct mn_mutex guard;
    struct mn_watch watch;
    set_up_watch(&s, &guard, &watch);
    for (int i = 0; i < 2; i++) {
        fake.gone = true;
        mn_watch_look(&watch, 1000000000);
        CHECK(mn_a32_load_relaxed(&s.crew.lost) != 0);
        fake.gone = false;
        mn_crew_replace_executor(&s.crew);
        CHECK(mn_crew_take_wakes(&s.crew).engine);
        mn_watch_look(&watch, 1000000000);
        CHECK(mn_a32_load_relaxed(&s.crew.lost) == 0 && !s.crew.hung);
    }
    mn_mutex_fini(&guard);
    tear_down(&s);
}

/* One that imports torch, as where the program has started it anew, may take its time. So may one
 * that makes a worker meanwhile, and looks within a second count once. */
static void
an_executor_that_reaps_nobody_is_ended_once_it_has_begun(void)
{
    struct bench s;
    struct mn_mutex guard;
    struct mn_watch watch;
    set_up_watch(&s, &guard, &watch);
    mn_a32_store_seqcst(&s.t->workers[1].state, MN_WORKER_SWEPT); /* and waits to be reaped */
    uint64_t now_ns = 0;
    for (int i = 0; i < 100; i++) {
        mn_watch_look(&watch, now_ns += 1000000000);
    }
    CHECK_EQ(fake.ended, 0);
    mn_a32_store_release(&s.t->ctl.start, MN_START_FORKED);
    for (int i = 0; i < 9 + 10; i++) {
        if (i == 9) {
            mn_worker_set_owner(&s.t->workers[2], 7, 0);
        }
        mn_watch_look(&watch, now_ns += 1000000000);
        mn_watch_look(&watch, now_ns + 1);
        CHECK_EQ(fake.ended, 0);
    }
    mn_watch_look(&watch, now_ns += 1000000000);
    CHECK_EQ(fake.ended, 1);
    mn_mutex_fini(&guard);
    tear_down(&s);
}

/* Sooner if it forks them, and not before it has begun; another new worker shows that it works. */
static void
an_executor_that_makes_nobody_is_ended(void)
{
    static const uint32_t most[] = {[MN_START_FORKED] = 30, [MN_START_THREADS] = 600};
    static const enum mn_start starts[] = {MN_START_FORKED, MN_START_THREADS};
    for (int n = 0; n < 2; n++) {
        struct bench s;
        struct mn_mutex guard;
        struct mn_watch watch;
        set_up_watch(&s, &guard, &watch);
        uint64_t now_ns = 0;
        mn_crew_want(&s.crew, 0);
        for (int i = 0; i < 2000; i++) {
            mn_watch_look(&watch, now_ns += 1000000000);
        }
        mn_a32_store_release(&s.t->ctl.start, starts[n]);
        mn_worker_set_owner(&s.t->workers[1], 1, 0);
        mn_a32_store_seqcst(&s.t->workers[1].state, MN_WORKER_STARTING);
        for (uint32_t i = 0; i < 3 * most[starts[n]]; i++) { /* what follows it hangs, too */
            mn_worker_set_owner(&s.t->workers[1], 1 + (i >= most[starts[n]] - 1), 0);
            mn_watch_look(&watch, now_ns += 1000000000);
            CHECK_EQ(fake.ended, (i + 1) / most[starts[n]] - (i + 1 >= most[starts[n]]));
            CHECK_EQ(mn_a32_load_relaxed(&s.crew.lost), i == 3 * most[starts[n]] - 1);
        }
        CHECK(s.crew.hung);
        mn_mutex_fini(&guard);
        tear_down(&s);
    }
}

/* One wake-up for one task, to a sleeper that may take it; workers that wait for memory are
 * skipped. */
static void
rings_go_to_who_may_take_the_task(void)
{
    struct bench s;
    set_up(&s, 2);
    for (uint32_t w = 0; w < WORKERS; w++) {
        mn_event_prepare_wait(&s.t->workers[w].event);
    }
    mn_crew_wake(&s.crew, &(struct mn_wakes){.workers = 3});
    for (uint32_t w = 0; w < WORKERS; w++) { /* no queue has a task */
        CHECK_EQ(mn_a32_load_acquire(&s.t->workers[w].event.word), MN_EVENT_ASLEEP);
    }
    uint32_t task = mn_tasks_take(&s.tasks, 64, MN_KIND_ROWS, 0, 1);
    CHECK_EQ(mn_tasks_publish(&s.tasks, task, MN_QUEUE_WORKER + 2), MN_OK);
    mn_crew_wake(&s.crew, &(struct mn_wakes){.workers = 1});
    CHECK_EQ(mn_a32_load_acquire(&s.t->workers[0].event.word), MN_EVENT_ASLEEP);
    CHECK_EQ(mn_a32_load_acquire(&s.t->workers[2].event.word), MN_EVENT_AWAKE);
    tear_down(&s);
}

static void
sleep_until_told(void *event)
{
    mn_event_prepare_wait(event);
    CHECK_EQ(mn_event_commit_wait(event, -1), 0);
}

/* The dead worker had claimed the wake-up of a sleeper, which no other thread would wake. */
static void
who_was_to_be_woken_by_the_dead_is_woken(void)
{
    struct bench s;
    set_up(&s, 2);
    struct mn_worker *k = &s.t->workers[1];
    struct mn_event *events[] = {&s.t->ctl.trainer, &k->event, &k->lease_event};
    for (uint32_t i = 0; i < 3; i++) {
        pid_t pid = mn_test_fork(sleep_until_told, events[i]);
        while (mn_a32_load_seqcst(&events[i]->word) != MN_EVENT_ASLEEP
               || mn_test_state(pid, pid) != 'S') {
            sched_yield();
        }
        mn_a32_store_seqcst(&events[i]->word, MN_EVENT_AWAKE); /* and then it was killed */
        (void)die(&s, 0, -9, false);
        int status = 0;
        uint64_t end = mn_test_clock_ns() + 20000 * MS;
        while (waitpid(pid, &status, WNOHANG) == 0) {
            CHECK(mn_test_clock_ns() < end);
            sched_yield();
        }
        CHECK_EQ(status, 0);
    }
    tear_down(&s);
}

/* ---- leases ---- */

static int
rows_map(struct mn_provider *self, uint64_t bytes, void **base)
{
    (void)self;
    *base = calloc(1, bytes);
    return *base != NULL ? 0 : -ENOMEM;
}

static void
rows_unmap(struct mn_provider *self, void *base, uint64_t bytes)
{
    (void)self;
    (void)bytes;
    free(base);
}

static void
what_a_worker_owes_comes_back_once(void)
{
    struct bench s;
    struct mn_provider provider = {rows_map, rows_unmap, NULL};
    struct mn_arena arena = {0};
    struct mn_arena_leases l;
    set_up(&s, 2);
    CHECK_EQ(mn_arena_map(&arena, &provider, MN_PAGE + ROWS), 0);
    CHECK_EQ(mn_arena_open(&arena, NULL, (struct mn_range){0, MN_PAGE},
                           (struct mn_range){MN_PAGE, ROWS}), 0);
    arena.limit = ROWS;
    CHECK_EQ(mn_arena_leases_open(&l, &s.shm, &arena), 0);
    struct mn_worker *k = &s.t->workers[1];
    mn_a32_store_seqcst(&k->lease_state, MN_LEASE_WANT);
    CHECK(mn_arena_leases_wanted(&l, 1) && !mn_arena_leases_wanted(&l, 0));
    mn_arena_leases_grant(&l, 1, ROWS / 2);
    CHECK_EQ(mn_a32_load_acquire(&k->lease_state), MN_LEASE_GRANTED);
    uint64_t off = k->lease_off;
    CHECK_EQ(mn_arena_leases_take(&l, 0, off, MN_PAGE), -EINVAL); /* another worker's */
    CHECK_EQ(mn_arena_leases_take(&l, 1, off, MN_PAGE), 0);       /* an envelope was accepted */
    CHECK_EQ(mn_arena_leases_take(&l, 1, off, MN_PAGE), -EINVAL); /* twice */
    CHECK(!mn_arena_leases_sound(&l, 1, off - MN_PAGE, 1));
    CHECK(!mn_arena_leases_sound(&l, 1, off + 1, 1));
    CHECK(!mn_arena_leases_sound(&l, 1, off + ROWS, 1) && !mn_arena_leases_sound(&l, 1, off, 0));
    CHECK(mn_arena_leases_sound(&l, 1, off + 2 * MN_PAGE, 1));
    mn_arena_leases_end(&l, 1, off + 2 * MN_PAGE); /* it used two pages, one of them not sent yet */
    CHECK_EQ(mn_arena_used(&arena), 2 * MN_PAGE);
    mn_arena_leases_grant(&l, 1, 2 * ROWS);
    CHECK_EQ(mn_a32_load_acquire(&k->lease_state), MN_LEASE_REFUSED);
    mn_arena_leases_forget(&l, 1);
    CHECK_EQ(mn_arena_used(&arena), MN_PAGE); /* the accepted page is no longer the worker's */
    mn_arena_free(&arena, off, MN_PAGE);
    CHECK_EQ(mn_arena_used(&arena), 0);
    mn_arena_leases_close(&l);
    mn_arena_close(&arena);
    tear_down(&s);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", a_task_is_tried_by_others_and_then_lost),
    MN_TEST("plain", a_lane_of_the_dead_is_emptied),
    MN_TEST("plain", a_collate_task_is_not_left_over),
    MN_TEST("plain", a_row_of_deaths_makes_pauses),
    MN_TEST("plain", who_dies_while_starting_for_seconds_is_not_replaced),
    MN_TEST("plain", who_is_killed_while_starting_is_replaced_for_longer),
    MN_TEST("plain", who_cannot_be_made_is_given_up_by_count),
    MN_TEST("plain", who_has_worked_and_left_begins_another_row),
    MN_TEST("plain", a_damaged_worker_is_told_to_leave_and_counted_once),
    MN_TEST("plain", a_lost_executor_is_told_once),
    MN_TEST("plain", a_replaced_executor_is_watched_again),
    MN_TEST("plain", an_executor_that_reaps_nobody_is_ended_once_it_has_begun),
    MN_TEST("plain", an_executor_that_makes_nobody_is_ended),
    MN_TEST("plain", rings_go_to_who_may_take_the_task),
    MN_TEST("plain", what_a_worker_owes_comes_back_once),
    MN_TEST("fork", who_was_to_be_woken_by_the_dead_is_woken),
};

MN_TEST_MAIN(tests)
