/* mn_costs.c - see mn_costs.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/mn_costs.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Quantiles cost a walk over the histogram; they move slowly, */
#define QUANTILES_EVERY 32u
/* ... the more slowly the more samples there are: by this part of the histogram. */
#define QUANTILES_PART 64u
/* The first samples say little about the others: until there are more, by this part of them. */
#define QUANTILES_FIRST 4u
/* Of tasks with cheap samples, one in this many is checked for where it was made. */
#define PLACES_EVERY 8u
/* The model's cells are prefetched this many rows ahead. A shuffled order hits none in cache, and
 * some ten misses are under way at a time. */
#define FETCH_AHEAD 12u

/* Prefetches the cells of the first rows; later, each row prefetches one more. */
static void
fetch_first(const struct mn_costs *c, const int64_t *index, uint32_t n)
{
    for (uint32_t i = 0; index != NULL && i < n && i < FETCH_AHEAD; i++) {
        mn_cost_fetch(&c->model, index[i]);
    }
}

static void
fetch_ahead(const struct mn_costs *c, const int64_t *index, uint32_t n, uint32_t i)
{
    if (index != NULL && i + FETCH_AHEAD < n) {
        mn_cost_fetch(&c->model, index[i + FETCH_AHEAD]);
    }
}

int
mn_costs_init(struct mn_costs *c, int64_t n)
{
    memset(c, 0, sizeof(*c));
    bool fits = n <= (int64_t)(PTRDIFF_MAX / sizeof(struct mn_cost_cell));
    c->cells = n > 0 && fits ? malloc(mn_cost_bytes(n)) : NULL;
    if (n > 0 && c->cells == NULL) {
        return -ENOMEM;
    }
    mn_slow_init(&c->slow);
    c->timeout_ns = MN_SLOW_NEVER;
    c->send_ns = MN_SPLIT_CANNOT;
    mn_locality_init(&c->locality);
    return mn_cost_init(&c->model, c->cells, n);
}

void
mn_costs_fini(struct mn_costs *c)
{
    free(c->cells);
    free(c->hint.ratio);
    free(c->bytes.log_bytes);
}

int
mn_costs_hinted(struct mn_costs *c)
{
    if (c->hint.ratio == NULL && c->model.n > 0) {
        float *ratio = calloc((size_t)c->model.n, sizeof(*ratio));
        if (ratio == NULL) {
            return -ENOMEM;
        }
        mn_hint_init(&c->hint, ratio, c->model.n);
    }
    return 0;
}

int
mn_costs_tell_bytes(struct mn_costs *c, const int64_t *index, const int64_t *bytes, int64_t n)
{
    if (c->bytes.log_bytes == NULL && c->model.n > 0) {
        float *log_bytes = calloc((size_t)c->model.n, sizeof(*log_bytes));
        if (log_bytes == NULL) {
            return -ENOMEM;
        }
        mn_bytes_init(&c->bytes, log_bytes, c->model.n);
    }
    for (int64_t i = 0; i < n; i++) {
        bool known = mn_cost_knows(&c->model, index[i]);
        mn_bytes_tell(&c->bytes, index[i], bytes[i],
                      known ? mn_cost_wall(&c->model, index[i]) : 0);
    }
    return 0;
}

/* Returns a sample's marks by what is known of groups now. One that followed its neighbour before,
 * and was expensive even so, has opened a group. */
static uint8_t
marks_of(const struct mn_costs *c, const struct mn_cost_cell *cell)
{
    const struct mn_locality *l = &c->locality;
    if (!(cell->marks & MN_COST_EARLY) || l->near.answer != MN_CONTRAST_YES) {
        return cell->marks;
    }
    unsigned opens = mn_locality_opens(l, (int64_t)cell->wall_ns) ? MN_COST_OPENS : 0u;
    return (uint8_t)((cell->marks & ~(unsigned)MN_COST_OPENS) | MN_COST_FOLLOWED | opens);
}

/* Returns what a sample will cost where it is best made, by the earlier cost of its index. */
static int64_t
predict_by_history(const struct mn_costs *c, int64_t index, bool usual)
{
    int64_t wall = mn_cost_wall(&c->model, index);
    const struct mn_contrast *home = &c->locality.home;
    if (index < 0 || index >= c->model.n || !mn_cost_knows(&c->model, index)) {
        return usual && c->median_ns < wall ? c->median_ns : wall;
    }
    const struct mn_cost_cell *cell = &c->model.cells[index];
    if (cell->marks & MN_COST_APART) {
        wall = mn_locality_beside(&c->locality, wall);
    }
    bool abroad = home->answer == MN_CONTRAST_YES && (cell->marks & MN_COST_ABROAD)
                  && cell->term == c->term;
    return abroad && wall > (int64_t)home->cheap_ns ? (int64_t)home->cheap_ns : wall;
}

