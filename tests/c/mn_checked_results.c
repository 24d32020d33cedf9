/* mn_checked_results: every field that a worker writes, with values that make no sense.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The trainer detects them before it uses any of them, ends the worker that wrote them, and has
 * another worker run the task again. It frees no memory that is in use.
 */
#define _GNU_SOURCE
#include "mn_rig.h"

#include "base/mn_base.h"
#include "engine/mn_autoscale.h"
#include "engine/mn_engine_state.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define MIB (UINT64_C(1) << 20)
#define WAIT_NS INT64_C(60000000000)

struct bench {
    struct rig r;
    struct rig_worker w[2];
    struct rig_block b, other; /* damaged; and another one in flight */
};

/* A batch of one task, which worker 0 has made. It may have an envelope in addition to its rows. */
static struct mn_engine *
set_up(struct bench *s, bool envelope, uint32_t retries)
{
    struct mn_engine_config cfg = {.workers = 2, .max_workers = 3, .max_retries = retries,
                                   .respawn = true, .arena_bytes = 64 * MIB, .window = 4,
                                   .in_order = true};
    struct mn_engine *e;
    CHECK_EQ(mn_engine_open(&e, &cfg), 0);
    memset(s, 0, sizeof(*s));
    s->r = (struct rig){.e = e, .scale = 90000, .env_max = envelope ? 200000 : 0};
    for (uint32_t i = 0; i < 2; i++) {
        s->w[i].scale = s->r.scale;
        s->w[i].env_max = s->r.env_max;
        CHECK_EQ(mn_worker_attach(&s->w[i].side, &e->shm, i), 0);
        mn_a32_store_release(&s->w[i].side.me->state, MN_WORKER_READY);
    }
    for (uint32_t i = 0; i < 2; i++) { /* with memory granted, no worker has to wait for it */
        mn_arena_leases_grant(&e->leases, i, MIB);
        uint64_t off = e->leases.at[i].off;
        CHECK(off != 0);
        mn_a32_store_release(&s->w[i].side.me->lease_state, MN_LEASE_IDLE);
        s->w[i].side.lease_off = s->w[i].side.used_end = off;
        s->w[i].side.lease_end = off + MIB;
    }
    rig_form(&s->r, 1);
    return e;
}

static uint32_t
claim(struct rig_worker *w)
{
    uint32_t task;
    CHECK_EQ(mn_worker_try(&w->side, &task), MN_OK);
    return task;
}

static void
plan_both(struct bench *s)
{
    CHECK_EQ(rig_plan(&s->r, 1, &s->b), MN_OK);
    CHECK_EQ(rig_plan(&s->r, 1, &s->other), MN_OK);
}

static void
die(struct bench *s, uint32_t number)
{
    struct mn_worker *k = s->w[number].side.me;
    mn_a32_store_seqcst(&k->state, MN_WORKER_EXITED);
    (void)rig_step(s->r.e);
    CHECK_EQ(mn_a32_load_acquire(&k->state), MN_WORKER_SWEPT);
}

/* All memory came back. */
static void
tear_down(struct bench *s)
{
    struct mn_engine *e = s->r.e;
    for (uint32_t i = 0; i < 2; i++) {
        die(s, i);
    }
    CHECK_EQ(mn_arena_used(&e->arena), 0);
    rig_has_no_records(e);
    CHECK_EQ(e->tasks.nfree, e->shm.ctl->ntasks);
    mn_engine_close(e);
}

static void
take(struct bench *s, struct rig_block *b)
{
    uint64_t sequence;
    CHECK_EQ(mn_engine_next(s->r.e, WAIT_NS, &sequence, &b->off), MN_OK);
    CHECK_EQ(sequence, b->sequence);
    rig_check(&s->r, b);
    mn_engine_taken(s->r.e, sequence, b->off, false);
}

/* ---- one finished task ---- */

struct record {
    struct mn_engine *e;
    struct mn_task *t;
    struct mn_block *block;
    struct mn_report *report;
    struct mn_envelope *env;
    struct mn_envelope_part *part;
    const struct bench *s;
};

typedef void (*spoil_fn)(struct record *r);

#define SPOIL(name, statement)                                                             \
    static void name(struct record *r)                                                     \
    {                                                                                      \
        statement;                                                                         \
    }

