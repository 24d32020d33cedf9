/* What was stored in a cache file since a client last asked.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A trainer that chooses among cached samples follows what all jobs store. The log itself is the
 *   list: its segments have rising generations, and a segment's entries lie one after another. A
 *   cursor is a place in it. A call costs O(entries stored since), besides one look at the
 *   segments where the cursor's own one is at its end.
 *
 * What is reported is a hint, as the index is. An entry may be gone at the time of the report, and
 * some are never reported; both cost a job a hit and nothing else. No lock is taken and nothing is
 * written. A cursor belongs to one thread, and is plain data.
 *
 * How the cursor gets past entries that are being written
 *   [K10] a writer stores the entry's length and a seal of another kind ("begun") before it copies
 *   data. [K10] -> [K11]: a cursor that sees a begun entry knows where the next one is. It notes
 *   the place, goes on, and reports the entry at a later call, once it has its own seal [K8].
 *   A place that is reserved and not begun ends the call; the next call looks again. Its writer may
 *   have died there. Once the log has moved on, and no living client has the segment reserved, the
 *   cursor leaves the rest of its segment. A writer that is late does not come back to such a
 *   segment (mn_cache_log.h).
 *
 * Recycling: where no segment has the cursor's generation any more, the cursor goes to the oldest
 *   one with a higher generation. Bytes of an older generation are no entry, because a seal, of
 *   either kind, covers the generation and the salt of the file.
 */
#ifndef MN_CACHE_CURSOR_H
#define MN_CACHE_CURSOR_H

#include <stdint.h>

#include "cache/mn_cache_file.h"

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

#endif /* MN_CACHE_CURSOR_H */
