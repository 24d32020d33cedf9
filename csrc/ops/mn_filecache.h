/* Facts learned about files: parsed headers and foreground boxes.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   A header is parsed once and a label volume scanned once for each state of a file. The number of
 *   threads and epochs does not matter.
 *
 * How
 *   A table of lists that only grow. An entry is made complete, then put at the head of its list by
 *   compare-and-swap. It is never changed or removed before the table ends. So there is no lock: no
 *   state that a fork could copy half done, no reclamation, no ABA.
 *   Two threads that learn the same fact at once both add it; either entry is right.
 *   Entries are found by path, kind and the file's identity (device, inode, size, mtime),
 *   so a changed file is learned anew. After MN_FILECACHE_ENTRIES nothing more is added:
 *   that bounds memory where files keep changing.
 */
#ifndef MN_FILECACHE_H
#define MN_FILECACHE_H

#include "base/mn_atomic.h"
#include "ops/mn_boxes.h"
#include "ops/mn_npy.h"

/* Heads of lists: 8 KiB, and lists of about a hundred entries for 100 000 files. */
#define MN_FILECACHE_LISTS 1024
#define MN_FILECACHE_ENTRIES 4000000u

enum mn_filecache_kind { MN_CACHED_HEADER, MN_CACHED_BOXES };

struct mn_filecache_entry {
    struct mn_filecache_entry *next; /* written only before the entry is published */
    uint64_t hash;
    enum mn_filecache_kind kind;
    struct mn_npy_identity identity;
    struct mn_npy npy;      /* MN_CACHED_HEADER */
    struct mn_boxes *boxes; /* MN_CACHED_BOXES, owned */
    char path[];
};

struct mn_filecache {
    mn_a64 heads[MN_FILECACHE_LISTS]; /* struct mn_filecache_entry *, or 0 */
    mn_a64 n_entries;
};

/* Zeroes it: an empty table is all zeros. */
void
mn_filecache_init(struct mn_filecache *cache);

/* Frees all entries; no thread may use the table any more. */
void
mn_filecache_fini(struct mn_filecache *cache);

/* Returns what is known of this state of the file, or NULL. It stays valid as long as the table. */
const struct mn_filecache_entry *
mn_filecache_find(const struct mn_filecache *cache, enum mn_filecache_kind kind,
                  const char *path, const struct mn_npy_identity *identity);

/* Adds a header (boxes NULL) or boxes, which then belong to the table. Returns the entry. Returns
 * NULL if the table is full, which is no error: boxes then still belong to the caller. */
const struct mn_filecache_entry *
mn_filecache_add(struct mn_filecache *cache, const char *path,
                 const struct mn_npy_identity *identity, const struct mn_npy *npy,
                 struct mn_boxes *boxes);

/* Calls `visit` for each entry of a kind until it returns nonzero, and returns that. */
int
mn_filecache_each(const struct mn_filecache *cache, enum mn_filecache_kind kind,
                  int (*visit)(const struct mn_filecache_entry *entry, void *arg),
                  void *arg);

#endif
