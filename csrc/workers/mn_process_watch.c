/* mn_process_watch.c - see mn_process_watch.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_process_watch.h"

#include <signal.h>

#include "base/mn_fault.h"
#include "os/mn_proc.h"

/* A look at each worker takes a microsecond or two. */
#define LOOK_NS UINT64_C(1000000000)
/* A working zygote answers in milliseconds; if the machine swaps, or it forks with much memory,
 * within seconds. This counts looks, not time: while the trainer itself is stopped, too, none are
 * counted. */
#define UNANSWERED_MOST 10u
/* Looks in a row without a new worker although one is wanted. A fork of a terabyte takes ten
 * seconds, and a zygote tries as long if the system refuses. If it waits for each worker's
 * interpreter to import the program, that may take minutes. */
#define LOOKS_WITHOUT_START_MOST 30u
#define LOOKS_WITHOUT_START_MOST_EACH 600u
/* This many zygotes in a row that hang are an error: a function that the program has registered
 * for forks may hang in each. */
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

/* Returns whether an entry may have this state while its process lives. An entry in STARTING gets
 * no wake-ups. */
static bool
may_be(const struct mn_watch *w, uint32_t state, bool worked)
{
    bool stopped = mn_a32_load_acquire(&w->crew->shm.ctl->stop) != 0;
    return (state == MN_WORKER_STARTING && !worked) || state == MN_WORKER_READY
           || (state == MN_WORKER_LEAVING && stopped);
}

/* Records the process of a new worker. Returns false if it is gone by now, and the zygote has to
 * say so. */
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

/* Returns whether the place should have no worker: then its entry was overwritten, and is
 * repaired. */
static bool
is_lie(struct mn_watch *w, uint32_t worker, uint32_t state)
{
    mn_mutex_lock(w->guard);
    bool lie = mn_crew_names_the_gone(w->crew, worker, state);
    unlock(w);
    return lie;
}

/* Returns whether the process has died. If no descriptor is left to find out, trusts the zygote. */
static bool
has_died(const struct mn_member *m, uint32_t state)
{
    int rc = mn_proc_alive((pid_t)m->pid);
    return rc == 0 || (rc < 0 && state == MN_WORKER_EXITED);
}

/* Returns whether the zygote should have reported or done something. due: a full look is due. */
static bool
look_at(struct mn_watch *w, uint32_t worker, bool due)
{
    struct mn_worker *k = mn_worker_at(&w->crew->shm, worker);
    struct mn_member *m = &w->crew->members[worker];
    /* First, so that its statement is no older: the worker may start and work during this look. */
    bool worked = mn_a32_load_acquire(&m->worked) != 0; /* with mn_crew_has_worked */
    uint32_t state = mn_a32_load_seqcst(&k->state); /* [S2] */
    MN_FAULT("watch.looks");
    if (m->pid == 0) {
        bool there = may_be(w, state, worked) || state == MN_WORKER_EXITED;
        /* Also now and then for any state: the entry may be overwritten before its process was
         * seen. */
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

/* Returns whether a worker is to be made or is being made. A stopped zygote never does that;
 * neither does one that hangs in the program's fork handlers. */
static bool
is_to_come(const struct mn_crew *c)
{
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        const struct mn_worker *k = mn_worker_at(&c->shm, i);
        uint32_t state = mn_a32_load_acquire(&k->state);
        bool no_process = c->members[i].pid == 0; /* else a worker exists, despite its entry */
        if (no_process && (state == MN_WORKER_WANTED
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
           || w->looks_without_start
                  >= (forked ? LOOKS_WITHOUT_START_MOST : LOOKS_WITHOUT_START_MOST_EACH);
}

/* Counts looks without an answer. owed: the zygote should have reported or done something. A zygote
 * that forks is busy for a while. Its start, which imports torch, may take as long as the machine
 * needs. */
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
    w->looks_without_start = to_come && loaded && none ? w->looks_without_start + 1 : 0;
    w->starts_seen = starts;
    w->hung = owed || to_come ? w->hung : 0;
    if (has_hung(w)) {
        w->hung++;
        w->unanswered = w->looks_without_start = 0; /* another zygote begins anew */
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
        mn_crew_lose_executor(c, w->hung >= HUNG_MOST); /* else another may start */
        unlock(w);
    }
}
