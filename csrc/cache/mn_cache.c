/* See mn_cache.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_thread.h"

#define SECOND_NS UINT64_C(1000000000)
#define RELIEVE_NS (SECOND_NS / 100) /* between two looks for pressure */
#define REFUSED_NS (5 * SECOND_NS) /* after a refusal no client waits for a maker */
#define PATIENCE 4

/* A file that this process has or had open; the others are kept for threads that read them. */
struct opened {
    struct mn_cache_file file;
    struct opened *before;
};

struct mn_cache {
    struct mn_cache_place place;
    uint64_t reserve;
    uint64_t promised;
    struct mn_mutex mutex;   /* guards all below but the loads of `opened` and relieve_at_ns */
    mn_a64 opened;           /* struct opened *, NULL: not attached */
    struct opened *former;   /* lost ones, still mapped */
    bool inherited;          /* from a process that was attached when it forked */
    struct mn_cache_log log; /* of the opened file */
    mn_a64 relieve_at_ns;
    struct mn_cache *next;
};

/* The process's clients, for its forks. */
static struct {
    pthread_mutex_t lock;
    struct mn_cache *first;
    pthread_once_t once;
    int refused; /* error number: forks cannot be watched */
} mn_cache_clients = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static struct opened *
opened_of(const struct mn_cache *cache)
{
    return (struct opened *)(uintptr_t)mn_a64_load_acquire(&cache->opened);
}

static void
publish(struct mn_cache *cache, struct opened *opened)
{
    mn_a64_store_release(&cache->opened, (uint64_t)(uintptr_t)opened);
}

static void
before_fork(void)
{
    (void)pthread_mutex_lock(&mn_cache_clients.lock);
    for (struct mn_cache *c = mn_cache_clients.first; c != NULL; c = c->next) {
        mn_mutex_lock(&c->mutex);
    }
}

static void
in_parent(void)
{
    for (struct mn_cache *c = mn_cache_clients.first; c != NULL; c = c->next) {
        mn_mutex_unlock(&c->mutex);
    }
    (void)pthread_mutex_unlock(&mn_cache_clients.lock);
}

/* The child has no mapping, and must not have the descriptor: it would keep the lock held. */
static void
in_child(void)
{
    for (struct mn_cache *c = mn_cache_clients.first; c != NULL; c = c->next) {
        struct opened *opened = opened_of(c);
        if (opened != NULL) {
            const struct mn_cache_map *map = &opened->file.map;
            if (mn_cache_locks_ours(opened->file.fd, map->device, map->inode)) {
                (void)close(opened->file.fd);
            }
            opened->before = c->former;
            c->former = opened;
            c->inherited = true;
        }
        c->promised = 0; /* is its parent's */
        publish(c, NULL);
        for (struct opened *o = c->former; o != NULL; o = o->before) {
            o->file.fd = o->file.map.fd = -1;
            o->file.map.base = NULL;
        }
        mn_mutex_unlock(&c->mutex);
    }
    (void)pthread_mutex_unlock(&mn_cache_clients.lock);
}

static void
watch_forks(void)
{
    mn_cache_clients.refused = pthread_atfork(before_fork, in_parent, in_child);
}

int
mn_cache_open(const struct mn_cache_place *place, uint64_t reserve, struct mn_cache **out)
{
    (void)pthread_once(&mn_cache_clients.once, watch_forks);
    if (mn_cache_clients.refused != 0) {
        return -mn_cache_clients.refused;
    }
    struct mn_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL) {
        return -ENOMEM;
    }
    cache->place = *place;
    cache->place.folder = strdup(place->folder);
    cache->place.name = strdup(place->name);
    cache->reserve = reserve;
    if (cache->place.folder == NULL || cache->place.name == NULL
        || mn_mutex_init(&cache->mutex) != 0) {
        free((char *)(uintptr_t)cache->place.folder);
        free((char *)(uintptr_t)cache->place.name);
        free(cache);
        return -ENOMEM;
    }
    (void)pthread_mutex_lock(&mn_cache_clients.lock);
    cache->next = mn_cache_clients.first;
    mn_cache_clients.first = cache;
    (void)pthread_mutex_unlock(&mn_cache_clients.lock);
    *out = cache;
    return 0;
}