SPOIL(flags, r->t->flags = 0xff00u)
SPOIL(both_flags, r->t->flags = MN_FLAG_NO_ROOM | MN_FLAG_ENVELOPE)
SPOIL(wall, r->t->wall_ns = UINT64_MAX)
SPOIL(cpu, r->t->cpu_ns = UINT64_MAX)
SPOIL(done, r->t->done_ns = UINT64_MAX)
SPOIL(done_soon, r->t->done_ns = mn_now_ns() + UINT64_C(1000000000000))
SPOIL(report_status, r->report->status = 77)
SPOIL(report_none, r->report->status = MN_ROW_NONE)
SPOIL(report_elsewhere, r->report->status = MN_ROW_ENVELOPE)
SPOIL(report_wall, r->report->wall_ns = UINT64_MAX)
SPOIL(no_envelope, r->t->flags = MN_FLAG_ENVELOPE)
SPOIL(env_nowhere, r->t->env_off = 0)
SPOIL(env_outside, r->t->env_off = r->e->shm.ctl->total_bytes)
SPOIL(env_far_outside, r->t->env_off = UINT64_MAX & ~UINT64_C(4095))
SPOIL(env_within_a_page, r->t->env_off += 8)
SPOIL(env_of_the_other, r->t->env_off = r->s->w[1].side.lease_off)
SPOIL(env_of_rows, r->t->env_off = mn_block_fields(r->block)[0] & ~UINT64_C(4095))
SPOIL(env_len_huge, r->t->env_len = UINT64_MAX)
SPOIL(env_len_past_the_lease, r->t->env_len = 2 * MIB)
SPOIL(env_len_none, r->t->env_len = 0)
SPOIL(env_len_less_than_its_head, r->t->env_len = sizeof(struct mn_envelope) - 1)
SPOIL(pickle_at, r->env->pickle_at = UINT64_MAX)
SPOIL(pickle_bytes, r->env->pickle_bytes = UINT64_MAX)
SPOIL(pickle_past_the_end, r->env->pickle_bytes++)
SPOIL(parts, r->env->nparts = UINT64_MAX)
SPOIL(parts_past_the_end, r->env->nparts = r->t->env_len / sizeof(struct mn_envelope_part))
SPOIL(part_at, r->env->nparts = 1; r->part->at = UINT64_MAX; r->part->bytes = 1)
SPOIL(part_bytes, r->env->nparts = 1; r->part->at = 0; r->part->bytes = UINT64_MAX)
SPOIL(part_within_a_page,
      r->env->nparts = 1; r->part->at = 8; r->part->bytes = MN_FIELD_BIG)

/* Fields that only the trainer uses, and times that are only shown: no value of them matters. */
SPOIL(trainers_own,
      r->t->block_off = r->t->row0 = r->t->nrows = r->t->kind = r->t->why = 12345)

struct spoiled {
    const char *name;
    spoil_fn fn;
    bool envelope;
    enum mn_damage found;
};

#define ROWS(fn, found) {#fn, fn, false, found}
#define ENVELOPE(fn, found) {#fn, fn, true, found}

static const struct spoiled cases[] = {
    ROWS(flags, MN_DAMAGE_ENVELOPE),
    ROWS(both_flags, MN_DAMAGE_ENVELOPE),
    ROWS(wall, MN_DAMAGE_TIMES),
    ROWS(cpu, MN_DAMAGE_TIMES),
    ROWS(done, MN_DAMAGE_TIMES),
    ROWS(done_soon, MN_DAMAGE_TIMES),
    ROWS(report_status, MN_DAMAGE_REPORTS),
    ROWS(report_none, MN_DAMAGE_REPORTS),
    ROWS(report_elsewhere, MN_DAMAGE_REPORTS),
    ROWS(report_wall, MN_DAMAGE_REPORTS),
    ROWS(no_envelope, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_nowhere, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_outside, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_far_outside, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_within_a_page, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_of_the_other, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_of_rows, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_len_huge, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_len_past_the_lease, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_len_none, MN_DAMAGE_ENVELOPE),
    ENVELOPE(env_len_less_than_its_head, MN_DAMAGE_PARTS),
    ENVELOPE(pickle_at, MN_DAMAGE_PARTS),
    ENVELOPE(pickle_bytes, MN_DAMAGE_PARTS),
    ENVELOPE(pickle_past_the_end, MN_DAMAGE_PARTS),
    ENVELOPE(parts, MN_DAMAGE_PARTS),
    ENVELOPE(parts_past_the_end, MN_DAMAGE_PARTS),
    ENVELOPE(part_at, MN_DAMAGE_PARTS),
    ENVELOPE(part_bytes, MN_DAMAGE_PARTS),
    ENVELOPE(part_within_a_page, MN_DAMAGE_PARTS),
    ENVELOPE(trainers_own, MN_SOUND),
};

