/* mn_crew.h - supervision of the workers: which exist, which have died, which to wake.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns the trainer's side of the table of workers: deaths, which dead workers are replaced, and the
 * wake-ups that are due. It knows workers, but no batches. The code that composes it with tasks
 * and leases takes back what a dead worker had, between mn_crew_record_death and mn_crew_swept:
 *
 *   EXITED - mn_crew_exited -> mn_crew_record_death -> (tasks, leases) -> mn_crew_swept - SWEPT
 *
 * An executor makes and reaps the workers: a zygote that forks processes, or threads that serve
 * themselves. It is told to check the table; a zygote is asked whether it lives, too.
 *
 * Lock. None of its own: all functions need the owner's lock unless they say otherwise, and make
 * no system call under it. So wake-ups are noted (mn_wakes), taken under the lock, and made
 * without it:
 *
 *     struct mn_wakes due = mn_crew_take_wakes(c);
 *     unlock
 *     mn_crew_wake(c, &due);
 *
 * A wake-up is noted after its cause was stored, so a late notification is late but not lost. A
 * notification of an event without a sleeper costs a load, and an unnecessary one costs a look.
 */
#ifndef MN_CREW_H
#define MN_CREW_H

#include <stdbool.h>
#include <stdint.h>

#include "os/mn_thread.h"
#include "workers/mn_records.h"
#include "workers/mn_tasks_and_retries.h"

/* ---- Whether a dead worker is replaced, and after which pause ----
 *
 * Purpose
 *   What ends one worker may end the next as well: a sample, worker_init_fn, a lack of memory.
 *   The caller must not wait for workers that will never exist, and the machine must not be
 *   busy with starting them.
 *
 * Rule, for each place of the crew
 *   A death after a finished task begins anew. A series of deaths without one is a crash loop.
 *   The pause before the next worker is none, then MN_RESPAWN_PAUSE_FIRST_MS, and doubles up
 *   to MN_RESPAWN_PAUSE_MOST_MS. The series has no end here: if the workers die while they run
 *   a task, it ends with that task's attempts (mn_tasks_and_retries.h).
 *   Workers that die while they start have no task. After MN_RESPAWN_DEATHS of them in a row,
 *   over a time, the place is not filled again. The time is MN_RESPAWN_NS, or
 *   MN_RESPAWN_KILLED_NS if the last one was killed. A worker that the system would not make
 *   was tried for seconds already, and counts as if that time was over. So does one whose records
 *   made no sense.
 *
 * A pure state machine: no clock, no lock, no system call.
 */

/* From a tenth of a second, which a user does not notice, to one second, which costs the machine
 * next to nothing. */
#define MN_RESPAWN_PAUSE_FIRST_MS 100u
#define MN_RESPAWN_PAUSE_MOST_MS 1000u
/* A cause that ends this many in a row, for this long, does not go away. A process that kills at
 * random, or a machine that is short of memory, hits one or two. */
#define MN_RESPAWN_DEATHS 3u
#define MN_RESPAWN_NS UINT64_C(3000000000)
/* A killer, usually another program, may hit several in a row. */
#define MN_RESPAWN_KILLED_NS UINT64_C(30000000000)

/* The history of one place. Zeroed memory is a place without deaths. */
struct mn_respawn {
    uint32_t crash_loop; /* deaths in a row without a finished task */
    uint32_t unready;    /* how many of them, the last ones, while the worker started */
    uint64_t unready_ns; /* when the first of those was seen */
};

struct mn_respawn_death {
    bool finished;    /* the worker has finished a task */
    bool began;       /* it had started: it was READY */
    bool killed;      /* by SIGKILL or SIGTERM */
    bool not_started; /* the system has not made it, or its records made no sense */
    uint64_t now_ns;
};

/* Wake-ups to make after the lock is released. Zeroed memory means none. */
struct mn_wakes {
    bool engine;      /* the engine thread must look again */
    bool leases;      /* leases were answered */
    bool executor;    /* the executor must check the table: a worker is WANTED, SWEPT or asked to
                       * exit */
    bool all_sleepers; /* after a death: also sleepers whose wake-up the dead worker had claimed */
    uint32_t workers; /* sleeping workers to wake at most: one for each task that was queued */
};

struct mn_crew {
    struct mn_shm shm;
    int zygote;          /* its pidfd, which the owner sets; -1: none, workers are threads */
    int command;         /* write end of its pipe: one byte means "check the table"; -1: none */
    struct mn_member {
        uint32_t damage; /* enum mn_damage: it is to be ended for this, and still exists */
        struct mn_respawn respawn; /* what its deaths say about the next one */
        bool wanted;     /* a worker exists or is to come, whatever its entry says */
        bool asked;      /* to exit, by the trainer: its entry may say anything */
        bool retired;    /* by the user */
        uint64_t tasks;  /* finished in this place before the present worker came */
        /* Facts about its process: see mn_watch. Only the watching thread writes them,
         * pid under the lock. */
        uint32_t pid;    /* 0: not seen yet, or swept */
        bool dead;       /* it was dead at the last look */
        mn_a32 end;      /* it is to be killed; set by any thread */
        uint64_t late;   /* word of the task for which it is; 0: for none */
    } *members;          /* [nworkers] */
    bool respawn;        /* dead workers are replaced */
    uint32_t ndeaths;    /* unexpected ones */
    struct mn_death death; /* the last */
    mn_a32 lost;         /* the executor is gone; written under the lock */
    bool hung;           /* and was ended, because it did not answer */
    struct mn_wakes wakes;
};

