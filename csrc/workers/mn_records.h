/* mn_records.h - everything trainer and workers say to each other, as records in one mapping.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Actors.  The *trainer*: the user's thread and the engine thread, one at a time, under the
 * engine's mutex.  The *zygote* forks and reaps workers.  The *workers* make samples.
 *
 * The mapping, by offset (never by pointer: every process may map it elsewhere):
 *
 *   ctl | workers[] | tasks[] | queues[] | input region | arena
 *
 *   ctl      one page: sizes, stop word, the two events of the trainer
 *   workers  one entry a worker slot: liveness, event, lease, what it runs
 *   tasks    fixed descriptors; a task is a run of neighbouring rows of one block
 *   queues    claim order: rings of (generation, task) entries, see mn_tasks_and_retries.h
 *   input    blocks: of one batch, its tasks, where its rows lie, indices, one report a row
 *   arena    rows of delivered fields, and what workers have leased
 *
 * Who owns what.
 *   - Only the trainer allocates and frees blocks, fields, leases, tasks. A worker writes its own
 *     entry, its own lease, and its RUNNING task with its rows and reports. It writes the word of a
 *     task that it claims, hints of queues, and the words of events that it notifies. It writes
 *     nothing else. So a kill at any instruction leaves every allocator whole.
 *   - The trainer writes a block and its tasks before a task word becomes QUEUED. A worker
 *     reads them only after it has made the word RUNNING.
 *
 * Order pairs (labels are repeated at the code):
 *   [T1] trainer: task word -> QUEUED, release       with [T2] worker: claim, acquire (CAS)
 *   [T3] worker: RUNNING -> DONE, seq_cst CAS        with [T4] trainer: task word, seq_cst
 *   [T3] also precedes, in the single total order, the worker's look at the trainer's event;
 *        its partner is the event's prepare_wait [B1] before the trainer's re-check [T4].
 *   [W1] trainer: which block it waits for           with [W2] worker: after its [T3]; seq_cst
 *        as these: if the worker reads none, the trainer's look is after the worker's DONE
 *   [R1] worker: READY, before it looks for tasks    with [R2] trainer: which workers to notify,
 *        after it has queued them; seq_cst: if it reads another state, the worker's look finds them
 *   [C1] worker: its PART -> DONE, then a look at the others, seq_cst: of two that end
 *        together at least one sees all of them DONE, and claims the collate task by CAS
 *   [A1] worker: running in its entry, then its      with [A2] trainer: task word, acquire, then
 *        claim's CAS, release: if no entry names a task, then no worker has claimed it, or its
 *        worker has finished it but for DONE
 *   [A3] worker: rows, then running = 0, release     with [A4] trainer: running, acquire: no worker
 *        writes to a task that its entry no longer names
 *   [S1] zygote: worker state -> EXITED, seq_cst     with [S2] trainer: state, seq_cst
 *   [L1] worker: lease WANT, seq_cst                 with [L2] trainer: seq_cst
 *        both are followed by a notification of the engine, and its look lies between
 *        prepare_wait and commit_wait: as mn_event.h asks
 *   [L3] trainer: lease GRANTED or REFUSED, seq_cst  with [L4] worker: seq_cst, as above
 *
 * Wrap. A task's generation is 32 bits and moves at each (re-)issue. An entry of a queue names task
 * and generation. So a stale entry can be claimed only if exactly 2^32 issues of one descriptor
 * pass while a worker holds the entry between two instructions.
 *
 * Crash. A worker that dies owns its RUNNING tasks, by its number in the word, and nothing
 * else. After its death is confirmed the trainer sweeps them: see mn_engine.h.
 */
#ifndef MN_RECORDS_H
#define MN_RECORDS_H

#include <stddef.h>
#include <stdint.h>

#include "base/mn_atomic.h"
#include "base/mn_base.h"
#include "sync/mn_event.h"

#define MN_PAGE 4096u
#define MN_MAGIC UINT64_C(0x6d696e61746f3031)

/* A field of a batch at least this large gets pages of its own, which the trainer hands out without
 * a copy. A smaller one is copied to ordinary memory, so that a program that retains the labels of
 * an epoch does not retain its images. 64 KiB is where a copy costs as much as the view. */
#define MN_FIELD_BIG (64u * 1024u)
#define MN_FIELD_ALIGN 64u

/* Most PART tasks of a block: the worker that ends one looks at all the others. */
#define MN_PARTS_MOST 63u

/* ---- task -------------------------------------------------------------------------- */