void
mn_cache_detach(struct mn_cache *cache)
{
    mn_mutex_lock(&cache->mutex);
    struct opened *opened = opened_of(cache);
    publish(cache, NULL);
    if (opened != NULL) {
        mn_cache_file_close(&cache->place, &opened->file);
        free(opened);
    }
    else if (cache->inherited) {
        mn_cache_file_sweep(&cache->place);
    }
    while (cache->former != NULL) {
        opened = cache->former;
        cache->former = opened->before;
        mn_cache_file_unmap(&opened->file);
        free(opened);
    }
    mn_mutex_unlock(&cache->mutex);
}

void
mn_cache_close(struct mn_cache *cache)
{
    (void)pthread_mutex_lock(&mn_cache_clients.lock);
    struct mn_cache **at = &mn_cache_clients.first;
    while (*at != NULL && *at != cache) {
        at = &(*at)->next;
    }
    if (*at == cache) {
        *at = cache->next;
    }
    (void)pthread_mutex_unlock(&mn_cache_clients.lock);
    mn_cache_detach(cache);
    mn_mutex_fini(&cache->mutex);
    free((char *)(uintptr_t)cache->place.folder);
    free((char *)(uintptr_t)cache->place.name);
    free(cache);
}

/* Under the mutex. */
static int
attach(struct mn_cache *cache)
{
    if (opened_of(cache) != NULL) {
        return 0;
    }
    struct opened *opened = calloc(1, sizeof(*opened));
    if (opened == NULL) {
        return -ENOMEM;
    }
    int rc = mn_cache_file_open(&cache->place, &opened->file);
    if (rc != 0) {
        free(opened);
        return rc;
    }
    cache->log = (struct mn_cache_log){.file = &opened->file, .reserve = cache->reserve};
    mn_a64_store_relaxed(&opened->file.map.slots[opened->file.slot].promised, cache->promised);
    publish(cache, opened);
    return 0;
}

int
mn_cache_attach(struct mn_cache *cache)
{
    if (opened_of(cache) != NULL) {
        return 0;
    }
    mn_mutex_lock(&cache->mutex);
    int rc = attach(cache);
    mn_mutex_unlock(&cache->mutex);
    return rc;
}

/* Under the mutex: attached, by a descriptor that still is this client's. */
static int
attach_surely(struct mn_cache *cache)
{
    struct opened *opened = opened_of(cache);
    if (opened != NULL
        && !mn_cache_locks_ours(opened->file.fd, opened->file.map.device,
                                opened->file.map.inode)) {
        opened->file.fd = -1; /* closed, or another file's by now */
        opened->before = cache->former;
        cache->former = opened;
        publish(cache, NULL);
    }
    return attach(cache);
}

bool
mn_cache_is_on_disk(const struct mn_cache *cache)
{
    return cache->place.on_disk;
}

void
mn_cache_promise(struct mn_cache *cache, uint64_t bytes)
{
    mn_mutex_lock(&cache->mutex);
    const struct opened *opened = opened_of(cache);
    cache->promised = bytes;
    if (opened != NULL) {
        mn_a64_store_relaxed(&opened->file.map.slots[opened->file.slot].promised, bytes);
    }
    mn_mutex_unlock(&cache->mutex);
}

static void
relieve(struct mn_cache *cache)
{
    if (cache->place.on_disk) {
        return;
    }
    uint64_t now = mn_now_ns(), at = mn_a64_load_relaxed(&cache->relieve_at_ns);
    if (now < at || !mn_a64_cas_acqrel(&cache->relieve_at_ns, &at, now + RELIEVE_NS)) {
        return;
    }
    mn_mutex_lock(&cache->mutex);
    if (attach_surely(cache) == 0) {
        mn_cache_log_relieve(&cache->log);
    }
    mn_mutex_unlock(&cache->mutex);
}

/* Verifies an entry, and takes it out of the index if a checksum is wrong. */
static bool
verify(const struct opened *opened, const struct mn_cache_found *found)
{
    bool whole = mn_cache_found_verify(found);
    if (!mn_cache_found_still(found)) {
        return false;
    }
    mn_cache_index_mark(found, whole);
    if (!whole) {
        (void)mn_a64_add_relaxed(&found->map->slots[opened->file.slot].damaged, 1);
    }
    return whole;
}

