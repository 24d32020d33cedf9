/* Which task to start next: see policy_dispatch.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "schedule/policy_dispatch.h"

#include <errno.h>
#include <string.h>

#include "base/mn_base.h"

enum { BY_SLACK = 0, BY_COST = 1, BY_ORDER = 2, HEAPS = 3 };

#define NO_NODE UINT32_MAX

/* -- the heaps ---------------------------------------------------------------------- */

static bool
before(const struct mn_dispatch *d, int kind, uint32_t x, uint32_t y)
{
    const struct mn_dispatch_node *a = &d->nodes[x];
    const struct mn_dispatch_node *b = &d->nodes[y];
    if (kind == BY_SLACK && a->slack_ns != b->slack_ns) {
        int64_t la = a->slack_ns > 0 ? a->slack_ns : 0;
        int64_t lb = b->slack_ns > 0 ? b->slack_ns : 0;
        if (la != lb) {
            return la < lb;
        }
        if (a->task.batch != b->task.batch) {
            return a->task.batch < b->task.batch;
        }
        return a->slack_ns < b->slack_ns;
    }
    if (kind == BY_COST && a->task.cost_ns != b->task.cost_ns) {
        return a->task.cost_ns > b->task.cost_ns;
    }
    if (kind == BY_ORDER && a->task.batch != b->task.batch) {
        return a->task.batch < b->task.batch;
    }
    return a->task.position < b->task.position;
}

static void
place(struct mn_dispatch *d, int kind, uint32_t at, uint32_t node)
{
    d->heap[kind][at] = node;
    d->nodes[node].at[kind] = at;
}

static void
sift_up(struct mn_dispatch *d, int kind, uint32_t at)
{
    uint32_t node = d->heap[kind][at];
    while (at > 0) {
        uint32_t parent = (at - 1) / 2;
        if (!before(d, kind, node, d->heap[kind][parent])) {
            break;
        }
        place(d, kind, at, d->heap[kind][parent]);
        at = parent;
    }
    place(d, kind, at, node);
}

static void
sift_down(struct mn_dispatch *d, int kind, uint32_t at, uint32_t count)
{
    uint32_t node = d->heap[kind][at];
    for (;;) {
        uint64_t left = 2 * (uint64_t)at + 1;
        if (left >= count) {
            break;
        }
        uint32_t child = (uint32_t)left;
        if (child + 1 < count
            && before(d, kind, d->heap[kind][child + 1], d->heap[kind][child])) {
            child++;
        }
        if (!before(d, kind, d->heap[kind][child], node)) {
            break;
        }
        place(d, kind, at, d->heap[kind][child]);
        at = child;
    }
    place(d, kind, at, node);
}

static void
heap_remove(struct mn_dispatch *d, int kind, uint32_t node)
{
    uint32_t at = d->nodes[node].at[kind];
    uint32_t last = d->heap[kind][d->count - 1];
    if (last == node) {
        return;
    }
    place(d, kind, at, last);
    sift_up(d, kind, at);
    sift_down(d, kind, d->nodes[last].at[kind], d->count - 1);
}

/* -- keys --------------------------------------------------------------------------- */

static int64_t
slack_of(const struct mn_dispatch_rates *r, const struct mn_dispatch_task *t)
{
    bool slow = r->workers > 1 && t->cost_ns > r->typical_ns; /* one has nothing to balance */
    int64_t excess = slow ? t->cost_ns - r->typical_ns : 0;
    return mn_times(t->batch, r->period_ns) - excess;
}

/* Half octaves: class 2k holds costs from 2^k, class 2k + 1 those from 1.5 * 2^k. */
static unsigned
class_of(int64_t cost_ns)
{
    if (cost_ns < 2) {
        return 0;
    }
    unsigned octave = 63u - (unsigned)__builtin_clzll((uint64_t)cost_ns);
    return 2 * octave + (unsigned)(((uint64_t)cost_ns >> (octave - 1)) & 1);
}

static void
account(struct mn_dispatch *d, int64_t cost_ns, int64_t sign)
{
    d->work_ns += sign * cost_ns;
    d->class_ns[class_of(cost_ns)] += sign * cost_ns;
}

static bool
rates_valid(const struct mn_dispatch_rates *r)
{
    return r->period_ns > 0 && r->window > 0 && r->workers > 0 && r->consumer_ns >= 0
           && r->typical_ns >= 0 && r->starved_below >= 0;
}

int64_t
mn_dispatch_period(int64_t consumer_ns, int64_t mean_sample_ns, int64_t batch_size,
                   uint32_t workers)
{
    int64_t supply = mn_times(mean_sample_ns > 0 ? mean_sample_ns : 0, batch_size)
                     / (workers > 0 ? (int64_t)workers : 1);
    int64_t longer = supply > consumer_ns ? supply : consumer_ns;
    return longer > 0 ? longer : 1;
}