static void
spoil(struct bench *s, const struct spoiled *c, uint32_t task)
{
    struct record r = {.e = s->r.e, .s = s};
    r.t = mn_task_at(&r.e->shm, task);
    r.block = mn_block_at(&r.e->shm, r.t->block_off);
    r.report = mn_block_reports(r.block);
    if (c->envelope) {
        CHECK(r.t->flags == MN_FLAG_ENVELOPE);
        r.env = mn_at(&r.e->shm, r.t->env_off);
        r.part = (struct mn_envelope_part *)(r.env + 1);
    }
    c->fn(&r);
}

/* Worker 0 leaves a damaged record. Worker 1 runs the task again, or without retries the batch is
 * lost, and names the damage. */
static void
leave_damage(const struct spoiled *c, uint32_t retries)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, c->envelope, retries);
    uint64_t sequence, off;
    plan_both(&s);
    uint32_t task = claim(&s.w[0]);
    uint32_t other = claim(&s.w[1]);
    CHECK_EQ(rig_run(&s.w[0], task), 0);
    CHECK_EQ(rig_run(&s.w[1], other), 0);
    spoil(&s, c, task);
    if (c->found == MN_SOUND) {
        CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_OK);
        CHECK_EQ(mn_engine_settle(e, off), MN_BLOCK_DONE);
        mn_engine_taken(e, sequence, off, false);
    }
    else {
        CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_NEXT_TIMEOUT);
        CHECK_EQ(e->crew.ndeaths, 1);
        CHECK_EQ(e->crew.death.status, MN_STATUS_DAMAGED + (int32_t)c->found);
        CHECK_EQ(mn_worker_try(&s.w[0].side, &other), MN_CLOSED);
        CHECK_EQ(mn_worker_try(&s.w[1].side, &other), MN_EMPTY);
        die(&s, 0);
        CHECK_EQ(e->tasks.retries, retries);
    }
    if (c->found != MN_SOUND && retries != 0) {
        CHECK_EQ(claim(&s.w[1]), task);
        CHECK_EQ(rig_run(&s.w[1], task), 0);
        take(&s, &s.b);
    }
    else if (c->found != MN_SOUND) {
        CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_OK);
        CHECK_EQ(mn_engine_settle(e, off), MN_BLOCK_LOST);
        CHECK_EQ(e->tasks.lost[task].status, MN_STATUS_DAMAGED + (int32_t)c->found);
        mn_engine_taken(e, sequence, off, false);
    }
    take(&s, &s.other);
    tear_down(&s);
}

static void
damaged_records_are_done_again_or_told(void)
{
    for (uint32_t i = 0; i < 2 * sizeof(cases) / sizeof(cases[0]); i++) {
        printf("  %s\n", cases[i / 2].name);
        fflush(stdout);
        leave_damage(&cases[i / 2], i % 2);
    }
}

/* Its worker dies, or its batch is abandoned, before the record was read. */
static void
damaged_records_free_nothing(void)
{
    for (uint32_t i = 0; i < 2 * sizeof(cases) / sizeof(cases[0]); i++) {
        const struct spoiled *c = &cases[i / 2];
        struct bench s;
        struct mn_engine *e = set_up(&s, c->envelope, 1);
        plan_both(&s);
        uint32_t task = claim(&s.w[0]);
        CHECK_EQ(rig_run(&s.w[0], task), 0);
        spoil(&s, c, task);
        if (i % 2 == 0) {
            die(&s, 0);
        }
        mn_engine_plan_clear(e);
        (void)rig_step(e);
        CHECK_EQ(e->flight.n, 0);
        tear_down(&s);
    }
}

