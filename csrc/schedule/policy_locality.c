/* See policy_locality.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_locality.h"

#include <string.h>

void
mn_locality_init(struct mn_locality *l)
{
    memset(l, 0, sizeof(*l));
    l->near.rank = l->home.rank = 0.5;
    l->order = (struct mn_locality_order){1.0, 1.0, true};
}

/* Moves a share of the last pairs toward 1 or 0. A share close to 0 becomes 0, because the ever
 * smaller numbers on the way there would take the processor a hundred times as long. */
static void
count_pair(double *share, bool is_one)
{
    *share += ((is_one ? 1.0 : 0.0) - *share) / MN_LOCALITY_PAIRS;
    *share = *share > 1e-9 ? *share : 0.0;
}

void
mn_locality_drawn(struct mn_locality *l, const int64_t *index, int64_t n, int64_t length)
{
    for (int64_t i = 1; i < n && i < MN_LOCALITY_PAIRS; i++) {
        int64_t low = index[i - 1] < index[i] ? index[i - 1] : index[i];
        int64_t high = index[i - 1] < index[i] ? index[i] : index[i - 1];
        bool near = low >= 0 && high < length && high - low <= length / 8;
        bool next = near && index[i] - 1 == index[i - 1];
        count_pair(&l->order.share, near);
        count_pair(&l->order.next, next);
    }
    bool was_near = l->order.near;
    l->order.near = l->order.share > (was_near ? 0.5 : 0.75);
    if (l->order.near && !was_near && l->near.answer == MN_CONTRAST_NO) {
        l->near = (struct mn_contrast){.rank = 0.5};
    }
}

/* ---- the contrast ------------------------------------------------------------------- */

static void
toward(double *mean, double x, uint32_t *n)
{
    if (*n < MN_CONTRAST_MEMORY) {
        (*n)++;
    }
    *mean += (x - *mean) / *n;
}

/* Returns the cost that this share of n costs does not exceed. */
static double
quantile(const float *cost, uint32_t n, double share)
{
    double below = share * n;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t less = 0, most = 0;
        for (uint32_t k = 0; k < n; k++) {
            less += cost[k] < cost[i] ? 1u : 0u;
            most += cost[k] <= cost[i] ? 1u : 0u;
        }
        if (less <= below && most > below) {
            return (double)cost[i];
        }
    }
    return 0.0;
}

/* Stores a cost; the quantile is computed only every few costs, because that takes a
 * microsecond. */
static void
append_cost(float *ring, uint32_t *at, uint32_t n, int64_t cost_ns, double share,
            double *quantile_ns)
{
    ring[(*at)++ % MN_CONTRAST_MEMORY] = (float)cost_ns;
    if (*at % (n < MN_CONTRAST_MEMORY ? 4u : 32u) == 0 || n < 4) {
        *quantile_ns = quantile(ring, n, share);
    }
}

/* Returns the share of the last costs of the cheap kind that are lower; equal ones count half. */
static double
rank_of(const struct mn_contrast *c, float cost)
{
    uint32_t twice = 0;
    for (uint32_t i = 0; i < c->ncheap; i++) {
        twice += c->cheap[i] < cost ? 2u : c->cheap[i] <= cost ? 1u : 0u;
    }
    return (double)twice / (2.0 * c->ncheap);
}

/* Returns whether the ranks say that the dear kind costs more. */
static bool
ranks_differ(const struct mn_contrast *c, double ask)
{
    bool both = c->ndear != 0 && c->ncheap != 0;
    /* The variance of the mean of ndear uniform ranks among ncheap others. */
    double variance = both ? (1.0 / c->ndear + 1.0 / c->ncheap) / 12.0 : 1.0;
    double above = c->rank - 0.5;
    return above >= ask * MN_CONTRAST_LEAST
           && above * above >= ask * ask * MN_CONTRAST_SIGMAS * MN_CONTRAST_SIGMAS * variance;
}

/* Returns by how much the share of samples that cost far more is larger in the dear kind; 0 where
 * that may be chance. */
static double
tails_differ(const struct mn_contrast *c, double ask)
{
    const struct mn_contrast_tail *d = &c->dear_tail, *h = &c->cheap_tail;
    if (d->far < ask * MN_CONTRAST_FAR_LEAST || h->n < MN_CONTRAST_EVIDENCE) {
        return 0.0;
    }
    double all = (d->far + h->far + 1.0) / (d->n + h->n + 2.0);
    double variance = all * (1.0 - all) * (1.0 / d->n + 1.0 / h->n);
    double more = d->far / d->n - h->far / h->n;
    double sigmas = ask * MN_CONTRAST_SIGMAS;
    return more > 0.0 && more * more >= sigmas * sigmas * variance ? more : 0.0;
}

