/* See mn_cache_file.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <time.h>
#include <unistd.h>

#include "base/mn_base.h"
#include "os/mn_memfd.h"
#include "os/mn_proc.h"
#include "os/mn_thread.h"

/* ---- checksums ---- */

#define PRIME_A UINT64_C(0x9e3779b97f4a7c15)
#define PRIME_B UINT64_C(0xc2b2ae3d27d4eb4f)
#define LANES 4

static inline uint64_t
rotated(uint64_t x, int by)
{
    return x << by | x >> (64 - by);
}

/* One multiplication, as they take most of the time. Another word always makes another lane. */
static inline uint64_t
mixed(uint64_t lane, uint64_t word)
{
    return rotated((lane ^ word) * PRIME_A, 31);
}

static inline uint64_t
finished(uint64_t x)
{
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 31;
}

uint64_t
mn_cache_checksum(uint64_t salt, const void *data, uint64_t bytes)
{
    const unsigned char *at = data;
    uint64_t lanes[LANES] = {salt + PRIME_A + PRIME_B, salt + PRIME_B, salt, salt - PRIME_A};
    uint64_t words[LANES], left = bytes;
    for (; left >= sizeof(words); left -= sizeof(words), at += sizeof(words)) {
        memcpy(words, at, sizeof(words));
        for (int i = 0; i < LANES; i++) {
            lanes[i] = mixed(lanes[i], words[i]);
        }
    }
    uint64_t sum = bytes;
    for (int i = 0; i < LANES; i++) {
        sum = mixed(sum, lanes[i]);
    }
    for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), at += sizeof(uint64_t)) {
        memcpy(words, at, sizeof(uint64_t));
        sum = mixed(sum, words[0]);
    }
    for (; left > 0; left--, at++) {
        sum = mixed(sum, *at + UINT64_C(256));
    }
    return finished(sum);
}

/* ---- where everything lies ---- */

#define RECORD_BYTES 2048 /* of data for each record of the index: it takes a 64th as much */

static uint64_t
pages(uint64_t bytes)
{
    return (bytes + MN_CACHE_PAGE - 1) / MN_CACHE_PAGE * MN_CACHE_PAGE;
}

/* From segments and buckets to all offsets. */
static void
lay_out(struct mn_cache_shape *shape)
{
    shape->magic = MN_CACHE_MAGIC;
    shape->layout = MN_CACHE_LAYOUT;
    shape->slots_off = pages(sizeof(struct mn_cache_header));
    shape->claims_off = shape->slots_off + pages(MN_CACHE_SLOTS * sizeof(struct mn_cache_slot));
    shape->segments_off
        = shape->claims_off + pages(MN_CACHE_CLAIMS * sizeof(struct mn_cache_claim));
    shape->index_off
        = shape->segments_off + pages(shape->nsegments * sizeof(struct mn_cache_segment));
    shape->data_off = shape->index_off + pages(shape->nbuckets * sizeof(struct mn_cache_bucket));
    shape->bytes = shape->data_off + shape->nsegments * shape->segment_bytes;
    shape->checksum
        = mn_cache_checksum(0, shape, offsetof(struct mn_cache_shape, checksum));
}

bool
mn_cache_shape_of(uint64_t bytes, uint64_t salt, struct mn_cache_shape *shape)
{
    if (bytes < MN_CACHE_BYTES_MIN || bytes > UINT64_C(1) << 46) {
        return false;
    }
    uint64_t n = (bytes + MN_CACHE_SEGMENT_MAX - 1) / MN_CACHE_SEGMENT_MAX;
    n = n > MN_CACHE_SEGMENTS ? n : MN_CACHE_SEGMENTS;
    uint64_t segment = bytes / n / MN_CACHE_PAGE * MN_CACHE_PAGE;
    *shape = (struct mn_cache_shape){
        .salt = salt, .nsegments = bytes / segment, .segment_bytes = segment,
        .nbuckets = bytes / (MN_CACHE_WAYS * RECORD_BYTES),
    };
    lay_out(shape);
    return true;
}