/* Whether there is an entry that may be used. */
static bool
finds(const struct opened *opened, struct mn_cache_digest digest, struct mn_cache_found *found)
{
    const struct mn_cache_map *map = &opened->file.map;
    if (!mn_cache_index_find(map, digest, found)) {
        return false;
    }
    if (map->data != NULL) {
        return true;
    }
    struct mn_cache_segment *segment = &map->segments[found->segment];
    uint64_t session = mn_a64_load_relaxed(&map->header->session);
    if (!found->verified && !verify(opened, found)) {
        return false;
    }
    if (mn_a64_load_relaxed(&segment->used) != session) {
        mn_a64_store_relaxed(&segment->used, session);
    }
    return true;
}

int
mn_cache_find(struct mn_cache *cache, struct mn_cache_digest digest, bool count,
              struct mn_cache_found *found)
{
    int rc = mn_cache_attach(cache);
    if (rc != 0) {
        return rc;
    }
    relieve(cache);
    const struct opened *opened = opened_of(cache);
    bool hit = opened != NULL && finds(opened, digest, found);
    if (!hit && opened != NULL && !mn_cache_data_is_there(&opened->file.map)) {
        mn_mutex_lock(&cache->mutex);
        rc = attach_surely(cache);
        mn_mutex_unlock(&cache->mutex);
        opened = opened_of(cache);
        hit = rc == 0 && opened != NULL && finds(opened, digest, found);
    }
    if (rc != 0 || opened == NULL) {
        return rc != 0 ? rc : MN_EMPTY;
    }
    struct mn_cache_slot *slot = &opened->file.map.slots[opened->file.slot];
    if (count && hit) {
        (void)mn_a64_add_relaxed(&slot->hits, 1);
        (void)mn_a64_add_relaxed(&slot->hit_bytes, found->bytes);
        (void)mn_a64_add_relaxed(&slot->saved_ns, found->made_ns);
    }
    else if (count) {
        (void)mn_a64_add_relaxed(&slot->misses, 1);
    }
    return hit ? 0 : MN_EMPTY;
}

bool
mn_cache_check(struct mn_cache *cache, const struct mn_cache_found *found)
{
    const struct opened *opened = opened_of(cache);
    return opened != NULL && found->map == &opened->file.map && verify(opened, found);
}

/* Under the mutex, attached. */
static int
store(struct mn_cache *cache, struct mn_cache_digest digest, struct mn_cache_head *head,
      const struct mn_cache_value *value)
{
    const struct mn_cache_file *file = &opened_of(cache)->file;
    const struct mn_cache_map *map = &file->map;
    uint64_t most = map->shape.segment_bytes;
    struct mn_cache_slot *slot = &map->slots[file->slot];
    struct mn_cache_reserved place;
    (void)mn_a64_add_relaxed(&slot->made_ns, head->made_ns);
    int rc = MN_CACHE_TOO_LARGE;
    if (head->bytes < most && mn_cache_payload_off(head->bytes) <= most - head->bytes) {
        uint64_t whole = mn_cache_payload_off(head->bytes) + head->bytes;
        rc = mn_cache_log_reserve(&cache->log, whole, &place);
    }
    if (rc != 0) {
        (void)mn_a64_add_relaxed(&slot->refused, 1);
        mn_a64_store_relaxed(&map->header->refused_ns, mn_now_ns());
        return rc;
    }
    head->generation = place.generation;
    rc = mn_cache_data_write(map, place.segment * most + place.off, head,
                             value->description, value->parts, value->nparts);
    if (rc != 0) {
        mn_cache_log_done(&cache->log);
        (void)mn_a64_add_relaxed(&slot->refused, 1);
        return mn_cache_log_is_full(rc) ? MN_FULL : rc;
    }
    mn_cache_index_insert(map, digest, place.generation, place.segment, place.off);
    MN_FAULT("cache.indexed");
    (void)mn_a64_add_relaxed(&map->segments[place.segment].entries, 1);
    mn_cache_log_done(&cache->log);
    (void)mn_a64_add_relaxed(&slot->stored, 1);
    (void)mn_a64_add_relaxed(&slot->stored_bytes, head->bytes);
    return 0;
}

int
mn_cache_store(struct mn_cache *cache, struct mn_cache_digest digest,
               const struct mn_cache_value *value)
{
    struct mn_cache_head head = {
        .digest = {digest.word[0], digest.word[1]},
        .bytes = mn_cache_padded(value->description->bytes),
        .described = value->description->bytes,
        .made_ns = value->made_ns,
    };
    for (uint64_t i = 0; i < value->nparts; i++) {
        head.bytes += mn_cache_padded(value->parts[i].bytes);
    }
    relieve(cache); /* making the value may have taken memory */
    mn_mutex_lock(&cache->mutex);
    int rc = attach_surely(cache);
    if (rc == 0) {
        cache->log.keeps = !value->evicts;
        rc = store(cache, digest, &head, value);
    }
    mn_mutex_unlock(&cache->mutex);
    return rc;
}