enum mn_task_status {
    MN_TASK_FREE = 0,
    MN_TASK_QUEUED = 1,   /* on a queue, may be claimed */
    MN_TASK_RUNNING = 2,  /* owned by the worker in the word */
    MN_TASK_DONE = 3,     /* results are published; owned by the trainer again */
    MN_TASK_LOST = 4,     /* its worker died and no retry is left */
    MN_TASK_CANCELLED = 5,
    MN_TASK_PLANNED = 6,  /* its block exists, it is on no queue yet */
    MN_TASK_WAITING = 7,  /* for the rest of its block; claimed by the worker that ends the last */
};

enum mn_task_kind {
    MN_KIND_ROWS = 0,    /* samples of a map-style dataset, each written to its row */
    MN_KIND_SAMPLES = 1, /* the same without a known layout: samples into the envelope */
    MN_KIND_BATCH = 2,   /* fetch and collate a whole batch, result into the envelope; or samples
                          * into rows, if they fit the block's layout */
    MN_KIND_RESUME = 3,  /* a new epoch begins for this worker (torch's resume marker) */
    MN_KIND_PART = 4,    /* samples into the envelope, for the block's collate task */
    MN_KIND_COLLATE = 5, /* collates the results of the block's PART tasks, in shared memory; always
                          * the block's last task. On a queue only after a death: see [C1] */
};

enum mn_task_flag {
    MN_FLAG_ENVELOPE = 1u << 0,  /* env_off, env_len hold a message */
    MN_FLAG_NO_ROOM = 1u << 1,   /* the memory limit left no memory for the envelope */
};

/* How the first sample of a task was made. */
enum mn_task_made {
    MN_MADE_APART = 0,    /* its worker had made another sample before it, */
    MN_MADE_NEXT = 1,     /* the sample before it in the sampler's order, */
    MN_MADE_FIRST = 2,    /* or none at all */
};

/* The worker of a task whose word was overwritten: mn_tasks_word(). */
#define MN_TASK_NOBODY 0xffffu

/* generation 63..32 | worker 31..16 | attempt 15..8 | status 7..0 */
static inline uint64_t
mn_task_word(uint32_t gen, uint32_t worker, uint32_t attempt, enum mn_task_status st)
{
    return (uint64_t)gen << 32 | (uint64_t)(worker & 0xffffu) << 16
           | (uint64_t)(attempt & 0xffu) << 8 | (uint64_t)st;
}

static inline uint32_t
mn_word_gen(uint64_t w)
{
    return (uint32_t)(w >> 32);
}

static inline uint32_t
mn_word_worker(uint64_t w)
{
    return (uint32_t)(w >> 16) & 0xffffu;
}

static inline uint32_t
mn_word_attempt(uint64_t w)
{
    return (uint32_t)(w >> 8) & 0xffu;
}

static inline enum mn_task_status
mn_word_status(uint64_t w)
{
    return (enum mn_task_status)(w & 0xffu);
}

struct mn_task {
    mn_a64 word;
    uint64_t block_off;  /* trainer, before QUEUED */
    uint32_t row0;
    uint32_t nrows;
    uint32_t kind;
    uint32_t made; /* enum mn_task_made; worker, before DONE */
    uint64_t env_off;  /* worker, before DONE */
    uint64_t env_len;
    uint32_t flags;
    uint32_t why; /* why it was started: enum mn_dispatch_why; trainer, before QUEUED */
    uint64_t wall_ns;
    uint64_t cpu_ns;
    uint64_t done_ns;  /* monotonic clock at DONE */
    uint64_t pad0[6];
};
MN_STATIC_ASSERT(sizeof(struct mn_task) == 128, "a task is two cache lines");

/* ---- block: one batch -------------------------------------------------------------- */

enum mn_row_status {
    MN_ROW_NONE = 0,
    MN_ROW_WRITTEN = 1,   /* its fields contain it */
    MN_ROW_ENVELOPE = 2,  /* it travels in the task's envelope */
};

struct mn_report {
    uint32_t status;
    uint32_t pad0;
    uint64_t wall_ns;
};
MN_STATIC_ASSERT(sizeof(struct mn_report) == 16, "report layout");
/* The distance from one wall_ns to the next, in an array of uint64_t. */
#define MN_REPORT_STEP (sizeof(struct mn_report) / sizeof(uint64_t))

enum mn_index_kind {
    MN_INDEX_INT64 = 0,   /* nrows + spares machine integers, from a list of int */
    MN_INDEX_PICKLE = 1,  /* index_bytes of pickle: the sampler's object */
    MN_INDEX_NUMBERED = 2, /* machine integers, by which costs are known, then that pickle */
};

