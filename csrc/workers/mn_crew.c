/* mn_crew.c - see mn_crew.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_crew.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_proc.h"

/* ---- whether a dead worker is replaced ---- */

/* Records a death that was not asked for. Returns whether to replace the worker. */
static bool
mn_respawn_died(struct mn_respawn *r, const struct mn_respawn_death *death)
{
    r->crash_loop = death->finished ? 0 : r->crash_loop + 1;
    if (death->finished || death->began) {
        r->unready = 0;
        return true;
    }
    if (r->unready++ == 0) {
        r->unready_ns = death->now_ns;
    }
    uint64_t most_ns = death->killed ? MN_RESPAWN_KILLED_NS : MN_RESPAWN_NS;
    bool long_ago = death->not_started || death->now_ns - r->unready_ns >= most_ns;
    return r->unready < MN_RESPAWN_DEATHS || !long_ago;
}

/* Returns how long the next worker waits. */
static uint16_t
mn_respawn_pause_ms(const struct mn_respawn *r)
{
    if (r->crash_loop < 2) {
        return 0;
    }
    uint32_t doublings = r->crash_loop - 2;
    return (uint16_t)(doublings < 4 ? MN_RESPAWN_PAUSE_FIRST_MS << doublings
                                    : MN_RESPAWN_PAUSE_MOST_MS);
}

int
mn_crew_open(struct mn_crew *c, const struct mn_shm *shm, bool respawn)
{
    *c = (struct mn_crew){.shm = *shm, .zygote = -1, .command = -1, .respawn = respawn};
    c->members = calloc(shm->ctl->nworkers, sizeof(*c->members));
    return c->members != NULL ? 0 : -ENOMEM;
}

void
mn_crew_close(struct mn_crew *c)
{
    free(c->members);
    c->members = NULL;
}

/* ---- deaths -------------------------------------------------------------------------- */

bool
mn_crew_exited(const struct mn_crew *c, uint32_t worker)
{
    struct mn_worker *k = mn_worker_at(&c->shm, worker);
    const struct mn_member *m = &c->members[worker];
    return mn_a32_load_seqcst(&k->state) == MN_WORKER_EXITED /* [S2], before a sleep */
           && (m->pid == 0 || m->dead);
}

uint32_t
mn_crew_pid(const struct mn_crew *c, uint32_t worker)
{
    const struct mn_worker *k = mn_worker_at(&c->shm, worker);
    uint32_t seen = c->members[worker].pid, state = mn_a32_load_acquire(&k->state);
    bool entry_is_empty = state == MN_WORKER_EMPTY || state == MN_WORKER_WANTED;
    return seen != 0 ? seen : entry_is_empty ? 0 : mn_worker_pid(k);
}

/* Returns an exit code, a signal or an error number, even from a damaged status. */
static int32_t
status_of(int32_t status)
{
    return status > -128 && status < MN_STATUS_DAMAGED ? status : 255;
}

struct mn_death
mn_crew_record_death(struct mn_crew *c, uint32_t worker, uint64_t now_ns)
{
    struct mn_worker *k = mn_worker_at(&c->shm, worker);
    struct mn_member *m = &c->members[worker];
    bool stopping = mn_a32_load_acquire(&c->shm.ctl->stop) != 0;
    bool damaged = m->damage != MN_SOUND; /* it was counted when the damage was found */
    bool asked = m->asked || c->zygote < 0; /* a thread's entry is trusted */
    bool left = mn_a32_load_relaxed(&k->exit_request) != 0 && asked && !damaged;
    uint64_t tasks = mn_a64_load_relaxed(&k->tasks_done); /* it is gone: the count is final */
    int32_t status = (int32_t)mn_a32_load_relaxed(&k->exit_status);
    uint64_t row = mn_a64_load_relaxed(&mn_worker_at(&c->shm, worker)->row);
    struct mn_death death = {worker, mn_crew_pid(c, worker), status_of(status), row};
    if (damaged) {
        death.status = MN_STATUS_DAMAGED + (int32_t)m->damage;
    }
    bool late = m->late != 0
                && (death.status == -SIGKILL || death.status == -MN_LATE_SIGNAL);
    death.status = late ? MN_STATUS_LATE : death.status;
    bool again = false;
    if (!stopping && !left) {
        c->ndeaths += !damaged;
        c->death = death;
        struct mn_respawn_death how = {
            .finished = tasks != m->tasks || late,
            .began = k->began != 0,
            .killed = death.status == -SIGKILL || death.status == -SIGTERM,
            .not_started = death.status >= MN_STATUS_NOT_STARTED,
            .now_ns = now_ns};
        again = mn_respawn_died(&m->respawn, &how);
    }
    else if (tasks != m->tasks) { /* it has worked: the next deaths are a new series */
        m->respawn = (struct mn_respawn){0};
    }
    m->tasks = tasks;
    m->damage = MN_SOUND;
    m->late = 0;
    m->asked = false;
    m->pid = 0;
    m->dead = false;
    mn_a32_store_relaxed(&m->end, 0);
    k->retired = m->retired;
    k->respawn = m->wanted = again && c->respawn && !m->retired;
    k->pause_ms = mn_respawn_pause_ms(&m->respawn);
    k->began = 0;
    mn_a32_store_relaxed(&k->exit_request, 0);
    return death;
}

