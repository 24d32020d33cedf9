/* mn_process_watch.c - see mn_process_watch.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_process_watch.h"

#include <errno.h>
#include <signal.h>
#include <unistd.h>

#include "os/mn_proc.h"

/* A read of /proc for each worker takes some ten microseconds. */
#define LOOK_NS UINT64_C(1000000000)
/* A zygote that works answers in milliseconds, and where the machine swaps, or a fork of much
 * memory is under way, within seconds. Looks, not time: while the trainer itself is stopped, too,
 * none are counted. */
#define UNANSWERED_MOST 10u

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

/* What an entry may say while its process lives. */
static bool
may_be(uint32_t state)
{
    return state == MN_WORKER_STARTING || state == MN_WORKER_READY;
}

/* Notes who has come. False where that is gone by now, and the zygote has to say so. */
static bool
note_who(struct mn_watch *w, uint32_t worker)
{
    const struct mn_worker *k = mn_worker_at(&w->crew->shm, worker);
    uint32_t pid = k->pid;
    uint64_t born = k->born;
    if (pid == 0 || born == 0) {
        return true; /* it is about to come */
    }
    int rc = mn_proc_alive((pid_t)pid, born);
    if (rc == 1) {
        mn_mutex_lock(w->guard);
        w->crew->members[worker].pid = pid;
        w->crew->members[worker].born = born;
        unlock(w);
    }
    return rc != 0;
}

/* Where /proc does not say whether it lives, the zygote is believed. */
static bool
has_died(const struct mn_member *m, uint32_t state)
{
    int rc = mn_proc_alive((pid_t)m->pid, m->born);
    return rc == 0 || (rc < 0 && state == MN_WORKER_EXITED);
}

/* The same without /proc, where a process may be hidden: a zygote is not killed for that. */
static bool
has_ended(uint32_t pid)
{
    int fd = mn_proc_pidfd((pid_t)pid);
    if (fd < 0) {
        return fd == -ESRCH;
    }
    bool ended = mn_proc_wait_pidfd(fd, 0) == 0;
    (void)close(fd);
    return ended;
}

/* Whether the zygote should have said or done something. due: it is time to look at all. */
static bool
look_at(struct mn_watch *w, uint32_t worker, bool due)
{
    struct mn_worker *k = mn_worker_at(&w->crew->shm, worker);
    struct mn_member *m = &w->crew->members[worker];
    uint32_t state = mn_a32_load_seqcst(&k->state); /* [S2] */
    if (m->pid == 0) {
        bool there = may_be(state) || state == MN_WORKER_EXITED;
        bool gone = there && !note_who(w, worker);
        return state == MN_WORKER_SWEPT
               || (due && gone && state != MN_WORKER_EXITED && has_ended(k->pid));
    }
    if (!m->dead && (due || state == MN_WORKER_EXITED || mn_a32_load_acquire(&m->end) != 0)) {
        m->dead = has_died(m, state);
    }
    if (m->dead) {
        return due && state != MN_WORKER_EXITED && has_ended(m->pid);
    }
    if (!may_be(state)) {
        mn_mutex_lock(w->guard);
        mn_crew_damaged(w->crew, worker, MN_DAMAGE_STATE);
        unlock(w);
    }
    if (mn_a32_load_acquire(&m->end) != 0
        && mn_proc_kill((pid_t)m->pid, m->born, SIGKILL) == 0) {
        mn_a32_store_relaxed(&m->end, 0); /* else it is tried again */
    }
    return false;
}

/* Whether a worker is to be made, or is being made: a stopped zygote never comes to that. One that
 * is not may take its time: a fork of much memory, pauses, a system that refuses. */
static bool
is_to_come(const struct mn_crew *c)
{
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        const struct mn_worker *k = mn_worker_at(&c->shm, i);
        uint32_t state = mn_a32_load_acquire(&k->state);
        if (state == MN_WORKER_WANTED || (state == MN_WORKER_STARTING && k->pid == 0)) {
            return true;
        }
    }
    return false;
}

/* owed: it should have said or done something. One that forks has its hands full. */
static void
expect_answer(struct mn_watch *w, bool owed)
{
    const struct mn_crew *c = w->crew;
    uint32_t starts = 0;
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        starts += mn_worker_at(&c->shm, i)->starts;
    }
    w->unanswered = owed && starts == w->starts_seen ? w->unanswered + 1 : 0;
    w->starts_seen = starts;
    if (w->unanswered == UNANSWERED_MOST) {
        c->executor->end(c->executor);
    }
}

void
mn_watch_look(struct mn_watch *w, uint64_t now_ns)
{
    struct mn_crew *c = w->crew;
    if (!c->executor->processes || c->lost || mn_a32_load_acquire(&c->shm.ctl->stop) != 0) {
        return;
    }
    bool due = now_ns - w->looked_ns >= LOOK_NS, owed = false;
    for (uint32_t i = 0; i < c->shm.ctl->nworkers; i++) {
        owed |= look_at(w, i, due);
    }
    if (due) {
        w->looked_ns = now_ns;
        owed = owed || (is_to_come(c) && c->executor->stopped(c->executor));
        expect_answer(w, owed);
    }
    if (c->executor->gone(c->executor)) {
        mn_mutex_lock(w->guard);
        mn_crew_lose_executor(c, w->unanswered >= UNANSWERED_MOST);
        unlock(w);
    }
}
