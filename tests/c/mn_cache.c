/* The cache file: a stored value is found complete or not at all, whichever processes die.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Entries are made from their key, so each reader can tell whether every byte is right.
 */
#define _GNU_SOURCE
#include "cache/mn_cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/time.h>

#include "base/mn_atomic.h"
#include "base/mn_base.h"
#include "os/mn_memfd.h"
#include "mn_test.h"

#define MIB (UINT64_C(1) << 20)

static char folder[64];
static bool on_disk; /* in this test */

static struct mn_cache_place
place_of(uint64_t bytes, uint64_t job, bool keep)
{
    return (struct mn_cache_place){folder, "test", bytes, job, job, 0, keep, on_disk, ""};
}

static struct mn_cache *
client_of(uint64_t bytes, uint64_t job, bool keep)
{
    struct mn_cache *cache;
    if (folder[0] == '\0') { /* of this run alone; forks inherit it */
        snprintf(folder, sizeof(folder), "%s/minato-test-%d", on_disk ? "/var/tmp" : "/dev/shm",
                 (int)getpid());
    }
    struct mn_cache_place place = place_of(bytes, job, keep);
    CHECK_EQ(mn_cache_open(&place, 0, &cache), 0);
    return cache;
}

static void
path_of(char path[80])
{
    snprintf(path, 80, "%s/test", folder);
}

/* On a disk the file stays. */
static void
nothing_left(void)
{
    char path[80];
    path_of(path);
    if (on_disk) {
        CHECK(unlink(path) == 0 && rmdir(folder) == 0);
    }
    CHECK(access(folder, F_OK) != 0);
}

/* Runs a test of a cache in memory with one on a disk. */
static void
disk(void (*test)(void))
{
    on_disk = true;
    folder[0] = '\0';
    test();
    on_disk = false;
    folder[0] = '\0';
}

static struct mn_cache_digest
digest_of(uint64_t key)
{
    uint64_t a = key, b = key + 77;
    return (struct mn_cache_digest){{mn_test_random(&a), mn_test_random(&b)}};
}

/* Between 1 and about 40,000 bytes; a few keys have none. */
static uint64_t
bytes_of(uint64_t key)
{
    return key % 50 == 7 ? 0 : key * 7919 % 40000 + 1;
}

static void
fill(unsigned char *data, uint64_t key, uint64_t bytes)
{
    uint64_t state = key;
    for (uint64_t i = 0; i < bytes; i++) {
        data[i] = (unsigned char)(i % 8 == 0 ? mn_test_random(&state) : state >> i % 8 * 8);
    }
}

static int
put_key(struct mn_cache *cache, uint64_t key)
{
    unsigned char data[2][40001];
    uint64_t bytes = bytes_of(key);
    fill(data[0], key, bytes);
    fill(data[1], key + 1, bytes / 2);
    struct mn_cache_part description = {&key, sizeof(key)};
    struct mn_cache_part parts[2] = {{data[0], bytes}, {data[1], bytes / 2}};
    struct mn_cache_value value = {&description, parts, 2, key, true};
    return mn_cache_store(cache, digest_of(key), &value);
}

/* 0: found and right; MN_EMPTY: not there, or gone while it was copied. */
static int
get_key(struct mn_cache *cache, uint64_t key)
{
    struct mn_cache_found found;
    unsigned char copied[2][40001], data[40001];
    uint64_t bytes = bytes_of(key), described;
    int rc = mn_cache_find(cache, digest_of(key), true, &found);
    if (rc != 0) {
        CHECK_EQ(rc, MN_EMPTY);
        return rc;
    }
    CHECK_EQ(found.described, sizeof(key));
    CHECK_EQ(mn_cache_copy(&found, 0, &described, sizeof(described)), 0);
    CHECK_EQ(mn_cache_copy(&found, 64, copied[0], bytes), 0);
    CHECK_EQ(mn_cache_copy(&found, 64 + mn_cache_padded(bytes), copied[1], bytes / 2), 0);
    if (!mn_cache_found_still(&found)) {
        return MN_EMPTY;
    }
    CHECK_EQ(described, key);
    CHECK_EQ(found.made_ns, key);
    fill(data, key, bytes);
    CHECK(memcmp(copied[0], data, bytes) == 0);
    fill(data, key + 1, bytes / 2);
    CHECK(memcmp(copied[1], data, bytes / 2) == 0);
    return 0;
}

static void
all_is_whole(struct mn_cache *cache)
{
    uint64_t checked, damaged;
    CHECK_EQ(mn_cache_verify(cache, &checked, &damaged), 0);
    CHECK_EQ(damaged, 0);
}

/* ---- one client ---- */