/* Returns whether hardly any sample costs enough to be worth saving. Few of the dear kind are
 * enough for that. Or it is judged by all samples, where one worker goes on and on and makes none
 * of the dear kind. */
static bool
little(const struct mn_contrast *c)
{
    double all = c->dear_tail.n + c->cheap_tail.n, far = c->dear_tail.far + c->cheap_tail.far;
    bool dear = c->ndear >= MN_CONTRAST_FEW && c->dear_ns < MN_LOCALITY_WORTH_NS
                && c->dear_tail.far * MN_CONTRAST_FEW <= c->dear_tail.n;
    bool any = all >= MN_CONTRAST_MANY && far * MN_CONTRAST_MANY <= all;
    return c->cheap_ns < MN_LOCALITY_WORTH_NS && (dear || any);
}

/* Returns whether enough samples were seen that a difference would have shown. Where some cost far
 * more than usual, telling which kind they belong to takes more. */
static bool
enough(const struct mn_contrast *c)
{
    bool both = c->ndear >= MN_CONTRAST_EVIDENCE && c->ncheap >= MN_CONTRAST_EVIDENCE;
    double all = c->dear_tail.n + c->cheap_tail.n;
    return little(c)
           || (both && (c->dear_tail.far == 0.0 || all >= 8.0 * MN_CONTRAST_EVIDENCE));
}

static void
decide(struct mn_contrast *c)
{
    double worth = c->cheap_ns / 4.0;
    worth = worth > MN_LOCALITY_WORTH_NS ? worth : MN_LOCALITY_WORTH_NS;
    double ask = c->answer == MN_CONTRAST_YES ? 0.5 : 1.0;
    bool ranks = ranks_differ(c, ask) && c->dear_ns - c->cheap_ns >= ask * worth;
    bool tails = tails_differ(c, ask) * (c->far_ns - c->cheap_ns) >= ask * worth;
    if (ranks || tails) {
        c->answer = MN_CONTRAST_YES;
        c->paid_ns = ranks ? c->dear_ns : c->far_ns;
    }
    else if (c->answer != MN_CONTRAST_UNKNOWN || enough(c)) {
        c->answer = MN_CONTRAST_NO;
    }
}

/* Counts a sample in its kind. Returns whether it cost far more than usual. */
static bool
count(struct mn_contrast *c, struct mn_contrast_tail *t, int64_t cost_ns)
{
    bool far = (double)cost_ns > MN_CONTRAST_FAR * c->cheap_ns + MN_LOCALITY_WORTH_NS;
    if (++t->n > MN_LOCALITY_MEMORY) {
        t->n /= 2.0;
        t->far /= 2.0;
    }
    t->far += far;
    return far;
}

static void
observe(struct mn_contrast *c, bool cheap, int64_t cost_ns)
{
    cost_ns = cost_ns > 0 ? cost_ns : 0;
    if (cheap) {
        c->ncheap += c->ncheap < MN_CONTRAST_MEMORY;
        (void)count(c, &c->cheap_tail, cost_ns);
        append_cost(c->cheap, &c->cheap_at, c->ncheap, cost_ns, 0.25, &c->cheap_ns);
    }
    else if (c->ncheap != 0) { /* else there is nothing to rank it in */
        if (count(c, &c->dear_tail, cost_ns)) {
            double n = c->dear_tail.far < MN_CONTRAST_MEMORY ? c->dear_tail.far
                                                             : MN_CONTRAST_MEMORY;
            c->far_ns += ((double)cost_ns - c->far_ns) / (n > 1.0 ? n : 1.0);
        }
        toward(&c->rank, rank_of(c, (float)cost_ns), &c->ndear);
        append_cost(c->dear, &c->dear_at, c->ndear, cost_ns, 0.5, &c->dear_ns);
    }
    decide(c);
}

/* ---- groups ------------------------------------------------------------------------- */

bool
mn_locality_opens(const struct mn_locality *l, int64_t cost_ns)
{
    return (double)cost_ns > (l->near.cheap_ns + l->near.paid_ns) / 2.0;
}

