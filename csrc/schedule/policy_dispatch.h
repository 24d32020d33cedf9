/* Which task to start next: least slack first, within a window that costs widen.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Actors
 *   One caller (the plan, under the engine's mutex) inserts the tasks of coming batches; tests and
 *   simulations call it through benchmarks/policies.c. While too few tasks are queued, it asks for
 *   the task to start, and takes it out. A task is one sample, or a chunk of neighbouring cheap
 *   samples of one batch, or, while neighbours are kept together, a piece of several chunks
 *   (mn_plan_worker_shares.c). A task that is queued before a worker is free was chosen early. In
 *   simulation one task per worker queued ahead cost nothing, because the order itself rarely
 *   changes.
 *
 * Slack
 *   period   predicted time between two batches (mn_dispatch_period)
 *   deadline of batch b, on a clock that stands at 0 when batch 0 is wanted: b * period
 *   excess   max(0, cost - typical), typical being the median cost of a task
 *   slack    deadline - excess
 *   Order: max(slack, 0), then batch, then slack, then position.
 *   A sample that costs as much as most has no excess, so equal costs give the sampler's
 *   order exactly. A slow one overtakes those whose deadline is nearer by less than its excess. It
 *   moves ahead only by what it needs to be ready with its neighbours. The rule uses excess and not
 *   cost, so that the window below is the steady window for ordinary samples. Among tasks of at
 *   least typical cost it is the same order.
 *   One worker alone has no excess and no finale: it follows the sampler's order. Its dataset may
 *   rely on that, such as one that reads on in a file.
 *   Negative slack (excess over batch * period) is a start that is overdue from the beginning. As
 *   batches count over the plan's epochs, only its first ones have it (a loader without persistent
 *   workers has a new plan for each epoch). Among these the earlier batch
 *   counts: slow samples of batches 1, 2, ... do not push all of batch 0 back. They wait only for
 *   its work.
 *
 * Tasks that may start (mn_dispatch_peek)
 *   WINDOW, EARLY: slack <= (head + window - 1) * period, with head the next batch to deliver. For
 *      ordinary samples that is: batch < head + window, torch's prefetch window. A slow
 *      sample enters earlier, by its excess, so it is ready as early as
 *      its batch-mates are. AHEAD: when nothing is in the window and workers would idle, while
 *      fewer than `starved_below` batches are ready in order from the head on. Some batch in the
 *      window then waits for a slow sample that is running already. Its delivery cannot be
 *      hastened, and the work beyond has to be done anyway. (When `starved_below` batches are
 *      ready, the
 *      consumer is slow, and idling is right.)
 *   FINALE_LPT: towards the end of the epoch, longest first; see below.
 *   AHEAD, FINALE_LPT and EARLY are bounded by the memory of what lies finished
 *   (mn_plan_window_and_memory.c), by the memory limit and by the end of the epoch.
 *   Limit: last_batch bounds ordinary tasks, for a caller that cannot use later batches yet
 *      (policy_ready.h). A slow task past it may start once its slack is that of an ordinary
 *      one of last_batch, or in the finale. It is started early and used when its turn has come.
 *
 * Work bound
 *   With enough memory, AHEAD means that no worker idles while a task is left. Then the epoch ends
 *   no later than W/P + (1 - 1/P) c. W is the whole work, P the workers, and c the cost of the task
 *   that finishes last. (Graham's argument: all workers were busy until it started, and the work
 *   other than it filled at most (W - c)/P). Order of delivery plays no part in it. A batch that is
 *   not complete holds back what the consumer sees but not what the workers do. That is the first
 *   epoch: nothing is known and c may be the slowest sample there is.
 *
 * The end of the epoch (costs known)
 *   Least slack starts a slow sample of the last batch about its excess before the end.
 *   That levels the workers only if cheap tasks are left to fill the gaps next to it. So the
 *   costliest task goes first once all tasks of the epoch are inserted (closed), if
 *   three conditions hold. Let c be the largest cost left and F the work left in tasks of at
 *   most c / MN_DISPATCH_SMALLER:
 *     F < P * c;
 *     the work left is at most MN_DISPATCH_FINALE * P * c * leisure;
 *     c is over MN_DISPATCH_DISTINCT times the cost of the task of least slack.
 *   While other work of at least P * c is left when a task of cost c starts, all
 *   workers stay busy past its end. So it cannot be the last to finish. With leisure 1 that holds
 *   before the finale: either F >= P * c, or (FINALE - 1) * P * c is left in addition to it. In the
 *   finale the order among distinct costs is longest processing time first. So the last task to
 *   finish is as cheap as the distribution allows. The term (1 - 1/P) c above shrinks towards the
 *   cost of the cheapest class.
 *   FINALE bounds how much delivery is disturbed when there is too little cheap work to ever keep
 *   the reserve. DISTINCT keeps noise from reordering equal costs. leisure = 1 - consumer / period:
 *   batches that come late, all together, still take the consumer its time each. A consumer that
 *   takes no time loses nothing by that. One as slow as the workers loses it all. For it the order
 *   stays least slack to the end, the rule for the smallest lateness. Lateness is then all that
 *   counts.
 *
 * Data
 *   Nodes in memory given by the caller, and three binary heaps of node numbers (slack, cost,
 *   order). Each node knows its place in each heap. Insert and take are O(log n). Work left by cost
 *   class (half octaves) for F. Ties are broken by position, so the order is a function of the
 *   inserted tasks and of the calls alone.
 *
 * Rates change: mn_dispatch_retime re-keys in O(n), and only when a rate has moved by more than an
 * eighth (MN_DISPATCH_JITTER), so that keys do not jitter.
 */