static void
stored_entries_are_found(void)
{
    struct mn_cache *cache = client_of(16 * MIB, 1, false);
    for (uint64_t key = 0; key < 200; key++) {
        CHECK_EQ(get_key(cache, key), MN_EMPTY);
        CHECK_EQ(put_key(cache, key), 0);
        CHECK_EQ(get_key(cache, key), 0);
    }
    for (uint64_t key = 0; key < 200; key++) {
        CHECK_EQ(get_key(cache, key), 0);
    }
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK_EQ(sums.hits, 400);
    CHECK_EQ(sums.misses, 200);
    CHECK_EQ(sums.entries, 200);
    CHECK_EQ(sums.clients, 1);
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

static void
a_full_cache_of_one_job_keeps_what_it_has(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    uint64_t key = 0, stored = 0;
    int rc;
    while ((rc = put_key(cache, key)) != MN_FULL) {
        CHECK_EQ(rc, 0);
        stored++;
        key++;
    }
    CHECK(stored > 30);
    for (uint64_t k = 0; k < key; k++) {
        CHECK_EQ(get_key(cache, k), 0);
    }
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK_EQ(sums.entries, stored);
    CHECK_EQ(sums.recycled, 0);
    mn_cache_close(cache);
    nothing_left();
}

static void
boxes_are_what_loops_copy(void)
{
    struct mn_cache *cache = client_of(16 * MIB, 1, false);
    enum { A = 5, B = 4, C = 7 };
    uint16_t array[A][B][C], out[A * B * C];
    for (int i = 0; i < A * B * C; i++) {
        (&array[0][0][0])[i] = (uint16_t)(i * 31);
    }
    struct mn_cache_part none = {"", 0}, part = {array, sizeof(array)};
    struct mn_cache_found found;
    struct mn_cache_value value = {&none, &part, 1, 0, true};
    CHECK_EQ(mn_cache_store(cache, digest_of(1), &value), 0);
    CHECK_EQ(mn_cache_find(cache, digest_of(1), true, &found), 0);
    const uint64_t shape[3] = {A, B, C};
    uint64_t seed = mn_test_seed();
    for (int round = 0; round < 500; round++) {
        uint64_t start[3], count[3], n = 0;
        for (int d = 0; d < 3; d++) {
            start[d] = mn_test_random(&seed) % shape[d];
            count[d] = 1 + mn_test_random(&seed) % (shape[d] - start[d]);
        }
        struct mn_cache_box box = {3, sizeof(uint16_t), shape, start, count};
        CHECK_EQ(mn_cache_copy_box(&found, 0, &box, out), 0);
        for (uint64_t a = 0; a < count[0]; a++) {
            for (uint64_t b = 0; b < count[1]; b++) {
                for (uint64_t c = 0; c < count[2]; c++) {
                    CHECK_EQ(out[n++], array[start[0] + a][start[1] + b][start[2] + c]);
                }
            }
        }
    }
    mn_cache_close(cache);
    nothing_left();
}

static int
file_of(int flags)
{
    int dir = open(folder, O_DIRECTORY | O_CLOEXEC);
    CHECK(dir >= 0);
    int fd = openat(dir, "test", flags | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    CHECK(close(dir) == 0);
    return fd;
}

/* Changes a byte of the file, behind the back of its clients. */
static void
flip(uint64_t off)
{
    unsigned char byte;
    int fd = file_of(O_RDWR);
    CHECK(pread(fd, &byte, 1, (off_t)off) == 1);
    byte ^= 0x40;
    CHECK(pwrite(fd, &byte, 1, (off_t)off) == 1);
    CHECK(close(fd) == 0);
}

static void
flipped_bytes_are_misses_or_are_noticed(void)
{
    struct mn_cache *cache = client_of(16 * MIB, 1, false);
    struct mn_cache_shape shape;
    uint64_t checked, damaged;
    CHECK(mn_cache_shape_of(16 * MIB, 0, &shape));
    CHECK_EQ(put_key(cache, 3), 0); /* the first entry of the log */
    uint64_t payload = shape.data_off + mn_cache_payload_off(24000);
    flip(payload + 100);
    CHECK_EQ(mn_cache_verify(cache, &checked, &damaged), 0);
    CHECK_EQ(checked, 1);
    CHECK_EQ(damaged, 1);
    flip(payload + 100);
    all_is_whole(cache);
    for (uint64_t off = 0; off < sizeof(struct mn_cache_entry); off++) {
        flip(shape.data_off + off);
        CHECK_EQ(get_key(cache, 3), MN_EMPTY);
        flip(shape.data_off + off);
        CHECK_EQ(get_key(cache, 3), 0);
    }
    mn_cache_close(cache);
}

/* Whatever an index holds, an entry is right or is not found. */
static void
torn_records_are_misses(void)
{
    struct mn_cache *cache = client_of(4 * MIB, 1, false);
    struct mn_cache_shape shape;
    uint64_t seed = mn_test_seed();
    CHECK(mn_cache_shape_of(4 * MIB, 0, &shape));
    for (uint64_t key = 0; key < 60; key++) {
        (void)put_key(cache, key);
    }
    int fd = file_of(O_RDWR);
    uint64_t words = shape.nbuckets * sizeof(struct mn_cache_bucket) / 8;
    for (int round = 0; round < 3000; round++) {
        uint64_t from = mn_test_random(&seed) % words, to = mn_test_random(&seed) % words, word;
        CHECK(pread(fd, &word, 8, (off_t)(shape.index_off + from * 8)) == 8);
        word ^= mn_test_random(&seed) % 4 == 0 ? UINT64_C(1) << mn_test_random(&seed) % 64 : 0;
        CHECK(pwrite(fd, &word, 8, (off_t)(shape.index_off + to * 8)) == 8);
        (void)get_key(cache, mn_test_random(&seed) % 60);
    }
    CHECK(close(fd) == 0);
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

/* A client that is to leave more memory to others than there is. */
static void
segments_go_back_to_the_system_under_pressure(void)
{
    struct mn_cache *cache = client_of(MIB, 1, false), *pressed;
    struct mn_cache_place place = place_of(MIB, 1, false);
    struct mn_cache_sums before, after;
    for (uint64_t key = 0; key < 100; key++) {
        (void)put_key(cache, key);
    }
    CHECK_EQ(mn_cache_sum(cache, &before), 0);
    int fd = file_of(O_RDONLY);
    uint64_t resident = mn_test_resident(fd);
    CHECK_EQ(mn_cache_open(&place, UINT64_C(1) << 62, &pressed), 0);
    (void)get_key(pressed, 1);
    CHECK_EQ(mn_cache_sum(cache, &after), 0);
    CHECK(after.returned > 1 && before.entries > 0);
    CHECK_EQ(after.entries, 0);
    CHECK_EQ(resident - mn_test_resident(fd), after.returned * 65536); /* segments */
    CHECK(close(fd) == 0);
    CHECK_EQ(put_key(pressed, 1), MN_FULL); /* the log does not grow for it, */
    for (uint64_t key = 0; key < 100; key++) { /* and what is there is right */
        (void)get_key(pressed, key);
    }
    all_is_whole(cache);
    mn_cache_close(pressed);
    mn_cache_close(cache);
    nothing_left();
}

/* A segment of 32 MiB. It gets as many pages as its entries need, and some more. */
static void
a_segment_grows_with_its_entries(void)
{
    struct mn_cache *cache = client_of(512 * MIB, 1, false);
    struct mn_cache_found found;
    struct mn_cache_sums sums;
    CHECK_EQ(put_key(cache, 0), 0);
    int fd = file_of(O_RDONLY);
    uint64_t first = mn_test_resident(fd), key = 0;
    do {
        CHECK_EQ(put_key(cache, ++key), 0);
        CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    } while (sums.used_bytes < 15 * MIB);
    CHECK_EQ(mn_test_resident(fd), first);
    while (sums.used_bytes < 17 * MIB) {
        CHECK_EQ(put_key(cache, ++key), 0);
        CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    }
    CHECK_EQ(mn_test_resident(fd), first + 16 * MIB);
    CHECK_EQ(mn_cache_find(cache, digest_of(key), false, &found), 0);
    CHECK_EQ(found.segment, 0); /* no other one was begun */
    for (uint64_t k = 0; k <= key; k++) {
        CHECK_EQ(get_key(cache, k), 0);
    }
    CHECK_EQ(close(fd), 0);
    mn_cache_close(cache);
    nothing_left();
}

static void
on_timer(int number)
{
    (void)number;
}

/* A call for all of it takes longer than the timer's period, and gives back what it has got. */
static void
a_timer_does_not_keep_a_file_from_its_pages(void)
{
    struct sigaction ticks = {.sa_handler = on_timer};
    struct itimerval period = {{0, 4000}, {0, 4000}}, none = {{0, 0}, {0, 0}};
    int fd = mn_memfd_create("test", 256 * MIB);
    CHECK(fd >= 0 && sigaction(SIGPROF, &ticks, NULL) == 0);
    CHECK(setitimer(ITIMER_PROF, &period, NULL) == 0);
    CHECK_EQ(mn_cache_reserve(fd, 0, 256 * MIB), 0);
    CHECK(setitimer(ITIMER_PROF, &none, NULL) == 0);
    CHECK_EQ(mn_test_resident(fd), 256 * MIB);
    CHECK_EQ(close(fd), 0);
}

/* A client that has promised all memory to other things. */
static void
promised_memory_is_left_to_others(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false), *other = client_of(2 * MIB, 1, false);
    CHECK_EQ(put_key(cache, 1), 0);
    mn_cache_promise(other, UINT64_C(1) << 62);
    CHECK_EQ(mn_cache_attach(other), 0);
    uint64_t key = 2;
    while (put_key(cache, key) != MN_FULL) { /* the log does not grow */
        CHECK(++key < 20);
    }
    mn_cache_close(other); /* and with it its promise */
    (void)usleep(250000);  /* the client has looked for room lately, and looks again after that */
    while (bytes_of(key) * 3 / 2 > 30000) {
        key++;
    }
    CHECK_EQ(put_key(cache, key), 0);
    mn_cache_close(cache);
    nothing_left();
}

static void
what_was_recycled_since_it_was_found_is_noticed(void)
{
    struct mn_cache *one = client_of(2 * MIB, 1, false), *other = client_of(2 * MIB, 2, false);
    struct mn_cache_found found;
    struct mn_cache_sums sums;
    CHECK_EQ(put_key(one, 1), 0);
    CHECK_EQ(mn_cache_find(one, digest_of(1), true, &found), 0);
    CHECK(mn_cache_found_still(&found));
    for (uint64_t key = 2; key < 400; key++) {
        int rc = put_key(other, key);
        CHECK_EQ(rc, 0);
    }
    CHECK_EQ(mn_cache_sum(one, &sums), 0);
    CHECK(sums.recycled > 64);
    CHECK_EQ(sums.jobs, 2);
    CHECK(!mn_cache_found_still(&found));
    CHECK_EQ(get_key(one, 1), MN_EMPTY);
    mn_cache_close(one);
    CHECK_EQ(get_key(other, 399), 0);
    mn_cache_close(other);
    nothing_left();
}

/* ---- files that are refused, or made again ---- */

static int
attached(uint64_t bytes)
{
    struct mn_cache *cache = client_of(bytes, 1, false);
    int rc = mn_cache_attach(cache);
    mn_cache_close(cache);
    return rc;
}

static void
what_is_not_ours_alone_is_refused(void)
{
    mn_cache_close(client_of(MIB, 1, false)); /* names the folder */
    CHECK(mkdir(folder, 0700) == 0 && chmod(folder, 0770) == 0);
    CHECK_EQ(attached(MIB), MN_CACHE_FOREIGN);
    CHECK(chmod(folder, 0700) == 0);
    CHECK(close(file_of(O_CREAT | O_RDWR)) == 0);
    char path[80];
    snprintf(path, sizeof(path), "%s/test", folder);
    CHECK(chmod(path, 0666) == 0);
    CHECK_EQ(attached(MIB), MN_CACHE_FOREIGN);
    CHECK(unlink(path) == 0 && symlink("/dev/null", path) == 0);
    CHECK_EQ(attached(MIB), MN_CACHE_FOREIGN);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0 && symlink("/dev/shm", folder) == 0);
    CHECK_EQ(attached(MIB), MN_CACHE_FOREIGN);
    CHECK(unlink(folder) == 0);
    nothing_left();
}

static void
a_folder_that_is_not_in_memory_is_refused(void)
{
    char elsewhere[] = "/var/tmp/minato-test-XXXXXX";
    CHECK(mkdtemp(elsewhere) != NULL);
    struct mn_cache_place place = {elsewhere, "test", MIB, 1, 1, 0, false, false, ""};
    struct mn_cache *cache;
    CHECK_EQ(mn_cache_open(&place, 0, &cache), 0);
    CHECK_EQ(mn_cache_attach(cache), MN_CACHE_NOT_IN_MEMORY);
    mn_cache_close(cache);
    CHECK(rmdir(elsewhere) == 0); /* was not made by it, and nothing is in it */
    place.folder = elsewhere;
    CHECK_EQ(mn_cache_open(&place, 0, &cache), 0);
    CHECK_EQ(mn_cache_attach(cache), MN_CACHE_NOT_IN_MEMORY);
    mn_cache_close(cache);
    CHECK(access(elsewhere, F_OK) != 0);
}

static void
a_damaged_header_is_refused(void)
{
    struct mn_cache *cache = client_of(MIB, 1, true);
    CHECK_EQ(put_key(cache, 1), 0);
    mn_cache_close(cache);
    for (uint64_t off = 0; off < sizeof(struct mn_cache_shape); off++) {
        bool layout = off / 8 == offsetof(struct mn_cache_shape, layout) / 8;
        bool magic = off / 8 == offsetof(struct mn_cache_shape, magic) / 8;
        flip(off);
        CHECK_EQ(attached(MIB), magic    ? MN_CACHE_OTHER_FILE
                                : layout ? MN_CACHE_OTHER_LAYOUT
                                         : MN_CACHE_DAMAGED);
        flip(off);
    }
    int fd = file_of(O_RDWR);
    CHECK(ftruncate(fd, 4096 * 3) == 0); /* offsets leave the file */
    CHECK(close(fd) == 0);
    CHECK_EQ(attached(MIB), MN_CACHE_DAMAGED);
    fd = file_of(O_RDWR | O_TRUNC);
    CHECK(close(fd) == 0);
    CHECK_EQ(attached(MIB), 0);
    nothing_left();
}

static void
a_kept_file_is_there_for_the_next_client(void)
{
    struct mn_cache *cache = client_of(4 * MIB, 1, true);
    CHECK_EQ(put_key(cache, 5), 0);
    mn_cache_close(cache);
    cache = client_of(8 * MIB, 2, true);
    CHECK_EQ(get_key(cache, 5), 0);
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK(sums.bytes <= 4 * MIB); /* the first one's size */
    mn_cache_close(cache);
    char path[80];
    snprintf(path, sizeof(path), "%s/test", folder);
    CHECK(unlink(path) == 0 && rmdir(folder) == 0);
}

static void
a_client_of_a_removed_file_goes_on_alone(void)
{
    struct mn_cache *one = client_of(4 * MIB, 1, false);
    CHECK_EQ(put_key(one, 5), 0);
    char path[80];
    snprintf(path, sizeof(path), "%s/test", folder);
    CHECK(unlink(path) == 0);
    struct mn_cache *other = client_of(4 * MIB, 1, false);
    CHECK_EQ(get_key(other, 5), MN_EMPTY);
    CHECK_EQ(put_key(other, 6), 0);
    CHECK_EQ(get_key(one, 5), 0);
    mn_cache_close(one); /* is not the last of the file that has the name now */
    CHECK(access(path, F_OK) == 0);
    CHECK_EQ(get_key(other, 6), 0);
    mn_cache_close(other);
    nothing_left();
}

static void
close_descriptors_of_the_folder(void)
{
    char path[64], to[256];
    DIR *dir = opendir("/proc/self/fd");
    CHECK(dir != NULL);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        snprintf(path, sizeof(path), "/proc/self/fd/%.20s", e->d_name);
        ssize_t n = readlink(path, to, sizeof(to) - 1);
        if (n > 0 && strncmp(to, folder, strlen(folder)) == 0) {
            CHECK(close(atoi(e->d_name)) == 0);
        }
    }
    CHECK(closedir(dir) == 0);
}

