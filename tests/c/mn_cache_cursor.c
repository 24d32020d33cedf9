/* A cursor reports what was stored in a cache file, whatever becomes of the writers.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache.h"

#include <pthread.h>

#include "base/mn_base.h"
#include "mn_test.h"

#define MIB (UINT64_C(1) << 20)
#define KEYS 4000

static char folder[64];

static struct mn_cache *
client_of(uint64_t job, uint64_t bytes)
{
    struct mn_cache *cache;
    if (folder[0] == '\0') { /* of this run alone; forks inherit it */
        snprintf(folder, sizeof(folder), "/dev/shm/minato-test-%d", (int)getpid());
    }
    struct mn_cache_place place = {folder, "cursor", bytes, job, job, 0, false, false, ""};
    CHECK_EQ(mn_cache_open(&place, 0, &cache), 0);
    CHECK_EQ(mn_cache_attach(cache), 0);
    return cache;
}

/* A digest that shows its key. */
static int
put_key(struct mn_cache *cache, uint64_t key)
{
    static const char data[9000];
    struct mn_cache_part description = {&key, sizeof(key)};
    struct mn_cache_part part = {data, key * 7919 % sizeof(data)};
    struct mn_cache_digest digest = {{key, key * UINT64_C(0x9e3779b97f4a7c15)}};
    struct mn_cache_value value = {&description, &part, 1, 1, true};
    return mn_cache_store(cache, digest, &value);
}

struct follower {
    struct mn_cache *cache;
    struct mn_cache_cursor cursor;
    unsigned char seen[KEYS];
    uint64_t n; /* reports so far */
};

/* Takes what is new; no key may be reported twice. */
static uint64_t
follow(struct follower *f, uint64_t most)
{
    struct mn_cache_stored out[64];
    uint64_t n, all = 0;
    do {
        CHECK_EQ(mn_cache_inserted(f->cache, &f->cursor, out, most, &n), 0);
        CHECK(n <= most);
        for (uint64_t i = 0; i < n; i++) {
            uint64_t key = out[i].key;
            CHECK(key < KEYS && out[i].generation >= f->cursor.oldest);
            CHECK_EQ(f->seen[key], 0);
            f->seen[key] = 1;
        }
        all += n;
    } while (n == most);
    f->n += all;
    return all;
}

static void
all_that_is_stored_is_reported_once(void)
{
    struct follower f = {.cache = client_of(1, 64 * MIB)};
    for (uint64_t key = 0; key < KEYS; key++) {
        CHECK_EQ(put_key(f.cache, key), 0);
        if (key % 7 == 0) {
            (void)follow(&f, 1 + key % 64);
        }
    }
    (void)follow(&f, 64);
    CHECK_EQ(f.n, KEYS);
    CHECK_EQ(follow(&f, 64), 0);
    f.cursor = (struct mn_cache_cursor){0};
    memset(f.seen, 0, sizeof(f.seen));
    CHECK_EQ(follow(&f, 64), KEYS);
    mn_cache_close(f.cache);
}

static void
a_cursor_behind_recycled_segments_jumps(void)
{
    struct follower f = {.cache = client_of(1, 2 * MIB)};
    struct mn_cache *other = client_of(2, 2 * MIB);
    uint64_t live = 0;
    CHECK_EQ(put_key(f.cache, 0), 0);
    CHECK_EQ(follow(&f, 64), 1);
    for (uint64_t key = 1; key < KEYS; key++) {
        CHECK_EQ(put_key(other, key), 0);
    }
    (void)follow(&f, 64);
    for (uint64_t key = 1; key < KEYS; key++) {
        struct mn_cache_digest digest = {{key, key * UINT64_C(0x9e3779b97f4a7c15)}};
        struct mn_cache_found found;
        bool found_it = mn_cache_find(f.cache, digest, false, &found) == 0;
        CHECK(!found_it || f.seen[key]); /* a full bucket may have lost one that the log has */
        live += f.seen[key];
    }
    CHECK(live > 100 && live < KEYS / 2);
    mn_cache_close(other);
    mn_cache_close(f.cache);
}

static const char *dies_at;

static void
meet_fault(const char *name)
{
    if (dies_at != NULL && strcmp(name, dies_at) == 0) {
        (void)kill(getpid(), SIGKILL);
    }
}

static void
die(void *at)
{
    struct mn_cache *cache = client_of(1, 2 * MIB);
    dies_at = at;
    mn_fault_hook = meet_fault;
    (void)put_key(cache, 1);
}

static void
a_dead_writers_place_stops_no_cursor(void)
{
    static const char *const points[] = {"cache.reserved", "cache.taken", "cache.part",
                                         "cache.written"};
    for (size_t i = 0; i < sizeof(points) / sizeof(points[0]); i++) {
        struct follower f = {.cache = client_of(1, 2 * MIB)};
        CHECK_EQ(put_key(f.cache, 0), 0);
        (void)mn_test_reap(mn_test_fork(die, (void *)(uintptr_t)points[i]));
        for (uint64_t key = 2; key < 200; key++) {
            CHECK_EQ(put_key(f.cache, key), 0);
        }
        (void)follow(&f, 64);
        bool lost = strcmp(points[i], "cache.taken") == 0; /* the rest of that segment */
        CHECK(f.seen[0] && !f.seen[1] && f.seen[199]);
        CHECK(lost ? f.n > 150 && f.n < 199 : f.n == 199);
        mn_cache_close(f.cache);
    }
}

static void *
write_some(void *first)
{
    uint64_t key = *(uint64_t *)first;
    struct mn_cache *cache = client_of(1, 64 * MIB);
    for (uint64_t i = 0; i < KEYS / 4; i++) {
        CHECK_EQ(put_key(cache, key + i), 0);
    }
    mn_cache_close(cache);
    return NULL;
}

static void
what_several_clients_store_is_reported_once(void)
{
    struct follower f = {.cache = client_of(1, 64 * MIB)};
    pthread_t threads[4];
    uint64_t first[4];
    for (uint64_t i = 0; i < 4; i++) {
        first[i] = i * KEYS / 4;
        CHECK_EQ(pthread_create(&threads[i], NULL, write_some, &first[i]), 0);
    }
    uint64_t stop_ns = mn_test_clock_ns() + UINT64_C(60000000000);
    while (f.n < KEYS && mn_test_clock_ns() < stop_ns) {
        (void)follow(&f, 64);
    }
    CHECK_EQ(f.n, KEYS);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
    }
    mn_cache_close(f.cache);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", all_that_is_stored_is_reported_once),
    MN_TEST("plain", a_cursor_behind_recycled_segments_jumps),
    MN_TEST("thread", what_several_clients_store_is_reported_once),
    MN_TEST("fork", a_dead_writers_place_stops_no_cursor),
};
MN_TEST_MAIN(tests)
