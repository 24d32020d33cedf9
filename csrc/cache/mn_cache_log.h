/* The log: where entries are written, and what makes room for more.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   Data lies in segments. Clients reserve places in the current one, without a lock. If its pages
 *   do not suffice for an entry, one client, which holds the log lock, gives it more. When it is
 *   full, that client makes another segment current. It takes a segment that was never used, else
 *   the oldest that may be recycled. No room at all is an ordinary result (MN_FULL): the entry is
 *   not stored.
 *
 * How many segments: an entry lies whole in one. A large number of segments wastes room where
 *   values are large, and keeps out values larger than a segment. A small number wastes room where
 *   jobs share the file: a segment is emptied at once, so half of one is empty on average. Sixteen
 *   cost a thirty-second of the cache then, and as much where a value has a sixteenth of a segment.
 *
 * Recycling: a segment is never written anew while a client may still write to it
 *   client                                        recycler, under the log lock
 *     reservation = the segment        [K1]         generation = 0 (exchange)          [K3]
 *     generation still the same?       [K2]         any reservation of it that lives?  [K4]
 *     yes: its bytes may be written                 no: a new generation, then the first byte
 *   [K1] -> [K4] and [K3] -> [K2] are all seq_cst. In their total order either K1 precedes K4: the
 *   recycler sees the reservation and leaves the segment alone. Or K4 precedes K1, hence K3
 *   precedes K2: the client sees generation 0 and withdraws. A reservation counts as long as the
 *   lock of its client is held, however long that takes. A writer that was stopped in mid-copy may
 *   wake. Only a dead client's is passed over, and a dead client cannot write. No time-out ends a
 *   reservation. Such a segment keeps generation 0. It is empty for readers, and is taken again,
 *   first of all, once no client has it reserved.
 *
 * A segment that the log has left gets no further entries, which a cursor relies on
 *   A writer looks once more, after [K1], whether the segment is the current one [K13]. A cursor
 *   looks whether the log has gone on [K14], and then for reservations [K4]; [K12] is the log's
 *   step to another segment. [K12] -> [K13] and [K12] -> [K14] are seq_cst, as K1 and K4 are. If a
 *   cursor sees K12 and then no reservation, K4 precedes K1. So K12 precedes K13, and the writer
 *   withdraws.
 *
 * Readers need no reservation
 *   [K5] a reader loads the generation (acquire), copies, and adds 0 to it (acq_rel) [K6].
 *   [K6] -> [K3]: if K6 still reads the generation, it precedes K3 in the order of that word. Then
 *   the copy, which K6 releases, happens before K3, which acquires, and before the recycler's first
 *   byte. If it reads another one, the copy is thrown away. [K7] -> [K5]: the new generation is
 *   stored with release after everything that belongs to the old one is gone. No generation is
 *   given twice (64 bits, counted under the log lock).
 *
 * When segments are recycled: never for a job that is alone. What it has, it keeps: a cycle of
 *   evictions reads more than a cache that never evicts. All processes of a job say the same job.
 *   Nor for a value whose caller asks for that, since its loader reads in order.
 *   On a disk, entries outlive the code that made them. There, a job that is alone recycles
 *   segments in which its session has found nothing. It does so once it has asked for many more
 *   values than there are.
 *
 * On a disk no memory is asked for, since the page cache gives way, and nothing goes back.
 *
 * Who pays: pages of a memory file are charged to the control group of the process that touches
 *   them first. Before it takes more pages, the log asks for the room under every limit from its
 *   group up to the root. It subtracts a reserve, what clients have promised to others (their
 *   loaders' memory_limit), and what the file system must keep for others. Under pressure the log
 *   does not grow, and the oldest segments give their pages back, as many as the reserve lacks.
 *   Each client looks every few milliseconds when it asks for values, so that a job may take memory
 *   while it loads. The kernel ends a job that takes more than the reserve between two looks.
 *
 * A client that is stopped while it holds the log lock: the others wait once for it, and note in
 *   the header that it is stuck. While it is, they only try the lock, and store nothing. The first
 *   that gets the lock takes the note away.
 *
 * What a crash leaves behind: a reserved place without an entry, which is lost until its segment is
 *   recycled. Or a segment with generation 0, or with pages, that is not current. The log takes
 *   this segment next.
 *
 * Cursors: what was stored in a cache file since a client last asked
 *   A trainer that chooses among cached samples follows what all jobs store. The log itself is the
 *   list: its segments have rising generations, and a segment's entries lie one after another. A
 *   cursor is a place in it. A call costs O(entries stored since), besides one look at the
 *   segments where the cursor's own one is at its end.
 *
 *   What is reported is a hint, as the index is. An entry may be gone at the time of the report,
 *   and some are never reported; both cost a job a hit and nothing else. No lock is taken and
 *   nothing is written. A cursor belongs to one thread, and is plain data.
 *
 * How the cursor gets past entries that are being written
 *   [K10] a writer stores the entry's length and a seal of another kind ("begun") before it copies
 *   data. [K10] -> [K11]: a cursor that sees a begun entry knows where the next one is. It notes
 *   the place, goes on, and reports the entry at a later call, once it has its own seal [K8].
 *   A place that is reserved and not begun ends the call; the next call looks again. Its writer may
 *   have died there. Once the log has moved on, and no living client has the segment reserved, the
 *   cursor leaves the rest of its segment. A writer that is late does not come back to such a
 *   segment.
 *   Where no segment has the cursor's generation any more, the cursor goes to the oldest
 *   one with a higher generation. Bytes of an older generation are no entry, because a seal, of
 *   either kind, covers the generation and the salt of the file.
 */
