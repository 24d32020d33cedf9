/* The arena alone: a fake provider that counts its calls, no task and no worker.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "memory/mn_arena.h"
#include "mn_test.h"

#define MIB (UINT64_C(1) << 20)
#define RECORDS (4 * MN_ARENA_PAGE)

/* A provider with limited memory, which records discards. */
struct fake {
    struct mn_provider provider;
    struct mn_mutex *guard;
    uint64_t most;      /* bytes that it maps at most */
    uint64_t discarded; /* bytes */
    char *last_at;
    uint32_t mapped;    /* number of present mappings */
    struct mn_arena *grabs; /* allocate from this arena meanwhile */
};

static int
fake_map(struct mn_provider *self, uint64_t bytes, void **base)
{
    struct fake *f = (struct fake *)self;
    if (bytes > f->most) {
        return -ENOMEM;
    }
    *base = calloc(1, bytes);
    f->mapped++;
    return 0;
}

static void
fake_unmap(struct mn_provider *self, void *base, uint64_t bytes)
{
    (void)bytes;
    ((struct fake *)self)->mapped--;
    free(base);
}

static void
fake_discard(struct mn_provider *self, void *at, uint64_t bytes)
{
    struct fake *f = (struct fake *)self;
    uint64_t off;
    memset(at, 0, bytes);
    f->discarded += bytes;
    f->last_at = at;
    mn_mutex_lock(f->guard); /* the guard must be free, else this hangs */
    if (f->grabs != NULL) {
        CHECK_EQ(mn_arena_alloc(f->grabs, f->grabs->total_bytes - RECORDS, &off), -EAGAIN);
    }
    mn_mutex_unlock(f->guard);
}

static void
set_up(struct mn_arena *a, struct fake *f, struct mn_mutex *guard, uint64_t rows)
{
    memset(a, 0, sizeof(*a));
    *f = (struct fake){.provider = {fake_map, fake_unmap, fake_discard}, .guard = guard,
                       .most = RECORDS + rows};
    CHECK_EQ(mn_mutex_init(guard), 0);
    CHECK_EQ(mn_arena_map(a, &f->provider, RECORDS + rows + 1), -ENOMEM);
    CHECK(a->base == NULL);
    CHECK_EQ(mn_arena_map(a, &f->provider, RECORDS + rows), 0);
    CHECK_EQ(mn_arena_open(a, guard, (struct mn_range){0, RECORDS},
                           (struct mn_range){RECORDS, rows}), 0);
    a->limit = rows / 2;
    mn_mutex_lock(guard);
}

static void
tear_down(struct mn_arena *a, struct fake *f, struct mn_mutex *guard)
{
    mn_mutex_unlock(guard);
    mn_arena_close(a);
    CHECK_EQ(f->mapped, 0);
    mn_mutex_fini(guard);
}

static void
the_ledger_says_what_is_used(void)
{
    struct mn_arena a;
    struct fake f;
    struct mn_mutex guard;
    uint64_t x, y, record;
    set_up(&a, &f, &guard, MIB);
    CHECK_EQ(mn_arena_alloc(&a, 1, &x), 0);
    CHECK_EQ(mn_arena_used(&a), MN_ARENA_PAGE);
    CHECK_EQ(mn_arena_record(&a, 100, &record), 0);
    CHECK(record < RECORDS && x >= RECORDS);
    CHECK_EQ(mn_arena_used(&a), MN_ARENA_PAGE); /* of rows only */
    CHECK(!mn_arena_exceeds(&a, MIB / 2 - MN_ARENA_PAGE));
    CHECK(mn_arena_exceeds(&a, MIB / 2));
    CHECK(mn_arena_exceeds(&a, UINT64_MAX));
    CHECK_EQ(mn_arena_alloc(&a, MIB / 2, &y), 0); /* the caller must check the limit */
    CHECK(mn_arena_exceeds(&a, 0));
    CHECK_EQ(mn_arena_alloc(&a, MIB, &y), -ENOMEM);
    CHECK_EQ(mn_arena_record(&a, RECORDS, &y), -ENOMEM);
    mn_arena_free_record(&a, record, 100);
    CHECK_EQ(mn_arena_record(&a, RECORDS, &record), 0);
    tear_down(&a, &f, &guard);
}

