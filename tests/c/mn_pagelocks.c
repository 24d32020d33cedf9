/* Page locks alone: memory that was reserved and never touched, and a driver that records calls.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "memory/mn_pagelocks.h"
#include "mn_test.h"

#define CHUNK MN_PAGELOCKS_CHUNK
#define CHUNKS 8u
#define BYTES (CHUNKS * CHUNK - MN_ARENA_PAGE) /* the last chunk is not whole */

/* The source of the mapping; locked memory must not be discarded. */
struct memory {
    struct mn_provider provider;
    uint64_t discarded;
    char *base;
};

/* One driver; its functions have no argument for another. */
static struct {
    char *base;
    bool locked[CHUNKS];
    uint64_t locks, unlocks, bytes;
    int in, refuses, no_unlock;
    struct mn_pagelocks *of;
} card;

static int
memory_map(struct mn_provider *self, uint64_t bytes, void **base)
{
    struct memory *m = (struct memory *)self;
    *base = mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    m->base = card.base = *base;
    return *base == MAP_FAILED ? -ENOMEM : 0;
}

static void
memory_unmap(struct mn_provider *self, void *base, uint64_t bytes)
{
    (void)self;
    for (uint32_t c = 0; c < CHUNKS; c++) {
        CHECK(!card.locked[c]);
    }
    CHECK(munmap(base, bytes) == 0);
}

static void
memory_discard(struct mn_provider *self, void *at, uint64_t bytes)
{
    struct memory *m = (struct memory *)self;
    uint64_t off = (uint64_t)((char *)at - m->base);
    for (uint64_t c = off / CHUNK; c * CHUNK < off + bytes; c++) {
        CHECK(!card.locked[c]);
    }
    m->discarded += bytes;
    CHECK_EQ(pthread_mutex_trylock(&card.of->mutex.m), EBUSY); /* no lock may come in between */
}

static int
enter(void *context)
{
    CHECK(context == &card);
    card.in++;
    return 0;
}

static int
leave(void **context)
{
    *context = &card;
    card.in--;
    return 0;
}

static int
lock(void *at, size_t bytes, unsigned int flags)
{
    uint64_t c = (uint64_t)((char *)at - card.base) / CHUNK;
    CHECK(card.in == 1 && flags == 5 && (char *)at == card.base + c * CHUNK);
    CHECK_EQ(bytes, c == CHUNKS - 1 ? CHUNK - MN_ARENA_PAGE : CHUNK);
    if (card.refuses != 0) {
        return card.refuses;
    }
    CHECK(!card.locked[c]);
    card.locked[c] = true;
    card.locks++;
    card.bytes += bytes;
    return 0;
}

static int
unlock(void *at)
{
    uint64_t c = (uint64_t)((char *)at - card.base) / CHUNK;
    CHECK(card.in == 1 && card.locked[c]);
    if (card.no_unlock != 0) {
        return card.no_unlock;
    }
    card.locked[c] = false;
    card.unlocks++;
    return 0;
}

static const struct mn_pagelocks_driver driver = {enter, leave, lock, unlock, &card, 5};

static void
set_up(struct mn_pagelocks *l, struct memory *m, uint64_t most)
{
    void *base;
    memset(&card, 0, sizeof(card));
    *m = (struct memory){.provider = {memory_map, memory_unmap, memory_discard}};
    CHECK_EQ(mn_pagelocks_init(l, &m->provider), 0);
    card.of = l;
    CHECK_EQ(l->provider.map(&l->provider, BYTES, &base), 0);
    CHECK_EQ(mn_pagelocks_use(l, base, 1), -ENOTSUP); /* no driver yet */
    CHECK_EQ(mn_pagelocks_set(l, &driver, most), 0);
    CHECK_EQ(mn_pagelocks_set(l, &driver, most), -EBUSY);
}

static void
tear_down(struct mn_pagelocks *l)
{
    l->provider.unmap(&l->provider, card.base, BYTES);
    mn_pagelocks_fini(l);
    CHECK_EQ(card.in, 0);
}

static void
chunks_are_locked_once(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, BYTES);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK - 1, 2), 0);
    CHECK(card.locked[0] && card.locked[1] && !card.locked[2]);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK, CHUNK), 0);
    CHECK_EQ(card.locks, 2);
    mn_pagelocks_used(&l, card.base + CHUNK - 1, 2);
    mn_pagelocks_used(&l, card.base + CHUNK, CHUNK);
    CHECK_EQ(card.unlocks, 0); /* the next batch will be there */
    CHECK_EQ(l.locked_bytes, 2 * CHUNK);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + BYTES - 1, 1), 0);
    CHECK_EQ(l.locked_bytes, 3 * CHUNK - MN_ARENA_PAGE);
    mn_pagelocks_used(&l, card.base + BYTES - 1, 1);
    tear_down(&l);
    CHECK_EQ(card.unlocks, 3);
}