enum mn_block_seeded {
    MN_SEEDED_BY_PLACE = 1, /* before each sample, by its position in the sampler's order */
    MN_SEEDED_BY_INDEX = 2, /* by its index; the block has machine integers */
};

/* Offsets inside a block are relative to the block; field offsets to the mapping. */
struct mn_block {
    uint64_t number;    /* of the batch within its epoch */
    uint64_t epoch;
    uint64_t position;  /* in the sampler's order, of row 0 */
    uint64_t base_seed;
    uint64_t user_epoch; /* 1 + the argument of DataLoader.set_epoch; 0: not called */
    uint32_t nrows;
    uint32_t ntasks;
    uint32_t nfields;
    uint32_t layout;  /* the layout of the rows; 0: none */
    uint32_t index_kind;
    uint32_t seeded;  /* enum mn_block_seeded; 0: not */
    uint64_t index_bytes;
    /* uint32_t tasks[ntasks] follows this record */
    uint32_t fields_at; /* uint64_t[nfields]: arena offset of row 0 of each field */
    uint32_t index_at;
    uint32_t reports_at; /* struct mn_report[nrows] */
    uint32_t spares;     /* indices behind those of rows: they replace failed samples */
    uint32_t apart; /* rows may go into different batches: one that fails fails alone */
    uint32_t serial;     /* of the block, among all blocks: no earlier block here had the same */
    uint64_t bytes;      /* of the block itself */
};
MN_STATIC_ASSERT(sizeof(struct mn_block) == 104, "block layout");

/* ---- envelope: a result outside of rows ---------------------------------------------- */

/* struct mn_envelope | struct mn_envelope_part[nparts] | pickle | small parts | big parts.
 * Offsets are relative to the envelope. */
struct mn_envelope {
    uint64_t nparts;
    uint64_t pickle_at;
    uint64_t pickle_bytes;
};
MN_STATIC_ASSERT(sizeof(struct mn_envelope) == 24, "envelope layout");

struct mn_envelope_part {
    uint64_t at;
    uint64_t bytes;
};
MN_STATIC_ASSERT(sizeof(struct mn_envelope_part) == 16, "part layout");

/* ---- worker ------------------------------------------------------------------------ */

enum mn_worker_state {
    MN_WORKER_EMPTY = 0,     /* no process wanted here */
    MN_WORKER_WANTED = 1,    /* trainer: requests a worker */
    MN_WORKER_STARTING = 2,  /* zygote: forked */
    MN_WORKER_READY = 3,     /* worker: in its loop */
    MN_WORKER_EXITED = 4,    /* zygote: seen dead, not yet reaped [S1] */
    MN_WORKER_SWEPT = 5,     /* trainer: its tasks are taken back; reap it */
    MN_WORKER_LEAVING = 6,   /* worker: the loader has stopped, and it ends its process in order */
};

/* How worker processes are started. If the zygote runs threads, which a fork would lose, each
 * worker is a separate interpreter. */
enum mn_start {
    MN_START_UNKNOWN = 0, /* the zygote has not started yet */
    MN_START_FORKED = 1,
    MN_START_THREADS = 2,
};

enum mn_lease_state {
    MN_LEASE_IDLE = 0,
    MN_LEASE_WANT = 1,
    MN_LEASE_GRANTED = 2,
    MN_LEASE_REFUSED = 3,
};

enum mn_exit_request {
    MN_EXIT_NOT = 0,
    MN_EXIT_SHRINK = 1, /* there are too many workers */
    MN_EXIT_ENDED = 2,  /* the user ended it: terminate() of a thread */
};

