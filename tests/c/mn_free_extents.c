/* The extent allocator against a simple bitmap, with malloc failing at times.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Includes the implementation, to look at the tree as well as at the answers. Linked with
 * --wrap=malloc and --wrap=calloc.
 */
#define _GNU_SOURCE
#include <sys/resource.h>

#include "memory/mn_arena.c"

#include "mn_test.h"

/* ---- malloc that fails ---- */

static bool malloc_fails;
static unsigned malloc_fails_one_in; /* 0: never */
static uint64_t malloc_random = 1;
static long nodes_alive;

void *__real_malloc(size_t bytes);
void *__wrap_malloc(size_t bytes);
void *__real_calloc(size_t n, size_t bytes);
void *__wrap_calloc(size_t n, size_t bytes);
void __real_free(void *p);
void __wrap_free(void *p);

static bool
no_memory(void)
{
    return malloc_fails
           || (malloc_fails_one_in != 0
               && mn_test_random(&malloc_random) % malloc_fails_one_in == 0);
}

void *
__wrap_malloc(size_t bytes)
{
    void *p = no_memory() ? NULL : __real_malloc(bytes);
    nodes_alive += p != NULL;
    return p;
}

void *
__wrap_calloc(size_t n, size_t bytes)
{
    void *p = no_memory() ? NULL : __real_calloc(n, bytes);
    nodes_alive += p != NULL;
    return p;
}

void
__wrap_free(void *p)
{
    nodes_alive -= p != NULL;
    __real_free(p);
}

/* ---- the model: a byte for each granule ---- */

enum { GRANULE = 4096, UNITS_MAX = 2048 };

enum { FREE, USED, LENT }; /* LENT and above: neighbours that were lent separately differ */

struct model {
    struct mn_extents *e;
    uint64_t base;
    uint32_t units;
    uint32_t turn, lends;
    unsigned char used[UNITS_MAX];
    uint32_t freed[UNITS_MAX]; /* turn + 1 of the last free; 0: used since, or not warm */
};

static void
model_open(struct model *m, uint64_t base_units, uint32_t units)
{
    memset(m, 0, sizeof(*m));
    m->base = base_units * GRANULE;
    m->units = units;
    CHECK_EQ(mn_extents_open(&m->e, m->base, (uint64_t)units * GRANULE, GRANULE), 0);
}

static uint64_t
model_off(const struct model *m, uint32_t unit)
{
    return m->base + (uint64_t)unit * GRANULE;
}

/* Returns the lowest run of n free units; m->units if there is none. */
static uint32_t
model_fit(const struct model *m, uint32_t n)
{
    for (uint32_t i = 0, run = 0; i < m->units; i++) {
        run = m->used[i] ? 0 : run + 1;
        if (run == n) {
            return i + 1 - n;
        }
    }
    return m->units;
}

/* ---- the tree's own invariants ---- */

static uint64_t tree_end;
static uint64_t tree_free;
static uint32_t tree_nodes;

static uint32_t
check_tree(const struct mn_extents *e, const struct mn_extent *node)
{
    if (node == NULL) {
        return 0;
    }
    uint32_t left = check_tree(e, node->left);
    CHECK(node->len > 0 && node->len % GRANULE == 0 && node->off % GRANULE == 0);
    CHECK(node->off > tree_end || (node->off == tree_end && tree_nodes == 0));
    tree_end = node->off + node->len;
    tree_free += node->len;
    tree_nodes++;
    uint32_t right = check_tree(e, node->right);
    uint64_t max = node->len;
    const struct mn_extent *below[2] = {node->left, node->right};
    for (int i = 0; i < 2; i++) {
        if (below[i] != NULL) {
            CHECK(below[i]->rank <= node->rank);
            max = below[i]->max > max ? below[i]->max : max;
        }
    }
    CHECK_EQ(node->max, max);
    return 1 + (left > right ? left : right);
}

