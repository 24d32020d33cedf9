/* mn_plan_take_over.c - an idle worker takes over part of another worker's share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * It takes the far half of the share of the worker that has the head, or else of the one with the
 * most to do. It does so only if that half would have waited there for longer than it costs to
 * open its group again.
 */
#include "schedule/mn_plan_state.h"

/* A task must run for this long, and for this many times the typical cost, before the tasks behind
 * it go to another worker. */
#define STUCK_NS (INT64_C(5) * 1000 * 1000)
#define STUCK_TIMES 3
/* Work is taken over only if it would otherwise wait for longer than 1 + 1/HELP_MARGIN times what
 * it costs to begin it elsewhere. */
#define HELP_MARGIN 4

/* Returns what another worker pays for a piece in addition to its samples. opened: the piece
 * continues a group that its own worker has opened, so another worker must open it again. */
static int64_t
price(const struct mn_plan *p, const struct mn_piece *x, bool opened)
{
    int64_t rows = x->batch->row0[x->t1] - x->batch->row0[x->t0];
    int64_t away = x->home >= 0 ? rows * p->known.away_ns : 0;
    int64_t opening = p->known.opening_ns;
    if (p->together.declared && opening == 0) { /* not measured yet: assume a high cost */
        opening = 32 * p->known.median_ns;
    }
    return away + (opened ? opening : 0);
}

/* Moves `takes` tasks of the victim's share, behind `stay` others that stay, to the helper, and
 * with them the rest of their chain. */
static void
take_over(struct mn_plan *p, uint32_t victim, uint32_t helper, uint32_t stay, uint32_t takes)
{
    struct mn_share *s = &p->shares.of[victim];
    bool has_chain = p->shares.chain.owner == (int64_t)victim;
    uint64_t chain = 0;
    struct mn_piece *x = s->first, *last = NULL;
    while (x != NULL && stay >= mn_piece_tasks(x)) {
        stay -= mn_piece_tasks(x);
        last = x;
        x = x->next;
    }
    if (x != NULL && stay != 0) {
        struct mn_piece *y = mn_share_split(p, victim, x, x->t0 + stay);
        last = x;
        x = x->next;
        chain = y->chain;
        takes -= takes < mn_piece_tasks(y) ? takes : mn_piece_tasks(y);
        mn_share_give(p, helper, y);
    }
    while (x != NULL && (takes != 0 || x->chain == chain)) {
        struct mn_piece *next = x->next;
        takes -= takes < mn_piece_tasks(x) ? takes : mn_piece_tasks(x);
        mn_share_take_behind(p, victim, last, x);
        chain = x->chain;
        mn_share_give(p, helper, x);
        x = next;
    }
    p->shares.helped++;
    if (has_chain && chain != p->shares.chain.number) {
        p->shares.chain.owner = victim;
    }
}

/* The best place to cut a share in two. */
struct border {
    uint32_t stay, takes;
    int64_t before_ns; /* what the victim has to do until then */
    int64_t price_ns;  /* what it costs to begin there */
    bool any;
};

/* Returns the border of two groups that is nearest to the middle, or else the middle itself. */
static struct border
best_border(struct mn_plan *p, struct mn_plan_round *r, uint32_t victim, int64_t before_ns)
{
    const struct mn_share *s = &p->shares.of[victim];
    uint32_t tasks = 0;
    int64_t ns = 0, done_ns = 0, nearest = INT64_MAX;
    const struct mn_piece *last = NULL;
    for (const struct mn_piece *x = s->first; x != NULL && mn_plan_piece_may_start(p, r, x);
         x = x->next) {
        tasks += mn_piece_tasks(x);
        ns += x->cost_ns;
        last = x;
    }
    if (last == NULL) {
        return (struct border){0};
    }
    struct border best = {0};
    uint64_t chain = s->chain;
    uint32_t stay = 0;
    for (const struct mn_piece *x = s->first; stay < tasks; x = x->next) {
        int64_t off = 2 * done_ns > ns ? 2 * done_ns - ns : ns - 2 * done_ns;
        /* Where groups are known to end with batches, a chain over batches is a guess. */
        bool edge = x->chain != chain || (stay != 0 && x->t0 == 0 && !p->known.joins);
        if (edge && off < nearest) {
            nearest = off;
            best = (struct border){stay, tasks - stay, before_ns + done_ns, price(p, x, false),
                                   true};
        }
        chain = x->chain;
        stay += mn_piece_tasks(x);
        done_ns += x->cost_ns;
    }
    if (!best.any) {
        int64_t half_ns = tasks > 1 ? ns * (tasks / 2) / tasks : 0;
        best = (struct border){tasks / 2, tasks - tasks / 2, before_ns + half_ns,
                               price(p, last, true), true};
    }
    return best;
}