#ifndef MN_POLICY_DISPATCH_H
#define MN_POLICY_DISPATCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Measured by benchmarks/simulate.py: with 1 the case of 20 % of 10 s in 0.5 s ends 0.6 % later. 4
 * and 8 gain nothing over 2 and hold delivery back for longer. */
#define MN_DISPATCH_FINALE 2
#define MN_DISPATCH_SMALLER 2 /* cheaper than half: two of them fit next to it */
#define MN_DISPATCH_DISTINCT_NUM 3 /* 3/2: beyond ordinary noise */
#define MN_DISPATCH_DISTINCT_DEN 2
#define MN_DISPATCH_JITTER 8 /* a rate that moved by at most an eighth counts as unchanged */

#define MN_DISPATCH_CLASSES 128

struct mn_dispatch_task {
    int64_t position; /* of its first sample among all that were planned; unique */
    int64_t batch;    /* the plan's sequence of its batch */
    int64_t cost_ns;  /* predicted */
    uint64_t tag;     /* owned by the caller */
};

enum mn_dispatch_why {
    MN_DISPATCH_WINDOW = 1, /* in the steady window */
    MN_DISPATCH_EARLY = 2,  /* past it, because it is known to be slow */
    MN_DISPATCH_AHEAD = 3,  /* past it, because workers would idle */
    MN_DISPATCH_FINALE_LPT = 4, /* the costliest task, because the epoch ends */
    MN_DISPATCH_ORDER = 5,  /* the first task in order, or one of a batch that has begun */
};

struct mn_dispatch_view {
    int64_t head_batch;    /* next to deliver */
    int64_t ready_batches; /* complete and undelivered; in order from the head, out of order all */
    int64_t last_batch;    /* past this only tasks known to be slow; INT64_MAX: no limit */
    int64_t held_ns;       /* work left in ordinary tasks that were given to workers already, which
                            * the dispatcher therefore does not hold */
};

struct mn_dispatch_choice {
    struct mn_dispatch_task task;
    int64_t slack_ns;
    enum mn_dispatch_why why;
    uint32_t node; /* for mn_dispatch_take */
};

struct mn_dispatch_node {
    struct mn_dispatch_task task;
    int64_t slack_ns;
    uint32_t at[3]; /* place in each heap */
    uint32_t next;  /* free list */
};

