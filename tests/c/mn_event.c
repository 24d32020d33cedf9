/* The event: no wake-up is lost, whichever process dies.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The stress bodies sleep without a timeout and every publish is answered before the next. So one
 * lost wake-up stops them for good and the deadline of the program reports it. Linked with --wrap
 * for mn_futex_wait and mn_now_ns: the plain cases script the kernel and the clock.
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "base/mn_base.h"
#include "mn_test.h"
#include "os/mn_thread.h"
#include "sync/mn_event.h"

/* ---- a scripted kernel ---- */

struct script {
    int rc;      /* result of the wait; 1: end of script, the real call */
    bool notified; /* another thread notifies meanwhile */
};

static const struct script *script;

/* In a scripted sleep each wait takes a millisecond of our own clock. */
#define TICK_NS 1000000
static uint64_t now_ns;
static int64_t waited_ns[8]; /* the requested timeouts */
static int waits;

/* A kernel that is slow to put us to sleep. With it a round of the conversation costs less than a
 * microsecond instead of fifty, so a hundred times more of them meet the moment in which a wake-up
 * could be lost. A lost one still ends in the real sleep. */
static bool kernel_dawdles;

int __real_mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns);
int __wrap_mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns);

int
__wrap_mn_futex_wait(mn_a32 *word, uint32_t expected, int64_t timeout_ns)
{
    if (script == NULL || script->rc == 1) {
        for (int spins = kernel_dawdles ? 2000 : 0; spins > 0; spins--) {
            if (mn_a32_load_relaxed(word) != expected) {
                return -EAGAIN;
            }
            mn_cpu_pause();
        }
        return __real_mn_futex_wait(word, expected, timeout_ns);
    }
    CHECK(waits < 8);
    waited_ns[waits++] = timeout_ns;
    now_ns += TICK_NS;
    if (script->notified) {
        CHECK(mn_event_notify((struct mn_event *)(void *)word));
    }
    return script++->rc;
}

uint64_t __real_mn_now_ns(void);
uint64_t __wrap_mn_now_ns(void);

uint64_t
__wrap_mn_now_ns(void)
{
    return script != NULL ? now_ns : __real_mn_now_ns();
}

static int
sleep_with(struct mn_event *event, const struct script *lines, int64_t timeout_ns)
{
    mn_event_prepare_wait(event);
    script = lines;
    waits = 0;
    int rc = mn_event_commit_wait(event, timeout_ns);
    script = NULL;
    CHECK_EQ(mn_a32_load_relaxed(&event->word), MN_EVENT_AWAKE);
    return rc;
}

static void
results_of_a_sleep(void)
{
    struct mn_event event = {0};
    const struct script notified[] = {{0, true}, {1, false}};
    const struct script spurious[] = {{0, false}, {0, false}, {-EAGAIN, true}, {1, false}};
    const struct script late[] = {{0, false}, {-ETIMEDOUT, false}, {1, false}};
    const struct script both[] = {{-ETIMEDOUT, true}, {1, false}};
    const struct script signal[] = {{-EINTR, false}, {1, false}};
    const struct script signal_and_ring[] = {{-EINTR, true}, {1, false}};
    CHECK_EQ(sleep_with(&event, notified, -1), 0);
    CHECK_EQ(sleep_with(&event, spurious, -1), 0);
    CHECK_EQ(sleep_with(&event, spurious, 1000000000), 0);
    CHECK_EQ(sleep_with(&event, late, -1), -ETIMEDOUT);
    CHECK_EQ(sleep_with(&event, both, -1), 0);
    CHECK_EQ(sleep_with(&event, signal, -1), -EINTR);
    CHECK_EQ(sleep_with(&event, signal_and_ring, -1), 0);
}

static void
a_timeout_holds_through_spurious_wakes(void)
{
    struct mn_event event = {0};
    const struct script spurious[] = {{0, false}, {-EAGAIN, false}, {0, false}, {-EIO, false}};
    CHECK_EQ(sleep_with(&event, spurious, 3 * TICK_NS - 1), -ETIMEDOUT);
    CHECK_EQ(waits, 3);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(waited_ns[i], (3 - i) * TICK_NS - 1);
    }
    CHECK_EQ(sleep_with(&event, spurious, -1), -EIO);
    CHECK_EQ(waited_ns[2], -1);
    CHECK_EQ(sleep_with(&event, NULL, 0), -ETIMEDOUT);
}

/* A caller that looks again after each sleep takes no core for it. */
static void
a_kernel_that_refuses_is_not_asked_all_the_time(void)
{
    struct mn_event event = {0};
    const struct script refused[] = {{-ENOSYS, false}, {-EINVAL, false}, {-EFAULT, false}};
    for (int i = 0; i < 3; i++) {
        uint64_t start = mn_test_clock_ns();
        CHECK_EQ(sleep_with(&event, &refused[i], -1), refused[i].rc);
        CHECK(mn_test_clock_ns() - start >= 1000000);
    }
}

