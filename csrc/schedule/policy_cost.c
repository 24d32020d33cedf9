/* The cost of a sample, and the distribution of costs: see policy_cost.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_cost.h"

#include <errno.h>
#include <string.h>

#include "schedule/policy_arithmetic.h"

/* ---- the distribution ------------------------------------------------------------------- */

#define SUB ((uint64_t)1 << MN_HIST_SUB_BITS)

/* Values under SUB have a bucket each; above, the octave and its leading bits. */
static unsigned
bucket_of(uint64_t v)
{
    if (v < SUB) {
        return (unsigned)v;
    }
    unsigned octave = 63u - (unsigned)__builtin_clzll(v);
    unsigned shift = octave - MN_HIST_SUB_BITS;
    return ((shift + 1) << MN_HIST_SUB_BITS) + (unsigned)((v >> shift) & (SUB - 1));
}

static uint64_t
bucket_low(unsigned b)
{
    if (b < SUB) {
        return b;
    }
    unsigned shift = (b >> MN_HIST_SUB_BITS) - 1;
    return (SUB + (b & (SUB - 1))) << shift;
}

static uint64_t
bucket_middle(unsigned b)
{
    unsigned shift = b < SUB ? 0 : (b >> MN_HIST_SUB_BITS) - 1;
    return bucket_low(b) + (((uint64_t)1 << shift) >> 1);
}

void
mn_histogram_init(struct mn_histogram *h)
{
    memset(h, 0, sizeof(*h));
}

static void
halve(struct mn_histogram *h)
{
    h->total = 0;
    for (unsigned b = 0; b < MN_HIST_BUCKETS; b++) {
        h->count[b] = (h->count[b] + 1) / 2;
        h->total += h->count[b];
    }
}

void
mn_histogram_add(struct mn_histogram *h, int64_t value_ns)
{
    if (h->total >= MN_HIST_KEEP) {
        halve(h);
    }
    h->count[bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0)]++;
    h->total++;
}

int64_t
mn_histogram_quantile(const struct mn_histogram *h, int permille)
{
    if (h->total == 0) {
        return 0;
    }
    uint64_t p = permille < 0 ? 0 : permille > 1000 ? 1000 : (uint64_t)permille;
    uint64_t rank = (p * h->total + 999) / 1000;
    rank = rank == 0 ? 1 : rank;
    uint64_t seen = 0;
    unsigned b = 0;
    for (; b < MN_HIST_BUCKETS; b++) {
        seen += h->count[b];
        if (seen >= rank) {
            break;
        }
    }
    return (int64_t)bucket_middle(b);
}

int
mn_histogram_above(const struct mn_histogram *h, int64_t value_ns)
{
    if (h->total == 0) {
        return 0;
    }
    uint64_t above = 0;
    unsigned first = bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0) + 1;
    for (unsigned b = first; b < MN_HIST_BUCKETS; b++) {
        above += h->count[b];
    }
    return (int)(above * 1000 / h->total);
}

int
mn_histogram_weight(const struct mn_histogram *h, int64_t value_ns)
{
    unsigned first = bucket_of(value_ns > 0 ? (uint64_t)value_ns : 0) + 1;
    double all = 0.0, above = 0.0;
    for (unsigned b = 0; b < MN_HIST_BUCKETS; b++) {
        double sum = (double)h->count[b] * (double)bucket_middle(b);
        all += sum;
        above += b >= first ? sum : 0.0;
    }
    return all > 0.0 ? (int)(1000.0 * above / all) : 0;
}

/* ---- costs by index --------------------------------------------------------------------- */

int
mn_cost_init(struct mn_cost *m, void *cells, int64_t n)
{
    if (n < 0 || (n > 0 && cells == NULL)) {
        return -EINVAL;
    }
    memset(m, 0, sizeof(*m));
    m->cells = cells;
    m->n = n;
    if (n > 0) {
        memset(cells, 0, mn_cost_bytes(n));
    }
    mn_histogram_init(&m->wall);
    return 0;
}

static struct mn_cost_cell *
cell_at(const struct mn_cost *m, int64_t index)
{
    return index >= 0 && index < m->n ? &m->cells[index] : NULL;
}

/* Returns on which side of c the value x is a surprise: -1, +1, or 0 for neither. */
static int8_t
surprise_of(double c, double x)
{
    if (x > c * MN_COST_SURPRISE) {
        return 1;
    }
    return x < c / MN_COST_SURPRISE ? -1 : 0;
}

static void
cell_restart(struct mn_cost_cell *c, double wall)
{
    c->wall_ns = (float)wall;
    c->age = 1;
    c->surprise = 0;
}

static void
cell_update(struct mn_cost_cell *c, double wall)
{
    if (c->seen < UINT16_MAX) {
        c->seen++;
    }
    double was = (double)c->wall_ns;
    int8_t side = surprise_of(was, wall);
    if (c->seen == 1 || c->age == 0 || (side != 0 && side == c->surprise)) {
        cell_restart(c, wall);
        return;
    }
    c->surprise = side;
    double factor = side > 0 ? MN_COST_SURPRISE : 1.0 / MN_COST_SURPRISE;
    double x = side == 0 ? wall : was * factor;
    if (c->age < MN_COST_MAX_AGE) {
        c->age++;
    }
    c->wall_ns = (float)(was + (x - was) / c->age);
}