/* Whether a shape is what mn_cache_shape_of() could have made, and of a file that long. */
static bool
shape_makes_sense(const struct mn_cache_shape *shape, uint64_t length)
{
    struct mn_cache_shape again = *shape;
    if (shape->segment_bytes == 0 || shape->segment_bytes > MN_CACHE_SEGMENT_MAX
        || shape->segment_bytes % MN_CACHE_PAGE != 0 || shape->nsegments == 0
        || shape->nsegments > UINT64_C(1) << 22 || shape->nbuckets == 0
        || shape->nbuckets > UINT64_C(1) << 40) {
        return false;
    }
    lay_out(&again);
    return memcmp(&again, shape, sizeof(again)) == 0 && length == shape->bytes;
}

/* ---- locks that end with the process that holds them ---- */

#define NAP_NS 200000

static int
set_lock(int fd, short kind, int64_t byte)
{
    struct flock lock = {.l_type = kind, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    while (fcntl(fd, F_OFD_SETLK, &lock) < 0) {
        if (errno != EINTR) {
            return errno == EACCES ? -EAGAIN : -errno;
        }
    }
    return 0;
}

int
mn_cache_lock_try(int fd, int64_t byte)
{
    return set_lock(fd, F_WRLCK, byte);
}

int
mn_cache_lock_wait(int fd, int64_t byte, int64_t timeout_ns)
{
    uint64_t start = mn_now_ns();
    for (;;) {
        int rc = mn_cache_lock_try(fd, byte);
        if (rc != -EAGAIN) {
            return rc;
        }
        if (mn_now_ns() - start >= (uint64_t)timeout_ns) {
            return -ETIMEDOUT;
        }
        mn_nap_ns(NAP_NS);
    }
}

void
mn_cache_unlock(int fd, int64_t byte)
{
    (void)set_lock(fd, F_UNLCK, byte);
}

/* Whether another description holds one of these bytes. True where that cannot be found out. */
static bool
is_locked(int fd, int64_t first, int64_t n)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = first, .l_len = n};
    while (fcntl(fd, F_OFD_GETLK, &lock) < 0) {
        if (errno != EINTR) {
            return true;
        }
    }
    return lock.l_type != F_UNLCK;
}

bool
mn_cache_locks_ours(int fd, uint64_t device, uint64_t inode)
{
    struct stat file;
    return fstat(fd, &file) == 0 && file.st_dev == device && file.st_ino == inode;
}

#define RESERVED_AT_ONCE (UINT64_C(1) << 20) /* takes less than a millisecond */

