/* From a key's digest to its entry, without a lock.
 * SPDX-License-Identifier: Apache-2.0
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
#ifndef MN_CACHE_INDEX_H
#define MN_CACHE_INDEX_H

#include <stdbool.h>
#include <stdint.h>

#include "cache/mn_cache_records.h"

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

#endif /* MN_CACHE_INDEX_H */