/* -- life --------------------------------------------------------------------------- */

void
mn_dispatch_clear(struct mn_dispatch *d)
{
    d->count = 0;
    d->work_ns = 0;
    d->closed = false;
    memset(d->class_ns, 0, sizeof(d->class_ns));
    d->free = NO_NODE;
    d->unused = 0; /* a list of all nodes would be walked at the start of each epoch */
}

int
mn_dispatch_init(struct mn_dispatch *d, void *memory, uint32_t capacity,
                 const struct mn_dispatch_rates *rates)
{
    if (memory == NULL || capacity == 0 || capacity == NO_NODE || !rates_valid(rates)) {
        return -EINVAL;
    }
    memset(d, 0, sizeof(*d));
    d->nodes = memory;
    d->heap[0] = (uint32_t *)(void *)(d->nodes + capacity);
    d->heap[1] = d->heap[0] + capacity;
    d->heap[2] = d->heap[1] + capacity;
    d->capacity = capacity;
    d->rates = *rates;
    mn_dispatch_clear(d);
    return 0;
}

int
mn_dispatch_insert(struct mn_dispatch *d, const struct mn_dispatch_task *task,
                   uint32_t *out)
{
    if (task->position < 0 || task->batch < 0) {
        return -EINVAL;
    }
    uint32_t id = d->free != NO_NODE ? d->free : d->unused;
    if (id == d->capacity) {
        return MN_FULL;
    }
    struct mn_dispatch_node *node = &d->nodes[id];
    if (id == d->unused) {
        d->unused++;
    }
    else {
        d->free = node->next;
    }
    node->task = *task;
    if (node->task.cost_ns < 0) {
        node->task.cost_ns = 0;
    }
    node->slack_ns = slack_of(&d->rates, &node->task);
    uint32_t at = d->count++;
    for (int kind = 0; kind < HEAPS; kind++) {
        place(d, kind, at, id);
        sift_up(d, kind, at);
    }
    account(d, node->task.cost_ns, 1);
    if (out != NULL) {
        *out = id;
    }
    return MN_OK;
}

void
mn_dispatch_take(struct mn_dispatch *d, uint32_t node)
{
    for (int kind = 0; kind < HEAPS; kind++) {
        heap_remove(d, kind, node);
    }
    d->count--;
    account(d, d->nodes[node].task.cost_ns, -1);
    d->nodes[node].next = d->free;
    d->free = node;
}

static void
heapify(struct mn_dispatch *d, int kind)
{
    for (uint32_t i = d->count / 2; i-- > 0;) {
        sift_down(d, kind, i, d->count);
    }
}

void
mn_dispatch_drop(struct mn_dispatch *d, bool (*drop)(const struct mn_dispatch_task *, void *),
                 void *arg)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < d->count; i++) {
        uint32_t id = d->heap[0][i];
        struct mn_dispatch_node *node = &d->nodes[id];
        if (drop == NULL || drop(&node->task, arg)) {
            account(d, node->task.cost_ns, -1);
            node->next = d->free;
            d->free = id;
        }
        else {
            d->heap[0][kept++] = id;
        }
    }
    d->count = kept;
    for (uint32_t i = 0; i < kept; i++) {
        for (int kind = HEAPS; kind-- > 0;) {
            place(d, kind, i, d->heap[0][i]);
        }
    }
    for (int kind = 0; kind < HEAPS; kind++) {
        heapify(d, kind);
    }
}

bool
mn_dispatch_retime(struct mn_dispatch *d, const struct mn_dispatch_rates *rates)
{
    if (!rates_valid(rates)) {
        return false;
    }
    bool alone = (d->rates.workers == 1) != (rates->workers == 1);
    /* These enter no key, except whether there is one worker: alone. */
    d->rates.consumer_ns = rates->consumer_ns;
    d->rates.window = rates->window;
    d->rates.starved_below = rates->starved_below;
    d->rates.workers = rates->workers;
    if (!alone && !mn_moved(d->rates.period_ns, rates->period_ns, MN_DISPATCH_JITTER)
        && !mn_moved(d->rates.typical_ns, rates->typical_ns, MN_DISPATCH_JITTER)) {
        return false;
    }
    d->rates = *rates;
    for (uint32_t i = 0; i < d->count; i++) {
        struct mn_dispatch_node *node = &d->nodes[d->heap[BY_SLACK][i]];
        node->slack_ns = slack_of(&d->rates, &node->task);
    }
    heapify(d, BY_SLACK);
    return true;
}

/* -- choice ------------------------------------------------------------------------- */