int
mn_cache_reserve(int fd, uint64_t off, uint64_t bytes)
{
    while (bytes > 0) {
        uint64_t n = bytes < RESERVED_AT_ONCE ? bytes : RESERVED_AT_ONCE;
        if (fallocate(fd, 0, (off_t)off, (off_t)n) == 0) {
            off += n;
            bytes -= n;
        }
        else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

/* ---- a removed file that a parent still has ---- */

#define PARENTS 32
#define PATH_BYTES 4352

/* 0: unknown, or none. */
static pid_t
parent_of(pid_t pid)
{
    char path[32], text[512];
    (void)snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof(text) - 1) : -1;
    if (fd >= 0) {
        (void)close(fd);
    }
    text[n > 0 ? n : 0] = 0;
    const char *end = strrchr(text, ')'); /* of its name, which may hold anything */
    int parent = 0;
    return end != NULL && sscanf(end + 1, " %*c %d", &parent) == 1 ? (pid_t)parent : 0;
}

/* Opens the file of a process that is shown as `shown`. -1: it has none. */
static int
open_of(pid_t pid, const char *shown)
{
    char path[32], to[PATH_BYTES];
    (void)snprintf(path, sizeof(path), "/proc/%d/fd", (int)pid);
    DIR *dir = opendir(path);
    int fd = -1;
    for (struct dirent *e; fd < 0 && dir != NULL && (e = readdir(dir)) != NULL;) {
        ssize_t n = readlinkat(dirfd(dir), e->d_name, to, sizeof(to) - 1);
        to[n > 0 ? n : 0] = 0;
        if (strcmp(to, shown) == 0) {
            fd = openat(dirfd(dir), e->d_name, O_RDWR | O_CLOEXEC);
        }
    }
    if (dir != NULL) {
        (void)closedir(dir);
    }
    return fd;
}

/* Looks in /proc for a descriptor that the parent of this process, its parent, or a further one has
 * of a removed file that had this name in the folder. Returns a descriptor of it, by an open file
 * description of its own, or -1. */
static int
open_removed(int folder, const char *name)
{
    char path[32], shown[PATH_BYTES];
    (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", folder);
    ssize_t n = readlink(path, shown, sizeof(shown) / 2);
    if (n <= 0) {
        return -1;
    }
    (void)snprintf(shown + n, sizeof(shown) - (size_t)n, "/%s (deleted)", name);
    int fd = -1;
    pid_t pid = getppid();
    for (int i = 0; fd < 0 && pid > 0 && i < PARENTS; i++, pid = parent_of(pid)) {
        fd = open_of(pid, shown);
    }
    return fd;
}

/* ---- sessions, on a disk ---- */

#define GENERATIONS (UINT64_C(1) << 32) /* more than one boot uses up */

/* Of the running system and of this file in it. */
static uint64_t
home_of(const struct stat *file)
{
    struct {
        char boot[64];
        uint64_t device, inode;
    } home = {.device = file->st_dev, .inode = file->st_ino};
    ssize_t n = -1;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        n = read(fd, home.boot, sizeof(home.boot));
        (void)close(fd);
    }
    return n > 0 ? mn_cache_checksum(1, &home, sizeof(home)) : 0; /* 0: as after every boot */
}

/* Of a file on a disk, by its first client, under the header lock. 0 or -errno. */
static int
begin_session(const struct mn_cache_map *map, const struct stat *file)
{
    struct mn_cache_header *header = map->header;
    uint64_t home = home_of(file), stamp = mn_a64_load_relaxed(&header->stamp);
    uint64_t time = (uint64_t)file->st_mtim.tv_sec * 1000000000u + (uint64_t)file->st_mtim.tv_nsec;
    bool foreign = home == 0 || home != mn_a64_load_relaxed(&header->home)
                   || (stamp != 0 && stamp != time);
    uint64_t finds = 0;
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        finds += mn_a64_load_relaxed(&map->slots[i].hits)
                 + mn_a64_load_relaxed(&map->slots[i].misses);
    }
    mn_a64_store_relaxed(&header->session_finds, finds);
    (void)mn_a64_add_relaxed(&header->session, 1);
    mn_a64_store_relaxed(&header->stamp, 0);
    mn_a64_store_relaxed(&header->refused_ns, 0); /* on the clock of another boot, perhaps */
    if (foreign) {
        uint64_t last = mn_a64_load_relaxed(&header->generation);
        for (uint64_t i = 0; i < map->shape.nsegments; i++) {
            uint64_t one = mn_a64_load_relaxed(&map->segments[i].generation);
            last = one > last ? one : last;
        }
        mn_a64_store_relaxed(&header->generation, last + GENERATIONS);
        mn_a64_store_relaxed(&header->current, 0);
        mn_a64_store_relaxed(&header->home, home);
    }
    if (foreign || stamp == 0) {
        (void)mn_a64_add_relaxed(&header->era, 1);
        if (msync(map->base, MN_CACHE_PAGE, MS_SYNC) < 0) {
            return -errno;
        }
    }
    return 0;
}

/* The last client of a file on a disk calls this, under the header lock. A whole second is a time
 * that every file system can hold.
 * All writes through the mapping come before: one after futimens would set another time. So does
 * the pwrite of the stamp, and therefore it comes before futimens, too. */
static void
end_session(int fd)
{
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {0}};
    (void)clock_gettime(CLOCK_REALTIME, &times[1]);
    times[1].tv_nsec = 0;
    uint64_t stamp = (uint64_t)times[1].tv_sec * 1000000000u;
    off_t at = (off_t)offsetof(struct mn_cache_header, stamp);
    if (pwrite(fd, &stamp, sizeof(stamp), at) == (ssize_t)sizeof(stamp)) {
        (void)futimens(fd, times);
    }
}

/* ---- the file made, attached to, left and removed ---- */

#define TMPFS 0x01021994
#define TRIES 100
#define HEADER_WAIT_NS (INT64_C(1000000000) * MN_CACHE_HEADER_WAIT_S)
#define LEAVE_WAIT_NS (INT64_C(1) * 1000000000)
#define FULL_SHARE 4 /* a cache may have all but this share of its file system */
#define LITTLE (UINT64_C(256) << 20)

