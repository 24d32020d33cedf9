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

#endif /* MN_CACHE_LOG_H */
