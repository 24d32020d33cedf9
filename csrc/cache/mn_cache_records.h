/* What lies in a cache file, which every process of a user maps.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   0         slots_off  claims_off  segments_off  index_off          data_off
 *   +---------+----------+-----------+-------------+------------------+------------------------+
 *   | header  | slots    | claims    | segments    | index            | data: segments of      |
 *   |         | 1/client | 1/key     | 1/segment   | buckets of 8     | entries, a log         |
 *   +---------+----------+-----------+-------------+------------------+------------------------+
 *
 * Everything but the data has its pages from the start. A segment gets its pages from its begin on,
 * each before a client may write to it, so that no write meets a full file system. The file keeps
 * its length as long as any process has it mapped. In memory all of it is mapped. On a disk the
 * data is not. It is read and written by system calls (mn_cache_log.h), which return errors
 * instead of signals.
 *
 * Owners
 *   header     its first part: the process that creates the file, under the header lock, until
 *              `ready`. From `home` on: its first client, under the header lock (mn_cache_file.h).
 *              `generation` and `current`: the holder of the log lock, and the first client.
 *   slot       the client that holds the lock of its byte (mn_cache_file.h).
 *   claim      the thread that exchanged its word from 0; see mn_cache.h.
 *   segment    generation and pages: the holder of the log lock. fill: clients with a reservation.
 *   record     any client, at any time, without a lock: it is a hint.
 *   entry      the client that reserved its place, until the seal is stored; constant after that.
 *
 * Numbers are of the machine's own byte order; only processes of one machine share the file.
 */
#ifndef MN_CACHE_RECORDS_H
#define MN_CACHE_RECORDS_H

#include <stdint.h>

#include "base/mn_atomic.h"
#include "base/mn_base.h"

#define MN_CACHE_LAYOUT 4u
#define MN_CACHE_MAGIC UINT64_C(0x6568636163206e6d) /* "mn cache" */
#define MN_CACHE_SLOTS 1024u
#define MN_CACHE_CLAIMS 4096u
#define MN_CACHE_WAYS 8u
#define MN_CACHE_BLOCK 65536u /* bytes under one checksum */
#define MN_CACHE_UNIT 64u     /* entries and their parts begin at multiples of this */
#define MN_CACHE_PAGE 4096u
#define MN_CACHE_COSTS 64u
#define MN_CACHE_LABEL_BYTES 256u
#define MN_CACHE_SEGMENTS 16u /* of a file, or more where these would be larger than the most */
#define MN_CACHE_SEGMENT_MAX (UINT64_C(1) << 30)
#define MN_CACHE_BYTES_MIN (UINT64_C(1) << 20)

struct mn_cache_digest {
    uint64_t word[2];
};

/* Fixed when the file is made. */
struct mn_cache_shape {
    uint64_t magic;
    uint64_t layout;
    uint64_t bytes; /* of the file */
    uint64_t salt;  /* random, part of every checksum: bytes of another file do not pass */
    uint64_t nsegments;
    uint64_t segment_bytes;
    uint64_t nbuckets;
    uint64_t slots_off;
    uint64_t claims_off;
    uint64_t segments_off;
    uint64_t index_off;
    uint64_t data_off;
    uint64_t checksum; /* of the words before it */
};

/* The cost of making values of some functions. Index: a function's number modulo MN_CACHE_COSTS. */
struct mn_cache_cost {
    mn_a64 made, made_ns;
};

struct mn_cache_header {
    struct mn_cache_shape shape;
    mn_a64 ready; /* MN_CACHE_MAGIC once the shape is written */
    mn_a64 keep;  /* 1: the last client leaves the file where it is */
    mn_a64 home;  /* checksum of boot, device and inode when it was last opened; on a disk only */
    mn_a64 stamp; /* time of the file in ns, set by its last client; 0: that client was killed */
    mn_a64 era;   /* an entry verified in another era must be verified again; 0 in memory */
    mn_a64 session; /* counts how often a client was the first one */
    mn_a64 session_finds; /* hits and misses before the session began */
    MN_ALIGNED(MN_CACHELINE) mn_a64 generation; /* the last one given to a segment; never reused */
    mn_a64 current;                             /* number + 1 of the segment written to; 0: none */
    mn_a64 refused_ns;                          /* when an entry last found no room; 0: never */
    mn_a64 recycled;                            /* segments so far */
    mn_a64 returned;                            /* segments whose pages went back to the system */
    mn_a64 stuck; /* 1: the log lock was waited for in vain, and has not been free since */
    MN_ALIGNED(MN_CACHELINE) struct mn_cache_cost costs[MN_CACHE_COSTS];
    mn_a64 label[MN_CACHE_LABEL_BYTES / 8]; /* for people: whose values, ends with 0; or all 0 */
};
MN_STATIC_ASSERT(sizeof(struct mn_cache_header) <= MN_CACHE_PAGE, "the header fits its page");