static void
check_against(const struct model *m)
{
    uint64_t used = 0, lent = 0, warm = 0;
    tree_end = m->base;
    tree_free = 0;
    tree_nodes = 0;
    check_tree(m->e, m->e->root);
    CHECK(m->e->spares >= m->e->promised + m->e->lends);
    for (uint32_t i = 0; i < m->units; i++) {
        used += m->used[i] == USED ? GRANULE : 0;
        lent += m->used[i] >= LENT ? GRANULE : 0;
        warm += m->freed[i] != 0 ? GRANULE : 0;
    }
    CHECK_EQ(mn_extents_used(m->e), used);
    CHECK_EQ(m->e->lent_bytes, lent);
    CHECK_EQ(m->e->warm_bytes, warm);
    CHECK_EQ(tree_free, (uint64_t)m->units * GRANULE - used - lent);
}

/* Walks the ranges that are warm and old enough, in pieces, and marks them in a copy. */
static void
check_cold(const struct model *m, uint32_t turns, uint64_t most)
{
    uint64_t from = m->base, off, len;
    unsigned char seen[UNITS_MAX] = {0};
    int rc;
    while ((rc = mn_extents_cold(m->e, turns, most, &from, &off, &len)) != MN_EMPTY) {
        CHECK(rc == MN_OK || rc == MN_FULL);
        if (rc == MN_OK) {
            CHECK(len > 0 && len <= most && from == off + len);
            memset(seen + (off - m->base) / GRANULE, 1, len / GRANULE);
        }
    }
    for (uint32_t i = 0; i < m->units; i++) {
        CHECK_EQ(seen[i], m->freed[i] != 0 && m->turn + 1 - m->freed[i] >= turns);
    }
}

/* Walks the free ranges from anywhere and paints them on a copy of the bitmap. */
static void
check_iteration(const struct model *m, uint64_t from)
{
    uint64_t off, len, at = from;
    unsigned char seen[UNITS_MAX] = {0};
    while (mn_extents_next_free(m->e, at, &off, &len) == MN_OK) {
        CHECK(off >= at && len > 0 && (off == from || off % GRANULE == 0));
        for (uint64_t i = off; i < off + len; i = (i / GRANULE + 1) * GRANULE) {
            seen[(i - m->base) / GRANULE] = 1;
        }
        at = off + len;
    }
    uint32_t first = from > m->base ? (uint32_t)((from - m->base) / GRANULE) : 0;
    for (uint32_t i = first; i < m->units; i++) {
        CHECK_EQ(seen[i], !m->used[i]);
    }
}

/* ---- the trace ---- */

static void
step_alloc(struct model *m, uint64_t *random)
{
    uint32_t n = 1 + (uint32_t)(mn_test_random(random) % (mn_test_random(random) % 60 + 1));
    uint64_t bytes = (uint64_t)n * GRANULE - mn_test_random(random) % GRANULE;
    uint64_t off = 0;
    uint32_t unit = model_fit(m, n);
    int rc = mn_extents_alloc(m->e, bytes, &off);
    if (unit == m->units) {
        CHECK_EQ(rc, -ENOMEM);
    }
    else if (rc == 0) {
        CHECK_EQ(off, model_off(m, unit));
        memset(m->used + unit, USED, n);
        memset(m->freed + unit, 0, n * sizeof(*m->freed));
    }
    else {
        CHECK_EQ(rc, -ENOMEM);
        CHECK(malloc_fails_one_in != 0);
    }
}

