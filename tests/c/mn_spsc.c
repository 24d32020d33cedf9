/* The ring: nothing lost, doubled, reordered or torn, across its wrap and across deaths.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include <pthread.h>

#include "mn_test.h"
#include "sync/mn_bell.h"
#include "sync/mn_spsc.h"

static struct mn_spsc *
open_ring(uint32_t capacity, uint32_t record)
{
    struct mn_spsc *ring = mn_test_shared(mn_spsc_memsize(capacity, record));
    CHECK_EQ(mn_spsc_init(ring, capacity, record), 0);
    return ring;
}

static void
close_ring(struct mn_spsc *ring)
{
    CHECK(munmap(ring, mn_spsc_memsize(ring->capacity, ring->record)) == 0);
}

/* As if that many records had passed. */
static void
begin_at(struct mn_spsc *ring, uint32_t index)
{
    mn_a32_store_relaxed(&ring->head, index);
    mn_a32_store_relaxed(&ring->tail, index);
    ring->head_seen = ring->tail_seen = index;
}

static void
shapes(void)
{
    CHECK_EQ(mn_spsc_memsize(0, 8), 0);
    CHECK_EQ(mn_spsc_memsize(3, 8), 0);
    CHECK_EQ(mn_spsc_memsize(4, 0), 0);
    CHECK_EQ(mn_spsc_memsize(4, (1u << 30) + 1), 0);
    CHECK_EQ(mn_spsc_memsize(1, 1), 4 * MN_CACHELINE);
    CHECK_EQ(mn_spsc_memsize(1u << 31, 1u << 30), (UINT64_C(1) << 61) + 3 * MN_CACHELINE);
    struct mn_spsc *ring = open_ring(8, 12);
    CHECK_EQ(mn_spsc_check(ring, 8, 12), 0);
    CHECK_EQ(mn_spsc_check(ring, 8, 13), -EINVAL);
    CHECK_EQ(mn_spsc_check(ring, 16, 12), -EINVAL);
    ring->magic++;
    CHECK_EQ(mn_spsc_check(ring, 8, 12), -EINVAL);
    CHECK_EQ(mn_spsc_init(ring, 5, 12), -EINVAL);
    CHECK_EQ(mn_spsc_init((struct mn_spsc *)(void *)((char *)ring + 8), 8, 12), -EINVAL);
    ring->magic--;
    close_ring(ring);
}

/* Against a model: a counter of what went in and one of what came out. */
static void
full_and_empty_across_the_wrap(void)
{
    uint64_t random = mn_test_seed();
    const uint32_t capacities[] = {1, 2, 8, 64};
    for (size_t c = 0; c < 4; c++) {
        struct mn_spsc *ring = open_ring(capacities[c], sizeof(uint64_t));
        uint64_t in = 0, out = 0, got;
        begin_at(ring, (uint32_t)0 - 100);
        for (int i = 0; i < 3000; i++) {
            CHECK_EQ(mn_spsc_count(ring), in - out);
            if (mn_test_random(&random) % 2 == 0) {
                int full = in - out == capacities[c] ? MN_FULL : MN_OK;
                CHECK_EQ(mn_spsc_push(ring, &in), full);
                in += full == MN_OK;
            }
            else {
                int empty = in == out ? MN_EMPTY : MN_OK;
                CHECK_EQ(mn_spsc_pop(ring, &got), empty);
                CHECK(empty || got == out);
                out += empty == MN_OK;
            }
        }
        CHECK(in > 200); /* past the wrap */
        close_ring(ring);
    }
}

/* ---- stress ---- */

struct message {
    uint64_t number;
    uint64_t noise[4];
    uint32_t sum;
    uint32_t last;
    unsigned char odd; /* so that the stride differs from the record */
} __attribute__((packed));

struct flow {
    struct mn_spsc *ring;
    uint64_t seed;
    uint64_t stop_ns;
    bool bells;
    struct mn_bell room; /* the producer sleeps here when full */
    MN_ALIGNED(MN_CACHELINE) struct mn_bell data;
};

static uint32_t
checksum(const struct message *m)
{
    uint64_t h = m->number * UINT64_C(0x9e3779b97f4a7c15) + m->last;
    for (int i = 0; i < 4; i++) {
        h = (h ^ m->noise[i]) * UINT64_C(0x100000001b3);
    }
    return (uint32_t)(h >> 32) ^ m->odd;
}

static void
fill(struct message *m, uint64_t number, uint64_t *random, bool last)
{
    m->number = number;
    for (int i = 0; i < 4; i++) {
        m->noise[i] = mn_test_random(random);
    }
    m->odd = (unsigned char)m->noise[0];
    m->last = last;
    m->sum = checksum(m);
}

/* Sleeps on bell until the ring's op succeeds: the combination that callers use. */
#define UNTIL_OK(flow, bell, op)                                                        \
    while ((op) != MN_OK) {                                                             \
        if (!(flow)->bells) {                                                           \
            sched_yield();                                                              \
            continue;                                                                   \
        }                                                                               \
        mn_bell_announce(bell);                                                         \
        if ((op) == MN_OK) {                                                            \
            mn_bell_retract(bell);                                                      \
            break;                                                                      \
        }                                                                               \
        CHECK_EQ(mn_bell_sleep(bell, -1), 0);                                           \
    }

static void
produce(struct flow *f)
{
    struct message m;
    uint64_t random = f->seed;
    bool last = false;
    for (uint64_t i = 0; !last; i++) {
        last = i > 1000 && i % 64 == 0 && mn_test_clock_ns() >= f->stop_ns;
        fill(&m, i, &random, last);
        UNTIL_OK(f, &f->room, mn_spsc_push(f->ring, &m))
        if (f->bells) {
            (void)mn_bell_ring_released(&f->data);
        }
    }
}