/* An envelope that is sent twice is freed once. */
static void
an_envelope_belongs_to_one_task(void)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, true, 0);
    struct mn_task *t[2];
    uint64_t sequence, off;
    CHECK_EQ(rig_plan(&s.r, 1, &s.b), MN_OK);
    s.r.position = 3;
    CHECK_EQ(rig_plan(&s.r, 1, &s.other), MN_OK);
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t task = claim(&s.w[0]);
        CHECK_EQ(rig_run(&s.w[0], task), 0);
        t[i] = mn_task_at(&e->shm, task);
    }
    t[1]->env_off = t[0]->env_off;
    t[1]->env_len = t[0]->env_len;
    take(&s, &s.b);
    CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_NEXT_TIMEOUT);
    die(&s, 0);
    CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_OK);
    CHECK_EQ(mn_engine_settle(e, off), MN_BLOCK_LOST);
    mn_engine_taken(e, sequence, off, false);
    tear_down(&s);
}

/* ---- the word of a task that a worker runs ---- */

static void
set_word(struct bench *s, uint32_t task, uint32_t worker, uint32_t status)
{
    mn_a64 *word = &mn_task_at(&s->r.e->shm, task)->word;
    uint32_t gen = mn_word_gen(mn_a64_load_relaxed(word));
    mn_a64_store_release(word, mn_task_word(gen, worker, 0, (enum mn_task_status)status));
}

/* A task with an impossible word is busy. It is retried when a worker dies and no other worker's
 * entry names it: the worker that runs it dies when it finds its word overwritten. */
static void
overwritten_words_are_swept(void)
{
    static const struct {
        uint32_t worker, status;
    } words[] = {{0, 99}, {0, MN_TASK_FREE}, {999, MN_TASK_DONE}, {999, MN_TASK_RUNNING}};
    for (uint32_t i = 0; i < 2 * sizeof(words) / sizeof(words[0]); i++) {
        struct bench s;
        struct mn_engine *e = set_up(&s, false, 1);
        uint64_t sequence, off;
        plan_both(&s);
        uint32_t task = claim(&s.w[0]), other = claim(&s.w[1]), none;
        CHECK_EQ(rig_run(&s.w[1], other), 0);
        set_word(&s, task, words[i / 2].worker, words[i / 2].status);
        CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_NEXT_TIMEOUT);
        die(&s, 1);
        mn_a32_store_release(&s.w[1].side.me->state, MN_WORKER_READY);
        CHECK_EQ(mn_worker_try(&s.w[1].side, &none), MN_EMPTY); /* worker 0 may write its rows */
        if (i % 2 == 0) {
            mn_engine_plan_clear(e);
            (void)rig_step(e);
            CHECK_EQ(e->flight.n, 1);
        }
        die(&s, 0);
        if (i % 2 == 0) {
            (void)rig_step(e);
            CHECK_EQ(e->flight.n, 0);
        }
        else {
            CHECK_EQ(e->tasks.retries, 1);
            CHECK_EQ(claim(&s.w[1]), task);
            CHECK_EQ(rig_run(&s.w[1], task), 0);
            take(&s, &s.b);
            take(&s, &s.other);
        }
        tear_down(&s);
    }
}

/* A stray write into a descriptor that no batch uses starts nothing. */
static void
overwritten_free_descriptors_stay_free(void)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, false, 1);
    uint32_t task = e->tasks.free[e->tasks.nfree - 1], none;
    set_word(&s, task, 0, MN_TASK_RUNNING);
    set_word(&s, e->tasks.free[0], 0, 99);
    die(&s, 0);
    CHECK_EQ(mn_worker_try(&s.w[1].side, &none), MN_EMPTY);
    CHECK_EQ(e->tasks.retries, 0);
    tear_down(&s);
}

/* ---- dead workers, and places without workers ---- */

