/* Facts learned about files, in lists that only grow.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_filecache.h"

#include <stdlib.h>
#include <string.h>

void
mn_filecache_init(struct mn_filecache *cache)
{
    memset(cache, 0, sizeof(*cache));
}

static struct mn_filecache_entry *
head_of(const struct mn_filecache *cache, uint64_t hash)
{
    /* Acquire: pairs with the publishing exchange in mn_filecache_add, so the entry and all entries
     * behind it are seen complete. */
    return (struct mn_filecache_entry *)(uintptr_t)mn_a64_load_acquire(
        &cache->heads[hash % MN_FILECACHE_LISTS]);
}

void
mn_filecache_fini(struct mn_filecache *cache)
{
    for (uint64_t list = 0; list < MN_FILECACHE_LISTS; list++) {
        struct mn_filecache_entry *entry = head_of(cache, list);
        while (entry != NULL) {
            struct mn_filecache_entry *next = entry->next;
            free(entry->boxes);
            free(entry);
            entry = next;
        }
    }
    mn_filecache_init(cache);
}

static uint64_t
hash_of(const char *path, enum mn_filecache_kind kind)
{
    return mn_path_hash(path) ^ (uint64_t)kind;
}

const struct mn_filecache_entry *
mn_filecache_find(const struct mn_filecache *cache, enum mn_filecache_kind kind,
                  const char *path, const struct mn_npy_identity *identity)
{
    uint64_t hash = hash_of(path, kind);
    const struct mn_filecache_entry *entry = head_of(cache, hash);
    for (; entry != NULL; entry = entry->next) {
        if (entry->hash == hash && entry->kind == kind
            && mn_same_identity(&entry->identity, identity) && strcmp(entry->path, path) == 0) {
            return entry;
        }
    }
    return NULL;
}

const struct mn_filecache_entry *
mn_filecache_add(struct mn_filecache *cache, const char *path,
                 const struct mn_npy_identity *identity, const struct mn_npy *npy,
                 struct mn_boxes *boxes)
{
    enum mn_filecache_kind kind = boxes != NULL ? MN_CACHED_BOXES : MN_CACHED_HEADER;
    size_t length = strlen(path) + 1;
    struct mn_filecache_entry *entry = NULL;
    if (mn_a64_add_relaxed(&cache->n_entries, 1) < MN_FILECACHE_ENTRIES) {
        entry = malloc(sizeof(*entry) + length);
    }
    if (entry == NULL) {
        mn_a64_add_relaxed(&cache->n_entries, UINT64_MAX); /* minus one: a count only */
        return NULL;
    }
    entry->hash = hash_of(path, kind);
    entry->kind = kind;
    entry->identity = *identity;
    entry->npy = *npy;
    entry->boxes = boxes;
    memcpy(entry->path, path, length);
    mn_a64 *head = &cache->heads[entry->hash % MN_FILECACHE_LISTS];
    uint64_t first = mn_a64_load_acquire(head);
    do {
        entry->next = (struct mn_filecache_entry *)(uintptr_t)first;
        /* Release: publishes the entry to head_of's acquire. */
    } while (!mn_a64_cas_acqrel(head, &first, (uint64_t)(uintptr_t)entry));
    return entry;
}

int
mn_filecache_each(const struct mn_filecache *cache, enum mn_filecache_kind kind,
                  int (*visit)(const struct mn_filecache_entry *entry, void *arg),
                  void *arg)
{
    int rc = 0;
    for (uint64_t list = 0; list < MN_FILECACHE_LISTS; list++) {
        const struct mn_filecache_entry *entry = head_of(cache, list);
        for (; rc == 0 && entry != NULL; entry = entry->next) {
            rc = entry->kind == kind ? visit(entry, arg) : 0;
        }
    }
    return rc;
}