static void
consume(void *arg)
{
    struct flow *f = arg;
    struct message m = {.last = 0}, same;
    uint64_t random = f->seed;
    for (uint64_t i = 0; !m.last; i++) {
        UNTIL_OK(f, &f->data, mn_spsc_pop(f->ring, &m))
        if (f->bells) {
            (void)mn_bell_ring_released(&f->room);
        }
        fill(&same, i, &random, m.last);
        CHECK_EQ(m.number, i);
        CHECK(m.sum == checksum(&m) && memcmp(&m, &same, sizeof(m)) == 0);
    }
    CHECK_EQ(mn_spsc_pop(f->ring, &m), MN_EMPTY);
}

static void *
consume_in_thread(void *arg)
{
    consume(arg);
    return NULL;
}

static void
stream(bool forked, bool bells, uint32_t capacity)
{
    struct flow *f = mn_test_shared(sizeof(*f));
    f->ring = open_ring(capacity, sizeof(struct message));
    f->seed = mn_test_seed();
    f->stop_ns = mn_test_stop_ns();
    f->bells = bells;
    begin_at(f->ring, (uint32_t)0 - 500);
    if (forked) {
        pid_t pid = mn_test_fork(consume, f);
        produce(f);
        CHECK_EQ(mn_test_reap(pid), 0);
    }
    else {
        pthread_t t;
        CHECK(pthread_create(&t, NULL, consume_in_thread, f) == 0);
        produce(f);
        CHECK(pthread_join(t, NULL) == 0);
    }
    close_ring(f->ring);
    CHECK(munmap(f, sizeof(*f)) == 0);
}

static void
threads_stream(void)
{
    stream(false, false, 64);
    stream(false, false, 1);
}

static void
threads_stream_with_bells(void)
{
    stream(false, true, 16);
}

static void
processes_stream(void)
{
    stream(true, false, 64);
}

static void
processes_stream_with_bells(void)
{
    stream(true, true, 4);
}

/* ---- deaths: whatever happened in full is in the ring, and a successor goes on ---- */

static void
push_for_ever(void *arg)
{
    struct mn_spsc *ring = arg;
    uint64_t record[8];
    for (;;) {
        uint64_t next = mn_a32_load_relaxed(&ring->tail); /* all that a successor knows */
        for (int i = 0; i < 8; i++) {
            record[i] = next;
        }
        while (mn_spsc_push(ring, record) != MN_OK) {
            sched_yield();
        }
    }
}

static void
producers_killed(void)
{
    struct mn_spsc *ring = open_ring(32, 8 * sizeof(uint64_t));
    uint64_t random = mn_test_seed(), record[8];
    uint32_t expected = 0;
    for (int life = 0; life < 20; life++) {
        pid_t pid = mn_test_fork(push_for_ever, ring);
        uint32_t until = expected + 1 + (uint32_t)(mn_test_random(&random) % 300);
        while (expected != until) {
            if (mn_spsc_pop(ring, record) == MN_OK) {
                CHECK_EQ(record[0], expected);
                CHECK(memcmp(record, record + 1, 7 * sizeof(uint64_t)) == 0);
                expected++;
            }
            else {
                sched_yield();
            }
        }
        CHECK(kill(pid, SIGKILL) == 0);
        CHECK(WIFSIGNALED(mn_test_reap(pid)));
    }
    close_ring(ring);
}

struct eaten {
    struct mn_spsc *ring;
    mn_a32 seen[4096]; /* how often each record was consumed */
};

static void
eat_for_ever(void *arg)
{
    struct eaten *e = arg;
    for (uint64_t record;;) {
        if (mn_spsc_pop(e->ring, &record) == MN_OK) {
            mn_a32_add_relaxed(&e->seen[record], 1);
        }
        else {
            sched_yield();
        }
    }
}

static void
consumers_killed(void)
{
    enum { LIVES = 16 };
    struct eaten *e = mn_test_shared(sizeof(*e));
    e->ring = open_ring(16, sizeof(uint64_t));
    uint64_t next = 0;
    for (int life = 0; life < LIVES; life++) {
        pid_t pid = mn_test_fork(eat_for_ever, e);
        for (uint64_t until = next + 4096 / LIVES; next < until;) {
            if (mn_spsc_push(e->ring, &next) == MN_OK) {
                next++;
            }
            else {
                sched_yield();
            }
        }
        CHECK(kill(pid, SIGKILL) == 0);
        CHECK(WIFSIGNALED(mn_test_reap(pid)));
    }
    for (uint64_t record; mn_spsc_pop(e->ring, &record) == MN_OK;) {
        mn_a32_add_relaxed(&e->seen[record], 1);
    }
    /* pop moves the head before the caller has used the record: a death in between loses
     * at most that one, and no record is seen by two. */
    int lost = 0;
    for (int i = 0; i < 4096; i++) {
        uint32_t seen = mn_a32_load_relaxed(&e->seen[i]);
        CHECK(seen <= 1);
        lost += seen == 0;
    }
    CHECK(lost <= LIVES);
    close_ring(e->ring);
    CHECK(munmap(e, sizeof(*e)) == 0);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", shapes),
    MN_TEST("plain", full_and_empty_across_the_wrap),
    MN_TEST("thread", threads_stream),
    MN_TEST("thread", threads_stream_with_bells),
    MN_TEST("fork", processes_stream),
    MN_TEST("fork", processes_stream_with_bells),
    MN_TEST("fork", producers_killed),
    MN_TEST("fork", consumers_killed),
};

MN_TEST_MAIN(tests)