struct mn_dispatch_rates {
    int64_t period_ns;
    int64_t consumer_ns; /* the consumer's time for a batch */
    int64_t typical_ns; /* median cost of a task */
    int64_t window;     /* batches: prefetch_factor * num_workers */
    int64_t starved_below;     /* work beyond may start if fewer batches than this are ready */
    uint32_t workers;
};

struct mn_dispatch {
    struct mn_dispatch_node *nodes; /* [capacity] */
    uint32_t *heap[3];              /* [capacity] each */
    uint32_t capacity;
    uint32_t count;
    uint32_t free;                  /* head of the free list, of nodes that were used */
    uint32_t unused;                /* nodes from here on were never used */
    bool closed;                    /* by the caller: the epoch has no more tasks to come */
    struct mn_dispatch_rates rates;
    int64_t work_ns;                /* sum of the costs of all tasks held */
    int64_t class_ns[MN_DISPATCH_CLASSES];
};

/* Bytes of memory for capacity tasks, 8-byte aligned. */
static inline size_t
mn_dispatch_bytes(uint32_t capacity)
{
    size_t node = sizeof(struct mn_dispatch_node) + 3 * sizeof(uint32_t);
    return ((size_t)capacity * node + 7) & ~(size_t)7;
}

/* Returns the predicted time between batches: the longer one of the consumer's time and the
 * workers' time for a batch. consumer_ns: between getting a batch and asking for the next. */
int64_t
mn_dispatch_period(int64_t consumer_ns, int64_t mean_sample_ns, int64_t batch_size,
                   uint32_t workers);

/* Returns 0, or -EINVAL for no memory, no capacity, or rates out of range: period, window and
 * workers must be positive, the others not negative. */
int
mn_dispatch_init(struct mn_dispatch *d, void *memory, uint32_t capacity,
                 const struct mn_dispatch_rates *rates);

/* Inserts a task. node: NULL, or receives its node for mn_dispatch_take(). Returns MN_OK, MN_FULL,
 * or -EINVAL for a negative position or batch. */
int
mn_dispatch_insert(struct mn_dispatch *d, const struct mn_dispatch_task *task,
                   uint32_t *node);

/* Finds the task that should start now. Returns MN_OK; MN_FULL if none may (the window is full and
 * no worker is starved); MN_EMPTY if there is none. Changes nothing. */
int
mn_dispatch_peek(const struct mn_dispatch *d, const struct mn_dispatch_view *view,
                 struct mn_dispatch_choice *out);

/* Returns whether a task that the dispatcher does not hold may start now (see above). It may
 * start earlier if it is known to be slow. Returns MN_OK and why, or MN_FULL. */
int
mn_dispatch_may(const struct mn_dispatch *d, const struct mn_dispatch_view *view,
                const struct mn_dispatch_task *task, enum mn_dispatch_why *why);

/* Returns the slack of a task, which may be negative; see the order above. */
int64_t
mn_dispatch_slack(const struct mn_dispatch *d, const struct mn_dispatch_task *task);

/* Finds the first task in the order of planning: for when memory refuses the other, or a queue is
 * full, or to prefer the head. Returns MN_OK or MN_EMPTY. */
int
mn_dispatch_first(const struct mn_dispatch *d, struct mn_dispatch_choice *out);

/* Takes a task out, by its node: of a choice made since the last change, or from insert. */
void
mn_dispatch_take(struct mn_dispatch *d, uint32_t node);

/* Takes out all tasks for which drop(task, arg) is true; NULL: all. O(n). */
void
mn_dispatch_drop(struct mn_dispatch *d, bool (*drop)(const struct mn_dispatch_task *, void *),
                 void *arg);

/* Sets new rates; re-keys if they moved enough. Returns whether it did. Ignores rates that are out
 * of range. */
bool
mn_dispatch_retime(struct mn_dispatch *d, const struct mn_dispatch_rates *rates);

/* Forgets all tasks (of an abandoned epoch). */
void
mn_dispatch_clear(struct mn_dispatch *d);

#endif