#ifndef MN_CACHE_LOG_H
#define MN_CACHE_LOG_H

#include <stdbool.h>
#include <stdint.h>

#include "cache/mn_cache_file.h"

/* One writer of a client; the caller sees to it that there is one at a time. */
struct mn_cache_log {
    const struct mn_cache_file *file;
    uint64_t reserve;       /* bytes of memory to leave to others */
    uint64_t no_room_ns;    /* when there last was no room; 0: not lately */
    bool keeps;             /* recycles nothing for the entry that is being stored */
};

struct mn_cache_reserved {
    uint32_t segment;
    uint64_t generation;
    uint64_t off; /* in the segment */
};

/* Reserves a place, which is the caller's until mn_cache_log_done(). 0, MN_FULL or -errno. */
int
mn_cache_log_reserve(struct mn_cache_log *log, uint64_t bytes, struct mn_cache_reserved *out);

void
mn_cache_log_done(struct mn_cache_log *log);

/* Gives the oldest segments back until the reserve is there again. Reads files of /proc. */
void
mn_cache_log_relieve(struct mn_cache_log *log);

/* Whether a system call's error says that there is no room. */
bool
mn_cache_log_is_full(int rc);

/* The number of jobs that have clients attached.
 *
 * A client is of a job, a tree of processes, and a rank. Ranks that were started one by one say the
 * same job, and each is a tree. Two trees of one job that have one rank are two jobs, which only
 * happen to say the same, such as the default port. */
uint64_t
mn_cache_log_jobs(const struct mn_cache_file *file);

#define MN_CACHE_PENDING 32u /* entries noted; of more, the first noted is forgotten */

struct mn_cache_stored {
    uint64_t key;        /* the first word of the digest, which does not depend on files' stamps */
    uint64_t generation; /* of its segment */
};

/* All zero: before everything that the file has. */
struct mn_cache_cursor {
    uint64_t salt;       /* of the file; another one begins again */
    uint64_t oldest;     /* generation that was in the file at the last call; older ones are gone */
    uint64_t generation; /* of the segment; 0: none yet */
    uint64_t segment;
    uint64_t off;        /* in it, of the next entry */
    uint64_t npending;
    uint64_t pending[MN_CACHE_PENDING]; /* offsets in it of entries that had begun */
};

/* Advances, and writes at most `most` of the entries that were stored since. The number of them;
 * `most` of them: there may be more. */
uint64_t
mn_cache_cursor_next(const struct mn_cache_file *file, struct mn_cache_cursor *cursor,
                     struct mn_cache_stored *out, uint64_t most);

/* ---- an entry: how its bytes are read and written ----
 *
 * Purpose
 *   The only difference between the two kinds of cache. In memory the data is mapped, and is read
 *   through the mapping. On a disk it is read by pread. So a block that cannot be read is an error
 *   of a call, and never a signal. What the kernel has of the file in its page cache is what other
 *   processes see, at once.
 *   Both are written by pwrite, because the kernel need not clear a page that it fills whole, and
 *   takes no fault for it: a MB in memory takes 0.42 ms of CPU in place of 0.72. Heads and seals in
 *   memory are stored through the mapping, because readers rely on the order of these stores.
 *
 * All offsets are from the begin of the data. Callers stay within the segment that they mean.
 */