static void
a_client_whose_descriptors_were_closed_attaches_anew(void)
{
    struct mn_cache *cache = client_of(4 * MIB, 1, false);
    for (uint64_t key = 1; key < 4; key++) {
        CHECK_EQ(put_key(cache, key), 0);
        close_descriptors_of_the_folder();
        int other = open("/dev/null", O_RDONLY | O_CLOEXEC); /* takes the number */
        CHECK(other >= 0);
        CHECK_EQ(get_key(cache, key), 0);
        CHECK_EQ(put_key(cache, key + 10), 0);
        CHECK_EQ(get_key(cache, key), 0);
        CHECK_EQ(get_key(cache, key + 10), 0);
        CHECK_EQ(close(other), 0); /* is still that file's */
    }
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK_EQ(sums.clients, 1);
    mn_cache_close(cache);
    nothing_left();
}

/* ---- threads ---- */

struct shared {
    struct mn_cache *cache;
    uint64_t stop_ns, seed;
    mn_a32 hits;
};

static void *
store_and_find(void *arg)
{
    struct shared *s = arg;
    uint64_t seed = s->seed + mn_a32_add_relaxed(&s->hits, 0) + (uint64_t)pthread_self();
    while (mn_test_clock_ns() < s->stop_ns || mn_a32_load_relaxed(&s->hits) == 0) {
        uint64_t key = mn_test_random(&seed) % 300;
        if (get_key(s->cache, key) == 0) {
            (void)mn_a32_add_relaxed(&s->hits, 1);
        }
        else {
            (void)put_key(s->cache, key);
        }
    }
    return NULL;
}

