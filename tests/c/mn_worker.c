/* mn_worker: worker processes that are killed at each labelled point, and at any other.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A thread plays the zygote: it reports deaths, waits for the engine's sweep, reaps and forks
 * again. In every case each batch is delivered once and complete, lost tasks are counted, and the
 * arena is empty in the end.
 */
#define _GNU_SOURCE
#include "mn_rig.h"

#include <poll.h>

#include "base/mn_base.h"
#include "os/mn_thread.h"

#define MIB (UINT64_C(1) << 20)
#define WAIT_NS INT64_C(10000000000)
#define WORKERS 4u
#define WINDOW 12u
#define POSITIONS (1u << 20)

/* State that the test, its zygote thread and its workers share. */
struct orders {
    mn_a32 *rows;         /* [POSITIONS]: how often each row was written */
    const char *label;    /* where workers die; NULL: nowhere */
    const char *after;    /* ... if this was the point passed before; NULL: always */
    uint32_t every;       /* ... at about one in this many visits */
    const char *held_up;  /* where workers stop for a while, now and then; NULL: nowhere */
    uint32_t kills_a_second;
    uint64_t seed;
    mn_a32 end;
};

struct nursery {
    struct rig rig;
    struct orders orders;
    struct mn_thread thread;
    pid_t pids[WORKERS];
    mn_a64 deaths; /* written by the thread, read while it runs */
    uint64_t forks;
    pid_t parent;
};

/* ---- in a worker ---- */

static const struct orders *orders;
static uint64_t dice;

static void
die_here(const char *name)
{
    static const char *before = "";
    if (orders->held_up != NULL && strcmp(name, orders->held_up) == 0
        && mn_test_random(&dice) % 20 == 0) {
        usleep(4000);
    }
    if (orders->label != NULL && strcmp(name, orders->label) == 0
        && (orders->after == NULL || strcmp(before, orders->after) == 0)
        && mn_test_random(&dice) % orders->every == 0) {
        (void)raise(SIGKILL);
    }
    before = name;
}

MN_NORETURN static void
be_worker(const struct nursery *n, uint32_t number)
{
    struct rig_worker w = {.scale = n->rig.scale,
                           .env_max = n->rig.env_max,
                           .first_try_only = n->rig.first_try_only,
                           .done_rows = n->orders.rows};
    /* Also when a failed check ends the test. The thread that forks outlives its workers. */
    CHECK(prctl(PR_SET_PDEATHSIG, SIGKILL) == 0 && getppid() == n->parent);
    orders = &n->orders;
    dice = n->orders.seed + n->forks;
    mn_fault_hook = die_here;
    CHECK_EQ(mn_worker_attach(&w.side, &n->rig.e->shm, number), 0);
    rig_work(&w);
    _exit(0);
}

/* ---- the zygote's thread ---- */

static void
fork_worker(struct nursery *n, uint32_t number)
{
    struct mn_worker *k = mn_worker_at(&n->rig.e->shm, number);
    mn_a32_store_release(&k->state, MN_WORKER_STARTING);
    n->forks++;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        be_worker(n, number);
    }
    mn_worker_set_owner(k, 1, (uint32_t)pid);
    n->pids[number] = pid;
}

/* Reports a dead worker, waits until its tasks are taken back, reaps. */
static void
look_after(struct nursery *n, uint32_t number)
{
    struct mn_engine *e = n->rig.e;
    struct mn_worker *k = mn_worker_at(&e->shm, number);
    siginfo_t info = {0};
    CHECK(waitid(P_PID, (id_t)n->pids[number], &info, WEXITED | WNOHANG | WNOWAIT) == 0);
    if (info.si_pid == 0) {
        return;
    }
    bool stop = mn_a32_load_acquire(&e->shm.ctl->stop) != 0;
    CHECK(stop || (info.si_code == CLD_KILLED && info.si_status == SIGKILL));
    n->deaths += info.si_code == CLD_KILLED;
    k->exit_status = info.si_code == CLD_KILLED ? -info.si_status : info.si_status;
    mn_a32_store_seqcst(&k->state, MN_WORKER_EXITED);
    mn_event_notify_always(&e->shm.ctl->engine); /* the dead one may have claimed it */
    while (mn_a32_load_acquire(&k->state) != MN_WORKER_SWEPT) {
        usleep(200);
    }
    (void)mn_test_reap(n->pids[number]);
    n->pids[number] = 0;
    if (k->respawn) {
        fork_worker(n, number);
    }
    else {
        mn_a32_store_release(&k->state, MN_WORKER_EMPTY);
    }
}