/* Returns the time until an idle worker may begin work that has no owner, that is until the head is
 * made. It counts what the head's worker is making, and the pieces of the head in that worker's
 * share. Queued tasks are left out, because they may belong to a later batch. INT64_MAX if no more
 * work is planned. */
static int64_t
more_in(const struct mn_plan *p, const struct mn_plan_round *r)
{
    const struct mn_planned *q = mn_plan_at(p, p->order.head);
    bool last = p->dispatch.closed && p->dispatch.count == 0;
    if (last || !p->cfg.in_order || q == NULL || q->maker == 0) {
        return INT64_MAX;
    }
    uint32_t w = (uint32_t)q->maker - 1;
    int64_t left = r->facts.workers[w].present_ns;
    const struct mn_piece *x = p->shares.of[w].first;
    for (; x != NULL && x->batch == q; x = x->next) {
        left += x->cost_ns;
    }
    return left;
}

/* Gives half of what a worker has to do to an idle one, if that pays. Returns whether it did. */
static bool
help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper, uint32_t victim)
{
    const struct mn_worker_view *v = &r->facts.workers[victim];
    struct border b = best_border(p, r, victim, v->left_ns);
    /* The victim is about to begin. */
    bool idles = b.stay == 0 && v->running_ns < 0 && v->queued == 0;
    /* Work without an owner has no extra cost, so wait for it, but only briefly. Work past the
     * window starts only while the head stands still. */
    uint64_t idle_ns = p->shares.of[helper].idle_ns;
    bool waits = idle_ns == 0
                 || (int64_t)(r->facts.now_ns - idle_ns) < mn_plan_patience_ns(p->pace.batch_bytes);
    if (r->soon && waits && (b.price_ns > 0 || p->known.near == MN_CONTRAST_UNKNOWN)) {
        return false;
    }
    /* Opening a group again for next to no gain takes the processor from others. */
    int64_t worth = b.price_ns + b.price_ns / HELP_MARGIN;
    if (!b.any || idles || (p->known.median_ns != 0 && b.before_ns <= worth)) {
        return false;
    }
    bool head = p->shares.of[victim].first->batch->sequence == p->order.head;
    if (!head && b.price_ns > 0 && more_in(p, r) <= b.price_ns) {
        return false; /* the helper may get other work before that cost has paid off */
    }
    take_over(p, victim, helper, b.stay, b.takes);
    return true;
}

bool
mn_plan_find_help(struct mn_plan *p, struct mn_plan_round *r, uint32_t helper)
{
    int64_t most = -1, each_ns = mn_plan_share_task_ns(p);
    uint32_t victim = 0, head = UINT32_MAX;
    each_ns = each_ns > 0 ? each_ns : 1; /* no cost is known */
    if (p->order.next - p->order.head < p->cfg.window && !p->dispatch.closed && !r->held
        && !p->stall.full) {
        return false; /* more is about to be planned, and the helper may begin with that */
    }
    if (r->facts.ready >= p->dispatch.rates.starved_below) {
        return false; /* the consumer is the slow part: nothing to gain */
    }
    for (uint32_t w = 0; w < p->cfg.max_workers; w++) {
        const struct mn_share *s = &p->shares.of[w];
        if (w == helper || s->first == NULL) {
            continue;
        }
        if (s->first->batch->sequence == p->order.head) {
            head = w;
        }
        int64_t much = s->cost_ns > 0 ? s->cost_ns : (int64_t)s->tasks * each_ns;
        if (much > most) {
            most = much;
            victim = w;
        }
    }
    if (head != UINT32_MAX && help(p, r, helper, head)) {
        return true;
    }
    return most >= 0 && victim != head && help(p, r, helper, victim);
}

uint32_t
mn_plan_find_stuck(const struct mn_plan *p, const struct mn_plan_round *r,
                   uint32_t helper)
{
    int64_t stuck = STUCK_TIMES * mn_plan_share_task_ns(p);
    stuck = stuck > STUCK_NS ? stuck : STUCK_NS;
    /* Its worker may be opening a group. While the time for that is unknown, allow more. */
    stuck += 2 * (p->known.away_ns + p->known.opening_ns);
    if (p->known.near == MN_CONTRAST_UNKNOWN) {
        stuck += MN_PLAN_UNKNOWN_NS;
    }
    uint32_t w = 0;
    while (w < p->cfg.max_workers
           && (w == helper || r->facts.workers[w].queued == 0
               || r->facts.workers[w].running_ns < stuck)) {
        w++;
    }
    return w;
}
