/* mn_arena.h - the mapping's memory: which ranges are in use, and how much may be used.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns the mapping, the two allocators over it (records of batches; rows and envelopes) and the
 * ledger. The ledger has what is used, what the program retains of that, and the limit. Knows no
 * task and no worker: a range belongs to the code that allocated it, until that code frees it.
 *
 *   mn_arena_alloc     mn_arena_free
 *   mn_arena_retain    mn_arena_release: a range that the program retains; it outlives its batch
 *   mn_arena_record    mn_arena_free_record
 *
 * Lock. None of its own. All functions need the owner's lock (guard), which guards every field
 * here. Pages go back to the system without it: the range is lent from the allocator, the guard is
 * released, and the range is returned. Nothing else here waits or makes a system call, except for
 * malloc.
 *
 * A provider supplies the memory: a memfd (mn_memory_file), or a test's substitute.
 *
 * Room. A caller that finds no memory may say so (room_waits). The next call that frees memory
 * sets room_came. The holder of the guard then notifies the waiting caller after it has released
 * the guard.
 *
 * Crash, fork: all of this is private memory of the trainer, so a worker that is killed at any
 * instruction cannot damage it. A child made by fork has a dead copy.
 */
#ifndef MN_ARENA_H
#define MN_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "os/mn_thread.h"

/* ---- a list of ranges of the arena that must be freed later ----
 *
 * A batch has a list of what it frees at its end. A worker has a list of what it was granted and
 * has not sent. Lists are private memory, unordered, and short, so a linear search is fast enough.
 * A list knows no allocator: a range that is taken out belongs to the caller.
 */

struct mn_range {
    uint64_t off, bytes;
};

/* Zeroed memory is an empty list. */
struct mn_ranges {
    struct mn_range *at; /* [n], with space for more */
    uint32_t n, capacity;
};

/* Adds a range; does nothing for 0 bytes. Returns 0 or -ENOMEM. */
int
mn_ranges_add(struct mn_ranges *r, uint64_t off, uint64_t bytes);

/* Takes out a range that lies wholly in one of the list's ranges; the parts before and behind it
 * stay. Returns 0. With nothing changed: -EINVAL if no range contains it, or -ENOMEM. */
int
mn_ranges_cut(struct mn_ranges *r, uint64_t off, uint64_t bytes);

/* Frees the list, but not the ranges in it. It is empty then. */
void
mn_ranges_fini(struct mn_ranges *r);

/* ---- Which free memory of the arena goes back to the system, and when ----
 *
 * Purpose
 *   Pages that were in use are several times as fast to write as fresh ones. So memory that
 *   the load will need again stays, and the rest is returned. Recent use shows what it needs. The
 *   allocator hands out the lowest address first, so under a steady load the same ranges are used
 *   again and again. The excess of an earlier load is not touched.
 *
 * Terms
 *   turn   the unit of age: MN_TRIM_TURN_NS in which memory was allocated, or
 *          MN_TRIM_PAUSE_NS in which none was. A loader whose consumer pauses, or that is
 *          between two epochs, ages ten times as slowly as one at work.
 *   warm   free, and may have pages
 *   pass   one walk over the free ranges, from the lowest address up; one per turn at most
 *
 * Rule
 *   Warm memory that was freed MN_TRIM_COLD turns ago is returned, except for a spare at the lowest
 *   addresses. The spare is a quarter of what batches in the making or ready use, at least
 *   MN_TRIM_SPARE. That amount comes and goes as slow samples do.
 *   Every MN_TRIM_COLD * MN_TRIM_LONG turns, memory of that age is returned without a spare.
 *   Warm memory counts against the memory limit. Over the limit the spare is at most what is
 *   left below it, and half of the age is enough.
 *
 * So memory that a load at work does not need is returned after about a second, the spare in ten to
 * twenty. When nothing is loaded, it takes eight to ten seconds, and the spare a hundred to two
 * hundred.
 *
 * No clock, no lock, no system call.
 */

#define MN_TRIM_TURN_NS UINT64_C(250000000)
#define MN_TRIM_PAUSE_NS UINT64_C(2500000000)
/* Turns; longer than memory lies idle at an ordinary pace of the consumer. A training step of up to
 * some seconds is a pause of one or two turns. */
#define MN_TRIM_COLD 4u
#define MN_TRIM_LONG 10u
/* Less than a batch of large samples. */
#define MN_TRIM_SPARE (UINT64_C(4) << 20)

struct mn_trim {
    uint64_t turned_ns; /* start of the current turn, 0 before the first */
    uint64_t allocs;    /* number of allocations at that time */
    uint32_t turns;     /* since the last pass without a spare */
    uint32_t age;       /* minimum age for the current pass, in turns; 0: there is no pass */
    uint64_t spare;     /* bytes that it leaves in place */
};