/* The successor of a dead worker is not blamed for its damage. The batch is not the next one. */
static void
damage_by_the_dead_is_nobody_elses(void)
{
    for (uint32_t i = 0; i < 2; i++) {
        struct bench s;
        struct mn_engine *e = set_up(&s, false, 1);
        uint64_t sequence, off;
        plan_both(&s);
        uint32_t first = claim(&s.w[1]), task = claim(&s.w[0]);
        CHECK_EQ(rig_run(&s.w[0], task), 0);
        if (i == 0) {
            set_word(&s, task, 0, 77);
        }
        else {
            mn_task_at(&e->shm, task)->flags = MN_FLAG_ENVELOPE;
        }
        die(&s, 0);
        mn_a32_store_release(&s.w[0].side.me->state, MN_WORKER_READY);
        CHECK_EQ(rig_run(&s.w[1], first), 0);
        take(&s, &s.b);
        CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_NEXT_TIMEOUT);
        CHECK_EQ(e->crew.members[0].damage, MN_SOUND);
        CHECK_EQ(claim(&s.w[0]), task);
        CHECK_EQ(rig_run(&s.w[0], task), 0);
        take(&s, &s.other);
        CHECK_EQ(e->crew.ndeaths, 1);
        tear_down(&s);
    }
}

/* ---- the worker's entry ---- */

static void
lease_with(uint64_t used_end, uint64_t want, bool sound)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, true, 1);
    struct mn_worker *k = s.w[0].side.me;
    uint64_t before = mn_arena_used(&e->arena);
    k->used_end = used_end != 1 ? used_end : s.w[0].side.used_end;
    k->want_bytes = want;
    mn_a32_store_seqcst(&k->lease_state, MN_LEASE_WANT);
    (void)rig_step(e);
    CHECK(mn_a32_load_acquire(&k->lease_state) != MN_LEASE_WANT);
    CHECK_EQ(e->crew.members[0].damage == MN_SOUND, sound);
    CHECK_EQ(mn_a32_load_acquire(&k->exit_request) == 0, sound);
    CHECK(sound || mn_arena_used(&e->arena) == before);
    tear_down(&s);
}

static void
leases_that_make_no_sense(void)
{
    lease_with(0, MIB, false);
    lease_with(UINT64_MAX, MIB, false);
    lease_with(8, MIB, false);
    lease_with(1, 0, false);
    lease_with(1, UINT64_MAX, false);
    lease_with(1, MIB, true);
    lease_with(1, UINT64_C(1) << 40, true); /* more than exists: refused */
}

/* "No room" of a worker that has lied about it is not the program's error. */
static void
no_room_of_a_damaged_worker(void)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, true, 0);
    uint64_t sequence, off;
    plan_both(&s);
    uint32_t task = claim(&s.w[0]);
    mn_crew_damaged(&e->crew, 0, MN_DAMAGE_LEASE);
    s.w[0].side.used_end = s.w[0].side.lease_end;
    mn_task_at(&e->shm, task)->flags = MN_FLAG_NO_ROOM;
    mn_block_reports(mn_block_at(&e->shm, mn_task_at(&e->shm, task)->block_off))->status =
        MN_ROW_ENVELOPE;
    CHECK_EQ(mn_worker_done(&s.w[0].side, task), MN_NO_TASK);
    CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_NEXT_TIMEOUT);
    die(&s, 0);
    CHECK_EQ(mn_engine_next(e, 0, &sequence, &off), MN_OK);
    CHECK_EQ(mn_engine_settle(e, off), MN_BLOCK_LOST);
    mn_engine_taken(e, sequence, off, false);
    mn_engine_plan_clear(e);
    tear_down(&s);
}

/* The trainer goes on, whatever the rest of the entry and the queues contain. */
static void
entries_that_make_no_sense(void)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, false, 1);
    struct mn_worker *k = s.w[0].side.me;
    uint64_t now = mn_now_ns();
    plan_both(&s);
    for (int turn = 0; turn < 4; turn++) {
        uint64_t value = turn % 2 == 0 ? UINT64_MAX : UINT64_C(1) << 62;
        mn_a64 *fields[] = {&k->running, &k->since_ns, &k->row, &k->tasks_done, &k->rows_done,
                            &k->busy_ns, &k->cpu_ns};
        for (uint32_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
            mn_a64_store_relaxed(fields[i], value);
        }
        mn_a64_store_relaxed(&k->owner, UINT64_MAX);
        k->tid = UINT32_MAX;
        k->exit_status = INT32_MIN;
        mn_a32_store_relaxed(&k->event.word, 77);
        mn_a32_store_relaxed(&k->lease_event.word, 77);
        mn_a32_store_relaxed(&k->lease_state, 77);
        mn_a64_store_relaxed(&mn_queue_at(&e->shm, MN_QUEUE_NORMAL)->hint, value);
        (void)rig_step(e);
        mn_mutex_lock(&e->mutex);
        mn_autoscale_saw(e, 0, 4);
        mn_autoscale_tick(e, now += 3000000000u);
        mn_engine_unlock(e);
    }
    CHECK_EQ(mn_event_commit_wait(&k->event, WAIT_NS), 0); /* it does not spin */
    for (uint32_t i = 0; i < 2; i++) {
        uint32_t task = claim(&s.w[1]);
        CHECK_EQ(rig_run(&s.w[1], task), 0);
    }
    take(&s, &s.b);
    take(&s, &s.other);
    mn_a32_store_relaxed(&k->exit_request, 0);
    die(&s, 0);
    CHECK(e->crew.death.status >= 0 && e->crew.death.status < 256);
    mn_engine_close(e);
}