/* of the word of a claim: tag of the key, slot + 1, incarnation */
#define TAG_SHIFT 32
#define SLOT_SHIFT 21
#define INCARNATIONS ((UINT64_C(1) << SLOT_SHIFT) - 1)
MN_STATIC_ASSERT(MN_CACHE_SLOTS < 1u << (TAG_SHIFT - SLOT_SHIFT), "slot + 1 has room");

static bool
owner_lives(const struct mn_cache_file *file, uint64_t word)
{
    uint64_t slot = ((word & UINT32_MAX) >> SLOT_SHIFT) - 1;
    return slot < MN_CACHE_SLOTS
           && (mn_a64_load_acquire(&file->map.slots[slot].incarnation) & INCARNATIONS)
                  == (word & INCARNATIONS)
           && mn_cache_slot_lives(file, (uint32_t)slot);
}

static struct mn_cache_claim *
place_of(const struct mn_cache_file *file, struct mn_cache_digest digest)
{
    return &file->map.claims[digest.word[1] % MN_CACHE_CLAIMS];
}

/* 0: claimed. MN_FULL: the place is another key's; go on without. -EBUSY: somebody makes it. */
static int
take_claim(const struct mn_cache_file *file, struct mn_cache_digest digest,
           struct mn_cache_claimed *out)
{
    struct mn_cache_claim *claim = place_of(file, digest);
    uint64_t word = digest.word[0] >> TAG_SHIFT << TAG_SHIFT
                    | (uint64_t)(file->slot + 1) << SLOT_SHIFT
                    | (file->incarnation & INCARNATIONS);
    out->claim = claim;
    out->turn = mn_a32_load_seqcst(&claim->turn);
    uint64_t seen = 0;
    while (!mn_a64_cas_seqcst(&claim->word, &seen, word)) {
        if (seen != 0 && owner_lives(file, seen)) {
            if (seen >> TAG_SHIFT != word >> TAG_SHIFT) {
                return MN_FULL;
            }
            out->word = seen;
            return -EBUSY;
        }
    }
    MN_FAULT("cache.claimed");
    out->word = word;
    return 0;
}

int
mn_cache_wait_for_key(const struct mn_cache_claimed *seen)
{
    if (mn_a64_load_seqcst(&seen->claim->word) != seen->word) {
        return 0;
    }
    int rc = mn_futex_wait(&seen->claim->turn, seen->turn, MN_CACHE_POLL_NS);
    return rc == -EINTR ? rc : 0;
}

/* Gives back what take_claim() has claimed under that word. */
static void
release_claim(const struct mn_cache_file *file, struct mn_cache_digest digest, uint64_t word)
{
    struct mn_cache_claim *claim = place_of(file, digest);
    if (mn_a64_cas_seqcst(&claim->word, &word, 0)) {
        (void)mn_a32_add_seqcst(&claim->turn, 1);
        (void)mn_futex_wake(&claim->turn, INT_MAX);
    }
}

int
mn_cache_claim_key(struct mn_cache *cache, struct mn_cache_digest digest,
                   struct mn_cache_claimed *out)
{
    int rc = mn_cache_attach(cache);
    const struct opened *opened = opened_of(cache);
    if (rc == 0) {
        rc = opened != NULL ? take_claim(&opened->file, digest, out) : MN_FULL;
    }
    return rc;
}

void
mn_cache_release_key(struct mn_cache *cache, struct mn_cache_digest digest, uint64_t word)
{
    const struct opened *opened = opened_of(cache);
    if (opened != NULL) {
        release_claim(&opened->file, digest, word);
    }
}

void
mn_cache_learn_cost(struct mn_cache *cache, uint64_t function, uint64_t made_ns)
{
    const struct opened *opened = opened_of(cache);
    if (opened != NULL) {
        struct mn_cache_cost *cost = &opened->file.map.header->costs[function % MN_CACHE_COSTS];
        (void)mn_a64_add_relaxed(&cost->made, 1);
        (void)mn_a64_add_relaxed(&cost->made_ns, made_ns);
    }
}