/* Returns 0 or -ENOMEM. */
int
mn_crew_open(struct mn_crew *c, const struct mn_shm *shm, bool respawn);

void
mn_crew_close(struct mn_crew *c);

/* Returns whether the executor has seen this worker dead and waits for mn_crew_swept(). If its
 * process is known, it must be gone, too, because an entry may say anything. */
bool
mn_crew_exited(const struct mn_crew *c, uint32_t worker);

/* Returns the process id of a worker, as recorded while the process lived, because its entry may
 * say anything. If none was recorded, returns what the entry says; 0 if the entry has no worker. */
uint32_t
mn_crew_pid(const struct mn_crew *c, uint32_t worker);

/* Counts a death, and returns its description. The dead worker's tasks and memory are not free yet.
 * struct mn_respawn decides whether and when it is replaced. */
struct mn_death
mn_crew_record_death(struct mn_crew *c, uint32_t worker, uint64_t now_ns);

/* Returns the longest present series of deaths in one place without a finished task. */
uint32_t
mn_crew_crash_loop(const struct mn_crew *c);

/* Asks a worker to exit when it has no task. That is not a death, and it is not replaced.
 * MN_EXIT_NOT: takes the request back. */
void
mn_crew_ask_to_exit(struct mn_crew *c, uint32_t worker, enum mn_exit_request how);

/* Requests a worker for this place. */
void
mn_crew_want(struct mn_crew *c, uint32_t worker);

/* The user ends this worker: it will not be replaced. */
void
mn_crew_retire(struct mn_crew *c, uint32_t worker);

/* Its tasks and memory were taken back: it may be reaped, and replaced where that helps. */
void
mn_crew_swept(struct mn_crew *c, uint32_t worker);

/* Ends a worker for its damaged records, because nothing that it writes can be trusted. A process
 * is killed (mn_watch_look), a thread asked to exit. Does nothing if the place has no
 * worker. */
void
mn_crew_damaged(struct mn_crew *c, uint32_t worker, enum mn_damage what);

/* The signal by which a worker writes its stack and dies: see minato/worker_exits.py. */
#define MN_LATE_SIGNAL (SIGRTMAX - 4)

/* Notes that a sample of the task with this word takes too long. end: also kills the worker. */
void
mn_crew_late(struct mn_crew *c, uint32_t worker, uint64_t word, bool end);

/* Returns the number of workers that may still finish a task. */
uint32_t
mn_crew_live(const struct mn_crew *c);

/* Another executor has taken the place of one that is gone. */
void
mn_crew_replace_executor(struct mn_crew *c);

/* Returns the wake-ups that are due, which the caller must make now. */
struct mn_wakes
mn_crew_take_wakes(struct mn_crew *c);

/* Makes wake-ups. Call it without the lock. */
void
mn_crew_wake(const struct mn_crew *c, const struct mn_wakes *due);

/* Wakes every worker, whatever it waits for. Call it without the lock. */
void
mn_crew_notify_all(const struct mn_crew *c);

/* ---- the trainer's own observation of workers' processes ----
 *
 * The zygote reports deaths. That is not enough: a zygote that is stopped or hangs reports nothing.
 * So the crew records which process has which entry (struct mn_member). It checks now and then
 * whether the process lives. It takes back a worker's tasks only when it does not, and kills it by
 * that record.
 *
 * Each look uses a descriptor of the process (os/mn_proc.h), opened for it and closed again, so
 * that descriptors do not grow with workers. All of this runs without the lock that guards the
 * crew (guard), which is taken for fields that other threads read. Only one thread may call this:
 * the one that sweeps. It passes the time. Native workers have no process of their own, and are
 * not watched.
 */

/* Zeroed but for the first two. */
struct mn_watch {
    struct mn_crew *crew;
    struct mn_mutex *guard;
    uint64_t looked_ns;   /* time of the last look at all workers */
    /* Numbers of looks in a row without a new process of the zygote: */
    uint32_t unanswered;          /* at which it owed an answer */
    uint32_t looks_without_start; /* at which a worker was to be started */
    uint32_t starts_seen;         /* processes that it had started at that time */
    uint32_t hung; /* zygotes in a row that were ended because they hung */
};

/* Checks which processes live, and whether the zygote answers. Call it before each round of
 * sweeps, without guard. */
void
mn_watch_look(struct mn_watch *w, uint64_t now_ns);

#endif