static void
threads_share_a_client(void)
{
    struct shared s = {.cache = client_of(32 * MIB, 1, false), .stop_ns = mn_test_stop_ns(),
                       .seed = mn_test_seed()};
    pthread_t threads[4];
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, store_and_find, &s) == 0);
    }
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(mn_a32_load_relaxed(&s.hits) > 0);
    all_is_whole(s.cache);
    mn_cache_close(s.cache);
    nothing_left();
}

static void *
wait_for_key(void *arg)
{
    struct shared *s = arg;
    struct mn_cache_claimed claimed;
    int rc;
    while ((rc = mn_cache_claim_key(s->cache, digest_of(9), &claimed)) == -EBUSY) {
        (void)mn_cache_wait_for_key(&claimed);
    }
    CHECK_EQ(rc, 0);
    (void)mn_a32_add_relaxed(&s->hits, 1);
    mn_cache_release_key(s->cache, digest_of(9), claimed.word);
    return NULL;
}

static void
a_claim_is_held_once(void)
{
    struct shared s = {.cache = client_of(MIB, 1, false)};
    struct mn_cache_claimed mine, other;
    CHECK_EQ(mn_cache_claim_key(s.cache, digest_of(9), &mine), 0);
    CHECK_EQ(mn_cache_claim_key(s.cache, digest_of(9), &other), -EBUSY);
    struct mn_cache_digest same_place = digest_of(9);
    same_place.word[0] = ~same_place.word[0];
    CHECK_EQ(mn_cache_claim_key(s.cache, same_place, &other), MN_FULL);
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, wait_for_key, &s) == 0);
    }
    mn_cache_release_key(s.cache, digest_of(9), mine.word);
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQ(mn_a32_load_relaxed(&s.hits), 3);
    mn_cache_release_key(s.cache, digest_of(9), mine.word); /* is free: nothing happens */
    mn_cache_close(s.cache);
    nothing_left();
}

/* ---- processes ---- */

struct worker {
    uint64_t job, seed, stop_ns;
    const char *dies_at; /* a fault point, or NULL */
    int how;
    const char *then; /* where it is killed after that, or NULL */
    bool at_once;     /* at the first time that it comes there */
};

static const char *fault, *fault_then;
static int fault_signal;
static unsigned fault_after;

static void
meet_fault(const char *name)
{
    if (fault != NULL && strcmp(fault, name) == 0 && fault_after-- == 0) {
        int number = fault_signal;
        fault = fault_then;
        fault_signal = SIGKILL;
        fault_after = 0;
        fault_then = NULL;
        (void)kill(getpid(), number);
    }
}

static void
work(void *arg)
{
    struct worker *w = arg;
    struct mn_cache *cache = client_of(2 * MIB, w->job, false);
    uint64_t seed = w->seed;
    if (w->dies_at != NULL) {
        fault = w->dies_at;
        fault_signal = w->how;
        fault_then = w->then;
        fault_after = w->at_once ? 0 : (unsigned)(mn_test_random(&seed) % 20);
        mn_fault_hook = meet_fault;
    }
    CHECK_EQ(mn_cache_attach(cache), 0);
    do {
        uint64_t key = mn_test_random(&seed) % 400;
        struct mn_cache_claimed claimed;
        int rc = mn_cache_claim_key(cache, digest_of(key), &claimed);
        if (get_key(cache, key) != 0) {
            (void)put_key(cache, key);
        }
        if (rc == 0) {
            mn_cache_release_key(cache, digest_of(key), claimed.word);
        }
    } while (mn_test_clock_ns() < w->stop_ns);
    mn_cache_close(cache);
}

