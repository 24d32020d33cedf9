/* See mn_cache_session.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "cache/mn_cache_session.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cache/mn_cache_checksum.h"

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

/* Of a file on a disk, by its first client, under the header lock: see mn_cache_file.h. */
int
mn_cache_session_begin(const struct mn_cache_map *map, const struct stat *file)
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
void
mn_cache_session_end(int fd)
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