/* Shared memory that was overwritten. */
static void
a_word_that_is_none_ends_the_sleep(void)
{
    struct mn_event event = {0};
    mn_event_prepare_wait(&event);
    mn_a32_store_relaxed(&event.word, 77);
    CHECK_EQ(mn_event_commit_wait(&event, -1), 0);
    CHECK_EQ(mn_a32_load_relaxed(&event.word), MN_EVENT_AWAKE);
}

static void
spinning_ends_with_its_time(void)
{
    static const struct script made_up[] = {{1, false}};
    uint64_t until = 0;
    script = made_up;
    now_ns = 1000;
    CHECK(!mn_event_spin(0, &until));
    CHECK(mn_event_spin(30, &until));
    now_ns = 1029;
    CHECK(mn_event_spin(30, &until));
    now_ns = 1030;
    CHECK(!mn_event_spin(30, &until));
    script = NULL;
}

static void
rings_tell_whether_somebody_slept(void)
{
    struct mn_event event = {0};
    CHECK(!mn_event_notify(&event) && !mn_event_notify_released(&event));
    mn_event_prepare_wait(&event);
    CHECK(mn_event_notify(&event) && !mn_event_notify(&event));
    CHECK_EQ(mn_event_commit_wait(&event, -1), 0); /* notified before the sleep began */
    mn_event_prepare_wait(&event);
    CHECK(mn_event_notify_released(&event) && !mn_event_notify_released(&event));
    CHECK_EQ(mn_event_commit_wait(&event, -1), 0);
    mn_event_prepare_wait(&event);
    mn_event_cancel_wait(&event);
    CHECK(!mn_event_notify(&event));
    mn_event_prepare_wait(&event);
    mn_event_notify_always(&event);
    CHECK_EQ(mn_event_commit_wait(&event, -1), 0);
}

/* ---- two threads that answer each other ---- */

struct side {
    MN_ALIGNED(MN_CACHELINE) struct mn_event event;
    MN_ALIGNED(MN_CACHELINE) mn_a32 said; /* published by this side */
    MN_ALIGNED(MN_CACHELINE) uint32_t plain[2]; /* ordinary data that goes with it */
};

struct talk {
    struct side side[2];
    uint64_t seed;
    uint64_t stop_ns;
    mn_a32 rounds;
    bool released; /* publish with release and ring_released, look with acquire */
};

#define LAST UINT32_MAX

static void
say(struct talk *t, int me, uint32_t value)
{
    struct side *mine = &t->side[me];
    mine->plain[value & 1] = value;
    if (t->released) {
        mn_a32_store_release(&mine->said, value);
        (void)mn_event_notify_released(&t->side[1 - me].event);
    }
    else {
        mn_a32_store_seqcst(&mine->said, value);
        (void)mn_event_notify(&t->side[1 - me].event);
    }
}

static uint32_t
hear(struct talk *t, int me)
{
    const mn_a32 *said = &t->side[1 - me].said;
    return t->released ? mn_a32_load_acquire(said) : mn_a32_load_seqcst(said);
}

/* Waits for the peer's next word, after looking a few times so that the announcement often
 * coincides with the peer's notification. */
static uint32_t
await(struct talk *t, int me, uint32_t not_this, uint64_t *random)
{
    struct mn_event *event = &t->side[me].event;
    uint32_t heard = not_this;
    for (uint64_t spins = mn_test_random(random) % 128; spins > 0; spins--) {
        if ((heard = hear(t, me)) != not_this) {
            return heard;
        }
    }
    while (heard == not_this) {
        mn_event_prepare_wait(event);
        if ((heard = hear(t, me)) != not_this) {
            mn_event_cancel_wait(event);
            break;
        }
        CHECK_EQ(mn_event_commit_wait(event, -1), 0);
        heard = hear(t, me);
    }
    CHECK(t->side[1 - me].plain[heard & 1] == heard);
    return heard;
}

static void
pause_a_little(uint64_t *random)
{
    for (uint64_t spins = mn_test_random(random) % 8; spins > 0; spins--) {
        mn_cpu_pause();
    }
}

static void
ask(struct talk *t)
{
    uint64_t random = t->seed;
    uint32_t i = 0;
    while (i % 64 != 63 || mn_test_clock_ns() < t->stop_ns) {
        say(t, 0, ++i);
        CHECK_EQ(await(t, 0, i - 1, &random), i);
        pause_a_little(&random);
    }
    say(t, 0, LAST);
    mn_a32_store_relaxed(&t->rounds, i);
}