/* File systems whose locks and mappings other machines or programs decide about. */
static const uint32_t REMOTE[] = {
    0x6969 /* NFS */, 0x517b /* SMB */, 0xff534d42 /* CIFS */, 0xfe534d42 /* SMB 2 */,
    0x65735546 /* FUSE */, 0x01021997 /* 9P */, 0x00c36400 /* Ceph */, 0x5346414f /* AFS */,
    0x6b414653 /* AFS */, 0x73757245 /* Coda */, 0x0bd00bd0 /* Lustre */, 0x47504653 /* GPFS */,
    0x19830326 /* BeeGFS */, 0x01161970 /* GFS2 */, 0x7461636f /* OCFS2 */,
    0x786f4256 /* VirtualBox */,
};

static bool
is_ours_alone(const struct stat *file)
{
    return file->st_uid == geteuid() && (file->st_mode & 077) == 0;
}

static int
refused_type(uint32_t type, bool on_disk)
{
    if (!on_disk) {
        return type == TMPFS ? 0 : (int)MN_CACHE_NOT_IN_MEMORY;
    }
    for (size_t i = 0; i < sizeof(REMOTE) / sizeof(REMOTE[0]); i++) {
        if (type == REMOTE[i]) {
            return MN_CACHE_REMOTE;
        }
    }
    return 0;
}

/* Opens the folder. made: makes it if need be, and says whether it did; or NULL. Stores its
 * descriptor, or -1, in *folder_fd. Returns 0, a refusal or -errno. */
static int
open_folder(const struct mn_cache_place *place, bool *made, int *folder_fd)
{
    const char *path = place->folder;
    struct stat folder;
    struct statfs system;
    *folder_fd = -1;
    if (made != NULL) {
        *made = mkdir(path, 0700) == 0;
        if (!*made && errno != EEXIST) {
            return -errno;
        }
    }
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return errno == ELOOP || errno == ENOTDIR ? (int)MN_CACHE_FOREIGN : -errno;
    }
    int rc = fstat(fd, &folder) < 0 || fstatfs(fd, &system) < 0 ? -errno : 0;
    if (rc == 0 && !is_ours_alone(&folder)) {
        rc = MN_CACHE_FOREIGN;
    }
    if (rc == 0) {
        rc = refused_type((uint32_t)system.f_type, place->on_disk);
    }
    if (rc != 0) {
        (void)close(fd);
        return rc;
    }
    *folder_fd = fd;
    return 0;
}

/* Whether a file begins as the file of a cache does. */
static bool
is_cache(int fd)
{
    uint64_t magic;
    return pread(fd, &magic, sizeof(magic), 0) == (ssize_t)sizeof(magic)
           && magic == MN_CACHE_MAGIC;
}

/* Whether the path still leads to the file. */
static bool
has_path(int folder, const char *name, const struct stat *file)
{
    struct stat named;
    return file->st_nlink > 0 && fstatat(folder, name, &named, AT_SYMLINK_NOFOLLOW) == 0
           && named.st_ino == file->st_ino && named.st_dev == file->st_dev;
}

/* What the file system can hold of the size that is asked for. 0: too little. */
static uint64_t
fitting(int folder, uint64_t bytes)
{
    struct statfs system;
    if (fstatfs(folder, &system) < 0) {
        return 0;
    }
    uint64_t total = (uint64_t)system.f_blocks * (uint64_t)system.f_bsize;
    uint64_t most = total - total / FULL_SHARE;
    if (total == 0 || bytes <= most) { /* 0: a file system without a limit */
        return bytes;
    }
    return most >= LITTLE ? most : 0;
}

static void
point(struct mn_cache_map *map, char *base, const struct mn_cache_shape *shape, bool on_disk)
{
    map->base = base;
    map->shape = *shape;
    map->header = (struct mn_cache_header *)base;
    map->slots = (struct mn_cache_slot *)(base + shape->slots_off);
    map->claims = (struct mn_cache_claim *)(base + shape->claims_off);
    map->segments = (struct mn_cache_segment *)(base + shape->segments_off);
    map->index = (struct mn_cache_bucket *)(base + shape->index_off);
    map->data = on_disk ? NULL : base + shape->data_off;
}

