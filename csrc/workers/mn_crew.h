/* mn_crew.h - supervision of the workers: who is there, who has died, who is to be woken.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns the trainer's side of the table of workers: deaths, which of the dead are replaced, and
 * the wake-ups that are due.  Knows what a worker is, and no batch: what the dead had is taken
 * back by whoever composes this with tasks and leases, between mn_crew_bury and mn_crew_swept:
 *
 *   EXITED -- mn_crew_exited --> mn_crew_bury --> (tasks, leases) --> mn_crew_swept -- SWEPT
 *
 * An executor makes and reaps the workers: a zygote that forks processes, threads that are their
 * own, or what a test makes up.  It is told to look at the table, and asked whether it lives.
 *
 * Lock.  None of its own: under the lock of whoever owns it, and nothing here makes a system
 * call then.  So wake-ups are noted (mn_wakes), taken under the lock, and made without it:
 *
 *     struct mn_wakes due = mn_crew_take_wakes(c);
 *     unlock
 *     mn_crew_wake(c, &due);
 *
 * What is noted is noted after its cause was stored, so that a late notification is late and not
 * lost.
 * An event that nobody sleeps on costs a load, and a notification too many a look.
 */
#ifndef MN_CREW_H
#define MN_CREW_H

#include <stdbool.h>
#include <stdint.h>

#include "workers/mn_records.h"
#include "workers/mn_tasks.h"
#include "workers/policy_respawn.h"

struct mn_executor {
    /* Look at the table: somebody is WANTED, SWEPT or to leave. No lock is held. */
    void (*look)(struct mn_executor *self);
    /* Whether nobody will look any more. No lock is held. */
    bool (*gone)(struct mn_executor *self);
    /* Ends an executor that does not answer. all: and the process that would start another. */
    void (*end)(struct mn_executor *self, bool all);
    bool processes; /* its workers have processes of their own */
};

/* What is due once the lock is let go of. Zeroed memory is nothing. */
struct mn_wakes {
    bool engine;      /* the engine's thread has to look again */
    bool room;        /* leases were answered */
    bool look;        /* the executor has to look at the table */
    bool everybody;   /* after a death, also those who were claimed and not woken */
    uint32_t workers; /* so many that sleep may find tasks */
};

struct mn_crew {
    struct mn_shm shm;
    struct mn_executor *executor; /* NULL: nobody makes workers yet */
    struct mn_member {
        uint32_t damage; /* enum mn_damage: it is to leave for that */
        struct mn_respawn respawn; /* what its deaths say of the next */
        bool wanted;     /* one is here or is to come, whatever its entry says */
        bool asked;      /* to leave, by the trainer: its entry may say anything */
        bool retired;    /* by the user */
        uint64_t tasks;  /* finished in this place before the present worker came */
        /* What is known of its process: mn_process_watch.h, whose thread alone writes it, pid
         * under the lock. */
        uint32_t pid;    /* 0: not seen yet, or swept */
        bool dead;       /* it was when it was looked at last */
        mn_a32 worked;   /* a result of its was accepted: it is not starting any more */
        mn_a32 end;      /* it is to be killed; whoever found out */
    } *members;          /* [nworkers] */
    bool respawn;        /* the dead are replaced */
    uint32_t ndeaths;    /* unexpected ones */
    struct mn_death death; /* the last */
    mn_a32 lost;         /* the executor is gone; written under the lock */
    bool hung;           /* and was ended, because it did not answer */
    struct mn_wakes wakes;
};

/* 0 or -ENOMEM. */
int
mn_crew_open(struct mn_crew *c, const struct mn_shm *shm, bool respawn);

void
mn_crew_close(struct mn_crew *c);

/* Whether its executor has seen this worker dead, and waits for mn_crew_swept; and where its
 * process is known, that is not there, either: an entry may say anything. */
bool
mn_crew_exited(const struct mn_crew *c, uint32_t worker);

