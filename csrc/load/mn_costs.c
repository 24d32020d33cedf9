/* mn_costs.c - see mn_costs.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "load/mn_costs.h"

#include "load/mn_message.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* Quantiles cost a walk over the histogram; they move slowly. */
#define QUANTILES_EVERY 32u
/* ... the slower the more there are: by this part of the histogram. */
#define QUANTILES_PART 64u
/* Rows ahead of which the model's cells are fetched: a shuffled order hits none in cache. */
#define FETCH_AHEAD 8u

int
mn_costs_init(struct mn_costs *c, int64_t n)
{
    memset(c, 0, sizeof(*c));
    c->cells = n > 0 ? malloc(mn_cost_bytes(n)) : NULL;
    if ((n > 0 && c->cells == NULL) || mn_mutex_init(&c->mutex) < 0) {
        free(c->cells);
        return -ENOMEM;
    }
    mn_slow_init(&c->slow);
    c->timeout_ns = MN_SLOW_NEVER;
    c->send_ns = MN_SPLIT_CANNOT;
    return mn_cost_init(&c->model, c->cells, n);
}

void
mn_costs_fini(struct mn_costs *c)
{
    mn_mutex_fini(&c->mutex);
    free(c->cells);
}

static void
observe_locked(struct mn_costs *c, int64_t index, int64_t wall_ns)
{
    mn_cost_observe(&c->model, index, wall_ns);
    if (c->since == 0
        || (c->since >= QUANTILES_EVERY && c->since >= c->model.wall.total / QUANTILES_PART)) {
        c->since = 0;
        c->median_ns = mn_histogram_quantile(&c->model.wall, 500);
        c->slowest_ns = mn_histogram_quantile(&c->model.wall, 995);
        c->timeout_ns = mn_slow_update(&c->slow, &c->model.wall);
        c->split = mn_split_worth(c->split, &c->model.wall, (int64_t)c->model.mean_wall_ns,
                                  c->send_ns);
    }
    c->since++;
}

void
mn_costs_observe(struct mn_costs *c, int64_t index, int64_t wall_ns)
{
    mn_mutex_lock(&c->mutex);
    observe_locked(c, index, wall_ns);
    mn_mutex_unlock(&c->mutex);
}

uint64_t
mn_costs_observe_rows(struct mn_costs *c, const int64_t *index, const struct mn_report *rows,
                      uint32_t n)
{
    uint64_t sum = 0;
    mn_mutex_lock(&c->mutex);
    for (uint32_t i = 0; i < n; i++) {
        if (index != NULL && i + FETCH_AHEAD < n) {
            mn_cost_fetch(&c->model, index[i + FETCH_AHEAD]);
        }
        if (rows[i].wall_ns != 0) {
            sum += rows[i].wall_ns;
            observe_locked(c, index != NULL ? index[i] : -1, (int64_t)rows[i].wall_ns);
        }
    }
    mn_mutex_unlock(&c->mutex);
    return sum;
}

void
mn_costs_sends(struct mn_costs *c, int64_t send_ns)
{
    mn_mutex_lock(&c->mutex);
    c->refused = c->refused || send_ns < 0;
    if (c->refused) {
        c->send_ns = MN_SPLIT_CANNOT;
        c->split = false;
    }
    else {
        /* of several workers' the cheapest: noise only adds */
        c->send_ns = c->send_ns < 0 || send_ns < c->send_ns ? send_ns : c->send_ns;
        c->split = mn_split_worth(c->split, &c->model.wall, (int64_t)c->model.mean_wall_ns,
                                  c->send_ns);
    }
    mn_mutex_unlock(&c->mutex);
}

void
mn_costs_collated(struct mn_costs *c, int64_t ns)
{
    mn_mutex_lock(&c->mutex);
    c->collate_ns = c->collate_ns == 0 ? ns : (3 * c->collate_ns + ns) / 4;
    mn_mutex_unlock(&c->mutex);
}

void
mn_costs_predict(struct mn_costs *c, const int64_t *index, uint32_t n, int64_t *out_ns)
{
    mn_mutex_lock(&c->mutex);
    for (uint32_t i = 0; i < n; i++) {
        if (index != NULL && i + FETCH_AHEAD < n) {
            mn_cost_fetch(&c->model, index[i + FETCH_AHEAD]);
        }
        out_ns[i] = mn_cost_wall(&c->model, index != NULL ? index[i] : -1);
    }
    mn_mutex_unlock(&c->mutex);
}

struct mn_costs_view
mn_costs_look(struct mn_costs *c)
{
    mn_mutex_lock(&c->mutex);
    struct mn_costs_view v = {(int64_t)c->model.mean_wall_ns, c->median_ns, c->slowest_ns,
                              c->timeout_ns, c->collate_ns, c->split, c->model.samples};
    mn_mutex_unlock(&c->mutex);
    return v;
}