/* Does the same, by its bytes, too, if they are known. */
static int64_t
predict_without_hint(const struct mn_costs *c, int64_t index, bool usual)
{
    int64_t wall = predict_by_history(c, index, usual);
    if (!c->bytes.serves) {
        return wall;
    }
    return mn_bytes_predict(&c->bytes, index, wall, mn_cost_knows(&c->model, index));
}

void
mn_costs_observe(struct mn_costs *c, int64_t index, const float *hint, int64_t wall_ns)
{
    if (hint != NULL) { /* before history has seen this cost */
        mn_hint_observe(&c->hint, index, *hint, predict_without_hint(c, index, false), wall_ns);
    }
    if (c->bytes.log_bytes != NULL) {
        bool known = mn_cost_knows(&c->model, index);
        mn_bytes_observe(&c->bytes, index, known ? predict_by_history(c, index, false) : 0,
                         wall_ns);
    }
    mn_cost_observe(&c->model, index, wall_ns);
    uint64_t all = c->model.wall.total, first = all / QUANTILES_FIRST;
    uint64_t every = first < QUANTILES_EVERY ? first : QUANTILES_EVERY;
    if (c->since == 0 || (c->since >= every && c->since >= all / QUANTILES_PART)) {
        c->since = 0;
        c->median_ns = mn_histogram_quantile(&c->model.wall, 500);
        c->slowest_ns = mn_histogram_quantile(&c->model.wall, 995);
        c->timeout_ns = mn_slow_update(&c->slow, &c->model.wall);
        /* A sample that opens a group is not slow for that reason. */
        int64_t opens = MN_SLOW_FACTOR * mn_locality_opening(&c->locality);
        c->timeout_ns = c->timeout_ns > opens ? c->timeout_ns : opens;
        c->split = mn_split_worth(c->split, &c->model.wall, (int64_t)c->model.mean_wall_ns,
                                  c->send_ns);
    }
    c->since++;
}

/* Does the same, by its hint if it has one. */
static int64_t
predict(const struct mn_costs *c, int64_t index, const float *hint, bool usual)
{
    int64_t wall = predict_without_hint(c, index, usual);
    return hint != NULL ? mn_hint_predict(&c->hint, index, *hint, wall) : wall;
}

/* Learns how a sample's cost depends on where it was made. Returns what it would cost next to its
 * neighbours and at home: the price of being away is not its property. */
static int64_t
observe_place(struct mn_costs *c, int64_t index, const float *hint, int64_t cost,
              const struct mn_costs_made *made, bool follows, bool edge)
{
    struct mn_locality *l = &c->locality;
    bool known = index >= 0 && index < c->model.n;
    struct mn_cost_cell none = {0}, *cell = known ? &c->model.cells[index] : &none;
    const unsigned unaware = MN_COST_APART | MN_COST_EARLY;
    unsigned now = follows ? MN_COST_EARLY : MN_COST_APART;
    now = l->near.answer != MN_CONTRAST_YES ? now : 0;
    if ((cell->marks & unaware & ~now) != 0) {
        cell->age = 0; /* its earlier cost says nothing about now */
    }
    now |= cell->marks & MN_COST_ABROAD;
    bool lived = cell->home != 0 && cell->term == c->term;
    /* Slow samples start alone, anywhere. How they were made would suggest that samples cost more
     * without their neighbours and away from home. */
    bool slow = mn_slow_starts_alone(predict(c, index, hint, true), c->median_ns);
    bool away = lived && cell->home != made->worker + 1 && l->home.answer == MN_CONTRAST_YES;
    bool alone = slow && l->near.answer != MN_CONTRAST_YES;
    uint8_t near = cell->marks; /* the price of being away says nothing about neighbours */
    if (!away && !alone) {
        near = mn_locality_observe_near(l, follows, edge, marks_of(c, cell), cost);
    }
    cell->marks = (uint8_t)((near & ~(unaware | MN_COST_ABROAD)) | now);
    int64_t own = cost; /* without the price of being away */
    if (!follows && !(cell->marks & MN_COST_OPENS)) {
        own = mn_locality_beside(l, cost);
    }
    bool together = l->near.answer != MN_CONTRAST_YES || follows;
    if (lived && together) {
        bool home = cell->home == made->worker + 1;
        if (!slow) {
            mn_locality_observe_home(l, home, cost);
        }
        own = home ? own : mn_locality_at_home(l, own);
    }
    bool again = cell->home == made->worker + 1 && cell->term == c->term;
    if (again && (cell->marks & MN_COST_ABROAD)) {
        cell->age = 0; /* its cost elsewhere says nothing about here */
    }
    cell->marks = (uint8_t)((cell->marks & ~(unsigned)MN_COST_ABROAD)
                            | (again ? 0u : (unsigned)MN_COST_ABROAD));
    cell->home = (uint16_t)(made->worker + 1);
    cell->term = c->term;
    return own;
}