void
mn_cost_observe(struct mn_cost *m, int64_t index, int64_t wall_ns)
{
    wall_ns = wall_ns < MN_COST_MOST_NS ? wall_ns : MN_COST_MOST_NS;
    double wall = wall_ns > 0 ? (double)wall_ns : 0.0;
    m->samples++;
    double weight = (double)(m->samples < MN_COST_MEMORY ? m->samples : MN_COST_MEMORY);
    m->mean_wall_ns += (wall - m->mean_wall_ns) / weight;
    mn_histogram_add(&m->wall, wall_ns);
    struct mn_cost_cell *c = cell_at(m, index);
    if (c != NULL) {
        m->known += c->seen == 0;
        cell_update(c, wall);
    }
}

bool
mn_cost_knows(const struct mn_cost *m, int64_t index)
{
    const struct mn_cost_cell *c = cell_at(m, index);
    return c != NULL && c->seen > 0;
}

int64_t
mn_cost_wall(const struct mn_cost *m, int64_t index)
{
    return (int64_t)(mn_cost_knows(m, index) ? (double)m->cells[index].wall_ns
                                             : m->mean_wall_ns);
}

int64_t
mn_cost_save(const struct mn_cost *m, int64_t *cursor, int64_t cap, int64_t *index,
             int64_t *wall_ns)
{
    int64_t out = 0;
    int64_t i = *cursor < 0 ? 0 : *cursor;
    for (; i < m->n && out < cap; i++) {
        const struct mn_cost_cell *c = &m->cells[i];
        if (c->seen > 0) {
            index[out] = i;
            wall_ns[out] = (int64_t)c->wall_ns;
            out++;
        }
    }
    *cursor = i;
    return out;
}

int64_t
mn_cost_slowest(const struct mn_cost *m, int64_t most, int64_t *index, int64_t *wall_ns)
{
    int64_t n = 0;
    for (int64_t i = 0; i < m->n; i++) {
        int64_t wall = (int64_t)m->cells[i].wall_ns;
        if (m->cells[i].seen == 0 || most == 0 || (n == most && wall <= wall_ns[n - 1])) {
            continue;
        }
        int64_t at = n < most ? n++ : n - 1;
        for (; at > 0 && wall_ns[at - 1] < wall; at--) {
            index[at] = index[at - 1];
            wall_ns[at] = wall_ns[at - 1];
        }
        index[at] = i;
        wall_ns[at] = wall;
    }
    return n;
}

int64_t
mn_cost_load(struct mn_cost *m, int64_t n, const int64_t *index, const int64_t *wall_ns)
{
    int64_t taken = 0;
    for (int64_t k = 0; k < n; k++) {
        if (cell_at(m, index[k]) != NULL) {
            mn_cost_observe(m, index[k], wall_ns[k]);
            taken++;
        }
    }
    return taken;
}

/* ---- slow samples ---- */

void
mn_slow_init(struct mn_slow *s)
{
    s->timeout_ns = MN_SLOW_NEVER;
    s->tail = false;
    s->dissent = 0;
}

/* Returns what an ordinary sample takes. */
static int64_t
norm_of(const struct mn_histogram *h)
{
    int64_t median = mn_histogram_quantile(h, 500);
    if (mn_histogram_above(h, mn_times(median, MN_SLOW_FACTOR)) <= MN_SLOW_MOST) {
        return median;
    }
    return mn_histogram_quantile(h, 900);
}

static int64_t
learn(const struct mn_slow *s, const struct mn_histogram *h, bool *tail)
{
    int64_t line = mn_times(norm_of(h), MN_SLOW_FACTOR);
    int share = mn_histogram_above(h, line);
    *tail = share >= (s->tail ? MN_SLOW_OFF : MN_SLOW_ON);
    int64_t t = *tail ? line : mn_times(mn_histogram_quantile(h, 990), MN_SLOW_GUARD);
    return t < MN_SLOW_LEAST_NS ? MN_SLOW_LEAST_NS : t;
}

int64_t
mn_slow_update(struct mn_slow *s, const struct mn_histogram *wall)
{
    if (wall->total < MN_SLOW_EVIDENCE) {
        return s->timeout_ns;
    }
    bool tail;
    int64_t wanted = learn(s, wall, &tail);
    if (s->timeout_ns == MN_SLOW_NEVER) {
        s->timeout_ns = wanted;
        s->tail = tail;
        return wanted;
    }
    if (tail == s->tail && !mn_moved(s->timeout_ns, wanted, 4)) {
        s->dissent = 0;
        return s->timeout_ns;
    }
    if (++s->dissent >= MN_SLOW_AGREE) {
        s->timeout_ns = wanted;
        s->tail = tail;
        s->dissent = 0;
    }
    return s->timeout_ns;
}