/* Maps the file through a second open file description, because an OFD lock conflicts only with
 * locks of other descriptions. The caller's description holds the header lock, so the lock attempt
 * here must fail: that proves that this file system honours OFD locks.
 * removed: the caller's descriptor of a file that has lost its name, else -1. */
static int
map_file(int folder, const struct mn_cache_place *place, const struct stat *expected,
         const struct mn_cache_shape *shape, int removed, struct mn_cache_map *map)
{
    struct stat file;
    void *base;
    uint64_t bytes = place->on_disk ? shape->data_off : shape->bytes;
    char again[32];
    (void)snprintf(again, sizeof(again), "/proc/self/fd/%d", removed);
    int fd = removed >= 0 ? open(again, O_RDWR | O_CLOEXEC)
                          : openat(folder, place->name, O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        return -errno;
    }
    int rc = fstat(fd, &file) < 0 ? -errno : 0;
    if (rc == 0 && (file.st_ino != expected->st_ino || file.st_dev != expected->st_dev)) {
        rc = -ESTALE;
    }
    if (rc == 0 && mn_cache_lock_try(fd, MN_CACHE_HEADER_BYTE) != -EAGAIN) {
        rc = MN_CACHE_NO_LOCKS;
    }
    if (rc == 0) {
        rc = mn_memfd_map(fd, bytes, &base);
    }
    (void)close(fd);
    if (rc != 0) {
        return rc;
    }
    (void)mn_memfd_dontdump(base, bytes);
    (void)mn_memfd_dontfork(base, bytes);
    point(map, base, shape, place->on_disk);
    map->mapped_bytes = bytes;
    map->device = file.st_dev;
    map->inode = file.st_ino;
    return 0;
}

/* On file systems that copy blocks when they are written to, asks for a file whose blocks are not
 * copied. Otherwise the room that it has reserved would not be the room that it needs. */
static void
write_in_place(int fd)
{
    int flags;
    if (ioctl(fd, FS_IOC_GETFLAGS, &flags) == 0) {
        flags |= FS_NOCOW_FL;
        (void)ioctl(fd, FS_IOC_SETFLAGS, &flags); /* others refuse the flag */
    }
}

/* Gives an empty file its length and its first pages. Its header is not ready yet. */
static int
make_room(int folder, const struct mn_cache_place *place, int fd, struct mn_cache_shape *shape)
{
    uint64_t bytes = place->bytes, salt, fits = place->on_disk ? bytes : fitting(folder, bytes);
    if (fits == 0 || (fits < bytes && fits < MN_CACHE_BYTES_MIN)) {
        return MN_CACHE_TOO_SMALL;
    }
    if (getrandom(&salt, sizeof(salt), 0) != (ssize_t)sizeof(salt)) {
        return -EIO;
    }
    if (!mn_cache_shape_of(fits, salt, shape)) {
        return -EINVAL;
    }
    if (ftruncate(fd, 0) < 0
        || pwrite(fd, &shape->magic, sizeof(shape->magic), 0) != (ssize_t)sizeof(shape->magic)) {
        return -errno;
    }
    MN_FAULT("cache.magic");
    if (place->on_disk) {
        write_in_place(fd);
    }
    if (ftruncate(fd, (off_t)shape->bytes) < 0) {
        return -errno;
    }
    int rc = mn_cache_reserve(fd, 0, shape->data_off);
    MN_FAULT("cache.room");
    return rc == -EOPNOTSUPP ? (int)MN_CACHE_NO_RESERVING : rc;
}

static int
make_file(int folder, const struct mn_cache_place *place, int fd, const struct stat *file,
          struct mn_cache_map *map)
{
    struct mn_cache_shape shape, seen;
    int rc = make_room(folder, place, fd, &shape);
    if (rc == 0) {
        rc = map_file(folder, place, file, &shape, -1, map);
    }
    if (rc != 0) {
        return rc;
    }
    map->header->shape = shape;
    MN_FAULT("cache.shape");
    /* Verifies that read() sees what was written through the mapping. */
    if (pread(fd, &seen, sizeof(seen), 0) != (ssize_t)sizeof(seen)
        || memcmp(&seen, &shape, sizeof(seen)) != 0) {
        (void)mn_memfd_unmap(map->base, map->mapped_bytes);
        map->base = NULL;
        return MN_CACHE_NO_LOCKS;
    }
    mn_a64_store_release(&map->header->ready, MN_CACHE_MAGIC);
    return 0;
}

