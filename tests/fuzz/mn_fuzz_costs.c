/* Costs of samples as a state may hold them: pairs of an index and nanoseconds.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "mn_fuzz.h"

#include "schedule/mn_costs.c"

enum { SAMPLES = 9 };

static void
must_make_sense(const struct mn_costs *c)
{
    int64_t index[SAMPLES], wall[SAMPLES];
    int64_t n = mn_costs_save(c, SAMPLES, index, wall, NULL);
    MUST(n == c->model.known && n <= SAMPLES);
    for (int64_t i = 0; i < n; i++) {
        MUST(index[i] >= 0 && index[i] < SAMPLES && wall[i] >= 0 && wall[i] <= MN_COST_MOST_NS);
    }
    for (int64_t i = -1; i <= SAMPLES; i++) {
        MUST(mn_cost_wall(&c->model, i) >= 0 && mn_cost_wall(&c->model, i) <= MN_COST_MOST_NS);
        bool known = mn_cost_knows(&c->model, i);
        int64_t ns = mn_bytes_predict(&c->bytes, i, mn_cost_wall(&c->model, i), known);
        MUST(ns >= 0 && ns <= MN_COST_MOST_NS);
    }
    MUST(mn_costs_slowest(c, SAMPLES, index, wall) == n);
    for (int64_t i = 1; i < n; i++) {
        MUST(wall[i] <= wall[i - 1]);
    }
    for (int permille = 0; permille <= 1000; permille += 100) {
        MUST(mn_costs_quantile(c, permille) >= 0);
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    struct mn_costs costs;
    MUST(mn_costs_init(&costs, SAMPLES) == 0);
    while (n >= 2 * sizeof(int64_t)) {
        int64_t index = (int64_t)number(&data, &n), wall = (int64_t)number(&data, &n);
        int64_t taken = mn_costs_load(&costs, 1, &index, &wall, NULL, NULL);
        MUST(taken == (index >= 0 && index < SAMPLES));
        mn_costs_observe(&costs, wall, NULL, index); /* the same numbers the other way round */
        MUST(mn_costs_hinted(&costs) == 0);
        float hint = (float)(wall & INT64_MAX);
        mn_costs_observe(&costs, index % SAMPLES, &hint, index);
        mn_costs_load(&costs, 1, &index, &wall, &hint, NULL);
        MUST(mn_costs_tell_bytes(&costs, &index, &wall, 1) == 0);
    }
    must_make_sense(&costs);
    mn_costs_fini(&costs);
    return 0;
}