static void
two_jobs_recycle_and_read_nothing_wrong(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    uint64_t seed = mn_test_seed();
    struct worker workers[4];
    pid_t pids[4];
    CHECK_EQ(mn_cache_attach(cache), 0);
    for (int i = 0; i < 4; i++) {
        workers[i] = (struct worker){.job = 1 + (uint64_t)i % 2, .seed = seed + (uint64_t)i,
                                     .stop_ns = mn_test_stop_ns()};
        pids[i] = mn_test_fork(work, &workers[i]);
    }
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(mn_test_reap(pids[i]), 0);
    }
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK(sums.recycled > 0 && sums.hits > 0);
    CHECK_EQ(sums.clients, 1);
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

static const char *const POINTS[] = {
    "cache.magic", "cache.room", "cache.shape", "cache.slot", "cache.pages", "cache.emptied",
    "cache.begun",
    "cache.reserved", "cache.part", "cache.written", "cache.indexed", "cache.claimed",
};
#define NPOINTS (sizeof(POINTS) / sizeof(POINTS[0]))

/* At the first visit, and at a later one: the file itself is made once. */
static void
a_client_killed_anywhere_leaves_a_whole_file(void)
{
    uint64_t seed = mn_test_seed();
    for (size_t i = 0; i < NPOINTS * 2; i++) {
        struct worker dying = {.job = 1, .seed = seed + i, .dies_at = POINTS[i % NPOINTS],
                               .how = SIGKILL, .at_once = i < NPOINTS,
                               .stop_ns = mn_test_clock_ns() + 300000000u};
        bool makes = i % NPOINTS < 4; /* the file itself */
        if (makes && !dying.at_once) {
            continue;
        }
        struct mn_cache *other = client_of(2 * MIB, 2, false);
        if (!makes) {
            CHECK_EQ(mn_cache_attach(other), 0);
        }
        int status = mn_test_reap(mn_test_fork(work, &dying));
        if (makes) {
            CHECK(WIFSIGNALED(status));
            mn_cache_close(other);
            other = client_of(2 * MIB, 2, false);
        }
        struct worker living = {.job = 3, .seed = seed + i,
                                .stop_ns = mn_test_clock_ns() + 50000000u};
        CHECK_EQ(mn_test_reap(mn_test_fork(work, &living)), 0);
        all_is_whole(other);
        mn_cache_close(other);
        nothing_left();
    }
}

static void
kills_at_random_leave_a_whole_file(void)
{
    uint64_t seed = mn_test_seed(), stop_ns = mn_test_stop_ns();
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    struct worker workers[3];
    pid_t pids[3] = {0};
    CHECK_EQ(mn_cache_attach(cache), 0);
    for (uint64_t n = 0; mn_test_clock_ns() < stop_ns; n++) {
        size_t i = n % 3;
        if (pids[i] != 0) {
            CHECK(kill(pids[i], SIGKILL) == 0);
            int status = mn_test_reap(pids[i]);
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        }
        workers[i] = (struct worker){.job = 1 + i % 2, .seed = seed + n,
                                     .stop_ns = stop_ns + 60000000000u};
        pids[i] = mn_test_fork(work, &workers[i]);
        (void)usleep((useconds_t)(mn_test_random(&seed) % 8000));
    }
    for (size_t i = 0; i < 3; i++) {
        if (pids[i] != 0) {
            CHECK(kill(pids[i], SIGKILL) == 0);
            (void)mn_test_reap(pids[i]);
        }
    }
    for (uint64_t key = 0; key < 400; key++) {
        (void)get_key(cache, key);
    }
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

/* The writer sleeps in mid-copy while the log goes round many times, and then writes on. */
static void
a_stopped_writer_overwrites_nothing(void)
{
    uint64_t seed = mn_test_seed();
    struct mn_cache *cache = client_of(2 * MIB, 2, false);
    struct worker stopped = {.job = 1, .seed = seed, .dies_at = "cache.part", .how = SIGSTOP,
                             .then = "cache.indexed", .stop_ns = mn_test_clock_ns() + 60000000000u};
    CHECK_EQ(mn_cache_attach(cache), 0);
    pid_t pid = mn_test_fork(work, &stopped);
    int status;
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    struct mn_cache_sums before, after;
    CHECK_EQ(mn_cache_sum(cache, &before), 0);
    for (uint64_t key = 0; key < 4000; key++) {
        int rc = put_key(cache, key % 1000);
        CHECK_EQ(rc, 0);
    }
    CHECK_EQ(mn_cache_sum(cache, &after), 0);
    CHECK(after.recycled - before.recycled > 128); /* some times round, with 16 segments */
    CHECK(kill(pid, SIGCONT) == 0);
    CHECK(WIFSIGNALED(mn_test_reap(pid))); /* behind what it wrote */
    for (uint64_t key = 0; key < 1000; key++) {
        (void)get_key(cache, key);
    }
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

static void
an_opener_of_a_removed_file_begins_anew(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    struct worker opener = {.job = 1, .seed = 1, .dies_at = "cache.opened", .how = SIGSTOP,
                            .then = "cache.indexed", .at_once = true,
                            .stop_ns = mn_test_clock_ns() + 60000000000u};
    CHECK_EQ(mn_cache_attach(cache), 0);
    pid_t pid = mn_test_fork(work, &opener);
    int status;
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    mn_cache_close(cache);
    nothing_left();
    CHECK(kill(pid, SIGCONT) == 0);
    status = mn_test_reap(pid); /* after it attached at once, and stored something */
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    cache = client_of(2 * MIB, 1, false);
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK(sums.used_bytes > 0); /* in a file that has its name */
    mn_cache_close(cache);
    nothing_left();
}

static void
sleep_on(void *arg)
{
    int fd = *(int *)arg;
    char byte;
    (void)read(fd, &byte, 1);
}

static void
fork_and_die(void *arg)
{
    int *ends = arg;
    struct mn_cache *cache = client_of(8 * MIB, 1, false);
    struct mn_cache_claimed claimed;
    CHECK_EQ(put_key(cache, 3), 0);
    CHECK_EQ(mn_cache_claim_key(cache, digest_of(4), &claimed), 0);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_EQ(get_key(cache, 3), 0);
        CHECK(write(ends[1], &child, sizeof(child)) == (ssize_t)sizeof(child));
        sleep_on(&ends[2]);
        CHECK_EQ(get_key(cache, 3), 0);
        CHECK_EQ(put_key(cache, 5), 0);
        mn_cache_close(cache);
        CHECK(write(ends[1], &child, sizeof(child)) == (ssize_t)sizeof(child));
        _exit(0);
    }
    sleep_on(&ends[4]);
    (void)kill(getpid(), SIGKILL);
}

static void
a_fork_that_outlives_its_parent_has_a_lock_of_its_own(void)
{
    int ends[6];
    pid_t told;
    CHECK(pipe(ends) == 0 && pipe(ends + 2) == 0 && pipe(ends + 4) == 0);
    struct mn_cache *cache = client_of(8 * MIB, 2, false);
    CHECK_EQ(mn_cache_attach(cache), 0);
    pid_t parent = mn_test_fork(fork_and_die, ends);
    CHECK(read(ends[0], &told, sizeof(told)) == (ssize_t)sizeof(told));
    struct mn_cache_sums sums;
    struct mn_cache_claimed claimed;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK_EQ(sums.clients, 3);
    CHECK_EQ(mn_cache_claim_key(cache, digest_of(4), &claimed), -EBUSY);
    CHECK(write(ends[5], "", 1) == 1);
    CHECK(WIFSIGNALED(mn_test_reap(parent)));
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK_EQ(sums.clients, 2); /* the child's lock is its own, and the parent's is free */
    CHECK_EQ(mn_cache_claim_key(cache, digest_of(4), &claimed), 0);
    CHECK(write(ends[3], "", 1) == 1);
    CHECK(read(ends[0], &told, sizeof(told)) == (ssize_t)sizeof(told));
    CHECK_EQ(get_key(cache, 5), 0);
    mn_cache_close(cache);
    nothing_left();
    for (int i = 0; i < 6; i++) {
        CHECK(close(ends[i]) == 0);
    }
}

static void
stop_with_the_log(void *arg)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    (void)arg;
    mn_fault_hook = meet_fault;
    fault = "cache.pages"; /* under the log lock */
    fault_signal = SIGSTOP;
    fault_after = 0;
    (void)put_key(cache, 1);
    mn_cache_close(cache);
}