/* Any range at all: the model knows whether all of it is allocated. */
static void
step_free(struct model *m, uint64_t *random)
{
    uint32_t unit = (uint32_t)(mn_test_random(random) % m->units), n = 1;
    while (unit > 0 && m->used[unit] && m->used[unit - 1] && mn_test_random(random) % 8) {
        unit--;
    }
    while (unit + n < m->units && m->used[unit + n] && mn_test_random(random) % 16) {
        n++;
    }
    n += mn_test_random(random) % 8 == 0; /* sometimes too far */
    bool valid = unit + n <= m->units;
    for (uint32_t i = unit; valid && i < unit + n; i++) {
        if (m->used[i] >= LENT) {
            return; /* lent memory must not be freed: it looks like used memory */
        }
        valid = m->used[i];
    }
    uint64_t bytes = (uint64_t)n * GRANULE - mn_test_random(random) % GRANULE;
    int rc = mn_extents_free(m->e, model_off(m, unit), bytes);
    if (!valid) {
        CHECK_EQ(rc, -EINVAL);
    }
    else if (rc == 0) {
        memset(m->used + unit, FREE, n);
        for (uint32_t i = unit; i < unit + n; i++) {
            m->freed[i] = m->turn + 1;
        }
    }
    else {
        CHECK_EQ(rc, -ENOMEM);
        CHECK(malloc_fails_one_in != 0);
    }
}

/* Lends any range, or returns the range that is lent there. */
static void
step_lend(struct model *m, uint64_t *random)
{
    uint32_t unit = (uint32_t)(mn_test_random(random) % m->units);
    uint32_t n = 1, state = m->used[unit];
    while (unit + n < m->units && m->used[unit + n] == state
           && (state >= LENT || mn_test_random(random) % 8 != 0)) {
        n++;
    }
    if (state >= LENT) {
        while (unit > 0 && m->used[unit - 1] == state) {
            unit--;
            n++;
        }
        mn_extents_return(m->e, model_off(m, unit), (uint64_t)n * GRANULE);
        memset(m->used + unit, FREE, n);
        return;
    }
    int rc = mn_extents_lend(m->e, model_off(m, unit), (uint64_t)n * GRANULE);
    if (state == USED) {
        CHECK_EQ(rc, -EINVAL);
    }
    else if (rc == 0) {
        memset(m->used + unit, (int)(LENT + m->lends++ % 250), n);
        memset(m->freed + unit, 0, n * sizeof(*m->freed));
    }
    else {
        CHECK_EQ(rc, -ENOMEM);
        CHECK(malloc_fails_one_in != 0);
    }
}

static void
trace(struct model *m, uint64_t *random, int steps)
{
    /* The balance drifts, so that the arena is nearly full and nearly empty in turns. */
    unsigned allocs = 50;
    for (int i = 0; i < steps; i++) {
        if (i % 100 == 0) {
            allocs = 20 + (unsigned)(mn_test_random(random) % 60);
        }
        if (mn_test_random(random) % 8 == 0) {
            step_lend(m, random);
        }
        else if (mn_test_random(random) % 100 < allocs) {
            step_alloc(m, random);
        }
        else {
            step_free(m, random);
        }
        check_against(m);
        if (i % 16 == 0) {
            uint64_t span = (uint64_t)m->units * GRANULE;
            check_iteration(m, m->base);
            check_iteration(m, m->base + mn_test_random(random) % span);
            uint32_t turns = (uint32_t)(mn_test_random(random) % 6);
            check_cold(m, turns, (1 + mn_test_random(random) % 40) * GRANULE);
            if (m->turn < 250) { /* later ones would look like the first */
                mn_extents_turn(m->e);
                m->turn++;
            }
        }
    }
}

static void
random_traces(void)
{
    uint64_t random = mn_test_seed();
    uint64_t stop = mn_test_stop_ns();
    static struct model m;
    malloc_random = random;
    for (int round = 0; round < 6 || mn_test_clock_ns() < stop; round++) {
        long before = nodes_alive;
        model_open(&m, mn_test_random(&random) % 100,
                   1 + (uint32_t)(mn_test_random(&random) % (round % 2 ? 64 : 512)));
        malloc_fails_one_in = round % 3 == 2 ? 3 : 0;
        trace(&m, &random, 600);
        malloc_fails_one_in = 0;
        mn_extents_close(m.e);
        CHECK_EQ(nodes_alive, before);
    }
}