/* Returns the most work left at which the finale begins, for a costliest task of pc / P. */
static int64_t
finale_work(const struct mn_dispatch_rates *r, int64_t pc)
{
    int64_t leisure = r->period_ns - r->consumer_ns;
    if (leisure <= 0) {
        return 0;
    }
    double share = (double)leisure / (double)r->period_ns;
    double work = (double)pc * MN_DISPATCH_FINALE * share;
    return work < 9e18 ? (int64_t)work : INT64_MAX;
}

/* The end of the epoch: the costliest task first, if that can still level the workers. */
static bool
finale(const struct mn_dispatch *d, const struct mn_dispatch_view *view,
       const struct mn_dispatch_node *least, const struct mn_dispatch_node *costly)
{
    int64_t c = costly->task.cost_ns;
    int64_t pc = mn_times(c, (int64_t)d->rates.workers);
    if (!d->closed || d->rates.workers == 1
        || d->work_ns + view->held_ns > finale_work(&d->rates, pc)
        || mn_times(c, MN_DISPATCH_DISTINCT_DEN)
               <= mn_times(least->task.cost_ns, MN_DISPATCH_DISTINCT_NUM)) {
        return false;
    }
    int64_t filler = view->held_ns;
    unsigned end = class_of(c / MN_DISPATCH_SMALLER);
    for (unsigned k = 0; k < end; k++) {
        filler += d->class_ns[k];
    }
    return filler < pc;
}

static void
choose(const struct mn_dispatch *d, uint32_t node, enum mn_dispatch_why why,
       struct mn_dispatch_choice *out)
{
    out->task = d->nodes[node].task;
    out->slack_ns = d->nodes[node].slack_ns;
    out->why = why;
    out->node = node;
}

int
mn_dispatch_first(const struct mn_dispatch *d, struct mn_dispatch_choice *out)
{
    if (d->count == 0) {
        return MN_EMPTY;
    }
    choose(d, d->heap[BY_ORDER][0], MN_DISPATCH_ORDER, out);
    return MN_OK;
}

/* Returns whether a task is not past last_batch, or is so slow that it is started as early as those
 * are. */
static bool
within(const struct mn_dispatch *d, const struct mn_dispatch_view *view, int64_t batch,
       int64_t slack_ns)
{
    return batch <= view->last_batch
           || slack_ns <= mn_times(view->last_batch, d->rates.period_ns);
}

/* Returns why a task may start; 0 if it may not yet. */
static int
reason(const struct mn_dispatch *d, const struct mn_dispatch_view *view, int64_t batch,
       int64_t slack_ns)
{
    int64_t edge = mn_times(view->head_batch + d->rates.window - 1, d->rates.period_ns);
    if (batch < view->head_batch + d->rates.window) {
        return MN_DISPATCH_WINDOW;
    }
    if (slack_ns <= edge) {
        return MN_DISPATCH_EARLY;
    }
    return view->ready_batches < d->rates.starved_below ? MN_DISPATCH_AHEAD : 0;
}

int64_t
mn_dispatch_slack(const struct mn_dispatch *d, const struct mn_dispatch_task *task)
{
    return slack_of(&d->rates, task);
}

int
mn_dispatch_may(const struct mn_dispatch *d, const struct mn_dispatch_view *view,
                const struct mn_dispatch_task *task, enum mn_dispatch_why *why)
{
    int64_t slack = slack_of(&d->rates, task);
    int r = within(d, view, task->batch, slack) ? reason(d, view, task->batch, slack) : 0;
    *why = (enum mn_dispatch_why)r;
    return r != 0 ? MN_OK : MN_FULL;
}

int
mn_dispatch_peek(const struct mn_dispatch *d, const struct mn_dispatch_view *view,
                 struct mn_dispatch_choice *out)
{
    if (d->count == 0) {
        return MN_EMPTY;
    }
    uint32_t least = d->heap[BY_SLACK][0];
    uint32_t costly = d->heap[BY_COST][0];
    const struct mn_dispatch_node *c = &d->nodes[costly];
    if (finale(d, view, &d->nodes[least], c)) {
        choose(d, costly, MN_DISPATCH_FINALE_LPT, out);
        return MN_OK;
    }
    if (!within(d, view, d->nodes[least].task.batch, d->nodes[least].slack_ns)) {
        least = d->heap[BY_ORDER][0];
    }
    const struct mn_dispatch_node *s = &d->nodes[least];
    int why = within(d, view, s->task.batch, s->slack_ns)
                  ? reason(d, view, s->task.batch, s->slack_ns)
                  : 0;
    if (why == 0) {
        return MN_FULL;
    }
    choose(d, least, (enum mn_dispatch_why)why, out);
    return MN_OK;
}