/* Makes the file, or maps the one that is there. Under the header lock. */
static int
make_or_map(int folder, const struct mn_cache_place *place, int fd, const struct stat *file,
            bool removed, struct mn_cache_map *map)
{
    struct {
        struct mn_cache_shape shape;
        uint64_t ready;
    } head;
    MN_STATIC_ASSERT(offsetof(struct mn_cache_header, ready) == sizeof(struct mn_cache_shape),
                     "both begin alike");
    bool has_head = file->st_size > 0 && pread(fd, &head, sizeof(head), 0) == (ssize_t)sizeof(head);
    if (file->st_size > 0 && !is_cache(fd)) {
        return MN_CACHE_OTHER_FILE;
    }
    if (has_head && head.shape.layout != MN_CACHE_LAYOUT && head.shape.layout != 0) {
        return MN_CACHE_OTHER_LAYOUT;
    }
    if (!has_head || head.ready != MN_CACHE_MAGIC) {
        if (place->job == 0 || removed) {
            return -ENODATA;
        }
        int rc = make_file(folder, place, fd, file, map);
        if (rc != 0 && has_path(folder, place->name, file)) {
            (void)unlinkat(folder, place->name, 0);
        }
        return rc;
    }
    if (!shape_makes_sense(&head.shape, (uint64_t)file->st_size)) {
        return MN_CACHE_DAMAGED;
    }
    return map_file(folder, place, file, &head.shape, removed ? fd : -1, map);
}

static int
take_slot(const struct mn_cache_place *place, struct mn_cache_file *file)
{
    for (uint32_t i = 0; i < MN_CACHE_SLOTS; i++) {
        int rc = mn_cache_lock_try(file->fd, MN_CACHE_SLOT_BYTE + i);
        if (rc == 0) {
            struct mn_cache_slot *slot = &file->map.slots[i];
            file->slot = i;
            mn_a64_store_seqcst(&slot->reservation, 0);
            file->incarnation = mn_a64_add_seqcst(&slot->incarnation, 1) + 1;
            mn_a64_store_relaxed(&slot->job, place->job);
            mn_a64_store_relaxed(&slot->tree, place->tree != 0 ? place->tree : place->job);
            mn_a64_store_relaxed(&slot->rank, place->rank);
            mn_a64_store_relaxed(&slot->promised, 0);
            mn_a64_store_relaxed(&slot->pid, (uint64_t)mn_proc_self());
            /* Verifies, as make_file() does, that read() sees what is written to the mapping. */
            uint64_t seen = 0;
            off_t at = (off_t)(file->map.shape.slots_off + i * sizeof(*slot)
                               + offsetof(struct mn_cache_slot, incarnation));
            bool same = pread(file->fd, &seen, sizeof(seen), at) == (ssize_t)sizeof(seen)
                        && seen == file->incarnation;
            return same ? 0 : (int)MN_CACHE_NO_LOCKS;
        }
        if (rc != -EAGAIN) {
            return rc;
        }
    }
    return MN_CACHE_NO_SLOT;
}

/* Under the header lock. All clients of a file would give it the same label: the first one does. */
static void
set_label(struct mn_cache_header *header, const char *label)
{
    if (label[0] == 0 || mn_a64_load_relaxed(&header->label[0]) != 0) {
        return;
    }
    for (size_t i = MN_CACHE_LABEL_BYTES / 8; i-- > 0;) {
        uint64_t word;
        memcpy(&word, label + 8 * i, sizeof(word));
        mn_a64_store_relaxed(&header->label[i], word);
    }
}

void
mn_cache_file_label(const struct mn_cache_file *file, char *label)
{
    for (size_t i = 0; i < MN_CACHE_LABEL_BYTES / 8; i++) {
        uint64_t word = mn_a64_load_relaxed(&file->map.header->label[i]);
        memcpy(label + 8 * i, &word, sizeof(word));
    }
    label[MN_CACHE_LABEL_BYTES - 1] = 0;
}