struct mn_worker {
    struct mn_event event;  /* of a worker without a task; notified by the trainer */
    mn_a32 state; /* enum mn_worker_state, which says who writes which state */
    /* A process's parent writes owner, tid and exit_status; the worker writes owner, too. A thread
     * writes its own. The trainer reads them at any time, for statistics and to see which process
     * is there: relaxed, except owner. */
    mn_a64 owner; /* starts << 32 | pid; taken in py/types/mn_segment_type.c */
    mn_a32 tid;     /* the thread that works; 0: the process's first */
    uint16_t began;   /* worker, before READY: 1; trainer, before SWEPT: 0 */
    uint16_t pause_ms; /* trainer, before SWEPT: pause before the next one is forked */
    mn_a32 exit_status; /* before EXITED: exit code, or -signal */
    uint16_t respawn;    /* trainer, before SWEPT: replace it */
    uint16_t retired;    /* trainer: the user ended it; do not replace it */
    /* line: lease, by worker and trainer in turn: [L1] to [L4] */
    MN_ALIGNED(MN_CACHELINE) mn_a32 lease_state;
    struct mn_event lease_event; /* of a worker that waits for a lease: it takes no notification
                                  * meant for one that could claim a task */
    uint64_t lease_off;  /* trainer, before GRANTED */
    uint64_t lease_len;
    uint64_t want_bytes;  /* worker, before WANT */
    uint64_t used_end;    /* worker, before WANT: end of what it used of the old lease */
    /* Worker, before READY: hashes of the states in which worker_init_fn has left the global
     * generators (minato/seeding/pitfalls.py); 0 for one that it has not changed. */
    uint64_t init_states[3];
    /* line: what it does, by the worker, for statistics and for the plan; relaxed, except for
     * [A1] to [A4] and the last two */
    MN_ALIGNED(MN_CACHELINE) mn_a64 running;  /* task number + 1, from before its claim; 0: idle */
    mn_a64 since_ns;  /* when the task began; 0: not yet, or no task */
    mn_a64 row;  /* row of the block that it makes; of one that died or is late: the sample */
    mn_a64 tasks_done;
    mn_a64 rows_done;
    mn_a64 busy_ns;
    mn_a64 cpu_ns;
    mn_a32 exit_request; /* trainer: exit after your current task; enum mn_exit_request */
    mn_a32 low_own; /* trainer: with fewer tasks than this on its own queue, the worker notifies the
                     * engine; 0: never */
};
MN_STATIC_ASSERT(sizeof(struct mn_worker) == 192, "worker entry layout");

/* Returns the process of an entry; 0: not written yet. While the entry is STARTING, READY, LEAVING,
 * EXITED or SWEPT, that process is not reaped, so its id belongs to no other process. */
static inline uint32_t
mn_worker_pid(const struct mn_worker *k)
{
    return (uint32_t)mn_a64_load_acquire(&k->owner);
}

/* Number of processes or threads that have had this entry, including the present one. */
static inline uint32_t
mn_worker_starts(const struct mn_worker *k)
{
    return (uint32_t)(mn_a64_load_relaxed(&k->owner) >> 32);
}

static inline void
mn_worker_set_owner(struct mn_worker *k, uint32_t starts, uint32_t pid)
{
    mn_a64_store_release(&k->owner, (uint64_t)starts << 32 | pid);
}

/* Returns the task that a worker has begun, and when. A snapshot only: the task may just be over.
 * Returns false if there is none or the entry makes no sense. */
static inline bool
mn_worker_at_work(const struct mn_worker *k, uint32_t ntasks, uint32_t *task, uint64_t *since_ns)
{
    uint64_t running = mn_a64_load_relaxed(&k->running);
    *since_ns = mn_a64_load_relaxed(&k->since_ns);
    *task = (uint32_t)(running - 1);
    return *since_ns != 0 && running != 0 && running <= ntasks;
}

/* ---- queue -------------------------------------------------------------------------- */

struct mn_queue {
    mn_a64 tail;  /* written by the trainer only */
    MN_ALIGNED(MN_CACHELINE) mn_a64 hint;  /* all entries before it are taken */
    MN_ALIGNED(MN_CACHELINE) uint64_t ring_off;
    uint64_t mask;
    uint64_t pad0[6];
};
MN_STATIC_ASSERT(sizeof(struct mn_queue) == 192, "queue layout");

/* Most tasks on a worker's own queue, with balanced scheduling: a millisecond of cheap ones. */
#define MN_QUEUE_OWN_TASKS 128u

enum mn_queue_number {
    MN_QUEUE_EXPRESS = 0,  /* tasks taken back: from dead workers, or from workers' own queues,
                            * where shares have ended */
    MN_QUEUE_NORMAL = 1,
    MN_QUEUE_WORKER = 2,   /* + worker number: only this worker claims from it. The trainer may
                            * withdraw tasks */
};

/* ---- control page ------------------------------------------------------------------ */

#define MN_TITLE_BYTES 192u