/* The allocation units of the two allocators. */
#define MN_ARENA_PAGE UINT64_C(4096)
#define MN_ARENA_RECORD 64u

/* The source of the mapping. */
struct mn_provider {
    /* Maps this many bytes, which read as zero if possible. Returns 0 or -errno. */
    int (*map)(struct mn_provider *self, uint64_t bytes, void **base);
    void (*unmap)(struct mn_provider *self, void *base, uint64_t bytes);
    /* Drops content that is no longer needed: it reads as zero from now on, and uses no memory. */
    void (*discard)(struct mn_provider *self, void *at, uint64_t bytes);
};

/* A sparse file without a name, for processes that inherit its descriptor or its mapping. */
struct mn_memory_file {
    struct mn_provider provider;
    int fd; /* -1: closed, the mapping stays */
};

void
mn_memory_file_init(struct mn_memory_file *file);

/* Closes the file, once every process that needs it has it. */
void
mn_memory_file_close(struct mn_memory_file *file);

struct mn_extents; /* which ranges are free: mn_arena.c */

struct mn_arena {
    struct mn_provider *provider;
    struct mn_mutex *guard;
    char *base;          /* of the mapping; offsets count from here */
    uint64_t total_bytes;
    struct mn_extents *records;
    struct mn_extents *rows;
    uint64_t rows_off;     /* start of the part that `rows` manages */
    uint64_t limit;        /* bytes of rows that may be used */
    uint64_t kept_bytes;   /* bytes of those in use that the program retains */
    struct mn_trim trim;
    uint64_t trim_from; /* where its current pass continues */
    uint64_t trimmed_bytes; /* returned to the system so far */
    bool room_waits;       /* the caller's: it found no memory, and waits for some to be freed */
    bool room_came;        /* memory was freed since */
};

/* Maps this many bytes. The arena must be zeroed memory. Returns 0, or -errno with nothing to
 * undo. */
int
mn_arena_map(struct mn_arena *a, struct mn_provider *provider, uint64_t bytes);

/* Starts to manage two parts of the mapping, in whole records and pages. Returns 0 or -ENOMEM. */
int
mn_arena_open(struct mn_arena *a, struct mn_mutex *guard, struct mn_range records,
              struct mn_range rows);

/* Forgets everything and unmaps. May be called on an arena that was not opened completely. */
void
mn_arena_close(struct mn_arena *a);

/* Allocates whole pages. Returns 0; -EAGAIN: some are lent, and will be back in a moment;
 * -ENOMEM. */
int
mn_arena_alloc(struct mn_arena *a, uint64_t bytes, uint64_t *off);

/* Frees what was allocated, at once or in parts. If the system refuses the few bytes to record
 * that, the range stays allocated, and counted. */
void
mn_arena_free(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Frees all ranges of a list and empties it. */
void
mn_arena_free_ranges(struct mn_arena *a, struct mn_ranges *r);

/* Allocates a record, which is never handed to the program. Returns 0 or -ENOMEM. */
int
mn_arena_record(struct mn_arena *a, uint64_t bytes, uint64_t *off);

void
mn_arena_free_record(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Lets the program retain a part of a range in the list: it is removed from the list, and
 * mn_arena_release() frees it. Returns 0; -EINVAL: the list does not contain it; -ENOMEM. */
int
mn_arena_retain(struct mn_arena *a, struct mn_ranges *of, uint64_t off, uint64_t bytes);

void
mn_arena_release(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Return the bytes that are allocated; free but may have pages; lent. */
uint64_t
mn_arena_used(const struct mn_arena *a);

uint64_t
mn_arena_warm(const struct mn_arena *a);

uint64_t
mn_arena_lent(const struct mn_arena *a);

/* Returns whether this many more bytes would exceed the limit. */
bool
mn_arena_exceeds(const struct mn_arena *a, uint64_t bytes);

/* Returns whether the caller that waits for memory must be notified now. Resets the flag: the
 * caller of this function must make the notification. */
bool
mn_arena_room_came(struct mn_arena *a);

/* Waits until nothing is lent, for callers that cannot try again later. Guard held, and released
 * meanwhile. Returns whether it had to wait. */
bool
mn_arena_no_lent(struct mn_arena *a);

/* Runs the next step of returning free memory. Only one thread may do so. Guard held, and
 * released meanwhile. Returns whether it should be called again at once. */
bool
mn_arena_trim(struct mn_arena *a, uint64_t now_ns);

/* Returns the pages of all free memory to the system. Guard held, and released now and then. */
void
mn_arena_discard_free(struct mn_arena *a);

/* Does the same for one range that is not free yet but no longer used. Guard not held. */
void
mn_arena_discard(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Rounds a size up to the arena's allocation unit. */
static inline uint64_t
mn_page_round(uint64_t bytes)
{
    return (bytes + MN_ARENA_PAGE - 1) & ~(MN_ARENA_PAGE - 1);
}

#endif