/* Clients wait once for the log lock, and once it is free store again. */
static void
a_stopped_holder_of_the_log_is_waited_for_once(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false), *other = client_of(2 * MIB, 1, false);
    CHECK_EQ(mn_cache_attach(cache), 0);
    pid_t pid = mn_test_fork(stop_with_the_log, NULL);
    int status;
    CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
    CHECK_EQ(put_key(cache, 2), MN_FULL);
    uint64_t start = mn_test_clock_ns();
    for (uint64_t n = 0; n < 3; n++) {
        (void)usleep(250000); /* it looks for room again */
        CHECK_EQ(put_key(cache, 3), MN_FULL);
        CHECK_EQ(put_key(other, 3), MN_FULL);
    }
    /* Each of them would wait for the lock for two seconds. */
    CHECK(mn_test_clock_ns() - start < UINT64_C(6000000000));
    CHECK(kill(pid, SIGCONT) == 0);
    CHECK_EQ(mn_test_reap(pid), 0);
    (void)usleep(250000);
    CHECK_EQ(put_key(other, 4), 0);
    mn_cache_close(other);
    mn_cache_close(cache);
    nothing_left();
}

/* ---- on a disk ---- */

static uint64_t
header_word(size_t off, const uint64_t *set)
{
    uint64_t word;
    int fd = file_of(O_RDWR);
    CHECK(pread(fd, &word, sizeof(word), (off_t)off) == (ssize_t)sizeof(word));
    if (set != NULL) { /* as if it had been so: the file's time stays */
        struct stat file;
        CHECK(fstat(fd, &file) == 0);
        CHECK(pwrite(fd, set, sizeof(*set), (off_t)off) == (ssize_t)sizeof(*set));
        CHECK(futimens(fd, (struct timespec[2]){file.st_atim, file.st_mtim}) == 0);
    }
    CHECK(close(fd) == 0);
    return word;
}

static uint64_t
era_of_file(void)
{
    return header_word(offsetof(struct mn_cache_header, era), NULL);
}

static void
start_system_anew(void)
{
    uint64_t home = header_word(offsetof(struct mn_cache_header, home), NULL) + 1;
    (void)header_word(offsetof(struct mn_cache_header, home), &home);
}

static uint64_t
damaged_of(struct mn_cache *cache)
{
    struct mn_cache_sums sums;
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    return sums.damaged;
}

static void
put_keys(uint64_t from, uint64_t to)
{
    struct mn_cache *cache = client_of(16 * MIB, 1, false);
    for (uint64_t key = from; key < to; key++) {
        CHECK_EQ(put_key(cache, key), 0);
    }
    mn_cache_close(cache);
}

static void
the_next_session_finds_all_and_verifies_nothing(void)
{
    put_keys(0, 100);
    uint64_t era = era_of_file();
    for (int session = 0; session < 3; session++) {
        struct mn_cache *cache = client_of(16 * MIB, 1, false);
        for (uint64_t key = 0; key < 100; key++) {
            CHECK_EQ(get_key(cache, key), 0);
        }
        CHECK_EQ(damaged_of(cache), 0);
        mn_cache_close(cache);
        CHECK_EQ(era_of_file(), era);
    }
    nothing_left();
}

static void
after_another_boot_each_entry_is_verified(void)
{
    put_keys(0, 100);
    uint64_t era = era_of_file();
    struct mn_cache_shape shape;
    CHECK(mn_cache_shape_of(16 * MIB, 0, &shape));
    uint64_t byte = shape.data_off + mn_cache_payload_off(64), word;
    word = header_word(byte, NULL) ^ 0x10000; /* of the first entry, by a disk that lost it */
    (void)header_word(byte, &word);
    struct mn_cache *cache = client_of(16 * MIB, 1, false);
    CHECK_EQ(mn_cache_attach(cache), 0);
    mn_cache_close(cache);
    CHECK_EQ(era_of_file(), era); /* not noticed, and not looked for, in the same boot */
    start_system_anew();
    cache = client_of(16 * MIB, 1, false);
    for (uint64_t key = 0; key < 100; key++) {
        CHECK_EQ(get_key(cache, key), key == 0 ? MN_EMPTY : 0);
    }
    CHECK_EQ(damaged_of(cache), 1);
    CHECK_EQ(put_key(cache, 0), 0); /* in its place */
    CHECK_EQ(get_key(cache, 0), 0);
    mn_cache_close(cache);
    CHECK_EQ(era_of_file(), era + 1);
    nothing_left();
}