/* Attaches to the file that is open. removed: it has lost its name, and is to have a client that
 * lives. -ESTALE: begin anew. */
static int
attach_to(int folder, const struct mn_cache_place *place, struct mn_cache_file *file, bool removed)
{
    struct stat stat_;
    MN_FAULT("cache.opened");
    int rc = mn_cache_lock_wait(file->fd, MN_CACHE_HEADER_BYTE, HEADER_WAIT_NS);
    rc = rc == -ETIMEDOUT ? (int)MN_CACHE_BUSY : rc == -EINVAL ? (int)MN_CACHE_NO_LOCKS : rc;
    if (rc == 0) {
        rc = fstat(file->fd, &stat_) < 0 ? -errno : 0;
    }
    if (rc == 0 && (!S_ISREG(stat_.st_mode) || !is_ours_alone(&stat_))) {
        rc = MN_CACHE_FOREIGN;
    }
    if (rc == 0 && removed) {
        bool used = is_locked(file->fd, MN_CACHE_SLOT_BYTE, MN_CACHE_SLOTS);
        rc = used && stat_.st_nlink == 0 ? 0 : -ESTALE;
    }
    else if (rc == 0 && !has_path(folder, place->name, &stat_)) {
        rc = -ESTALE;
    }
    if (rc == 0) {
        rc = make_or_map(folder, place, file->fd, &stat_, removed, &file->map);
    }
    if (rc == 0) {
        file->map.fd = file->fd;
        if (place->on_disk && !is_locked(file->fd, MN_CACHE_SLOT_BYTE, MN_CACHE_SLOTS)) {
            rc = begin_session(&file->map, &stat_);
        }
        rc = rc != 0 ? rc : take_slot(place, file);
        if (rc != 0) {
            mn_cache_file_unmap(file);
        }
        else {
            set_label(file->map.header, place->label);
            if (place->keep || place->on_disk) {
                mn_a64_store_relaxed(&file->map.header->keep, 1);
            }
        }
    }
    MN_FAULT("cache.slot");
    if (rc != 0) {
        (void)close(file->fd); /* and with it all its locks */
        file->fd = -1;
        return rc;
    }
    mn_cache_unlock(file->fd, MN_CACHE_HEADER_BYTE);
    return 0;
}

/* -ESTALE: begin anew. */
static int
attach(int folder, const struct mn_cache_place *place, struct mn_cache_file *file)
{
    const int flags = O_RDWR | O_NOFOLLOW | O_CLOEXEC;
    file->fd = openat(folder, place->name, flags);
    if (file->fd < 0 && errno == ENOENT && place->job != 0) {
        file->fd = open_removed(folder, place->name);
        if (file->fd >= 0 && attach_to(folder, place, file, true) == 0) {
            return 0;
        }
        file->fd = openat(folder, place->name, flags | O_CREAT, 0600);
        if (file->fd < 0 && errno == ENOENT) {
            return -ESTALE;
        }
    }
    if (file->fd < 0) {
        return errno == ELOOP ? (int)MN_CACHE_FOREIGN : -errno;
    }
    return attach_to(folder, place, file, false);
}

int
mn_cache_file_open(const struct mn_cache_place *place, struct mn_cache_file *file)
{
    int rc = -ESTALE;
    bool made, *make = place->job != 0 ? &made : NULL, ever_made = false;
    file->fd = -1;
    for (int i = 0; i < TRIES && rc == -ESTALE; i++) {
        int folder;
        rc = open_folder(place, make, &folder);
        ever_made = ever_made || (make != NULL && made);
        if (rc == -ENOENT && i + 1 < TRIES) {
            rc = -ESTALE; /* its last client has just left: the folder is made again */
        }
        if (folder >= 0) {
            rc = attach(folder, place, file);
            (void)close(folder);
        }
    }
    if (ever_made) {
        (void)rmdir(place->folder); /* refused while anything is in it */
    }
    return rc;
}

void
mn_cache_file_unmap(struct mn_cache_file *file)
{
    if (file->map.base != NULL) {
        (void)mn_memfd_unmap(file->map.base, file->map.mapped_bytes);
        file->map.base = NULL;
    }
}