static void
answer(void *arg)
{
    struct talk *t = arg;
    uint64_t random = t->seed + 1;
    mn_test_settle(1);
    for (uint32_t last = 0;;) {
        uint32_t heard = await(t, 1, last, &random);
        if (heard == LAST) {
            return;
        }
        CHECK_EQ(heard, last + 1);
        say(t, 1, last = heard);
        pause_a_little(&random);
    }
}

static void *
answer_in_thread(void *arg)
{
    answer(arg);
    return NULL;
}

static void
converse(bool forked, bool released)
{
    struct talk *t = mn_test_shared(sizeof(*t));
    t->seed = mn_test_seed();
    t->stop_ns = mn_test_stop_ns();
    t->released = released;
    kernel_dawdles = true;
    cpu_set_t before;
    CHECK(sched_getaffinity(0, sizeof(before), &before) == 0);
    if (forked) {
        pid_t pid = mn_test_fork(answer, t);
        mn_test_settle(0);
        ask(t);
        CHECK_EQ(mn_test_reap(pid), 0);
    }
    else {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, answer_in_thread, t) == 0);
        mn_test_settle(0);
        ask(t);
        CHECK(pthread_join(thread, NULL) == 0);
    }
    CHECK(sched_setaffinity(0, sizeof(before), &before) == 0);
    kernel_dawdles = false;
    printf("  %u rounds\n", mn_a32_load_relaxed(&t->rounds));
    CHECK(munmap(t, sizeof(*t)) == 0);
}

static void
threads_converse(void)
{
    converse(false, false);
    converse(false, true);
}

static void
processes_converse(void)
{
    converse(true, false);
    converse(true, true);
}

/* ---- several notifiers ---- */

enum { NOTIFIERS = 3 };

struct crowd {
    struct mn_event event;
    mn_a32 next;
    uint64_t stop_ns;
    struct {
        MN_ALIGNED(MN_CACHELINE) mn_a32 asked;
        mn_a32 served;
    } each[NOTIFIERS];
    mn_a32 left;
};

static void
crowd_ring(void *arg)
{
    struct crowd *c = arg;
    uint32_t me = mn_a32_add_relaxed(&c->next, 1);
    for (uint32_t n = 1; n < 100 || mn_test_clock_ns() < c->stop_ns; n++) {
        mn_a32_store_seqcst(&c->each[me].asked, n);
        (void)mn_event_notify(&c->event);
        while (mn_a32_load_acquire(&c->each[me].served) != n) {
            sched_yield();
        }
    }
    (void)mn_a32_add_seqcst(&c->left, 1);
    (void)mn_event_notify(&c->event);
}

static bool
crowd_serve(struct crowd *c)
{
    bool any = mn_a32_load_seqcst(&c->left) == NOTIFIERS;
    for (int i = 0; i < NOTIFIERS; i++) {
        uint32_t asked = mn_a32_load_seqcst(&c->each[i].asked);
        if (asked != mn_a32_load_relaxed(&c->each[i].served)) {
            mn_a32_store_release(&c->each[i].served, asked);
            any = true;
        }
    }
    return any;
}

static void
crowd_sleep(struct crowd *c)
{
    while (mn_a32_load_seqcst(&c->left) != NOTIFIERS) {
        if (crowd_serve(c)) {
            continue;
        }
        mn_event_prepare_wait(&c->event);
        if (crowd_serve(c)) {
            mn_event_cancel_wait(&c->event);
        }
        else {
            CHECK_EQ(mn_event_commit_wait(&c->event, -1), 0);
        }
    }
}

static void *
crowd_ring_in_thread(void *arg)
{
    crowd_ring(arg);
    return NULL;
}

static void
ring_one_sleeper(bool forked)
{
    struct crowd *c = mn_test_shared(sizeof(*c));
    pthread_t threads[NOTIFIERS];
    pid_t pids[NOTIFIERS];
    c->stop_ns = mn_test_stop_ns();
    for (int i = 0; i < NOTIFIERS; i++) {
        if (forked) {
            pids[i] = mn_test_fork(crowd_ring, c);
        }
        else {
            CHECK(pthread_create(&threads[i], NULL, crowd_ring_in_thread, c) == 0);
        }
    }
    crowd_sleep(c);
    for (int i = 0; i < NOTIFIERS; i++) {
        CHECK_EQ(forked ? mn_test_reap(pids[i]) : pthread_join(threads[i], NULL), 0);
    }
    CHECK(munmap(c, sizeof(*c)) == 0);
}

static void
threads_ring_one_sleeper(void)
{
    ring_one_sleeper(false);
}

static void
processes_ring_one_sleeper(void)
{
    ring_one_sleeper(true);
}