static void
only_ranges_of_the_mapping_are_locked(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, BYTES);
    CHECK_EQ(mn_pagelocks_use(&l, card.base - 1, 1), -EINVAL);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + BYTES, 1), -EINVAL);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + BYTES - 1, 2), -EINVAL);
    CHECK_EQ(mn_pagelocks_use(&l, card.base, UINT64_MAX), -EINVAL);
    CHECK_EQ(mn_pagelocks_use(&l, card.base, 0), -EINVAL);
    CHECK_EQ(card.locks, 0);
    tear_down(&l);
}

static void
what_is_read_is_not_given_back(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, BYTES);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK, 1), 0);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK + 9, 1), 0);
    l.provider.discard(&l.provider, card.base + CHUNK / 2, 2 * CHUNK);
    CHECK_EQ(m.discarded, CHUNK); /* half a chunk on either side */
    mn_pagelocks_used(&l, card.base + CHUNK, 1);
    l.provider.discard(&l.provider, card.base + CHUNK, CHUNK);
    CHECK_EQ(m.discarded, CHUNK);
    mn_pagelocks_used(&l, card.base + CHUNK + 9, 1);
    l.provider.discard(&l.provider, card.base + CHUNK + 4096, 4096);
    CHECK_EQ(m.discarded, CHUNK + 4096);
    CHECK(card.unlocks == 1 && l.locked_bytes == 0);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK, 1), 0); /* and again */
    CHECK_EQ(card.locks, 2);
    mn_pagelocks_used(&l, card.base + CHUNK, 1);
    card.no_unlock = 1;
    l.provider.discard(&l.provider, card.base + CHUNK, CHUNK);
    CHECK_EQ(m.discarded, CHUNK + 4096);
    card.no_unlock = 0;
    tear_down(&l);
}

static void
where_nothing_is_locked_all_is_given_back(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, BYTES);
    l.provider.discard(&l.provider, card.base + CHUNK / 2, 2 * CHUNK);
    CHECK(m.discarded == 2 * CHUNK && card.locks == 0 && card.unlocks == 0);
    tear_down(&l);
}

static void
no_more_than_may_be(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, 2 * CHUNK);
    CHECK_EQ(mn_pagelocks_use(&l, card.base, 3 * CHUNK), -ENOMEM);
    CHECK_EQ(card.locks, 2);
    l.provider.discard(&l.provider, card.base, 2 * CHUNK); /* no user is left */
    CHECK(card.unlocks == 2 && m.discarded == 2 * CHUNK);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + 5 * CHUNK, 2 * CHUNK), 0);
    CHECK_EQ(mn_pagelocks_use(&l, card.base, 1), -ENOMEM);
    mn_pagelocks_used(&l, card.base + 5 * CHUNK, 2 * CHUNK);
    tear_down(&l);
}

static void
a_refusal_is_remembered(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, BYTES);
    CHECK_EQ(mn_pagelocks_use(&l, card.base, 1), 0);
    card.refuses = 2;
    CHECK_EQ(mn_pagelocks_use(&l, card.base, 2 * CHUNK), -ENOTSUP);
    CHECK_EQ(l.refused, 2);
    card.refuses = 0;
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK, 1), -ENOTSUP);
    mn_pagelocks_used(&l, card.base, 1);
    l.provider.discard(&l.provider, card.base, CHUNK);
    CHECK(card.locks == 1 && card.unlocks == 1);
    tear_down(&l);
}

static void
after_a_stop_nothing_is_locked(void)
{
    struct mn_pagelocks l;
    struct memory m;
    set_up(&l, &m, BYTES);
    CHECK_EQ(mn_pagelocks_use(&l, card.base, 1), 0);
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK, 1), 0);
    mn_pagelocks_used(&l, card.base, 1);
    mn_pagelocks_stop(&l);
    CHECK(!card.locked[0] && card.locked[1]); /* it is being read */
    CHECK_EQ(mn_pagelocks_use(&l, card.base + CHUNK, 1), -ENOTSUP);
    mn_pagelocks_used(&l, card.base + CHUNK, 1);
    CHECK(!card.locked[1] && l.locked_bytes == 0 && l.refused == 0);
    mn_pagelocks_stop(&l);
    tear_down(&l);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", chunks_are_locked_once),
    MN_TEST("plain", only_ranges_of_the_mapping_are_locked),
    MN_TEST("plain", what_is_read_is_not_given_back),
    MN_TEST("plain", where_nothing_is_locked_all_is_given_back),
    MN_TEST("plain", no_more_than_may_be),
    MN_TEST("plain", a_refusal_is_remembered),
    MN_TEST("plain", after_a_stop_nothing_is_locked),
};

MN_TEST_MAIN(tests)