/* Of its process, as it was seen while that lived: its entry may say anything. Where nobody has
 * seen it, what the entry says, or 0 where that says that nobody is there. */
uint32_t
mn_crew_pid(const struct mn_crew *c, uint32_t worker);

/* A result of this worker's was accepted. */
static inline void
mn_crew_has_worked(struct mn_crew *c, uint32_t worker)
{
    mn_a32_store_release(&c->members[worker].worked, 1); /* it was READY before */
}

/* Counts a death, and says what there is to be said of it. Nothing of the dead is free yet.
 * Whether and when another comes in its place: policy_respawn.h. */
struct mn_death
mn_crew_bury(struct mn_crew *c, uint32_t worker, uint64_t now_ns);

/* The longest row of deaths in one place, up to now, in which no task was finished. */
uint32_t
mn_crew_crash_loop(const struct mn_crew *c);

/* Asks a worker to leave when it has nothing in hand: it is no death, and not replaced.
 * MN_LEAVE_NOT: never mind. */
void
mn_crew_ask_to_leave(struct mn_crew *c, uint32_t worker, enum mn_leave how);

/* A worker is to come to this place. */
void
mn_crew_want(struct mn_crew *c, uint32_t worker);

/* Whether one is in this place or is to come, whatever its entry says. */
bool
mn_crew_is_wanted(const struct mn_crew *c, uint32_t worker);

/* That, and nobody has asked it to leave. */
bool
mn_crew_stays(const struct mn_crew *c, uint32_t worker);

/* The user ends this worker: there will be no other in its place. */
void
mn_crew_retire(struct mn_crew *c, uint32_t worker);

/* What it had is taken back: it may be reaped, and replaced where that is of use. */
void
mn_crew_swept(struct mn_crew *c, uint32_t worker);

/* Puts right what was written over in places where nobody is: an entry that says that somebody is
 * there and runs a task, or waits for room, holds others up. */
void
mn_crew_clear_empty(struct mn_crew *c);

/* The same where an entry names a process that is not there any more, and says in that state that
 * it is. False, and nothing done, where somebody is to be. */
bool
mn_crew_names_the_gone(struct mn_crew *c, uint32_t worker, uint32_t state);

/* Has a worker ended, for what it wrote: nothing that it goes on to write can be trusted. A
 * process is killed (mn_process_watch.h), a thread told to leave. Nothing where nobody is. */
void
mn_crew_damaged(struct mn_crew *c, uint32_t worker, enum mn_damage what);

/* Whether it was told so and is there still. */
bool
mn_crew_is_damaged(const struct mn_crew *c, uint32_t worker);

/* Workers that may still finish something. */
uint32_t
mn_crew_live(const struct mn_crew *c);

/* The executor is gone, by itself or because it hung: whoever waits is told. */
void
mn_crew_lose_executor(struct mn_crew *c, bool hung);

/* Another executor has taken the place of one that is gone. */
void
mn_crew_replace_executor(struct mn_crew *c);

/* What is due, which is the caller's to make now. */
struct mn_wakes
mn_crew_take_wakes(struct mn_crew *c);

/* Makes it. Without the lock. */
void
mn_crew_wake(const struct mn_crew *c, const struct mn_wakes *due);

/* Wakes up to n workers that sleep and may find tasks. Without the lock. */
void
mn_crew_notify(const struct mn_crew *c, uint32_t n);

/* Wakes every worker, whatever it waits for. Without the lock. */
void
mn_crew_notify_all(const struct mn_crew *c);

/* ---- the executors that there are --------------------------------------------------- */

/* A zygote, or threads, which are told by their own events and cannot be gone. */
struct mn_zygote {
    struct mn_executor executor;
    struct mn_shm shm;
    int pidfd; /* of the standby, the zygote's parent; -1: none */
    int cmd;   /* write end of its pipe: one byte = look; -1: threads */
};

void
mn_zygote_init(struct mn_zygote *z, const struct mn_shm *shm, int pidfd, int cmd);

#endif