/* ---- the worker's process ---- */

#define SECOND_NS UINT64_C(1000000000)

/* A process that does nothing, for a worker's entry. */
static pid_t
put_process(struct bench *s, uint32_t number)
{
    struct mn_worker *k = s->w[number].side.me;
    pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* else it keeps the output open */
        for (;;) {
            pause();
        }
    }
    mn_worker_set_owner(k, mn_worker_starts(k), (uint32_t)pid);
    return pid;
}

static int
end_of(pid_t pid)
{
    int status;
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    return WTERMSIG(status);
}

/* Closes the engine, and ends the process that stood in for its zygote. */
static void
close_with(struct mn_engine *e, pid_t zygote)
{
    CHECK_EQ(kill(zygote, SIGKILL), 0);
    CHECK_EQ(end_of(zygote), SIGKILL);
    close(e->crew.zygote);
    mn_engine_close(e);
}

/* Waits until the worker's process is a zombie. */
static void
await_end(pid_t pid)
{
    siginfo_t info;
    CHECK_EQ(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
}

/* The entry says that the worker is dead while its process lives. It is swept once it is dead. */
static void
an_entry_that_lies_about_its_death(void)
{
    struct bench s;
    struct mn_engine *e = set_up(&s, false, 1);
    struct mn_worker *k = s.w[0].side.me;
    pid_t zygote = put_process(&s, 1), worker = put_process(&s, 0);
    e->crew.zygote = mn_proc_pidfd(zygote);
    plan_both(&s);
    uint32_t task = claim(&s.w[0]);
    mn_watch_look(&e->watch, SECOND_NS);
    mn_worker_set_owner(k, 1, (uint32_t)getpid()); /* it would name another process now */
    mn_a32_store_seqcst(&k->state, MN_WORKER_EXITED);
    mn_watch_look(&e->watch, 2 * SECOND_NS);
    (void)rig_step(e);
    CHECK_EQ(mn_a32_load_relaxed(&k->state), MN_WORKER_EXITED);
    CHECK_EQ(mn_word_status(mn_a64_load_relaxed(&mn_task_at(&e->shm, task)->word)),
             MN_TASK_RUNNING);
    CHECK_EQ(kill(worker, SIGKILL), 0);
    await_end(worker);
    mn_watch_look(&e->watch, 3 * SECOND_NS);
    (void)rig_step(e);
    CHECK_EQ(mn_a32_load_relaxed(&k->state), MN_WORKER_SWEPT);
    CHECK_EQ(end_of(worker), SIGKILL);
    CHECK_EQ(e->crew.ndeaths, 1);
    close_with(e, zygote);
}

static const struct mn_test tests[] = {
    MN_TEST("fork", an_entry_that_lies_about_its_death),
    MN_TEST("plain", damaged_records_are_done_again_or_told),
    MN_TEST("plain", damaged_records_free_nothing),
    MN_TEST("plain", an_envelope_belongs_to_one_task),
    MN_TEST("plain", overwritten_words_are_swept),
    MN_TEST("plain", overwritten_free_descriptors_stay_free),
    MN_TEST("plain", damage_by_the_dead_is_nobody_elses),
    MN_TEST("plain", leases_that_make_no_sense),
    MN_TEST("plain", no_room_of_a_damaged_worker),
    MN_TEST("plain", entries_that_make_no_sense),
};

MN_TEST_MAIN(tests)