static void
zygote_main(void *arg)
{
    struct nursery *n = arg;
    uint64_t state = n->orders.seed, last = mn_test_clock_ns();
    for (uint32_t i = 0; i < WORKERS; i++) {
        fork_worker(n, i);
    }
    for (bool any = true; any; usleep(300)) {
        bool stop = mn_a32_load_acquire(&n->rig.e->shm.ctl->stop) != 0;
        any = !stop;
        for (uint32_t i = 0; i < WORKERS; i++) {
            if (n->pids[i] != 0) {
                look_after(n, i);
                any = any || n->pids[i] != 0;
            }
        }
        uint64_t now = mn_test_clock_ns(), random = mn_test_random(&state);
        uint64_t rate = n->orders.kills_a_second;
        if (!stop && rate != 0 && now - last > 2000000000u / rate * (random % 64) / 64) {
            pid_t pid = n->pids[random / 64 % WORKERS];
            if (pid != 0) {
                CHECK(kill(pid, SIGKILL) == 0);
            }
            last = now;
        }
    }
}

/* ---- the trainer ---- */

static void
open_nursery(struct nursery *n, uint32_t retries, uint64_t scale, uint64_t env_max)
{
    struct mn_engine_config cfg = {.workers = WORKERS, .max_retries = retries,
                                   .respawn = true, .memory_limit = 64 * MIB,
                                   .arena_bytes = 256 * MIB, .window = 8, .in_order = true};
    memset(n, 0, sizeof(*n));
    n->parent = getpid();
    n->orders.seed = mn_test_seed();
    n->orders.rows = mn_test_shared(POSITIONS * sizeof(mn_a32));
    n->rig.scale = scale;
    n->rig.env_max = env_max;
    n->rig.first_try_only = true; /* so that one try leaves nothing to the next one */
    CHECK_EQ(mn_engine_open(&n->rig.e, &cfg), 0);
    rig_form(&n->rig, 2);
}

static void
start_nursery(struct nursery *n)
{
    /* In the product, workers are children of another process. Here their deaths would interrupt
     * the trainer's sleep, which then looks at its event: no lost wake-up would be seen. */
    sigset_t deaths;
    CHECK(sigemptyset(&deaths) == 0 && sigaddset(&deaths, SIGCHLD) == 0);
    CHECK_EQ(pthread_sigmask(SIG_BLOCK, &deaths, NULL), 0);
    for (uint32_t i = 0; i < n->rig.e->shm.ctl->ntasks; i++) {
        n->rig.e->tasks.gens[i] = UINT32_MAX - i % 64;
    }
    CHECK_EQ(mn_engine_start(n->rig.e, -1, -1), 0);
    CHECK_EQ(mn_thread_start(&n->thread, "zygote", zygote_main, n), 0);
}

static void
close_nursery(struct nursery *n)
{
    struct mn_engine *e = n->rig.e;
    CHECK_EQ(e->flight.n, 0);
    mn_engine_stop(e);
    CHECK_EQ(mn_thread_join(&n->thread), 0);
    CHECK_EQ(e->tasks.nfree, e->shm.ctl->ntasks);
    rig_has_no_records(e);
    /* The engine has swept all workers: not even a lease is left. */
    CHECK_EQ(mn_arena_used(&e->arena), 0);
    mn_engine_close(e);
    CHECK(munmap(n->orders.rows, POSITIONS * sizeof(mn_a32)) == 0);
}

/* Plans and takes until time is up, and until a worker has died if one should. Returns how many
 * batches were lost. */
