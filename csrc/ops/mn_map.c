/* Mappings of files that are kept between samples.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include "ops/mn_map.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/vfs.h>
#include <unistd.h>

/* ---- Reading mapped files that may shrink meanwhile ---- */

/* The range that this thread reads. Initial-exec, because the handler also runs in threads that
 * never read a range. Another model may allocate at a thread's first access. musl does not, and
 * refuses initial-exec in what is loaded at run time. */
#if defined(__GLIBC__)
#define MN_GUARD_TLS _Thread_local __attribute__((tls_model("initial-exec")))
#else
#define MN_GUARD_TLS _Thread_local
#endif
static MN_GUARD_TLS struct mn_guard *mn_guard_range;

/* The handler belongs to the whole process, and so does its state. */
static struct sigaction mn_guard_before;
static mn_a32 mn_guard_installed; /* 0 once the previous handler has been put back */
static mn_a32 mn_guard_installer; /* pid of the process that is changing the two, or 0 */

static bool
replace_by_zeros(struct mn_guard *guard, const void *address)
{
    uintptr_t at = (uintptr_t)address - (uintptr_t)guard->bytes;
    if (at >= guard->size) {
        return false;
    }
    mn_a32_store_relaxed(&guard->lost, 1); /* read by the same thread */
    return mmap(guard->bytes, guard->size, PROT_READ,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0)
           != MAP_FAILED;
}

static void
on_sigbus(int number, siginfo_t *info, void *context)
{
    (void)context;
    int saved = errno;
    bool sent = info->si_code <= 0; /* by kill() or raise(), not by a fault */
    if (sent || mn_guard_range == NULL
        || !replace_by_zeros(mn_guard_range, info->si_addr)) {
        struct sigaction before = mn_guard_before;
        if (mn_a32_xchg_acqrel(&mn_guard_installed, 0) == 0) {
            memset(&before, 0, sizeof(before));
            before.sa_handler = SIG_DFL;
        }
        sigaction(number, &before, NULL);
        if (sent) {
            raise(number);
        }
    }
    errno = saved;
}

static bool
is_ours(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) != 0 && action->sa_sigaction == on_sigbus;
}

/* One thread at a time; a fork in the middle leaves the pid of another process. */
static void
lock(void)
{
    uint32_t me = (uint32_t)getpid(), found = 0;
    while (!mn_a32_cas_acqrel(&mn_guard_installer, &found, me)) {
        if (found == me) {
            mn_cpu_pause();
            found = 0;
        }
    }
}

static void
install(void)
{
    struct sigaction ours, now;
    memset(&ours, 0, sizeof(ours));
    ours.sa_sigaction = on_sigbus;
    /* SA_NODEFER: the previous handler may be reached, and end, from within. */
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigemptyset(&ours.sa_mask);
    lock();
    sigaction(SIGBUS, NULL, &now);
    if (!is_ours(&now)) {
        mn_guard_before = now;
    }
    else if (mn_a32_load_relaxed(&mn_guard_installed) == 0) {
        /* Other code has restored our handler as its predecessor, and is done. */
        memset(&mn_guard_before, 0, sizeof(mn_guard_before));
        mn_guard_before.sa_handler = SIG_DFL;
    }
    mn_a32_store_release(&mn_guard_installed, 1);
    sigaction(SIGBUS, &ours, NULL);
    mn_a32_store_release(&mn_guard_installer, 0);
}

void
mn_guard_enter(struct mn_guard *guard)
{
    struct sigaction now;
    sigset_t bus, old;
    if (sigaction(SIGBUS, NULL, &now) != 0 || !is_ours(&now)
        || mn_a32_load_acquire(&mn_guard_installed) == 0) {
        install();
    }
    sigemptyset(&bus);
    sigaddset(&bus, SIGBUS);
    guard->blocked = pthread_sigmask(SIG_UNBLOCK, &bus, &old) == 0
                     && sigismember(&old, SIGBUS) == 1;
    mn_a32_store_relaxed(&guard->lost, 0);
    mn_guard_range = guard;
}