/* ---- data that a notification carries ---- */

struct parcel {
    struct mn_event event;
    uint32_t plain;
};

static void *
ring_with_parcel(void *arg)
{
    struct parcel *p = arg;
    p->plain = 7;
    while (!mn_event_notify(&p->event)) {
        sched_yield();
    }
    return NULL;
}

/* No look at an atomic word between the sleep and the plain read: the notification itself must
 * order them. ThreadSanitizer judges that. */
static void
a_ring_carries_what_came_before(void)
{
    for (int i = 0; i < 100; i++) {
        struct parcel p = {.plain = 0};
        pthread_t t;
        CHECK(pthread_create(&t, NULL, ring_with_parcel, &p) == 0);
        mn_event_prepare_wait(&p.event);
        CHECK_EQ(mn_event_commit_wait(&p.event, -1), 0);
        CHECK_EQ(p.plain, 7);
        CHECK(pthread_join(t, NULL) == 0);
    }
}

/* ---- deaths ---- */

static const char *die_at;

static void
die_here(const char *name)
{
    if (strcmp(name, die_at) == 0) {
        raise(SIGKILL);
    }
}

struct pair {
    struct mn_event event;
    mn_a32 announced;
};

static void
sleep_once(void *arg)
{
    struct pair *p = arg;
    mn_event_prepare_wait(&p->event);
    mn_a32_store_seqcst(&p->announced, 1);
    CHECK_EQ(mn_event_commit_wait(&p->event, -1), 0);
}

static void
ring_and_die(void *arg)
{
    struct pair *p = arg;
    mn_fault_hook = die_here;
    (void)mn_event_notify(&p->event);
}

static pid_t
start_sleeper(struct pair *p)
{
    pid_t pid = mn_test_fork(sleep_once, p);
    while (mn_a32_load_seqcst(&p->announced) == 0 || mn_test_state(pid, pid) != 'S') {
        sched_yield();
    }
    mn_a32_store_seqcst(&p->announced, 0);
    return pid;
}

static bool
was_killed(pid_t pid)
{
    int status = mn_test_reap(pid);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
}

static void
a_sleeper_killed_leaks_nothing(void)
{
    struct pair *p = mn_test_shared(sizeof(*p));
    pid_t pid = start_sleeper(p);
    CHECK(kill(pid, SIGKILL) == 0 && was_killed(pid));
    CHECK_EQ(mn_a32_load_relaxed(&p->event.word), MN_EVENT_ASLEEP);
    CHECK(mn_event_notify(&p->event)); /* one call in vain */
    CHECK(!mn_event_notify(&p->event));
    pid = start_sleeper(p);
    CHECK(mn_event_notify(&p->event));
    CHECK_EQ(mn_test_reap(pid), 0);

    die_at = "event.prepared";
    mn_fault_hook = die_here;
    CHECK(was_killed(mn_test_fork(sleep_once, p)));
    mn_fault_hook = NULL;
    mn_a32_store_seqcst(&p->announced, 0);
    pid = start_sleeper(p); /* without any clean-up */
    CHECK(mn_event_notify(&p->event));
    CHECK_EQ(mn_test_reap(pid), 0);
    CHECK(munmap(p, sizeof(*p)) == 0);
}

static void
a_kick_repairs_a_ringer_killed(void)
{
    struct pair *p = mn_test_shared(sizeof(*p));
    pid_t sleeper = start_sleeper(p);
    die_at = "event.claimed";
    CHECK(was_killed(mn_test_fork(ring_and_die, p)));
    CHECK(!mn_event_notify(&p->event)); /* the dead one claimed the sleeper */
    CHECK_EQ(mn_test_state(sleeper, sleeper), 'S');
    mn_event_notify_always(&p->event);
    CHECK_EQ(mn_test_reap(sleeper), 0);
    CHECK(munmap(p, sizeof(*p)) == 0);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", results_of_a_sleep),
    MN_TEST("plain", a_timeout_holds_through_spurious_wakes),
    MN_TEST("plain", a_kernel_that_refuses_is_not_asked_all_the_time),
    MN_TEST("plain", a_word_that_is_none_ends_the_sleep),
    MN_TEST("plain", spinning_ends_with_its_time),
    MN_TEST("plain", rings_tell_whether_somebody_slept),
    MN_TEST("thread", threads_converse),
    MN_TEST("thread", threads_ring_one_sleeper),
    MN_TEST("thread", a_ring_carries_what_came_before),
    MN_TEST("fork", processes_converse),
    MN_TEST("fork", processes_ring_one_sleeper),
    MN_TEST("fork", a_sleeper_killed_leaks_nothing),
    MN_TEST("fork", a_kick_repairs_a_ringer_killed),
};

MN_TEST_MAIN(tests)
