/* The policies behind functions of 64-bit integers and pointers, for policies.py.
 * SPDX-License-Identifier: Apache-2.0
 */
#include <stdlib.h>

#include "base/mn_base.h"
#include "schedule/mn_costs.c"
#include "schedule/mn_plan.c"
#include "schedule/policy_worker_count.h"
#include "schedule/policy_dispatch.h"
#include "schedule/policy_locality.h"
#include "schedule/policy_ready.h"

int64_t
chunk_size(int64_t cost, int64_t overhead, int64_t batch, int64_t idle)
{
    return mn_chunk_size(cost, overhead, batch, idle);
}

int64_t
chunk_next(const int64_t *costs, int64_t n, int64_t overhead, int64_t limit)
{
    return mn_chunk_next(costs, n, overhead, limit);
}

int64_t
dispatch_period(int64_t consumer, int64_t mean, int64_t batch, int64_t workers)
{
    return mn_dispatch_period(consumer, mean, batch, (uint32_t)workers);
}

int64_t
split_worth(int64_t on, const int64_t *walls, int64_t n, int64_t send)
{
    struct mn_costs c = {.split = on != 0, .send_ns = send};
    double sum = 0.0;
    for (int64_t i = 0; i < n; i++) {
        mn_histogram_add(&c.model.wall, walls[i]);
        sum += (double)walls[i];
    }
    c.model.mean_wall_ns = n > 0 ? sum / (double)n : 0.0;
    return mn_split_worth(&c);
}

/* ---- costs, and the timeout learned from them ---- */

void *
cost_new(int64_t n)
{
    struct mn_costs *c = malloc(sizeof(*c));
    if (c != NULL && mn_costs_init(c, n) < 0) {
        free(c);
        c = NULL;
    }
    return c;
}

void
cost_free(struct mn_costs *c)
{
    mn_costs_fini(c);
    free(c);
}

void
cost_observe(struct mn_costs *c, int64_t index, int64_t wall)
{
    mn_cost_observe(&c->model, index, wall);
}

int64_t
cost_wall(const struct mn_costs *c, int64_t index)
{
    return mn_cost_wall(&c->model, index);
}

int64_t
cost_knows(const struct mn_costs *c, int64_t index)
{
    return mn_cost_knows(&c->model, index);
}

int64_t
cost_quantile(const struct mn_costs *c, int64_t permille)
{
    return mn_costs_quantile(c, (int)permille);
}

int64_t
cost_above(const struct mn_costs *c, int64_t ns)
{
    return mn_histogram_above(&c->model.wall, ns);
}

int64_t
cost_weight(const struct mn_costs *c, int64_t ns)
{
    return mn_histogram_weight(&c->model.wall, ns);
}

int64_t
cost_save(const struct mn_costs *c, int64_t most, int64_t *index, int64_t *wall)
{
    return mn_costs_save(c, most, index, wall, NULL);
}

int64_t
cost_load(struct mn_costs *c, int64_t n, const int64_t *index, const int64_t *wall)
{
    return mn_costs_load(c, n, index, wall, NULL, NULL);
}

int64_t
cost_learn_timeout(struct mn_costs *c)
{
    return mn_slow_update(&c->slow, &c->model.wall);
}

int64_t
cost_timeout(const struct mn_costs *c)
{
    return c->slow.timeout_ns;
}

int64_t
cost_tail(const struct mn_costs *c)
{
    return c->slow.tail;
}

int64_t
cost_known(const struct mn_costs *c)
{
    return c->model.known;
}

int64_t
cost_samples(const struct mn_costs *c)
{
    return (int64_t)c->model.samples;
}

void
cost_mean(const struct mn_costs *c, double *mean)
{
    *mean = c->model.mean_wall_ns;
}

/* ---- dispatch ---- */

static struct mn_dispatch_rates
rates_of(const int64_t *rates)
{
    return (struct mn_dispatch_rates){.period_ns = rates[0],
                                      .consumer_ns = rates[1],
                                      .typical_ns = rates[2],
                                      .window = rates[3],
                                      .starved_below = rates[4],
                                      .workers = (uint32_t)rates[5]};
}

void *
dispatch_new(int64_t capacity, const int64_t *rates)
{
    struct mn_dispatch_rates r = rates_of(rates);
    struct mn_dispatch *d = calloc(1, sizeof(*d) + mn_dispatch_bytes((uint32_t)capacity));
    if (d != NULL && mn_dispatch_init(d, d + 1, (uint32_t)capacity, &r) < 0) {
        free(d);
        d = NULL;
    }
    return d;
}

int64_t
dispatch_insert(struct mn_dispatch *d, int64_t position, int64_t batch, int64_t cost, int64_t tag)
{
    struct mn_dispatch_task task = {position, batch, cost, (uint64_t)tag};
    return mn_dispatch_insert(d, &task, NULL);
}