static void
bytes_flipped_between_sessions_are_misses(void)
{
    struct mn_cache_shape shape;
    CHECK(mn_cache_shape_of(16 * MIB, 0, &shape));
    uint64_t bytes = mn_cache_padded(8) + mn_cache_padded(bytes_of(3))
                     + mn_cache_padded(bytes_of(3) / 2);
    uint64_t payload = mn_cache_payload_off(bytes), whole = payload + bytes;
    for (uint64_t off = 0; off < whole; off += off < payload ? 7 : whole / 23) {
        if (off >= 72 && off < payload) {
            continue; /* between the checksums and the payload lies nothing */
        }
        put_keys(3, 4);
        flip(shape.data_off + off);
        struct mn_cache *cache = client_of(16 * MIB, 1, false);
        CHECK_EQ(get_key(cache, 3), MN_EMPTY);
        CHECK_EQ(put_key(cache, 3), 0);
        CHECK_EQ(get_key(cache, 3), 0);
        CHECK_EQ(damaged_of(cache), off < 64 ? 0 : 1); /* a wrong head is no entry at all */
        mn_cache_close(cache);
        nothing_left();
    }
}

static void
after_a_kill_each_entry_is_verified(void)
{
    uint64_t seed = mn_test_seed(), era = 0;
    mn_cache_close(client_of(2 * MIB, 1, false)); /* names the folder */
    for (int round = 0; round < 3; round++) {
        struct worker dying = {.job = 1, .seed = seed + (uint64_t)round, .dies_at = "cache.part",
                               .how = SIGKILL, .stop_ns = mn_test_clock_ns() + 60000000000u};
        CHECK(WIFSIGNALED(mn_test_reap(mn_test_fork(work, &dying))));
        CHECK_EQ(era_of_file(), ++era);
    }
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    for (uint64_t key = 0; key < 400; key++) {
        (void)get_key(cache, key);
    }
    CHECK_EQ(damaged_of(cache), 0);
    mn_cache_close(cache);
    CHECK_EQ(era_of_file(), ++era);
    put_keys(1001, 1002);
    CHECK_EQ(era_of_file(), era); /* it was left in order */
    nothing_left();
}

static void
read_all(unsigned char *to, uint64_t bytes)
{
    int fd = file_of(O_RDONLY);
    CHECK(pread(fd, to, bytes, 0) == (ssize_t)bytes);
    CHECK(close(fd) == 0);
}

/* After a power loss each page is as old as it likes. What is delivered is right, and what is
 * stored from then on stays right. */
static void
pages_of_any_age_lead_to_no_wrong_byte(void)
{
    uint64_t seed = mn_test_seed();
    struct mn_cache_shape shape;
    CHECK(mn_cache_shape_of(2 * MIB, 0, &shape));
    unsigned char *ages[2] = {malloc(shape.bytes), malloc(shape.bytes)};
    CHECK(ages[0] != NULL && ages[1] != NULL);
    for (int round = 0; round < 12; round++) {
        for (int age = 0; age < 2; age++) {
            struct mn_cache *one = client_of(2 * MIB, 1, false);
            struct mn_cache *other = client_of(2 * MIB, 2, false);
            CHECK_EQ(mn_cache_attach(other), 0); /* so that segments are recycled */
            for (int n = 0; n < 150; n++) {
                uint64_t key = mn_test_random(&seed) % 200;
                if (get_key(one, key) != 0) {
                    (void)put_key(one, key);
                }
            }
            read_all(ages[age], shape.bytes);
            mn_cache_close(other);
            mn_cache_close(one);
        }
        int fd = file_of(O_RDWR);
        for (uint64_t page = 4096; page < shape.bytes; page += 4096) {
            CHECK(pwrite(fd, ages[mn_test_random(&seed) % 2] + page, 4096, (off_t)page) == 4096);
        }
        CHECK(close(fd) == 0);
        start_system_anew();
    }
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    for (uint64_t key = 0; key < 200; key++) {
        (void)get_key(cache, key);
    }
    mn_cache_close(cache);
    free(ages[0]);
    free(ages[1]);
    nothing_left();
}