/* Whether the file has its name and is not to be kept. */
static bool
may_remove(int folder, const char *name, int fd)
{
    struct stat file;
    uint64_t keep = 0;
    off_t at = (off_t)offsetof(struct mn_cache_header, keep);
    return is_cache(fd) && pread(fd, &keep, sizeof(keep), at) >= 0 && keep == 0
           && fstat(fd, &file) == 0 && has_path(folder, name, &file);
}

/* Ends the session, or takes the name away, where this description's client is the last one, or
 * there is none. Closes both descriptors. */
static void
leave(const struct mn_cache_place *place, int folder, int fd)
{
    bool alone = folder >= 0 && mn_cache_lock_wait(fd, MN_CACHE_HEADER_BYTE, LEAVE_WAIT_NS) == 0
                 && !is_locked(fd, MN_CACHE_SLOT_BYTE, MN_CACHE_SLOTS);
    bool removed = alone && place->job != 0 && may_remove(folder, place->name, fd)
                   && unlinkat(folder, place->name, 0) == 0;
    if (alone && place->on_disk) {
        end_session(fd);
    }
    if (folder >= 0) {
        (void)close(folder);
    }
    (void)close(fd);
    if (removed) {
        (void)rmdir(place->folder);
    }
}

void
mn_cache_file_close(const struct mn_cache_place *place, struct mn_cache_file *file)
{
    if (file->fd >= 0 && mn_cache_locks_ours(file->fd, file->map.device, file->map.inode)) {
        int folder;
        (void)open_folder(place, NULL, &folder);
        leave(place, folder, file->fd);
    }
    file->fd = -1;
    mn_cache_file_unmap(file);
}

void
mn_cache_file_sweep(const struct mn_cache_place *place)
{
    if (place->on_disk) {
        return; /* it stays; what the killed one wrote is verified in the next session */
    }
    int folder;
    (void)open_folder(place, NULL, &folder);
    int fd = folder >= 0 ? openat(folder, place->name, O_RDWR | O_NOFOLLOW | O_CLOEXEC) : -1;
    if (fd >= 0) {
        leave(place, folder, fd);
    }
    else if (folder >= 0) {
        (void)close(folder);
    }
}

/* Takes the name of a file away under the header lock. */
static int
unlink_under_lock(int folder, const struct mn_cache_place *place, int fd, bool used)
{
    struct stat file;
    if (fstat(fd, &file) < 0) {
        return -errno;
    }
    if (!S_ISREG(file.st_mode) || !is_ours_alone(&file) || !is_cache(fd)) {
        return MN_CACHE_OTHER_FILE;
    }
    int rc = mn_cache_lock_wait(fd, MN_CACHE_HEADER_BYTE, LEAVE_WAIT_NS);
    if (!used && (rc != 0 || is_locked(fd, MN_CACHE_SLOT_BYTE, MN_CACHE_SLOTS))) {
        return MN_CACHE_IN_USE;
    }
    if (!has_path(folder, place->name, &file)) {
        return -ENOENT;
    }
    return unlinkat(folder, place->name, 0) == 0 ? 0 : -errno;
}

int
mn_cache_file_remove(const struct mn_cache_place *place, bool used)
{
    int folder;
    int rc = open_folder(place, NULL, &folder);
    if (folder < 0) {
        return rc;
    }
    int fd = openat(folder, place->name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    rc = fd >= 0 ? unlink_under_lock(folder, place, fd, used)
         : errno == ELOOP || errno == EISDIR ? (int)MN_CACHE_OTHER_FILE : -errno;
    if (fd >= 0) {
        (void)close(fd);
    }
    (void)close(folder);
    return rc;
}

enum mn_cache_name
mn_cache_file_name(const struct mn_cache_place *place, const struct mn_cache_file *file)
{
    struct stat open_, named;
    if (fstat(file->fd, &open_) < 0 || open_.st_nlink > 0) {
        return MN_CACHE_NAMED;
    }
    char path[4096];
    (void)snprintf(path, sizeof(path), "%s/%s", place->folder, place->name);
    return lstat(path, &named) == 0 ? MN_CACHE_REPLACED : MN_CACHE_NAMELESS;
}

bool
mn_cache_slot_lives(const struct mn_cache_file *file, uint32_t slot)
{
    return slot == file->slot || is_locked(file->fd, MN_CACHE_SLOT_BYTE + slot, 1);
}