/* One client: one process that has the file mapped. */
struct mn_cache_slot {
    mn_a64 incarnation; /* how many clients this slot has had */
    mn_a64 reservation; /* number + 1 of the segment that the client writes to; 0: none */
    mn_a64 job;         /* the client's job; 0: the client is a guest, without a job */
    mn_a64 pid;         /* shown to people only; no code depends on it */
    mn_a64 promised;    /* bytes of memory that the client may take for other things */
    mn_a64 damaged;     /* entries with a wrong checksum that its clients have met */
    mn_a64 tree, rank;  /* see mn_cache_log_jobs() */
    MN_ALIGNED(MN_CACHELINE) mn_a64 hits; /* this and the rest: sums over all clients */
    mn_a64 hit_bytes;
    mn_a64 saved_ns; /* what the hits cost when they were made */
    mn_a64 misses;
    mn_a64 made_ns; /* what the misses cost */
    mn_a64 stored;
    mn_a64 stored_bytes;
    mn_a64 refused;
};
MN_STATIC_ASSERT(sizeof(struct mn_cache_slot) == 128, "two cache lines, no neighbour's");

struct mn_cache_claim {
    mn_a64 word; /* key, slot and incarnation of its owner; 0: free */
    mn_a32 turn; /* futex: counts how often the word became free */
    uint32_t unused;
};

struct mn_cache_segment {
    mn_a64 generation; /* 0: holds no entries */
    mn_a64 fill;       /* bytes reserved so far */
    mn_a64 pages; /* bytes that have their pages, from its begin on */
    mn_a64 entries;
    mn_a64 used; /* the last session that found or stored something in it */
    uint64_t unused[3];
};
MN_STATIC_ASSERT(sizeof(struct mn_cache_segment) == 64, "a cache line, which readers share");

struct mn_cache_record {
    mn_a64 digest[2];
    mn_a64 generation; /* of the segment, when the entry was written; 0: empty */
    mn_a64 place; /* segment << 42 | era of the last check << 24 | offset in it / MN_CACHE_UNIT */
};

struct mn_cache_bucket {
    struct mn_cache_record record[MN_CACHE_WAYS];
};

/* What an entry says of itself. */
struct mn_cache_head {
    uint64_t digest[2];
    uint64_t generation;
    uint64_t bytes;     /* of the payload: description, padded to a unit, then the data */
    uint64_t described; /* bytes of the description */
    uint64_t made_ns;   /* what it cost to make */
    uint64_t sums;      /* checksum of the checksums */
};
#define MN_CACHE_HEAD_WORDS (sizeof(struct mn_cache_head) / sizeof(uint64_t))

/* Followed by nblocks checksums, padded to a unit, and by the payload. Atomic words, because a torn
 * record may lead a reader to an entry that is being written. */
struct mn_cache_entry {
    mn_a64 head[MN_CACHE_HEAD_WORDS]; /* struct mn_cache_head */
    mn_a64 seal;                      /* checksum of the head; the last word that is written */
};
MN_STATIC_ASSERT(sizeof(struct mn_cache_entry) == MN_CACHE_UNIT, "a unit");

/* A mapping and where its parts are. Constant once it is made. */
struct mn_cache_map {
    char *base;
    struct mn_cache_shape shape; /* copied, so that what is written to the file cannot move it */
    struct mn_cache_header *header;
    struct mn_cache_slot *slots;
    struct mn_cache_claim *claims;
    struct mn_cache_segment *segments;
    struct mn_cache_bucket *index;
    char *data; /* NULL: on a disk, read and written through fd */
    int fd;     /* on a disk: the client's */
    uint64_t mapped_bytes;
    uint64_t device, inode;
};

static inline uint64_t
mn_cache_padded(uint64_t bytes)
{
    return (bytes + MN_CACHE_UNIT - 1) / MN_CACHE_UNIT * MN_CACHE_UNIT;
}

static inline uint64_t
mn_cache_nblocks(uint64_t bytes)
{
    return (bytes + MN_CACHE_BLOCK - 1) / MN_CACHE_BLOCK;
}

/* From the entry's own place to its payload. */
static inline uint64_t
mn_cache_payload_off(uint64_t bytes)
{
    return sizeof(struct mn_cache_entry) + mn_cache_padded(mn_cache_nblocks(bytes) * 8);
}

#endif /* MN_CACHE_RECORDS_H */