void
mn_crew_ask_to_exit(struct mn_crew *c, uint32_t worker, enum mn_exit_request how)
{
    c->members[worker].asked = how != MN_EXIT_NOT;
    mn_a32_store_seqcst(&mn_worker_at(&c->shm, worker)->exit_request, how);
}

void
mn_crew_want(struct mn_crew *c, uint32_t worker)
{
    c->members[worker].wanted = true;
    mn_a32_store_seqcst(&mn_worker_at(&c->shm, worker)->state, MN_WORKER_WANTED);
}

void
mn_crew_retire(struct mn_crew *c, uint32_t worker)
{
    c->members[worker].retired = true;
    mn_worker_at(&c->shm, worker)->retired = 1;
}

void
mn_crew_swept(struct mn_crew *c, uint32_t worker)
{
    struct mn_worker *k = mn_worker_at(&c->shm, worker);
    mn_a64_store_relaxed(&k->since_ns, 0);
    mn_a64_store_relaxed(&k->running, 0);
    mn_a32_store_relaxed(&k->lease_state, MN_LEASE_IDLE);
    mn_a32_store_seqcst(&k->state, MN_WORKER_SWEPT);
    /* There may be tasks again, and there is news. */
    c->wakes.executor = c->wakes.all_sleepers = true;
}

static bool
is_empty(const struct mn_crew *c, uint32_t worker)
{
    const struct mn_member *m = &c->members[worker];
    return !m->wanted && m->pid == 0;
}

void
mn_crew_damaged(struct mn_crew *c, uint32_t worker, enum mn_damage what)
{
    struct mn_worker *k = mn_worker_at(&c->shm, worker);
    struct mn_member *m = &c->members[worker];
    if (m->damage == MN_SOUND && !is_empty(c, worker)) {
        m->damage = what;
        c->ndeaths++;
        int32_t status = MN_STATUS_DAMAGED + (int32_t)what;
        c->death = (struct mn_death){worker, mn_crew_pid(c, worker), status, MN_NO_ROW};
        mn_a32_store_seqcst(&k->exit_request, MN_EXIT_SHRINK);
        mn_a32_store_release(&m->end, 1); /* the engine thread does it */
        c->wakes.engine = c->wakes.all_sleepers = true;
    }
}

void
mn_crew_late(struct mn_crew *c, uint32_t worker, uint64_t word, bool end)
{
    struct mn_member *m = &c->members[worker];
    m->late = word;
    if (end) {
        mn_a32_store_release(&m->end, 1); /* the engine thread does it */
        c->wakes.engine = true;
    }
}

uint32_t
mn_crew_crash_loop(const struct mn_crew *c)
{
    uint32_t longest = 0;
    for (uint32_t w = 0; w < c->shm.ctl->nworkers; w++) {
        uint32_t own = c->members[w].respawn.crash_loop;
        longest = own > longest ? own : longest;
    }
    return longest;
}

uint32_t
mn_crew_live(const struct mn_crew *c)
{
    uint32_t live = 0;
    for (uint32_t w = 0; w < c->shm.ctl->nworkers; w++) {
        live += c->members[w].wanted;
    }
    return live;
}

void
mn_crew_replace_executor(struct mn_crew *c)
{
    mn_a32_store_relaxed(&c->lost, 0);
    c->wakes.engine = true;
}

/* ---- wake-ups ------------------------------------------------------------------------ */

/* Returns whether a queue may have an entry. */
static bool
waits_on(const struct mn_crew *c, uint32_t queue)
{
    const struct mn_queue *l = mn_queue_at(&c->shm, queue);
    return mn_a64_load_acquire(&l->hint) != mn_a64_load_seqcst(&l->tail);
}

/* Wakes a sleeping worker; returns whether it slept. The event may also have other sleepers: dead
 * ones, and threads that wait to be wanted. */
