/* mn_arena.h - the mapping's memory: who has what of it, and how much may be had.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Owns the mapping, the two allocators over it (records of batches; rows and envelopes) and the
 * ledger: what is used, what of that the program keeps, and the limit.  Knows no task and no
 * worker: a range is somebody's who will give it back.
 *
 *   mn_arena_alloc     mn_arena_free
 *   mn_arena_keep      mn_arena_release: a range that the program has, which outlives its batch
 *   mn_arena_record    mn_arena_free_record
 *
 * Lock.  None of its own: all of it is called under the lock of whoever owns it (guard), which
 * guards every field here.  Pages go back to the system without it: the range is lent from the
 * allocator, the guard let go of, and the range returned.  Nothing else here waits or makes a
 * system call, but for malloc.
 *
 * Where memory comes from says a provider: a memfd (mn_memory_file), or what a test makes up.
 *
 * Room.  Somebody may have found that there is none, and says so (room_waits).  Whatever gives
 * memory back then sets room_came, and whoever holds the guard tells, once he has let go of it.
 *
 * Crash, fork: all of this is private memory of the trainer, see mn_free_extents.h.
 */
#ifndef MN_ARENA_H
#define MN_ARENA_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/mn_free_extents.h"
#include "memory/mn_ranges_to_free.h"
#include "memory/policy_trim.h"
#include "os/mn_thread.h"

/* Of what is managed here. */
#define MN_ARENA_PAGE UINT64_C(4096)
#define MN_ARENA_RECORD 64u

/* Where the mapping comes from. */
struct mn_provider {
    /* So much memory that reads as zero, if that is possible. 0 or -errno. */
    int (*map)(struct mn_provider *self, uint64_t bytes, void **base);
    void (*unmap)(struct mn_provider *self, void *base, uint64_t bytes);
    /* Nobody needs what stands there: it reads as zero from now on, and costs nothing. */
    void (*discard)(struct mn_provider *self, void *at, uint64_t bytes);
};

/* A sparse file without a name, for processes that inherit its descriptor or its mapping. */
struct mn_memory_file {
    struct mn_provider provider;
    int fd; /* -1: closed, the mapping stays */
};

void
mn_memory_file_init(struct mn_memory_file *file);

/* Whoever needs the file has it by now. */
void
mn_memory_file_close(struct mn_memory_file *file);

struct mn_arena {
    struct mn_provider *provider;
    struct mn_mutex *guard;
    char *base;          /* of the mapping; offsets count from here */
    uint64_t total_bytes;
    struct mn_extents *records;
    struct mn_extents *rows;
    uint64_t rows_off;     /* begin of what rows manages */
    uint64_t limit;        /* bytes of rows that may be used */
    uint64_t kept_bytes;   /* of those used, by the program */
    struct mn_trim trim;
    uint64_t trim_from; /* where its present pass has come to */
    uint64_t trimmed_bytes; /* given back to the system so far */
    bool room_waits;       /* somebody waits for memory that comes back */
    bool room_came;        /* it did since */
};

/* A mapping of so many bytes. The arena is zeroed memory before. 0 or -errno, with nothing to
 * undo. */
int
mn_arena_map(struct mn_arena *a, struct mn_provider *provider, uint64_t bytes);

/* Begins to manage two parts of it, in whole records and pages. 0 or -ENOMEM. */
int
mn_arena_open(struct mn_arena *a, struct mn_mutex *guard, struct mn_range records,
              struct mn_range rows);

/* Forgets everything and unmaps; what was not opened is no matter. */
void
mn_arena_close(struct mn_arena *a);

/* Whole pages. 0; -EAGAIN: some are lent, and will be back in a moment; -ENOMEM. */
int
mn_arena_alloc(struct mn_arena *a, uint64_t bytes, uint64_t *off);

/* Frees what was allocated, once or in parts. Where the system refuses the few bytes to note it
 * down, the range stays allocated, and counted. */
void
mn_arena_free(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Frees all of a list and empties it. */
void
mn_arena_free_ranges(struct mn_arena *a, struct mn_ranges *r);

/* A range that nobody in the program has a use for. 0 or -ENOMEM. */
int
mn_arena_record(struct mn_arena *a, uint64_t bytes, uint64_t *off);

void
mn_arena_free_record(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* The program keeps a part of what is in the list: it is in it no more, and mn_arena_release
 * frees it. 0; -EINVAL: the list does not have it; -ENOMEM. */
int
mn_arena_keep(struct mn_arena *a, struct mn_ranges *of, uint64_t off, uint64_t bytes);

void
mn_arena_release(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Bytes allocated; free ones that may hold pages; lent ones. */
uint64_t
mn_arena_used(const struct mn_arena *a);

uint64_t
mn_arena_warm(const struct mn_arena *a);

uint64_t
mn_arena_lent(const struct mn_arena *a);

/* Whether so much more is over the limit. */
bool
mn_arena_exceeds(const struct mn_arena *a, uint64_t bytes);

/* Somebody has found no room: he is to be told when some comes back. */
void
mn_arena_wait_for_room(struct mn_arena *a, bool waits);

/* Whether that is to be told now; asked once, it is the asker's to tell. */
bool
mn_arena_room_came(struct mn_arena *a);

/* Waits until nothing is lent: for what has no other to try again for it. Guard held, and let
 * go of meanwhile. Whether it had to wait. */
bool
mn_arena_no_lent(struct mn_arena *a);

/* The next step of what policy_trim.h has to say. One thread. Guard held, and let go of
 * meanwhile. Whether it should be called again at once. */
bool
mn_arena_trim(struct mn_arena *a, uint64_t now_ns);

/* Gives the pages of all that is free back to the system. Guard held, and let go of now and
 * then. */
void
mn_arena_discard_free(struct mn_arena *a);

/* The same of one range that is not free yet, and that nobody uses. Guard not held. */
void
mn_arena_discard(struct mn_arena *a, uint64_t off, uint64_t bytes);

/* Rounds a range up to what the arena manages. */
static inline uint64_t
mn_page_round(uint64_t bytes)
{
    return (bytes + MN_ARENA_PAGE - 1) & ~(MN_ARENA_PAGE - 1);
}

#endif
