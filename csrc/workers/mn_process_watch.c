/* mn_process_watch.c - see mn_process_watch.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_process_watch.h"

#include <signal.h>

#include "base/mn_fault.h"
#include "os/mn_proc.h"

/* A look at each worker takes a microsecond or two. */
#define LOOK_NS UINT64_C(1000000000)
/* A zygote that works answers in milliseconds, and where the machine swaps, or a fork of much
 * memory is under way, within seconds. Looks, not time: while the trainer itself is stopped, too,
 * none are counted. */
#define UNANSWERED_MOST 10u
/* So many in which nobody was made where somebody is to be: a fork of a terabyte takes ten
 * seconds, and so long a zygote tries what the system refuses. Where it waits for the interpreter
 * of each worker to import the program, that may take minutes. */
#define STARTS_NOBODY_MOST 30u
#define STARTS_NOBODY_MOST_EACH 600u
/* So many zygotes in a row that hang are an error: a function that the program has registered for
 * forks may hang in each. */
#define HUNG_MOST 2u

void
mn_watch_init(struct mn_watch *w, struct mn_crew *crew, struct mn_mutex *guard)
{
    *w = (struct mn_watch){.crew = crew, .guard = guard};
}

static void
unlock(struct mn_watch *w)
{
    struct mn_wakes due = mn_crew_take_wakes(w->crew);
    mn_mutex_unlock(w->guard);
    mn_crew_wake(w->crew, &due);
}

/* What an entry may say while its process lives. One that says STARTING is woken by nobody. */
static bool
may_be(const struct mn_watch *w, uint32_t state, bool worked)
{
    bool stopped = mn_a32_load_acquire(&w->crew->shm.ctl->stop) != 0;
    return (state == MN_WORKER_STARTING && !worked) || state == MN_WORKER_READY
           || (state == MN_WORKER_LEAVING && stopped);
}

/* Notes who has come. False where that is gone by now, and the zygote has to say so. */
static bool
note_who(struct mn_watch *w, uint32_t worker)
{
    uint32_t pid = mn_worker_pid(mn_worker_at(&w->crew->shm, worker));
    if (pid == 0) {
        return true; /* it is about to come */
    }
    int rc = mn_proc_alive((pid_t)pid);
    if (rc == 1) {
        mn_mutex_lock(w->guard);
        w->crew->members[worker].pid = pid;
        unlock(w);
    }
    return rc != 0;
}

/* Whether nobody was to be there: that entry was written over, and is put right. */
static bool
is_lie(struct mn_watch *w, uint32_t worker, uint32_t state)
{
    mn_mutex_lock(w->guard);
    bool lie = mn_crew_names_the_gone(w->crew, worker, state);
    unlock(w);
    return lie;
}

/* Where no descriptor is left to find out whether it lives, the zygote is believed. */
static bool
has_died(const struct mn_member *m, uint32_t state)
{
    int rc = mn_proc_alive((pid_t)m->pid);
    return rc == 0 || (rc < 0 && state == MN_WORKER_EXITED);
}

/* Whether the zygote should have said or done something. due: it is time to look at all. */
static bool
look_at(struct mn_watch *w, uint32_t worker, bool due)
{
    struct mn_worker *k = mn_worker_at(&w->crew->shm, worker);
    struct mn_member *m = &w->crew->members[worker];
    /* First, so that what it says is no older: it may start and work while it is looked at. */
    bool worked = mn_a32_load_acquire(&m->worked) != 0; /* with mn_crew_has_worked */
    uint32_t state = mn_a32_load_seqcst(&k->state); /* [S2] */
    MN_FAULT("watch.looks");
    if (m->pid == 0) {
        bool there = may_be(w, state, worked) || state == MN_WORKER_EXITED;
        /* Now and then whatever it says: it may be written over before its process was seen. */
        bool gone = (there || due) && !note_who(w, worker) && there;
        if (gone && state != MN_WORKER_EXITED && is_lie(w, worker, state)) {
            return false;
        }
        return state == MN_WORKER_SWEPT
               || (due && gone && state != MN_WORKER_EXITED);
    }
    if (!m->dead && (due || state == MN_WORKER_EXITED || mn_a32_load_acquire(&m->end) != 0)) {
        m->dead = has_died(m, state);
    }
    if (m->dead) {
        return due && state != MN_WORKER_EXITED;
    }
    if (!may_be(w, state, worked)) {
        mn_mutex_lock(w->guard);
        mn_crew_damaged(w->crew, worker, MN_DAMAGE_STATE);
        unlock(w);
    }
    if (mn_a32_load_acquire(&m->end) != 0
        && mn_proc_kill((pid_t)m->pid, SIGKILL) == 0) {
        mn_a32_store_relaxed(&m->end, 0); /* else it is tried again */
    }
    return false;
}

/* Whether a worker is to be made, or is being made: a stopped zygote never comes to that, and one
 * that hangs in what the program has do at forks does not, either. */
static bool
is_to_come(const struct mn_crew *c)
{
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        const struct mn_worker *k = mn_worker_at(&c->shm, i);
        uint32_t state = mn_a32_load_acquire(&k->state);
        bool nobody = c->members[i].pid == 0; /* else somebody is there, whatever it says */
        if (nobody && (state == MN_WORKER_WANTED
                       || (state == MN_WORKER_STARTING && mn_worker_pid(k) == 0))) {
            return true;
        }
    }
    return false;
}

static uint32_t
how_made(const struct mn_crew *c)
{
    return mn_a32_load_acquire(&c->shm.ctl->start); /* enum mn_start */
}

static bool
has_hung(const struct mn_watch *w)
{
    bool forked = how_made(w->crew) == MN_START_FORKED;
    return w->unanswered >= UNANSWERED_MOST
           || w->starts_nobody >= (forked ? STARTS_NOBODY_MOST : STARTS_NOBODY_MOST_EACH);
}

/* owed: it should have said or done something. One that forks has its hands full, for a while, and
 * to begin, which imports torch, may take as long as the machine likes. */
static void
expect_answer(struct mn_watch *w, bool owed, bool to_come)
{
    const struct mn_crew *c = w->crew;
    uint32_t starts = 0;
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        starts += mn_worker_starts(mn_worker_at(&c->shm, i));
    }
    bool none = starts == w->starts_seen;
    bool loaded = how_made(c) != MN_START_UNKNOWN;
    w->unanswered = owed && loaded && none ? w->unanswered + 1 : 0;
    w->starts_nobody = to_come && loaded && none ? w->starts_nobody + 1 : 0;
    w->starts_seen = starts;
    w->hung = owed || to_come ? w->hung : 0;
    if (has_hung(w)) {
        w->hung++;
        w->unanswered = w->starts_nobody = 0; /* another zygote begins anew */
        c->executor->end(c->executor, w->hung >= HUNG_MOST);
    }
}

void
mn_watch_look(struct mn_watch *w, uint64_t now_ns)
{
    struct mn_crew *c = w->crew;
    if (!c->executor->processes || mn_a32_load_relaxed(&c->lost) != 0
        || mn_a32_load_acquire(&c->shm.ctl->stop) != 0) {
        return;
    }
    bool due = now_ns - w->looked_ns >= LOOK_NS, owed = false;
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        owed |= look_at(w, i, due);
    }
    if (due) {
        w->looked_ns = now_ns;
        expect_answer(w, owed, is_to_come(c));
    }
    if (c->executor->gone(c->executor)) {
        mn_mutex_lock(w->guard);
        mn_crew_lose_executor(c, w->hung != 0);
        unlock(w);
    }
}