/* ---- promises ---- */

static void
promised_frees_cannot_fail(void)
{
    static struct model m;
    uint64_t off[UNITS_MAX];
    model_open(&m, 0, UNITS_MAX);
    for (uint32_t i = 0; i < UNITS_MAX; i++) {
        CHECK_EQ(mn_extents_alloc(m.e, GRANULE, &off[i]), 0);
        m.used[i] = 1;
    }
    CHECK_EQ(mn_extents_alloc(m.e, 1, &off[0]), -ENOMEM);
    malloc_fails = true;
    for (uint32_t i = 0; i < UNITS_MAX; i += 2) { /* every hole is a node of its own */
        CHECK_EQ(mn_extents_free(m.e, off[i], GRANULE), 0);
        m.used[i] = 0;
        m.freed[i] = 1;
    }
    check_against(&m);
    for (uint32_t i = 1; i < UNITS_MAX; i += 2) {
        CHECK_EQ(mn_extents_free(m.e, off[i], GRANULE), 0);
        m.used[i] = 0;
        m.freed[i] = 1;
    }
    malloc_fails = false;
    check_against(&m);
    CHECK_EQ(m.e->promised, 0);
    CHECK(m.e->spares <= MN_EXTENT_SLACK); /* the rest was returned */
    mn_extents_close(m.e);
}

static void
frees_in_announced_pieces_cannot_fail(void)
{
    static struct model m;
    uint64_t off;
    model_open(&m, 0, 100);
    CHECK_EQ(mn_extents_alloc(m.e, 100 * GRANULE, &off), 0);
    memset(m.used, 1, 100);
    CHECK_EQ(mn_extents_reserve(m.e, 29), 0);
    malloc_fails = true;
    for (uint32_t i = 0; i < 30; i++) {
        CHECK_EQ(mn_extents_free(m.e, model_off(&m, 3 * i), GRANULE), 0);
        m.used[3 * i] = 0;
        m.freed[3 * i] = 1;
    }
    check_against(&m);
    /* Past the promises: refused, and nothing has changed. Joining needs no node, but the rule is
     * kept simple: one spare or nothing. */
    mn_extent_trim(m.e, 0);
    CHECK_EQ(mn_extents_free(m.e, model_off(&m, 94), GRANULE), -ENOMEM);
    CHECK_EQ(mn_extents_reserve(m.e, 1), -ENOMEM);
    check_against(&m);
    malloc_fails = false;
    CHECK_EQ(mn_extents_free(m.e, model_off(&m, 94), GRANULE), 0);
    m.used[94] = 0;
    m.freed[94] = 1;
    check_against(&m);
    mn_extents_close(m.e);
}

static void
a_failed_alloc_changes_nothing(void)
{
    static struct model m;
    uint64_t off;
    model_open(&m, 7, 10);
    malloc_fails = true;
    CHECK_EQ(mn_extents_alloc(m.e, GRANULE, &off), -ENOMEM);
    check_against(&m);
    struct mn_extents *other = NULL;
    CHECK_EQ(mn_extents_open(&other, 0, GRANULE, GRANULE), -ENOMEM);
    malloc_fails = false;
    CHECK(other == NULL);
    CHECK_EQ(mn_extents_alloc(m.e, GRANULE, &off), 0);
    CHECK_EQ(off, 7 * GRANULE);
    mn_extents_close(m.e);
    mn_extents_close(NULL);
}