struct mn_ctl {
    /* lines: written by the trainer before any other process looks, and constant except for
     * start */
    uint64_t magic;
    uint64_t sizes;  /* folded sizes of the records above; an attach refuses any other */
    uint64_t total_bytes;
    uint64_t workers_off;
    uint64_t tasks_off;
    uint64_t queues_off;
    uint64_t input_off;
    uint64_t input_bytes;
    uint64_t arena_off;
    uint64_t arena_bytes;
    uint32_t nworkers;
    uint32_t ntasks;
    uint32_t nqueues;
    uint32_t spin_ns; /* how long a waiting worker or caller spins before it sleeps; 0: not */
    uint32_t trainer_pid;
    mn_a32 start;  /* zygote: enum mn_start */
    /* line: the trainer's messages to workers at any time; seq_cst */
    MN_ALIGNED(MN_CACHELINE) mn_a32 stop;
    mn_a32 fence_word;  /* counted up where a seq_cst write must lie between a plain one and a look
                         * at an event */
    mn_a32 low_water;   /* trainer: a worker that leaves fewer tasks on the normal queue notifies
                         * the engine; 0: never */
    mn_a32 dismissed;   /* trainer: threads that are workers end where they are, without any report,
                         * because the interpreter exits */
    /* line: the user's thread in next(), where workers notify it */
    MN_ALIGNED(MN_CACHELINE) struct mn_event trainer;
    uint32_t pad0;
    mn_a64 wanted;  /* block that next() waits for, or MN_WANT_* */
    /* line: the engine thread, where all processes notify it */
    MN_ALIGNED(MN_CACHELINE) struct mn_event engine;
    uint32_t pad1;
    /* line: the trainer in next(), for other processes' statistics; only it writes, relaxed */
    MN_ALIGNED(MN_CACHELINE) mn_a64 opened_ns;
    mn_a64 waiting_since_ns; /* in next() since then; 0: not in next() */
    mn_a64 wait_ns;          /* total earlier time in next() */
    mn_a64 given;            /* batches delivered */
    mn_a64 used_bytes;       /* of the arena, when it last looked for a batch */
    mn_a64 limit_bytes;
    mn_a64 opening_ns;  /* the time to open a group of samples that is kept together */
    mn_a64 group_milli; /* thousandths of samples in a group; 0: none is kept together */
    mn_a64 failed;      /* samples that were left out or replaced because they failed */
    /* lines: the loader's name for observers, UTF-8, ended by a zero; the trainer writes it before
     * there are workers */
    MN_ALIGNED(MN_CACHELINE) char title[MN_TITLE_BYTES];
};

#define MN_WANT_NONE UINT64_C(0)
#define MN_WANT_ANY UINT64_C(1)
#define MN_WANT_CHANGE UINT64_C(2) /* any task, even if some are done already */

static inline uint64_t
mn_sizes_word(void)
{
    return (uint64_t)sizeof(struct mn_ctl) << 48 ^ (uint64_t)sizeof(struct mn_worker) << 36
           ^ (uint64_t)sizeof(struct mn_task) << 24 ^ (uint64_t)sizeof(struct mn_block) << 12
           ^ (uint64_t)sizeof(struct mn_queue);
}

/* A mapping as one process sees it. */
struct mn_shm {
    char *base;
    struct mn_ctl *ctl;
};

static inline void *
mn_at(const struct mn_shm *shm, uint64_t off)
{
    return shm->base + off;
}

static inline struct mn_worker *
mn_worker_at(const struct mn_shm *shm, uint32_t w)
{
    return (struct mn_worker *)(void *)(shm->base + shm->ctl->workers_off) + w;
}

static inline struct mn_task *
mn_task_at(const struct mn_shm *shm, uint32_t t)
{
    return (struct mn_task *)(void *)(shm->base + shm->ctl->tasks_off) + t;
}

static inline struct mn_queue *
mn_queue_at(const struct mn_shm *shm, uint32_t queue)
{
    return (struct mn_queue *)(void *)(shm->base + shm->ctl->queues_off) + queue;
}

static inline struct mn_block *
mn_block_at(const struct mn_shm *shm, uint64_t off)
{
    return (struct mn_block *)(void *)(shm->base + off);
}

static inline uint32_t *
mn_block_tasks(struct mn_block *b)
{
    return (uint32_t *)(void *)(b + 1);
}

static inline uint64_t *
mn_block_fields(struct mn_block *b)
{
    return (uint64_t *)(void *)((char *)b + b->fields_at);
}

static inline void *
mn_block_index(struct mn_block *b)
{
    return (char *)b + b->index_at;
}

static inline struct mn_report *
mn_block_reports(struct mn_block *b)
{
    return (struct mn_report *)(void *)((char *)b + b->reports_at);
}

#endif