static void
entries_that_no_session_uses_make_room(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    struct mn_cache_sums sums;
    uint64_t key = 0, rounds = 0;
    while (put_key(cache, key) != MN_FULL) {
        key++;
    }
    mn_cache_close(cache);
    cache = client_of(2 * MIB, 1, false);
    CHECK_EQ(get_key(cache, 1), 0); /* is used still, and so are its neighbours */
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    for (uint64_t n = 1000; n < 1000 + 8 * sums.entries; n++) {
        CHECK_EQ(get_key(cache, n % 100 + 1000), MN_EMPTY);
    }
    int rc;
    while ((rc = put_key(cache, key + rounds)) != MN_FULL && rounds < 1000) {
        CHECK_EQ(rc, 0);
        rounds++;
    }
    CHECK(rounds > 30); /* until all is of this session */
    CHECK_EQ(rc, MN_FULL);
    CHECK_EQ(get_key(cache, 1), 0);
    CHECK_EQ(mn_cache_sum(cache, &sums), 0);
    CHECK_EQ(sums.recycled, 15);
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

/* What the system does when a test asks for it. */
static struct {
    long type;       /* of the file system */
    bool locks_all;  /* one lock to two descriptions */
    bool shows_old;  /* what was written through a mapping is not read */
    int read_error, write_error, reserve_error;
} fake;

int
__real_fstatfs(int fd, struct statfs *system);
int
__wrap_fstatfs(int fd, struct statfs *system);
int
__wrap_fstatfs(int fd, struct statfs *system)
{
    int rc = __real_fstatfs(fd, system);
    system->f_type = fake.type != 0 ? fake.type : system->f_type;
    return rc;
}

int
__real_fcntl(int fd, int command, ...);
int
__wrap_fcntl(int fd, int command, ...);
int
__wrap_fcntl(int fd, int command, ...)
{
    va_list arguments;
    va_start(arguments, command);
    struct flock *lock = va_arg(arguments, struct flock *); /* the cache has no other calls */
    va_end(arguments);
    return fake.locks_all && command == F_OFD_SETLK ? 0 : __real_fcntl(fd, command, lock);
}

ssize_t
__real_pread(int fd, void *to, size_t bytes, off_t off);
ssize_t
__wrap_pread(int fd, void *to, size_t bytes, off_t off);
ssize_t
__wrap_pread(int fd, void *to, size_t bytes, off_t off)
{
    if (fake.read_error != 0) {
        errno = fake.read_error;
        return -1;
    }
    ssize_t n = __real_pread(fd, to, bytes, off);
    if (fake.shows_old && n > 0) {
        memset(to, 0, (size_t)n);
    }
    return n;
}

ssize_t
__real_pwrite(int fd, const void *from, size_t bytes, off_t off);
ssize_t
__wrap_pwrite(int fd, const void *from, size_t bytes, off_t off);
ssize_t
__wrap_pwrite(int fd, const void *from, size_t bytes, off_t off)
{
    if (fake.write_error != 0) {
        errno = fake.write_error;
        return -1;
    }
    return __real_pwrite(fd, from, bytes, off);
}

int
__real_fallocate(int fd, int mode, off_t off, off_t bytes);
int
__wrap_fallocate(int fd, int mode, off_t off, off_t bytes);
int
__wrap_fallocate(int fd, int mode, off_t off, off_t bytes)
{
    if (fake.reserve_error != 0) {
        errno = fake.reserve_error;
        return -1;
    }
    return __real_fallocate(fd, mode, off, bytes);
}

static void
file_systems_of_others_are_refused(void)
{
    mn_cache_close(client_of(MIB, 1, false)); /* names the folder */
    fake.type = 0x6969; /* NFS */
    CHECK_EQ(attached(MIB), MN_CACHE_REMOTE);
    fake.type = 0x65735546; /* FUSE */
    CHECK_EQ(attached(MIB), MN_CACHE_REMOTE);
    fake.type = 0;
    fake.locks_all = true;
    CHECK_EQ(attached(MIB), MN_CACHE_NO_LOCKS);
    fake.locks_all = false;
    fake.shows_old = true;
    CHECK_EQ(attached(MIB), MN_CACHE_NO_LOCKS);
    fake.shows_old = false;
    fake.reserve_error = EOPNOTSUPP;
    CHECK_EQ(attached(MIB), MN_CACHE_NO_RESERVING);
    fake.reserve_error = ENOSPC;
    CHECK_EQ(attached(MIB), -ENOSPC);
    fake.reserve_error = 0;
    CHECK(access(folder, F_OK) != 0); /* whatever it was, nothing is left */
    CHECK_EQ(attached(MIB), 0);
    nothing_left();
}

static void
a_full_or_failing_disk_is_a_result(void)
{
    struct mn_cache *cache = client_of(2 * MIB, 1, false);
    struct mn_cache_found found;
    char byte;
    CHECK_EQ(mn_cache_attach(cache), 0); /* which makes the file */
    fake.write_error = ENOSPC;
    CHECK_EQ(put_key(cache, 1), MN_FULL);
    fake.write_error = EIO;
    CHECK_EQ(put_key(cache, 1), -EIO);
    fake.write_error = 0;
    CHECK_EQ(get_key(cache, 1), MN_EMPTY);
    CHECK_EQ(put_key(cache, 1), 0);
    CHECK_EQ(mn_cache_find(cache, digest_of(1), true, &found), 0);
    fake.read_error = EIO;
    CHECK_EQ(mn_cache_copy(&found, 0, &byte, 1), -EIO);
    CHECK_EQ(get_key(cache, 1), MN_EMPTY);
    fake.read_error = 0;
    CHECK_EQ(get_key(cache, 1), 0);
    fake.reserve_error = EFBIG; /* of a limit for the process's files */
    uint64_t key = 2;
    while (put_key(cache, key) != MN_FULL) {
        key++;
        CHECK(key < 100);
    }
    fake.reserve_error = 0;
    all_is_whole(cache);
    mn_cache_close(cache);
    nothing_left();
}

static const struct mn_test tests[] = {
    MN_TEST_BOTH("plain", stored_entries_are_found, disk),
    MN_TEST_BOTH("plain", a_full_cache_of_one_job_keeps_what_it_has, disk),
    MN_TEST_BOTH("plain", boxes_are_what_loops_copy, disk),
    MN_TEST_BOTH("plain", torn_records_are_misses, disk),
    MN_TEST_BOTH("plain", what_was_recycled_since_it_was_found_is_noticed, disk),
    MN_TEST_BOTH("plain", a_damaged_header_is_refused, disk),
    MN_TEST_BOTH("plain", a_kept_file_is_there_for_the_next_client, disk),
    MN_TEST_BOTH("plain", a_client_of_a_removed_file_goes_on_alone, disk),
    MN_TEST_BOTH("plain", a_client_whose_descriptors_were_closed_attaches_anew, disk),
    MN_TEST_BOTH("thread", threads_share_a_client, disk),
    MN_TEST_BOTH("thread", a_claim_is_held_once, disk),
    MN_TEST_BOTH("fork", two_jobs_recycle_and_read_nothing_wrong, disk),
    MN_TEST_BOTH("fork", a_client_killed_anywhere_leaves_a_whole_file, disk),
    MN_TEST_BOTH("fork", kills_at_random_leave_a_whole_file, disk),
    MN_TEST_BOTH("fork", a_stopped_writer_overwrites_nothing, disk),
    MN_TEST_BOTH("fork", an_opener_of_a_removed_file_begins_anew, disk),
    MN_TEST_BOTH("fork", a_fork_that_outlives_its_parent_has_a_lock_of_its_own, disk),
    MN_TEST_WITHIN("plain", the_next_session_finds_all_and_verifies_nothing, disk),
    MN_TEST_WITHIN("plain", after_another_boot_each_entry_is_verified, disk),
    MN_TEST_WITHIN("plain", bytes_flipped_between_sessions_are_misses, disk),
    MN_TEST_WITHIN("fork", after_a_kill_each_entry_is_verified, disk),
    MN_TEST_WITHIN("plain", pages_of_any_age_lead_to_no_wrong_byte, disk),
    MN_TEST_WITHIN("plain", entries_that_no_session_uses_make_room, disk),
    MN_TEST_WITHIN("plain", file_systems_of_others_are_refused, disk),
    MN_TEST_WITHIN("plain", a_full_or_failing_disk_is_a_result, disk),
    MN_TEST("plain", flipped_bytes_are_misses_or_are_noticed),
    MN_TEST_ADVISED("plain", segments_go_back_to_the_system_under_pressure),
    MN_TEST("plain", a_segment_grows_with_its_entries),
    MN_TEST("plain", a_timer_does_not_keep_a_file_from_its_pages),
    MN_TEST("plain", promised_memory_is_left_to_others),
    MN_TEST("plain", what_is_not_ours_alone_is_refused),
    MN_TEST("plain", a_folder_that_is_not_in_memory_is_refused),
    MN_TEST("fork", a_stopped_holder_of_the_log_is_waited_for_once),
};
MN_TEST_MAIN(tests)