static uint8_t
followed(struct mn_locality *l, bool edge, uint8_t marks, int64_t cost_ns)
{
    bool opens = mn_locality_opens(l, cost_ns);
    if (marks & MN_COST_OPENS) {
        l->right += opens;
        l->wrong += !opens;
    }
    l->followers++;
    l->opened += opens;
    l->edges += edge;
    l->edges_opened += edge && opens;
    double share = (l->edges_opened + 0.5) / (l->edges + 1.0);
    l->joins = share < (l->joins ? 0.6 : 0.45);
    if (l->edges > MN_CONTRAST_MEMORY) {
        l->edges /= 2.0;
        l->edges_opened /= 2.0;
    }
    if (l->followers > MN_LOCALITY_MEMORY) {
        l->followers /= 2.0;
        l->opened /= 2.0;
        l->firsts /= 2.0;
        l->right /= 2.0;
        l->wrong /= 2.0;
    }
    if (!opens) {
        double n = l->followers < MN_CONTRAST_MEMORY ? l->followers : MN_CONTRAST_MEMORY;
        l->each_ns += ((double)cost_ns - l->each_ns) / n;
    }
    return (uint8_t)(MN_COST_FOLLOWED | (opens ? MN_COST_OPENS : 0u));
}

uint8_t
mn_locality_observe_near(struct mn_locality *l, bool follows, bool edge, uint8_t marks,
                         int64_t cost_ns)
{
    bool together = l->near.answer == MN_CONTRAST_YES;
    if (together && follows) {
        marks = followed(l, edge, marks, cost_ns);
    }
    l->firsts += together && !follows;
    observe(&l->near, follows, cost_ns);
    return marks;
}

void
mn_locality_observe_home(struct mn_locality *l, bool home, int64_t cost_ns)
{
    observe(&l->home, home, cost_ns);
}

double
mn_locality_length(const struct mn_locality *l)
{
    if (l->near.answer != MN_CONTRAST_YES) {
        return 1.0;
    }
    double openings = l->opened + l->firsts;
    return openings > 0.0 ? (l->followers + l->firsts) / openings : 1.0;
}

bool
mn_locality_believes(const struct mn_locality *l)
{
    return l->order.next > 0.5 ? l->right + 1.0 >= l->wrong
                               : l->right > l->wrong + MN_LOCALITY_RIGHT;
}

bool
mn_locality_joins(const struct mn_locality *l)
{
    return l->near.answer == MN_CONTRAST_YES && l->joins;
}

bool
mn_locality_breaks(const struct mn_locality *l, const struct mn_locality_place *p)
{
    if (p->length == 0) {
        return true;
    }
    if (p->declared && p->begins) {
        return true;
    }
    if (p->batch && p->length + p->rows > p->most) {
        return true; /* whole batches, so that chains do not end in the middle of one */
    }
    if (p->declared) {
        return false;
    }
    uint8_t marks = mn_locality_believes(l) ? p->marks : 0;
    if ((marks & MN_COST_OPENS) && p->number % 8 != 7) {
        return true;
    }
    if (!p->batch || (marks & MN_COST_FOLLOWED)) {
        return false;
    }
    uint64_t every = l->edges < MN_LOCALITY_EDGES ? 4 : 16;
    bool tries = l->near.answer == MN_CONTRAST_YES && p->length <= p->rows
                 && p->number / (uint64_t)p->rows % every == 1;
    return !tries && !mn_locality_joins(l);
}

int64_t
mn_locality_opening(const struct mn_locality *l)
{
    double each = l->each_ns > 0.0 ? l->each_ns : l->near.cheap_ns;
    double opening = l->near.paid_ns - each;
    return l->near.answer == MN_CONTRAST_YES && opening > 0.0 ? (int64_t)opening : 0;
}

/* Returns a cost without what is paid on average for something, but at least that of the cheap
 * kind. */
static int64_t
without(int64_t cost_ns, int64_t paid_ns, int64_t cheap_ns)
{
    int64_t least = cost_ns < cheap_ns ? cost_ns : cheap_ns;
    return cost_ns - paid_ns > least ? cost_ns - paid_ns : least;
}

int64_t
mn_locality_beside(const struct mn_locality *l, int64_t cost_ns)
{
    int64_t opening = mn_locality_opening(l), cheap = (int64_t)l->near.cheap_ns;
    bool opened = opening != 0 && cost_ns > cheap + opening / 2;
    return opened ? without(cost_ns, opening, cheap) : cost_ns;
}

int64_t
mn_locality_at_home(const struct mn_locality *l, int64_t cost_ns)
{
    return without(cost_ns, mn_locality_away(l), (int64_t)l->home.cheap_ns);
}

int64_t
mn_locality_away(const struct mn_locality *l)
{
    double away = l->home.paid_ns - l->home.cheap_ns;
    return l->home.answer == MN_CONTRAST_YES && away > 0.0 ? (int64_t)away : 0;
}