/* A batch ends, and the part of it that the program retains stays. */
static void
what_is_kept_outlives_its_list(void)
{
    struct mn_arena a;
    struct fake f;
    struct mn_mutex guard;
    uint64_t off, page = MN_ARENA_PAGE;
    struct mn_ranges batch = {0};
    set_up(&a, &f, &guard, MIB);
    CHECK_EQ(mn_arena_alloc(&a, 8 * page, &off), 0);
    CHECK_EQ(mn_ranges_add(&batch, off, 8 * page), 0);
    CHECK_EQ(mn_arena_retain(&a, &batch, off + 2 * page, 3 * page), 0);
    CHECK_EQ(mn_arena_retain(&a, &batch, off + 2 * page, page), -EINVAL); /* retained already */
    CHECK_EQ(mn_arena_retain(&a, &batch, off + 5 * page, 4 * page), -EINVAL); /* too long */
    CHECK_EQ(mn_arena_retain(&a, &batch, off, UINT64_MAX & ~(page - 1)), -EINVAL);
    CHECK_EQ(a.kept_bytes, 3 * page);
    mn_arena_free_ranges(&a, &batch);
    CHECK_EQ(batch.n, 0);
    CHECK_EQ(mn_arena_used(&a), 3 * page);
    mn_arena_release(&a, off + 2 * page, 3 * page);
    CHECK_EQ(a.kept_bytes, 0);
    CHECK_EQ(mn_arena_used(&a), 0);
    mn_ranges_fini(&batch);
    tear_down(&a, &f, &guard);
}

/* After ranges are taken at random, the list holds exactly the rest. */
static void
ranges_are_cut_anywhere(void)
{
    uint64_t state = mn_test_seed();
    for (uint32_t turn = 0; turn < 300; turn++) {
        struct mn_ranges r = {0};
        bool mine[64];
        CHECK_EQ(mn_ranges_add(&r, 10, 30), 0);
        CHECK_EQ(mn_ranges_add(&r, 50, 14), 0);
        CHECK_EQ(mn_ranges_add(&r, 7, 0), 0); /* adds nothing */
        for (uint32_t i = 0; i < 64; i++) {
            mine[i] = (i >= 10 && i < 40) || i >= 50;
        }
        for (uint32_t step = 0; step < 40; step++) {
            uint64_t off = mn_test_random(&state) % 64, n = mn_test_random(&state) % 6 + 1;
            bool all = off + n <= 64;
            for (uint64_t i = off; all && i < off + n; i++) {
                all = mine[i];
            }
            CHECK_EQ(mn_ranges_cut(&r, off, n), all ? 0 : -EINVAL);
            for (uint64_t i = off; all && i < off + n; i++) {
                mine[i] = false;
            }
        }
        uint64_t left = 0, listed = 0;
        for (uint32_t i = 0; i < 64; i++) {
            left += mine[i];
        }
        for (uint32_t i = 0; i < r.n; i++) {
            listed += r.at[i].bytes;
            CHECK(r.at[i].bytes != 0);
        }
        CHECK_EQ(listed, left);
        mn_ranges_fini(&r);
    }
}

static void
who_waits_for_room_is_told_once(void)
{
    struct mn_arena a;
    struct fake f;
    struct mn_mutex guard;
    uint64_t x, y;
    set_up(&a, &f, &guard, MIB);
    CHECK_EQ(mn_arena_alloc(&a, MIB / 2, &x), 0);
    CHECK_EQ(mn_arena_alloc(&a, MIB / 2, &y), 0);
    mn_arena_free(&a, x, MIB / 4);
    CHECK(!mn_arena_room_came(&a)); /* no caller waits */
    a.room_waits = true;
    CHECK(!mn_arena_room_came(&a));
    mn_arena_free(&a, x + MIB / 4, MIB / 4);
    mn_arena_free(&a, y, MIB / 2);
    CHECK(mn_arena_room_came(&a));
    CHECK(!mn_arena_room_came(&a));
    tear_down(&a, &f, &guard);
}

/* Free memory goes back at the given time, without the guard, and cannot be allocated meanwhile. */
static void
free_memory_goes_back(void)
{
    struct mn_arena a;
    struct fake f;
    struct mn_mutex guard;
    uint64_t x, now = 1000000000;
    set_up(&a, &f, &guard, 64 * MIB);
    CHECK_EQ(mn_arena_alloc(&a, 48 * MIB, &x), 0);
    mn_arena_free(&a, x, 48 * MIB);
    a.room_waits = true;
    while (mn_arena_trim(&a, now)) {
    }
    CHECK_EQ(f.discarded, 0);
    for (uint32_t turn = 0; turn < 2 * MN_TRIM_COLD; turn++) {
        now += MN_TRIM_PAUSE_NS;
        while (mn_arena_trim(&a, now)) {
        }
    }
    CHECK_EQ(f.discarded, 48 * MIB - MN_TRIM_SPARE);
    CHECK_EQ(a.trimmed_bytes, f.discarded);
    CHECK_EQ(mn_arena_warm(&a), MN_TRIM_SPARE);
    CHECK(mn_arena_room_came(&a));
    f.grabs = &a;
    mn_arena_discard_free(&a);
    CHECK_EQ(f.discarded, 48 * MIB);
    CHECK_EQ(mn_arena_lent(&a), 0);
    CHECK(!mn_arena_no_lent(&a));
    tear_down(&a, &f, &guard);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", the_ledger_says_what_is_used),
    MN_TEST("plain", what_is_kept_outlives_its_list),
    MN_TEST("plain", ranges_are_cut_anywhere),
    MN_TEST("plain", who_waits_for_room_is_told_once),
    MN_TEST("plain", free_memory_goes_back),
};

MN_TEST_MAIN(tests)