static int64_t
give(int rc, const struct mn_dispatch_choice *c, int64_t *out)
{
    if (rc != MN_OK) {
        return 0;
    }
    int64_t values[] = {c->task.position, c->task.batch,  c->task.cost_ns, (int64_t)c->task.tag,
                        c->slack_ns,      (int64_t)c->why, c->node};
    for (int i = 0; i < 7; i++) {
        out[i] = values[i];
    }
    return 1;
}

int64_t
dispatch_peek(const struct mn_dispatch *d, int64_t head, int64_t ready, int64_t last, int64_t *out)
{
    struct mn_dispatch_view view = {.head_batch = head, .ready_batches = ready, .last_batch = last};
    struct mn_dispatch_choice choice;
    return give(mn_dispatch_peek(d, &view, &choice), &choice, out);
}

int64_t
dispatch_first(const struct mn_dispatch *d, int64_t *out)
{
    struct mn_dispatch_choice choice;
    return give(mn_dispatch_first(d, &choice), &choice, out);
}

void
dispatch_take(struct mn_dispatch *d, int64_t node)
{
    mn_dispatch_take(d, (uint32_t)node);
}

int64_t
dispatch_retime(struct mn_dispatch *d, const int64_t *rates)
{
    struct mn_dispatch_rates r = rates_of(rates);
    return mn_dispatch_retime(d, &r);
}

void
dispatch_close(struct mn_dispatch *d, int64_t closed)
{
    d->closed = closed != 0;
}

static bool
is_of(const struct mn_dispatch_task *task, void *batch)
{
    return task->batch == *(const int64_t *)batch;
}

void
dispatch_drop(struct mn_dispatch *d, int64_t batch)
{
    mn_dispatch_drop(d, is_of, &batch);
}

void
dispatch_clear(struct mn_dispatch *d)
{
    mn_dispatch_clear(d);
}

int64_t
dispatch_count(const struct mn_dispatch *d)
{
    return d->count;
}

int64_t
dispatch_work(const struct mn_dispatch *d)
{
    return d->work_ns;
}

/* ---- the number of workers ---- */

void *
scaler_new(void)
{
    return calloc(1, sizeof(struct mn_scaler));
}

const char *
scaler_update(struct mn_scaler *s, const int64_t *in, int64_t *out)
{
    struct mn_scaler_input input = {
        .workers = (int32_t)in[0], .min_workers = (int32_t)in[1], .max_workers = (int32_t)in[2],
        .occupancy_permille = (int32_t)in[3], .cpu_permille = (int32_t)in[4],
        .cores_milli = (int32_t)in[5], .wait_permille = (int32_t)in[6], .backlog = in[7],
        .rate_milli = in[8], .speed_milli = in[9], .busy_permille = (int32_t)in[10],
        .fitting = (int32_t)in[11], .taken_milli = in[12],
    };
    struct mn_scaler_decision d = mn_scaler_update(s, &input);
    out[0] = d.target;
    out[1] = d.reason;
    return d.text;
}

/* ---- batches of ready samples ---- */

void *
ready_new(int64_t batch, int64_t bound)
{
    size_t bytes = mn_ready_bytes(batch, bound);
    struct mn_ready *r = bytes == 0 ? NULL : calloc(1, sizeof(*r) + bytes);
    if (r != NULL) {
        (void)mn_ready_init(r, r + 1, batch, bound);
    }
    return r;
}

int64_t
ready_end(struct mn_ready *r, int64_t total)
{
    return mn_ready_end(r, total);
}

int64_t
ready_mark(struct mn_ready *r, int64_t position, int64_t slow)
{
    return mn_ready_mark(r, position, slow != 0);
}

/* Returns the number of positions in out, or -1: wait. */
int64_t
ready_form(struct mn_ready *r, int64_t mix, int64_t *out)
{
    int64_t n = 0;
    return mn_ready_form(r, mix != 0, out, &n) == MN_EMPTY ? -1 : n;
}

int64_t
ready_could_mix(const struct mn_ready *r)
{
    return mn_ready_could_mix(r);
}

int64_t
ready_horizon(const struct mn_ready *r)
{
    return mn_ready_horizon(r);
}

void
ready_displaced(const struct mn_ready *r, int64_t *out)
{
    out[0] = r->displaced_max;
    out[1] = r->displaced_sum;
}

/* ---- locality: the other functions are called as they are ---- */

struct mn_locality *
locality_new(void)
{
    struct mn_locality *l = malloc(sizeof(*l));
    if (l != NULL) {
        mn_locality_init(l);
    }
    return l;
}

int
locality_near(const struct mn_locality *l)
{
    return (int)l->near.answer;
}

int
locality_home(const struct mn_locality *l)
{
    return (int)l->home.answer;
}

int
locality_place(const struct mn_locality *l, int declared, int begins, int batch, int marks,
               uint64_t number, int64_t length, int64_t rows, int64_t most)
{
    struct mn_locality_place place = {declared != 0, begins != 0, batch != 0, (uint8_t)marks,
                                      number, length, rows, most};
    return mn_locality_breaks(l, &place);
}

void
policy_free(void *memory)
{
    free(memory);
}