bool
mn_guard_leave(struct mn_guard *guard)
{
    mn_guard_range = NULL;
    if (guard->blocked) {
        sigset_t bus;
        sigemptyset(&bus);
        sigaddset(&bus, SIGBUS);
        pthread_sigmask(SIG_BLOCK, &bus, NULL);
    }
    return mn_a32_load_relaxed(&guard->lost) == 0;
}

#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* RUSAGE_THREAD */
#endif

/* FNV-1a */
uint64_t
mn_path_hash(const char *path)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (const char *c = path; *c != '\0'; c++) {
        hash = (hash ^ (unsigned char)*c) * 0x100000001b3u;
    }
    return hash ^ hash >> 32;
}

bool
mn_same_identity(const struct mn_npy_identity *a, const struct mn_npy_identity *b)
{
    return a->device == b->device && a->inode == b->inode && a->size == b->size
           && a->mtime_ns == b->mtime_ns;
}

/* ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, tmpfs, overlayfs, SquashFS, EROFS: their magic numbers
 * as statfs(2) lists them. ZFS is not among them: it keeps mapped pages twice. */
static bool
is_local(int fd)
{
    static const uint32_t local[] = {0xef53,     0x58465342, 0x9123683e, 0xf2f52010, 0xca451a4e,
                                     0x01021994, 0x794c7630, 0x73717368, 0xe0f5e1e2};
    struct statfs fs;
    if (fstatfs(fd, &fs) != 0) {
        return false;
    }
    for (size_t i = 0; i < sizeof(local) / sizeof(local[0]); i++) {
        if ((uint32_t)fs.f_type == local[i]) {
            return true;
        }
    }
    return false;
}

/* -- The table ------------------------------------------------------------------------- */

void
mn_maps_init(struct mn_maps *maps, uint64_t most_bytes)
{
    memset(maps, 0, sizeof(*maps));
    maps->most_bytes = most_bytes;
}

static struct mn_map_slot *
slot_at(struct mn_maps *maps, uint64_t hash, int way)
{
    return &maps->slots[(hash + (uint64_t)way) % MN_MAPS];
}

/* Takes the mapping out of a slot; NULL if it is empty. */
static struct mn_map *
take_slot(struct mn_map_slot *slot)
{
    if (mn_a64_load_relaxed(&slot->map) == 0) { /* a hint: the exchange decides */
        return NULL;
    }
    /* Acquire: pairs with the release in put_in_slot. */
    return (struct mn_map *)(uintptr_t)mn_a64_xchg_acqrel(&slot->map, 0);
}

void
mn_maps_fini(struct mn_maps *maps)
{
    for (int i = 0; i < MN_MAPS; i++) {
        mn_map_close(maps, take_slot(&maps->slots[i]));
    }
}

struct mn_map *
mn_maps_take(struct mn_maps *maps, const char *path)
{
    uint64_t hash = mn_path_hash(path);
    for (int way = 0; way < MN_MAPS_WAYS; way++) {
        struct mn_map_slot *slot = slot_at(maps, hash, way);
        struct mn_map *map = mn_a64_load_relaxed(&slot->hash) == hash ? take_slot(slot) : NULL;
        if (map != NULL && strcmp(map->path, path) == 0) {
            return map;
        }
        if (map != NULL) {
            mn_maps_put(maps, map); /* the hint belonged to another mapping; now it is right */
        }
    }
    return NULL;
}

static bool
put_in_slot(struct mn_maps *maps, struct mn_map_slot *slot, struct mn_map *map)
{
    uint64_t empty = 0, hash = map->hash;
    /* Release: the mapping is complete for the thread that takes it out. */
    if (mn_a64_load_relaxed(&slot->map) != 0
        || !mn_a64_cas_acqrel(&slot->map, &empty, (uint64_t)(uintptr_t)map)) {
        return false;
    }
    mn_a64_store_relaxed(&slot->hash, hash);
    mn_a64_store_relaxed(&slot->stamp, mn_a64_add_relaxed(&maps->clock, 1));
    return true;
}