void
mn_costs_new_workers(struct mn_costs *c)
{
    if (++c->term == 0) { /* it has wrapped: no old term may pass for a new one */
        for (int64_t i = 0; i < c->model.n; i++) {
            c->model.cells[i].home = 0;
        }
    }
}

void
mn_costs_places(struct mn_costs *c, const int64_t *index, uint32_t n, uint16_t *home,
                uint8_t *marks)
{
    bool homes = c->locality.home.answer == MN_CONTRAST_YES;
    for (uint32_t i = 0; i < n; i++) {
        bool known = index != NULL && index[i] >= 0 && index[i] < c->model.n;
        const struct mn_cost_cell *cell = known ? &c->model.cells[index[i]] : NULL;
        home[i] = cell != NULL && homes && cell->term == c->term ? cell->home : 0;
        marks[i] = cell != NULL ? marks_of(c, cell) : 0;
    }
}

/* Returns whether to learn how the rows of a task depend on where they were made. For cheap rows
 * that are known not to depend on it, only now and then: learning takes as long as they do. */
static bool
looks_at_place(struct mn_costs *c)
{
    bool little = c->locality.near.answer == MN_CONTRAST_NO
                  && c->median_ns < MN_LOCALITY_WORTH_NS;
    return !little || c->tasks++ % PLACES_EVERY == 0;
}

uint64_t
mn_costs_observe_rows(struct mn_costs *c, const int64_t *index, const float *hint,
                      const uint64_t *wall_ns, size_t step, uint32_t n,
                      const struct mn_costs_made *made)
{
    uint64_t sum = 0;
    bool looks = made->learn_locality && looks_at_place(c);
    fetch_first(c, index, n);
    for (uint32_t i = 0; i < n; i++) {
        fetch_ahead(c, index, n, i);
        uint64_t wall = wall_ns[i * step];
        if (wall != 0) {
            sum += wall;
            int64_t at = index != NULL ? index[i] : -1, cost = (int64_t)wall;
            const float *own = hint != NULL ? hint + i : NULL;
            if (looks && (i > 0 || !made->newcomer)) {
                cost = observe_place(c, at, own, cost, made, i > 0 || made->follows,
                                     i == 0 && made->edge);
            }
            else if (looks && at >= 0 && at < c->model.n) {
                /* A worker's very first sample also pays for the worker's start. */
                c->model.cells[at].marks |= MN_COST_APART;
            }
            mn_costs_observe(c, at, own, cost);
        }
    }
    return sum;
}

void
mn_costs_sends(struct mn_costs *c, int64_t send_ns)
{
    c->refused = c->refused || send_ns < 0;
    if (c->refused) {
        c->send_ns = MN_SPLIT_CANNOT;
        c->split = false;
    }
    else {
        /* of several workers' values the lowest: noise only adds */
        c->send_ns = c->send_ns < 0 || send_ns < c->send_ns ? send_ns : c->send_ns;
        c->split = mn_split_worth(c->split, &c->model.wall, (int64_t)c->model.mean_wall_ns,
                                  c->send_ns);
    }
}

void
mn_costs_collated(struct mn_costs *c, int64_t ns)
{
    c->collate_ns = c->collate_ns == 0 ? ns : (3 * c->collate_ns + ns) / 4;
}

void
mn_costs_predict(struct mn_costs *c, const int64_t *index, const float *hint, uint32_t n,
                 bool usual, int64_t *out_ns)
{
    fetch_first(c, index, n);
    for (uint32_t i = 0; i < n; i++) {
        fetch_ahead(c, index, n, i);
        out_ns[i] = predict(c, index != NULL ? index[i] : -1, hint != NULL ? hint + i : NULL,
                            usual);
    }
}

struct mn_costs_view
mn_costs_look(struct mn_costs *c)
{
    return (struct mn_costs_view){(int64_t)c->model.mean_wall_ns, c->median_ns, c->slowest_ns,
                                  c->timeout_ns, c->collate_ns, c->split,
                                  mn_bytes_revision(&c->bytes), c->model.samples,
                                  c->locality.near.answer, c->locality.home.answer,
                                  mn_locality_joins(&c->locality),
                                  mn_locality_believes(&c->locality),
                                  mn_locality_opening(&c->locality),
                                  mn_locality_away(&c->locality),
                                  mn_locality_length(&c->locality)};
}