/* Returning needs no extra node, even after a neighbour was freed meanwhile. */
static void
returning_cannot_fail(void)
{
    static struct model m;
    uint64_t off;
    model_open(&m, 0, 9);
    for (uint32_t i = 0; i < 9; i++) {
        CHECK_EQ(mn_extents_alloc(m.e, GRANULE, &off), 0);
    }
    for (uint32_t i = 0; i < 9; i++) {
        CHECK_EQ(mn_extents_free(m.e, model_off(&m, i), GRANULE), 0);
    }
    for (uint32_t i = 0; i < 9; i += 2) {
        CHECK_EQ(mn_extents_lend(m.e, model_off(&m, i), GRANULE), 0);
    }
    for (uint32_t i = 1; i < 9; i += 2) { /* else the returned range would join it */
        CHECK_EQ(mn_extents_alloc(m.e, GRANULE, &off), 0);
        CHECK_EQ(off, model_off(&m, i));
    }
    mn_extent_trim(m.e, m.e->promised);
    malloc_fails = true;
    for (uint32_t i = 0; i < 9; i += 2) {
        mn_extents_return(m.e, model_off(&m, i), GRANULE);
    }
    malloc_fails = false;
    CHECK_EQ(mn_extents_used(m.e), 4 * GRANULE);
    CHECK_EQ(m.e->lent_bytes, 0);
    CHECK_EQ(m.e->warm_bytes, 0);
    mn_extents_close(m.e);
}

/* A long search takes many calls, and each of them makes progress. */
static void
a_search_goes_on_where_it_stopped(void)
{
    struct mn_extents *e = NULL;
    uint64_t off, len, from = 0, n = (uint64_t)5 * MN_EXTENT_LOOK, found = 0;
    CHECK_EQ(mn_extents_open(&e, 0, 2 * n * GRANULE, GRANULE), 0);
    CHECK_EQ(mn_extents_alloc(e, n * GRANULE, &off), 0);
    CHECK_EQ(mn_extents_free(e, 0, n * GRANULE), 0);
    mn_extents_turn(e);
    CHECK_EQ(mn_extents_alloc(e, GRANULE, &off), 0);
    CHECK_EQ(mn_extents_lend(e, GRANULE, (n - 2) * GRANULE), 0);
    mn_extents_return(e, GRANULE, (n - 2) * GRANULE);
    int rc, looks = 0;
    while ((rc = mn_extents_cold(e, 1, n * GRANULE, &from, &off, &len)) != MN_EMPTY) {
        found += rc == MN_OK ? len : 0;
        looks++;
    }
    CHECK_EQ(found, GRANULE);
    CHECK(looks > 4 && looks < 8);
    mn_extents_close(e);
}

static void
left_over_promises_go(void)
{
    static struct model m;
    uint64_t off;
    model_open(&m, 0, 64);
    for (int i = 0; i < 1000; i++) { /* always more announced than done */
        CHECK_EQ(mn_extents_alloc(m.e, 4 * GRANULE, &off), 0);
        CHECK_EQ(mn_extents_reserve(m.e, 3), 0);
        CHECK_EQ(mn_extents_free(m.e, off, 4 * GRANULE), 0);
    }
    CHECK_EQ(m.e->promised, 0);
    mn_extents_close(m.e);
}