static uint64_t
deliver(struct nursery *n, uint64_t stop, uint64_t *taken)
{
    struct rig_block flight[WINDOW] = {0};
    uint64_t state = n->orders.seed, number, off, lost = 0, first = 0;
    for (bool more = true; more || first < n->rig.number;) {
        more = more && n->rig.position < POSITIONS - 1000
               && (mn_test_clock_ns() < stop || n->rig.number < 20
                   || (n->orders.label != NULL && n->deaths == 0));
        if (more && n->rig.number - first < WINDOW) {
            uint32_t rows = (uint32_t)(mn_test_random(&state) % 30);
            CHECK_EQ(rig_plan(&n->rig, rows, &flight[n->rig.number % WINDOW]), MN_OK);
            continue;
        }
        /* WAIT_NS is for the whole wait: nothing makes up for a lost wake-up. */
        CHECK_EQ(mn_engine_next(n->rig.e, WAIT_NS, &number, &off), MN_OK);
        CHECK_EQ(number, first);
        struct rig_block *b = &flight[first++ % WINDOW];
        b->off = off;
        if (mn_engine_poll(n->rig.e, off) == MN_BLOCK_DONE) {
            rig_check(&n->rig, b);
            for (uint32_t row = 0; row < b->nrows; row++) {
                CHECK(mn_a32_load_relaxed(&n->orders.rows[b->position + row]) >= 1);
            }
            ++*taken;
        }
        else {
            lost++;
        }
        mn_engine_taken(n->rig.e, number, off, false);
    }
    return lost;
}

static void
report(const struct nursery *n, uint64_t taken, uint64_t lost)
{
    printf("  taken %llu lost %llu deaths %llu retries %llu\n", (unsigned long long)taken,
           (unsigned long long)lost, (unsigned long long)n->deaths,
           (unsigned long long)n->rig.e->tasks.retries);
    fflush(stdout);
}

/* The points of a worker's code at which it is killed, at about one in `every` visits, and the
 * fewest and most tasks that each death loses. */
static const struct point {
    const char *label, *after; /* only if this point was passed just before; NULL: always */
    uint32_t every, least, most;
    bool parts;
    const char *held_up;
} points[] = {
    {"runqueue.claim.before", NULL, 30, 0, 0, false, NULL},
    {"runqueue.claim.after", NULL, 30, 1, 1, false, NULL},
    {"worker.done.before", NULL, 30, 1, 1, false, NULL},
    /* Another worker is about to claim the same task: its claim fails, and it is not treated as
     * damaged. */
    {"worker.done.before", NULL, 30, 1, 1, false, "runqueue.claim.before"},
    {"worker.done.after", NULL, 30, 0, 0, false, NULL},
    /* Asleep, and perhaps with a task that waits for memory. */
    {"event.prepared", NULL, 6, 0, 1, false, NULL},
    /* After claiming a sleeper's event, the engine's and then the trainer's: no other notification
     * will wake that sleeper. */
    {"event.claimed", "runqueue.claim.after", 8, 1, 1, false, NULL},
    {"event.claimed", "worker.done.after", 2, 0, 0, false, NULL},
    {"worker.lease.want", NULL, 6, 1, 1, false, NULL},
    {"worker.lease.granted", NULL, 6, 1, 1, false, NULL},
    /* The last part of a batch is done, and no worker has claimed its collate task. */
    {"worker.done.after", NULL, 30, 0, 0, true, NULL},
    {"worker.collate.claimed", NULL, 4, 1, 1, true, NULL},
};

static void
die_at_each_point(void)
{
    static struct nursery n;
    for (const struct point *p = points; p < points + sizeof(points) / sizeof(*points); p++) {
        uint64_t taken = 0;
        printf("  %s", p->label);
        open_nursery(&n, 200, 3000, 60000);
        n.rig.parts = p->parts;
        n.orders.label = p->label;
        n.orders.after = p->after;
        n.orders.held_up = p->held_up;
        n.orders.every = p->every;
        start_nursery(&n);
        uint64_t lost = deliver(&n, mn_test_stop_ns(), &taken);
        report(&n, taken, lost);
        CHECK_EQ(lost, 0);
        CHECK(n.deaths > 0);
        CHECK(n.rig.e->tasks.retries <= n.deaths * p->most);
        CHECK(n.rig.e->tasks.retries >= n.deaths * p->least);
        close_nursery(&n);
    }
}