int64_t
mn_cache_patience_ns(struct mn_cache *cache, uint64_t function)
{
    const struct opened *opened = opened_of(cache);
    if (opened == NULL) {
        return 0;
    }
    const struct mn_cache_header *header = opened->file.map.header;
    const struct mn_cache_cost *cost = &header->costs[function % MN_CACHE_COSTS];
    uint64_t refused = mn_a64_load_relaxed(&header->refused_ns), now = mn_now_ns();
    uint64_t made = mn_a64_load_relaxed(&cost->made), made_ns = mn_a64_load_relaxed(&cost->made_ns);
    if (refused != 0 && now - refused < REFUSED_NS) {
        return 0;
    }
    uint64_t patience = made > 0 ? PATIENCE * (made_ns / made) : 0;
    return (int64_t)(patience > SECOND_NS ? patience : SECOND_NS);
}

int
mn_cache_inserted(struct mn_cache *cache, struct mn_cache_cursor *cursor,
                  struct mn_cache_stored *out, uint64_t most, uint64_t *n)
{
    int rc = mn_cache_attach(cache);
    const struct opened *opened = opened_of(cache);
    *n = rc == 0 && opened != NULL ? mn_cache_cursor_next(&opened->file, cursor, out, most) : 0;
    return rc;
}

int
mn_cache_sum(struct mn_cache *cache, struct mn_cache_sums *sums)
{
    memset(sums, 0, sizeof(*sums));
    int rc = mn_cache_attach(cache);
    const struct opened *opened = opened_of(cache);
    if (rc != 0 || opened == NULL) {
        return rc;
    }
    const struct mn_cache_map *map = &opened->file.map;
    mn_cache_file_label(&opened->file, sums->label);
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        const struct mn_cache_slot *slot = &map->slots[i];
        sums->hits += mn_a64_load_relaxed(&slot->hits);
        sums->hit_bytes += mn_a64_load_relaxed(&slot->hit_bytes);
        sums->saved_ns += mn_a64_load_relaxed(&slot->saved_ns);
        sums->misses += mn_a64_load_relaxed(&slot->misses);
        sums->made_ns += mn_a64_load_relaxed(&slot->made_ns);
        sums->stored += mn_a64_load_relaxed(&slot->stored);
        sums->stored_bytes += mn_a64_load_relaxed(&slot->stored_bytes);
        sums->refused += mn_a64_load_relaxed(&slot->refused);
        sums->damaged += mn_a64_load_relaxed(&slot->damaged);
        sums->clients += mn_a64_load_relaxed(&slot->job) != 0
                         && mn_cache_slot_lives(&opened->file, i);
    }
    sums->jobs = mn_cache_log_jobs(&opened->file);
    sums->name = mn_cache_file_name(&cache->place, &opened->file);
    for (uint64_t i = 0; i < map->shape.nsegments; i++) {
        const struct mn_cache_segment *segment = &map->segments[i];
        if (mn_a64_load_relaxed(&segment->generation) != 0) {
            sums->used_bytes += mn_a64_load_relaxed(&segment->fill);
            sums->entries += mn_a64_load_relaxed(&segment->entries);
        }
    }
    sums->segments = map->shape.nsegments;
    sums->bytes = map->shape.nsegments * map->shape.segment_bytes;
    sums->recycled = mn_a64_load_relaxed(&map->header->recycled);
    sums->returned = mn_a64_load_relaxed(&map->header->returned);
    sums->entry_bytes_max = map->shape.segment_bytes - 2 * MN_CACHE_UNIT
                            - mn_cache_padded(mn_cache_nblocks(map->shape.segment_bytes) * 8);
    return 0;
}

int
mn_cache_verify(struct mn_cache *cache, uint64_t *checked, uint64_t *damaged)
{
    *checked = *damaged = 0;
    int rc = mn_cache_attach(cache);
    const struct opened *opened = opened_of(cache);
    if (rc != 0 || opened == NULL) {
        return rc;
    }
    const struct mn_cache_map *map = &opened->file.map;
    for (uint64_t i = 0; i < map->shape.nbuckets * MN_CACHE_WAYS; i++) {
        struct mn_cache_found found;
        if (!mn_cache_index_entry(map, &map->index[i / MN_CACHE_WAYS].record[i % MN_CACHE_WAYS],
                                  &found)) {
            continue;
        }
        bool whole = mn_cache_found_verify(&found);
        if (mn_cache_found_still(&found)) {
            *checked += 1;
            *damaged += !whole;
        }
    }
    return 0;
}