static void
bad_arguments(void)
{
    struct mn_extents *e = NULL;
    uint64_t off = 0;
    CHECK_EQ(mn_extents_open(&e, 0, 0, 4096), -EINVAL);
    CHECK_EQ(mn_extents_open(&e, 0, 4096, 0), -EINVAL);
    CHECK_EQ(mn_extents_open(&e, 0, 4096 * 3, 4096 * 3), -EINVAL);
    CHECK_EQ(mn_extents_open(&e, 1, 4096, 4096), -EINVAL);
    CHECK_EQ(mn_extents_open(&e, 0, 4097, 4096), -EINVAL);
    CHECK_EQ(mn_extents_open(&e, UINT64_C(1) << 62, UINT64_C(3) << 61, 4096), -EINVAL);
    CHECK_EQ(mn_extents_open(&e, UINT64_C(1) << 63, 4096, 4096), -EINVAL);
    CHECK(e == NULL);
    CHECK_EQ(mn_extents_open(&e, 4096, 4 * 4096, 4096), 0);
    CHECK_EQ(mn_extents_alloc(e, 0, &off), -EINVAL);
    CHECK_EQ(mn_extents_alloc(e, UINT64_MAX, &off), -ENOMEM);
    CHECK_EQ(mn_extents_alloc(e, 4 * 4096 + 1, &off), -ENOMEM);
    CHECK_EQ(mn_extents_alloc(e, 4 * 4096 - 1, &off), 0);
    CHECK_EQ(mn_extents_free(e, 0, 4096), -EINVAL);
    CHECK_EQ(mn_extents_free(e, 4096, 0), -EINVAL);
    CHECK_EQ(mn_extents_free(e, 4097, 1), -EINVAL);
    CHECK_EQ(mn_extents_free(e, 4096, UINT64_MAX), -EINVAL);
    CHECK_EQ(mn_extents_free(e, 5 * 4096, 1), -EINVAL);
    CHECK_EQ(mn_extents_free(e, 4096, 4 * 4096 + 1), -EINVAL);
    CHECK_EQ(mn_extents_free(e, 4096, 4 * 4096 - 1), 0);
    CHECK_EQ(mn_extents_free(e, 4096, 4096), -EINVAL);
    CHECK_EQ(mn_extents_used(e), 0);
    mn_extents_close(e);
}

/* Opening a large allocator does not touch each granule. That also holds the second time, when
 * malloc has memory of that size from the first. */
static void
opening_takes_no_pages(void)
{
    for (int turn = 0; turn < 4; turn++) {
        struct rusage before, after;
        struct mn_extents *e = NULL;
        CHECK_EQ(getrusage(RUSAGE_SELF, &before), 0);
        CHECK_EQ(mn_extents_open(&e, 0, (UINT64_C(24) << 20) * GRANULE, GRANULE), 0);
        CHECK_EQ(getrusage(RUSAGE_SELF, &after), 0);
        CHECK(after.ru_minflt - before.ru_minflt < 1024); /* of 6144 */
        mn_extents_close(e);
    }
}

/* Tests a shape, not a time: the tree over many holes stays shallow. */
static void
many_holes_stay_shallow(void)
{
    enum { HOLES = 1 << 16 };
    struct mn_extents *e = NULL;
    uint64_t off;
    CHECK_EQ(mn_extents_open(&e, 0, (uint64_t)2 * HOLES * GRANULE, GRANULE), 0);
    for (int i = 0; i < 2 * HOLES; i++) {
        CHECK_EQ(mn_extents_alloc(e, GRANULE, &off), 0);
    }
    for (int i = 0; i < HOLES; i++) {
        CHECK_EQ(mn_extents_free(e, (uint64_t)2 * i * GRANULE, GRANULE), 0);
    }
    tree_end = tree_free = tree_nodes = 0;
    uint32_t depth = check_tree(e, e->root);
    CHECK_EQ(tree_nodes, HOLES);
    CHECK(depth >= 17 && depth < 80); /* about 3 ln n = 33 for random ranks */
    CHECK_EQ(mn_extents_alloc(e, 2 * GRANULE, &off), -ENOMEM);
    mn_extents_close(e);
}

static const struct mn_test tests[] = {
    MN_TEST("plain", bad_arguments),
    MN_TEST("plain", a_failed_alloc_changes_nothing),
    MN_TEST("plain", promised_frees_cannot_fail),
    MN_TEST("plain", frees_in_announced_pieces_cannot_fail),
    MN_TEST("plain", returning_cannot_fail),
    MN_TEST("plain", a_search_goes_on_where_it_stopped),
    MN_TEST("plain", left_over_promises_go),
    MN_TEST("plain", opening_takes_no_pages),
    MN_TEST("plain", many_holes_stay_shallow),
    MN_TEST("plain", random_traces),
};

MN_TEST_MAIN(tests)