/* Kills from outside, at no particular point. */
static void
die_anywhere(void)
{
    static struct nursery n;
    for (int parts = 0; parts < 2; parts++) {
        uint64_t taken = 0;
        open_nursery(&n, 200, 12000, 200000);
        n.rig.parts = parts;
        n.orders.kills_a_second = 200;
        start_nursery(&n);
        uint64_t lost = deliver(&n, mn_test_stop_ns(), &taken);
        report(&n, taken, lost);
        CHECK_EQ(lost, 0);
        CHECK(n.deaths > 5);
        close_nursery(&n);
    }
}

/* Without retries a death costs its batch, and only that one. */
static void
lost_batches_are_told(void)
{
    static struct nursery n;
    for (int parts = 0; parts < 2; parts++) {
        uint64_t taken = 0;
        open_nursery(&n, 0, 3000, 60000);
        n.rig.parts = parts;
        n.orders.label = "worker.done.before";
        n.orders.every = 40;
        start_nursery(&n);
        uint64_t lost = deliver(&n, mn_test_stop_ns(), &taken);
        report(&n, taken, lost);
        CHECK(lost > 0 && taken > 0);
        CHECK(lost <= n.deaths); /* two tasks of one batch may be lost */
        CHECK_EQ(n.rig.e->tasks.retries, 0);
        CHECK(n.rig.e->flight.mean_envelope_bytes < 100 * MIB);
        close_nursery(&n);
    }
}

/* A task that never succeeds is given up after its retries, and the others go on. */
static void
poison_is_given_up(void)
{
    static struct nursery n;
    struct rig_block b;
    uint64_t number, off;
    open_nursery(&n, 2, 3000, 0);
    n.orders.label = "worker.done.before";
    n.orders.every = 1;
    start_nursery(&n);
    CHECK_EQ(rig_plan(&n.rig, 1, &b), MN_OK);
    CHECK_EQ(mn_engine_next(n.rig.e, WAIT_NS, &number, &off), MN_OK);
    CHECK_EQ(mn_engine_poll(n.rig.e, off), MN_BLOCK_LOST);
    uint32_t task = mn_block_tasks(mn_block_at(&n.rig.e->shm, off))[0];
    const struct mn_death *death = &n.rig.e->tasks.lost[task];
    CHECK_EQ(n.rig.e->tasks.retries, 2);
    CHECK_EQ(mn_a32_load_relaxed(&n.orders.rows[0]), 3);
    CHECK_EQ(death->status, -SIGKILL);
    CHECK(death->pid > 1 && death->worker < WORKERS);
    mn_engine_taken(n.rig.e, number, off, false);
    close_nursery(&n);
}

/* The trainer and the process that forked the workers are killed while one worker waits for
 * memory. */
static void
waiting_for_room_ends_with_the_trainer(void)
{
    int fd[2];
    char c;
    CHECK(pipe(fd) == 0);
    pid_t trainer = fork();
    CHECK(trainer >= 0);
    if (trainer == 0) {
        struct mn_engine_config cfg = {.workers = 1, .arena_bytes = 16 * MIB, .processes = true};
        struct mn_engine *e;
        struct mn_worker_side side;
        uint64_t off;
        struct mn_lifeline_end line;
        CHECK_EQ(mn_engine_open(&e, &cfg), 0);
        mn_lifeline_hold(&line, e->lifeline_end);
        if (fork() != 0) {
            close(fd[1]);
            pause();
        }
        CHECK_EQ(mn_worker_attach(&side, &e->shm, 0), 0);
        side.trainer = &line;
        CHECK(write(fd[1], "!", 1) == 1);
        CHECK_EQ(mn_worker_lease(&side, MIB, &off), MN_CLOSED);
        _exit(0);
    }
    close(fd[1]);
    CHECK(read(fd[0], &c, 1) == 1);
    CHECK(kill(trainer, SIGKILL) == 0);
    (void)mn_test_reap(trainer);
    struct pollfd p = {.fd = fd[0], .events = POLLIN};
    CHECK(poll(&p, 1, 20000) == 1);
    CHECK(read(fd[0], &c, 1) == 0); /* the worker has ended */
    close(fd[0]);
}

static const struct mn_test tests[] = {
    MN_TEST("fork", waiting_for_room_ends_with_the_trainer),
    MN_TEST("fork", die_at_each_point),
    MN_TEST("fork", die_anywhere),
    MN_TEST("fork", lost_batches_are_told),
    MN_TEST("fork", poison_is_given_up),
};

MN_TEST_MAIN(tests)