struct mn_cache_part {
    const void *data;
    uint64_t bytes;
};

/* Writes an entry: description and parts, each padded to a unit, their checksums, the head with
 * `sums` set, and its seal last of all. 0 or -errno; the seal is not written then. */
int
mn_cache_data_write(const struct mn_cache_map *map, uint64_t off, const struct mn_cache_head *head,
                    const struct mn_cache_part *description, const struct mn_cache_part *parts,
                    uint64_t nparts);

/* Whether what was read before came from this file: a program that closes every descriptor may have
 * given the number to another one since. */
bool
mn_cache_data_is_there(const struct mn_cache_map *map);

/* ---- the index: from a key's digest to its entry, without a lock ----
 *
 * Purpose
 *   The index is a hint. Each digest belongs to one bucket of eight records; any client writes any
 *   of them at any time, a word after the other. A reader believes a record only when the entry
 *   that it leads to confirms it. So a torn record, and one of a recycled segment, is a miss. There
 *   is nothing that a client could hold while it dies.
 *
 * Why a confirmed entry is whole
 *   [K8] the writer stores the entry's seal (release) after the entry's other words and the data.
 *   [K8] -> [K9]: a reader loads the seal (acquire) before all else. If it fits the other words,
 *   the digest and the generation that the reader asks for, all of the entry is visible. Older
 *   bytes at the same place were of an older generation, and the seal covers the generation, a salt
 *   of the file, and all lengths. Bytes that have not been written are zero, which is no seal.
 *
 * On a disk a writer writes an entry by system calls, the seal by the last one. It stores the
 * entry's record after that (release). A reader loads the record (acquire) before it reads.
 *
 * Eras (on a disk): a record says in which era its entry was last verified, or written. Where that
 * is not the file's, the entry is verified before it is used. The mark is part of the word that
 * says where the entry lies, and is exchanged with it: a record that has changed gets none.
 *
 * A bucket that is full of live records loses the one of the oldest generation. Its entry stays in
 * the log, unseen, until its segment is recycled. The index has a record for each 2 KiB of data, so
 * of a log full of entries of 4 KiB less than 2 % are lost, and almost none of larger ones.
 */

/* An entry that was whole when it was looked at. */
struct mn_cache_found {
    const struct mn_cache_map *map;
    uint32_t segment;
    uint64_t generation;
    uint64_t bytes;     /* of the payload */
    uint64_t described; /* of its description, which comes first */
    uint64_t made_ns;
    uint64_t sums;
    uint64_t payload; /* where it begins in the data */
    struct mn_cache_record *record;
    uint64_t place; /* what the record said */
    bool verified;  /* in this era */
};

/* False: there is none. */
bool
mn_cache_index_find(const struct mn_cache_map *map, struct mn_cache_digest digest,
                    struct mn_cache_found *found);

/* Says where an entry lies, after its seal was stored. */
void
mn_cache_index_insert(const struct mn_cache_map *map, struct mn_cache_digest digest,
                      uint64_t generation, uint32_t segment, uint64_t off);

/* The entry that a record of the index leads to, if it confirms the record. */
bool
mn_cache_index_entry(const struct mn_cache_map *map, struct mn_cache_record *record,
                     struct mn_cache_found *found);

/* Says in the index that an entry is verified in this era, or takes it out of the index. */
void
mn_cache_index_mark(const struct mn_cache_found *found, bool whole);

/* Whether what was copied since it was found is the entry's. */
bool
mn_cache_found_still(const struct mn_cache_found *found);

/* Whether every block has its checksum. Meaningful if it is still there afterwards. */
bool
mn_cache_found_verify(const struct mn_cache_found *found);

/* Part of an array in C order that lies in an entry's payload. All in items. */
struct mn_cache_box {
    int ndim;
    uint64_t itemsize;
    const uint64_t *shape, *start, *count;
};

/* Copies bytes of the payload from `off` on; no check but of the bounds (-EINVAL). Another error:
 * they cannot be read. */
int
mn_cache_copy(const struct mn_cache_found *found, uint64_t off, void *to, uint64_t bytes);

/* Copies a box out of an array at `off`, to C order. */
int
mn_cache_copy_box(const struct mn_cache_found *found, uint64_t off,
                  const struct mn_cache_box *box, void *to);

#endif /* MN_CACHE_LOG_H */