void
mn_maps_put(struct mn_maps *maps, struct mn_map *map)
{
    bool kept = false;
    for (int way = 0; !kept && !map->lost && way < MN_MAPS_WAYS; way++) {
        kept = put_in_slot(maps, slot_at(maps, map->hash, way), map);
    }
    if (!kept) {
        mn_map_close(maps, map);
    }
}

/* Returns whether a mapping of this path could be put. Other threads may be faster: then it is
 * closed. */
static bool
has_slot(struct mn_maps *maps, uint64_t hash)
{
    for (int way = 0; way < MN_MAPS_WAYS; way++) {
        if (mn_a64_load_relaxed(&slot_at(maps, hash, way)->map) == 0) {
            return true;
        }
    }
    return false;
}

/* Drops the oldest of the mappings whose place it could have. */
static void
drop_oldest(struct mn_maps *maps, uint64_t hash)
{
    struct mn_map_slot *oldest = NULL;
    uint64_t stamp = UINT64_MAX;
    for (int way = 0; way < MN_MAPS_WAYS; way++) {
        struct mn_map_slot *slot = slot_at(maps, hash, way);
        if (mn_a64_load_relaxed(&slot->map) != 0
            && mn_a64_load_relaxed(&slot->stamp) < stamp) {
            stamp = mn_a64_load_relaxed(&slot->stamp);
            oldest = slot;
        }
    }
    if (oldest != NULL) {
        mn_map_close(maps, take_slot(oldest)); /* NULL if another thread was faster */
    }
}

/* Finds room for a mapping of this size, and counts its bytes. */
static bool
find_room(struct mn_maps *maps, uint64_t hash, uint64_t size)
{
    for (int attempt = 0; attempt <= MN_MAPS_WAYS; attempt++) {
        if (has_slot(maps, hash)) {
            uint64_t before = mn_a64_add_relaxed(&maps->bytes, size);
            if (before + size <= maps->most_bytes && before + size >= size) {
                return true;
            }
            mn_a64_add_relaxed(&maps->bytes, 0 - size);
        }
        if (attempt == 0 && mn_a64_add_relaxed(&maps->misfits, 1) % MN_MAPS_TURN != 0) {
            return false;
        }
        drop_oldest(maps, hash);
    }
    return false;
}

/* -- One mapping ----------------------------------------------------------------------- */

struct mn_map *
mn_map_open(struct mn_maps *maps, int fd, const char *path,
            const struct mn_npy_identity *identity)
{
    size_t length = strlen(path) + 1;
    uint64_t size = identity->size, hash = mn_path_hash(path);
    if (size == 0 || size > SIZE_MAX / 2 || !find_room(maps, hash, size)) {
        return NULL;
    }
    struct mn_map *map = malloc(sizeof(*map) + length);
    void *bytes = map != NULL && is_local(fd)
                      ? mmap(NULL, (size_t)size, PROT_READ, MAP_SHARED, fd, 0)
                      : MAP_FAILED;
    if (bytes == MAP_FAILED) {
        mn_a64_add_relaxed(&maps->bytes, 0 - size);
        free(map);
        return NULL;
    }
    *map = (struct mn_map){
        .identity = *identity,
        .hash = hash,
        .guard = {.bytes = bytes, .size = (size_t)size},
    };
    memcpy(map->path, path, length);
    return map;
}

void
mn_map_close(struct mn_maps *maps, struct mn_map *map)
{
    if (map != NULL) {
        mn_a64_add_relaxed(&maps->bytes, 0 - (uint64_t)map->guard.size);
        munmap(map->guard.bytes, map->guard.size);
        free(map);
    }
}

void
mn_map_ahead(const struct mn_map *map, uint64_t off, uint64_t length)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    if (off < map->guard.size) {
        uint64_t start = off / page * page, left = map->guard.size - start;
        length += off - start;
        (void)madvise(map->guard.bytes + start, (size_t)(length < left ? length : left),
                      MADV_WILLNEED);
    }
}

bool
mn_map_waited(uint64_t *counter)
{
    struct rusage usage;
    if (getrusage(RUSAGE_THREAD, &usage) != 0) {
        return false;
    }
    uint64_t before = *counter;
    *counter = (uint64_t)usage.ru_majflt;
    return *counter != before;
}
