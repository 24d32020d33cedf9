/* mn_crew.c - see mn_crew.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "workers/mn_crew.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>

#include "base/mn_fault.h"

int
mn_crew_open(struct mn_crew *c, const struct mn_shm *shm, bool respawn)
{
    *c = (struct mn_crew){.shm = *shm, .respawn = respawn};
    c->members = calloc(shm->ctl->nworkers, sizeof(*c->members));
    return c->members != NULL ? 0 : -ENOMEM;
}

void
mn_crew_close(struct mn_crew *c)
{
    free(c->members);
    *c = (struct mn_crew){0};
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
    bool asked = m->asked || !c->executor->processes; /* a thread's entry is trusted */
    bool left = mn_a32_load_relaxed(&k->exit_request) != 0 && asked && !damaged;
    uint64_t tasks = mn_a64_load_relaxed(&k->tasks_done); /* it is gone: the count is final */
    int32_t status = (int32_t)mn_a32_load_relaxed(&k->exit_status);
    uint64_t row = mn_a64_load_relaxed(&mn_worker_at(&c->shm, worker)->row);
    struct mn_death death = {worker, mn_crew_pid(c, worker), status_of(status), row};
    if (damaged) {
        death.status = MN_STATUS_DAMAGED + (int32_t)m->damage;
    }
    bool late = m->late != 0 && death.status == -SIGKILL;
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

bool
mn_crew_is_wanted(const struct mn_crew *c, uint32_t worker)
{
    return c->members[worker].wanted;
}

bool
mn_crew_stays(const struct mn_crew *c, uint32_t worker)
{
    return c->members[worker].wanted && !c->members[worker].asked;
}

void
mn_crew_retire(struct mn_crew *c, uint32_t worker)
{
    c->members[worker].retired = true;
    mn_worker_at(&c->shm, worker)->retired = 1;
}

/* Resets the parts of a worker's entry that others rely on while it lives. */
static void
clear(struct mn_worker *k)
{
    mn_a64_store_relaxed(&k->since_ns, 0);
    mn_a64_store_relaxed(&k->running, 0);
    mn_a32_store_relaxed(&k->lease_state, MN_LEASE_IDLE);
}

void
mn_crew_swept(struct mn_crew *c, uint32_t worker)
{
    struct mn_worker *k = mn_worker_at(&c->shm, worker);
    clear(k);
    mn_a32_store_relaxed(&c->members[worker].worked, 0); /* now that its results were read */
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

/* Returns whether the entry itself says, too, that no process can be there. If it is WANTED or
 * STARTING, the zygote may make one, even if a stray write caused that. Such a worker is then like
 * any other. */
static bool
names_no_process(struct mn_worker *k, uint32_t state)
{
    return state == MN_WORKER_EMPTY
           || (mn_worker_pid(k) == 0 && state != MN_WORKER_WANTED
               && state != MN_WORKER_STARTING && state != MN_WORKER_SWEPT);
}

static void
put_right(struct mn_worker *k, uint32_t state)
{
    clear(k);
    if (state != MN_WORKER_EMPTY) { /* unless the zygote has written something meanwhile */
        (void)mn_a32_cas_seqcst(&k->state, &state, MN_WORKER_EMPTY);
    }
}

void
mn_crew_clear_empty(struct mn_crew *c)
{
    for (uint32_t w = 0; w < c->shm.ctl->nworkers; w++) {
        struct mn_worker *k = mn_worker_at(&c->shm, w);
        uint32_t state = mn_a32_load_acquire(&k->state);
        if (is_empty(c, w) && names_no_process(k, state)) {
            put_right(k, state);
        }
    }
}

bool
mn_crew_names_the_gone(struct mn_crew *c, uint32_t worker, uint32_t state)
{
    bool empty = is_empty(c, worker);
    if (empty) {
        put_right(mn_worker_at(&c->shm, worker), state);
    }
    return empty;
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
mn_crew_late(struct mn_crew *c, uint32_t worker, uint64_t word)
{
    struct mn_member *m = &c->members[worker];
    m->late = word;
    mn_a32_store_release(&m->end, 1); /* the engine thread does it */
    c->wakes.engine = true;
}

bool
mn_crew_is_damaged(const struct mn_crew *c, uint32_t worker)
{
    return c->members[worker].damage != MN_SOUND;
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
mn_crew_lose_executor(struct mn_crew *c, bool hung)
{
    if (mn_a32_load_relaxed(&c->lost) == 0) {
        c->wakes.all_sleepers = true;
        c->hung = hung;
        mn_a32_store_relaxed(&c->lost, 1);
    }
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

void
mn_crew_notify(const struct mn_crew *c, uint32_t n)
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

void
mn_crew_wake(const struct mn_crew *c, const struct mn_wakes *due)
{
    MN_FAULT("crew.wake");
    if (due->engine) {
        (void)mn_event_notify_released(&c->shm.ctl->engine);
    }
    if (due->executor && c->executor != NULL) {
        c->executor->check_table(c->executor);
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
        mn_crew_notify(c, due->workers);
    }
}