static bool
notify_worker(const struct mn_crew *c, uint32_t w)
{
    struct mn_worker *k = mn_worker_at(&c->shm, w);
    return mn_a32_load_seqcst(&k->state) == MN_WORKER_READY /* [R2] */
           && mn_event_notify(&k->event);
}

/* Wakes up to n sleeping workers that may find tasks. */
static void
notify_some(const struct mn_crew *c, uint32_t n)
{
    uint32_t workers = c->shm.ctl->nworkers;
    for (uint32_t w = 0; w < workers && n != 0; w++) { /* own queues come first */
        n -= waits_on(c, MN_QUEUE_WORKER + w) && notify_worker(c, w);
    }
    bool shared = waits_on(c, MN_QUEUE_EXPRESS) || waits_on(c, MN_QUEUE_NORMAL);
    for (uint32_t w = 0; w < workers && shared && n != 0; w++) {
        n -= notify_worker(c, w);
    }
}

void
mn_crew_notify_all(const struct mn_crew *c)
{
    for (uint32_t w = 0; w < c->shm.ctl->nworkers; w++) {
        mn_event_notify(&mn_worker_at(&c->shm, w)->event);
        mn_event_notify(&mn_worker_at(&c->shm, w)->lease_event);
    }
}

struct mn_wakes
mn_crew_take_wakes(struct mn_crew *c)
{
    struct mn_wakes due = c->wakes;
    c->wakes = (struct mn_wakes){0};
    return due;
}

/* Threads serve themselves, each woken by its own event. */
static void
tell_executor(const struct mn_crew *c)
{
    if (c->command >= 0) {
        ssize_t n = write(c->command, "!", 1);
        (void)n; /* full: it was told already; closed: its death is noticed elsewhere */
        return;
    }
    for (uint32_t w = 0; w < c->shm.ctl->nworkers; w++) {
        mn_event_notify(&mn_worker_at(&c->shm, w)->event);
    }
}

void
mn_crew_wake(const struct mn_crew *c, const struct mn_wakes *due)
{
    MN_FAULT("crew.wake");
    if (due->engine) {
        (void)mn_event_notify_released(&c->shm.ctl->engine);
    }
    if (due->executor) {
        tell_executor(c);
    }
    for (uint32_t w = 0; (due->leases || due->all_sleepers) && w < c->shm.ctl->nworkers; w++) {
        struct mn_worker *k = mn_worker_at(&c->shm, w);
        if (due->all_sleepers) {
            mn_event_notify_always(&k->event);
            mn_event_notify_always(&k->lease_event);
        }
        else if (mn_a32_load_acquire(&k->lease_state) != MN_LEASE_WANT) {
            mn_event_notify(&k->lease_event); /* it has its answer */
        }
    }
    if (due->all_sleepers) { /* the dead one may have claimed it without waking */
        mn_event_notify_always(&c->shm.ctl->trainer);
    }
    if (due->workers != 0) {
        notify_some(c, due->workers);
    }
}

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

static void
unlock(struct mn_watch *w)
{
    struct mn_wakes due = mn_crew_take_wakes(w->crew);
    mn_mutex_unlock(w->guard);
    mn_crew_wake(w->crew, &due);
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
    uint32_t state = mn_a32_load_seqcst(&k->state); /* [S2] */
    MN_FAULT("watch.looks");
    if (m->pid == 0) {
        bool there = state == MN_WORKER_STARTING || state == MN_WORKER_READY
                     || state == MN_WORKER_LEAVING || state == MN_WORKER_EXITED;
        bool gone = there && !note_who(w, worker);
        return state == MN_WORKER_SWEPT
               || (due && gone && state != MN_WORKER_EXITED);
    }
    if (!m->dead && (due || state == MN_WORKER_EXITED || mn_a32_load_acquire(&m->end) != 0)) {
        m->dead = has_died(m, state);
    }
    if (m->dead) {
        return due && state != MN_WORKER_EXITED;
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
        (void)mn_proc_kill_pidfd(c->zygote, SIGKILL);
    }
}

void
mn_watch_look(struct mn_watch *w, uint64_t now_ns)
{
    struct mn_crew *c = w->crew;
    if (c->zygote < 0 || mn_a32_load_relaxed(&c->lost) != 0
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
    if (mn_proc_ended(c->zygote)) {
        mn_mutex_lock(w->guard);
        c->wakes.all_sleepers = true;
        c->hung = w->hung >= HUNG_MOST; /* else another may start */
        mn_a32_store_relaxed(&c->lost, 1);
        unlock(w);
    }
}
