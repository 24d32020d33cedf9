/* .npy files: their headers, reading parts of them, and the mappings kept between samples.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE /* O_DIRECT, RUSAGE_THREAD */
#endif

#include "ops/mn_npy.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/mn_base.h"

/* ---- Headers ----
 *
 * A header is a Python dict in text. The parser knows just the dict literals that NumPy writes and
 * accepts: string keys, and as values strings, True, False and tuples of integers. It never looks
 * past the length that it is given.
 */

MN_STATIC_ASSERT(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
                 "voxels are used as they lie in the file, which is little-endian");

struct cursor {
    const char *at, *end;
    const char *path;
    struct mn_text *text;
};

struct header {
    bool has_descr, has_order, has_shape, fortran;
    char descr[16];
    int ndim;
    int64_t shape[MN_VOLUME_DIMS];
};

static const struct {
    const char *descr, *name;
    size_t size;
} dtypes[] = {
    [MN_DTYPE_NONE] = {"", "no dtype", 0},  [MN_DTYPE_U8] = {"|u1", "uint8", 1},
    [MN_DTYPE_I16] = {"<i2", "int16", 2},   [MN_DTYPE_U16] = {"<u2", "uint16", 2},
    [MN_DTYPE_I32] = {"<i4", "int32", 4},   [MN_DTYPE_F32] = {"<f4", "float32", 4},
    [MN_DTYPE_F64] = {"<f8", "float64", 8},
};

#define N_DTYPES ((int)(sizeof(dtypes) / sizeof(dtypes[0])))

size_t
mn_dtype_size(int dtype)
{
    return dtype > 0 && dtype < N_DTYPES ? dtypes[dtype].size : 0;
}

const char *
mn_dtype_name(int dtype)
{
    return dtypes[dtype > 0 && dtype < N_DTYPES ? dtype : 0].name;
}

const char *
mn_dtype_code(int dtype)
{
    return dtypes[dtype > 0 && dtype < N_DTYPES ? dtype : 0].descr;
}

static int
malformed(struct cursor *c, const char *what)
{
    return mn_fail(c->text, EINVAL, "%s: malformed .npy header: %s", c->path, what);
}

static void
skip_space(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t')) {
        c->at++;
    }
}

/* Returns whether the next character after space is `wanted`, and consumes it if so. */
static bool
accept(struct cursor *c, char wanted)
{
    skip_space(c);
    if (c->at < c->end && *c->at == wanted) {
        c->at++;
        return true;
    }
    return false;
}

static bool
accept_word(struct cursor *c, const char *word)
{
    size_t length = strlen(word);
    skip_space(c);
    if ((size_t)(c->end - c->at) >= length && memcmp(c->at, word, length) == 0) {
        c->at += length;
        return true;
    }
    return false;
}

/* Parses a quoted string without escapes; cuts it to fit `out`, which a known one always does. */
static int
parse_string(struct cursor *c, char *out, size_t size)
{
    skip_space(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"')) {
        return malformed(c, "a string was expected");
    }
    char quote = *c->at++;
    size_t length = 0;
    while (c->at < c->end && *c->at != quote) {
        if (*c->at == '\\') {
            return malformed(c, "a string with an escape");
        }
        if (length + 1 < size) {
            out[length++] = *c->at >= ' ' && *c->at <= '~' ? *c->at : '?'; /* for texts */
        }
        c->at++;
    }
    out[length] = '\0';
    return accept(c, quote) ? 0 : malformed(c, "a string without an end");
}

static int
parse_integer(struct cursor *c, int64_t *value)
{
    skip_space(c);
    const char *first = c->at;
    *value = 0;
    while (c->at < c->end && *c->at >= '0' && *c->at <= '9') {
        if (__builtin_mul_overflow(*value, (int64_t)10, value)
            || __builtin_add_overflow(*value, (int64_t)(*c->at - '0'), value)) {
            return mn_fail(c->text, EINVAL, "%s: a length in the shape exceeds 64 bits",
                           c->path);
        }
        c->at++;
    }
    if (c->at == first || (*first == '0' && c->at > first + 1)) {
        return malformed(c, "the shape is not a tuple of lengths"); /* 07 is no number */
    }
    if (c->at < c->end && *c->at == 'L') {
        c->at++; /* as Python 2 wrote long integers */
    }
    return 0;
}

static int
parse_shape(struct cursor *c, struct header *h)
{
    if (!accept(c, '(')) {
        return malformed(c, "the shape is not a tuple of lengths");
    }
    h->ndim = 0;
    while (!accept(c, ')')) {
        int64_t length;
        int rc = parse_integer(c, &length);
        if (rc < 0) {
            return rc;
        }
        if (h->ndim < MN_VOLUME_DIMS) {
            h->shape[h->ndim] = length;
        }
        if (h->ndim++ >= 64) {
            return malformed(c, "more than 64 axes");
        }
        if (!accept(c, ',')) {
            if (accept(c, ')')) {
                break;
            }
            return malformed(c, "the shape is not a tuple of lengths");
        }
    }
    h->has_shape = true;
    return 0;
}

static int
parse_descr(struct cursor *c, struct header *h)
{
    skip_space(c);
    if (c->at < c->end && *c->at == '[') {
        return mn_fail(c->text, EINVAL, "%s: holds a structured array, not voxels", c->path);
    }
    h->has_descr = true;
    return parse_string(c, h->descr, sizeof(h->descr));
}

static int
parse_item(struct cursor *c, struct header *h)
{
    char name[16];
    int rc = parse_string(c, name, sizeof(name));
    if (rc < 0) {
        return rc;
    }
    if (!accept(c, ':')) {
        return malformed(c, "':' was expected");
    }
    if (strcmp(name, "descr") == 0 && !h->has_descr) {
        return parse_descr(c, h);
    }
    if (strcmp(name, "shape") == 0 && !h->has_shape) {
        return parse_shape(c, h);
    }
    if (strcmp(name, "fortran_order") == 0 && !h->has_order) {
        h->has_order = true;
        h->fortran = accept_word(c, "True");
        return h->fortran || accept_word(c, "False")
                   ? 0
                   : malformed(c, "fortran_order is neither True nor False");
    }
    return malformed(c, "an unknown or repeated key; allowed are descr, fortran_order and shape");
}

static int
parse_dict(struct cursor *c, struct header *h)
{
    if (!accept(c, '{')) {
        return malformed(c, "no dict");
    }
    while (!accept(c, '}')) {
        int rc = parse_item(c, h);
        if (rc < 0) {
            return rc;
        }
        if (!accept(c, ',')) {
            if (accept(c, '}')) {
                break;
            }
            return malformed(c, "',' or '}' was expected");
        }
    }
    skip_space(c);
    if (c->at != c->end) {
        return malformed(c, "text after the dict");
    }
    if (!h->has_descr || !h->has_order || !h->has_shape) {
        return malformed(c, "descr, fortran_order or shape is missing");
    }
    return 0;
}

static int
check_dtype(struct cursor *c, const struct header *h, struct mn_npy *npy)
{
    const char *descr = strcmp(h->descr, "<u1") == 0 ? "|u1" : h->descr;
    for (int d = 1; d < N_DTYPES; d++) {
        if (strcmp(descr, dtypes[d].descr) == 0) {
            npy->dtype = d;
            return 0;
        }
    }
    return mn_fail(c->text, EINVAL,
                   "%s: dtype '%s' is not supported; it must be uint8 or little-endian "
                   "int16, uint16, int32, float32 or float64",
                   c->path, h->descr);
}

static int
check_shape(struct cursor *c, const struct header *h, struct mn_npy *npy,
            uint64_t file_size)
{
    if (h->ndim != MN_VOLUME_DIMS) {
        return mn_fail(c->text, EINVAL,
                       "%s: has %d axes; a volume has 4 (channel, depth, height, width)",
                       c->path, h->ndim);
    }
    int64_t bytes = (int64_t)mn_dtype_size(npy->dtype);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        npy->shape[axis] = h->shape[axis];
        if (h->shape[axis] == 0) {
            return mn_fail(c->text, EINVAL, "%s: axis %d is empty", c->path, axis);
        }
        if (__builtin_mul_overflow(bytes, h->shape[axis], &bytes)) {
            return mn_fail(c->text, EINVAL, "%s: its shape needs more than 2^63 bytes",
                           c->path);
        }
    }
    npy->data_bytes = (uint64_t)bytes;
    uint64_t body = file_size - npy->data_off;
    if (body != npy->data_bytes) {
        return mn_fail(c->text, EINVAL,
                       "%s: %s: the header promises %llu bytes of voxels, the file has "
                       "%llu",
                       c->path, body < npy->data_bytes ? "truncated" : "too long",
                       (unsigned long long)npy->data_bytes, (unsigned long long)body);
    }
    return 0;
}

/* Parses the bytes before the dict, which end in its length. */
static int
parse_prefix(const unsigned char *head, size_t length, struct cursor *c, uint64_t *start,
             uint64_t *dict_bytes, uint64_t *need)
{
    if (length < 12) {
        *need = 12;
        return 1;
    }
    if (memcmp(head, "\x93NUMPY", 6) != 0) {
        return mn_fail(c->text, EINVAL, "%s: is not a .npy file", c->path);
    }
    if (head[6] < 1 || head[6] > 3 || head[7] != 0) {
        return mn_fail(c->text, EINVAL, "%s: .npy format version %d.%d is unknown", c->path,
                       head[6], head[7]);
    }
    *dict_bytes = (uint64_t)head[8] | (uint64_t)head[9] << 8;
    *start = 10;
    if (head[6] > 1) {
        *dict_bytes |= (uint64_t)head[10] << 16 | (uint64_t)head[11] << 24;
        *start = 12;
    }
    return 0;
}

/* Parses the first `length` bytes of a file of file_size bytes. A pure function. Returns 0; 1 if
 * more than `length` bytes are needed, their number then in *need; or -EINVAL. `path` is only for
 * texts. */
static int
parse(struct mn_npy *npy, const unsigned char *head, size_t length, uint64_t file_size,
      const char *path, uint64_t *need, struct mn_text *text)
{
    struct cursor c = {.path = path, .text = text};
    struct header h = {0};
    uint64_t start = 0, dict_bytes = 0;
    if (file_size < 12) {
        return mn_fail(text, EINVAL, "%s: is not a .npy file: it has %llu bytes", path,
                       (unsigned long long)file_size);
    }
    int rc = parse_prefix(head, length, &c, &start, &dict_bytes, need);
    if (rc != 0) {
        return rc;
    }
    npy->data_off = start + dict_bytes;
    if (npy->data_off > file_size) {
        return mn_fail(text, EINVAL, "%s: truncated within its header", path);
    }
    if (npy->data_off > MN_NPY_HEADER_MAX) {
        return malformed(&c, "longer than 64 KiB");
    }
    if (npy->data_off > length) {
        *need = npy->data_off;
        return 1;
    }
    c.at = (const char *)head + start;
    c.end = c.at + dict_bytes;
    rc = parse_dict(&c, &h);
    if (rc == 0) {
        rc = check_dtype(&c, &h, npy);
    }
    if (rc == 0 && h.fortran) {
        rc = mn_fail(text, EINVAL,
                     "%s: is in Fortran order; save numpy.ascontiguousarray of it", path);
    }
    return rc == 0 ? check_shape(&c, &h, npy, file_size) : rc;
}

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

/* Begins a section in which the calling thread reads the range. Sections do not nest. */
static void
guard_enter(struct mn_guard *guard)
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

/* Ends the section. Returns false if the thread may have read something else than the file. */
static bool
guard_leave(struct mn_guard *guard)
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

/* Unmaps a mapping; NULL is allowed. */
static void
map_close(struct mn_maps *maps, struct mn_map *map)
{
    if (map != NULL) {
        mn_a64_add_relaxed(&maps->bytes, 0 - (uint64_t)map->guard.size);
        munmap(map->guard.bytes, map->guard.size);
        free(map);
    }
}

void
mn_maps_fini(struct mn_maps *maps)
{
    for (int i = 0; i < MN_MAPS; i++) {
        map_close(maps, take_slot(&maps->slots[i]));
    }
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

/* Returns the mapping to the table, which may unmap it at once. */
static void
maps_put(struct mn_maps *maps, struct mn_map *map)
{
    bool kept = false;
    for (int way = 0; !kept && !map->lost && way < MN_MAPS_WAYS; way++) {
        kept = put_in_slot(maps, slot_at(maps, map->hash, way), map);
    }
    if (!kept) {
        map_close(maps, map);
    }
}

/* Takes a mapping of this path, which the caller then owns; NULL if there is none. Its identity may
 * be out of date. */
static struct mn_map *
maps_take(struct mn_maps *maps, const char *path)
{
    uint64_t hash = mn_path_hash(path);
    for (int way = 0; way < MN_MAPS_WAYS; way++) {
        struct mn_map_slot *slot = slot_at(maps, hash, way);
        struct mn_map *map = mn_a64_load_relaxed(&slot->hash) == hash ? take_slot(slot) : NULL;
        if (map != NULL && strcmp(map->path, path) == 0) {
            return map;
        }
        if (map != NULL) {
            maps_put(maps, map); /* the hint belonged to another mapping; now it is right */
        }
    }
    return NULL;
}

/* Looks for the slots of a path. *empty: whether its mapping could be put in one; other threads may
 * be faster: then it is closed. Returns the slot of the mapping that was put back longest ago, or
 * NULL. */
static struct mn_map_slot *
oldest_slot(struct mn_maps *maps, uint64_t hash, bool *empty)
{
    struct mn_map_slot *oldest = NULL;
    uint64_t stamp = UINT64_MAX;
    *empty = false;
    for (int way = 0; way < MN_MAPS_WAYS; way++) {
        struct mn_map_slot *slot = slot_at(maps, hash, way);
        if (mn_a64_load_relaxed(&slot->map) == 0) {
            *empty = true;
        }
        else if (mn_a64_load_relaxed(&slot->stamp) < stamp) {
            stamp = mn_a64_load_relaxed(&slot->stamp);
            oldest = slot;
        }
    }
    return oldest;
}

/* Finds room for a mapping of this size, and counts its bytes. */
static bool
find_room(struct mn_maps *maps, uint64_t hash, uint64_t size)
{
    for (int attempt = 0; attempt <= MN_MAPS_WAYS; attempt++) {
        bool empty;
        struct mn_map_slot *oldest = oldest_slot(maps, hash, &empty);
        if (empty) {
            uint64_t before = mn_a64_add_relaxed(&maps->bytes, size);
            if (before + size <= maps->most_bytes && before + size >= size) {
                return true;
            }
            mn_a64_add_relaxed(&maps->bytes, 0 - size);
        }
        if (attempt == 0 && mn_a64_add_relaxed(&maps->misfits, 1) % MN_MAPS_TURN != 0) {
            return false;
        }
        if (oldest != NULL) {
            map_close(maps, take_slot(oldest)); /* NULL if another thread was faster */
        }
    }
    return false;
}

/* -- One mapping ----------------------------------------------------------------------- */

/* Maps an open file that has this identity. The caller owns the mapping, and must put or close it.
 * NULL: read the file by calls. */
static struct mn_map *
map_open(struct mn_maps *maps, int fd, const char *path,
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

/* Starts to read these bytes from the disk, unless they are in the page cache. */
static void
map_ahead(const struct mn_map *map, uint64_t off, uint64_t length)
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

/* ---- .npy files ---- */

/* Makes the buffer hold at least size bytes; its contents are lost. */
static int
buffer_grow(struct mn_npy_buffer *buffer, size_t size, struct mn_text *text)
{
    if (size <= buffer->size) {
        return 0;
    }
    size_t rounded = (size + MN_NPY_BLOCK - 1) / MN_NPY_BLOCK * MN_NPY_BLOCK;
    void *bytes = NULL;
    if (rounded < size || posix_memalign(&bytes, MN_NPY_BLOCK, rounded) != 0) {
        return mn_fail_memory(text, size);
    }
    free(buffer->bytes);
    buffer->bytes = bytes;
    buffer->size = rounded;
    return 0;
}

static int
fail_errno(struct mn_text *text, const char *path, const char *doing)
{
    int code = errno;
    char reason[128];
#if defined(__GLIBC__)
    const char *words = strerror_r(code, reason, sizeof(reason));
#else
    strerror_r(code, reason, sizeof(reason));
    const char *words = reason;
#endif
    return mn_fail(text, code, "%s: %s: %s", path, doing, words);
}

static int
fail_direct(struct mn_text *text, const char *path)
{
    return mn_fail(text, EINVAL,
                   "%s: its file system cannot bypass the page cache; use direct=False",
                   path);
}

static struct mn_npy_identity
identity_of(const struct stat *st)
{
    return (struct mn_npy_identity){
        .device = (uint64_t)st->st_dev,
        .inode = (uint64_t)st->st_ino,
        .size = (uint64_t)st->st_size,
        .mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec,
    };
}

static int
identify(struct mn_npy_file *file, struct mn_text *text)
{
    struct stat st;
    if (fstat(file->fd, &st) != 0) {
        return fail_errno(text, file->path, "fstat");
    }
    if (!S_ISREG(st.st_mode)) {
        return mn_fail(text, EINVAL, "%s: is not a regular file", file->path);
    }
    file->identity = identity_of(&st);
    return 0;
}

/* Takes a mapping of the file's current state out of the table, if it is there. A mapping of an
 * earlier state is dropped. */
static bool
find_mapped(struct mn_npy_file *file, struct mn_maps *maps)
{
    struct stat st;
    struct mn_map *map = maps_take(maps, file->path);
    if (map == NULL) {
        return false;
    }
    if (stat(file->path, &st) == 0) {
        file->identity = identity_of(&st);
        if (mn_same_identity(&map->identity, &file->identity)) {
            file->map = map;
            return true;
        }
    }
    map_close(maps, map);
    return false;
}

static void
close_fd(struct mn_npy_file *file)
{
    if (file->fd >= 0) {
        close(file->fd);
        file->fd = -1;
    }
}

static int
open_path(const char *path, int more_flags)
{
    int fd;
    /* O_NONBLOCK: a FIFO in place of the file must not hang the worker. */
    do {
        fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | more_flags);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

int
mn_npy_open(struct mn_npy_file *file, struct mn_maps *maps, const char *path, bool direct,
            struct mn_text *text)
{
    *file = (struct mn_npy_file){.path = path, .fd = -1, .direct = direct};
    if (maps != NULL && !direct && find_mapped(file, maps)) {
        return 0;
    }
    file->fd = open_path(path, direct ? O_DIRECT : 0);
    if (file->fd < 0) {
        return direct && errno == EINVAL ? fail_direct(text, path)
                                         : fail_errno(text, path, "cannot be opened");
    }
    int rc = identify(file, text);
    if (rc == 0 && maps != NULL && !direct) {
        file->map = map_open(maps, file->fd, path, &file->identity);
        file->newly_mapped = file->map != NULL;
    }
    if (rc < 0) {
        close_fd(file);
    }
    return rc;
}

void
mn_npy_header_known(struct mn_npy_file *file)
{
    if (file->map != NULL) {
        close_fd(file);
    }
}

void
mn_npy_close(struct mn_npy_file *file, struct mn_maps *maps)
{
    close_fd(file);
    if (file->map != NULL) {
        maps_put(maps, file->map);
        file->map = NULL;
    }
}

void
mn_npy_open_again(struct mn_npy_file *again, const struct mn_npy_file *file)
{
    struct stat st;
    *again = (struct mn_npy_file){.path = file->path, .fd = open_path(file->path, 0)};
    if (again->fd >= 0) {
        struct mn_npy_identity now = {0};
        if (fstat(again->fd, &st) == 0) {
            now = identity_of(&st);
        }
        if (!mn_same_identity(&now, &file->map->identity)) {
            mn_npy_close(again, NULL);
        }
    }
}

bool
mn_npy_is_cached(const struct mn_npy_file *again, uint64_t off)
{
    char byte;
    struct iovec to = {&byte, 1};
    return again->fd < 0 || preadv2(again->fd, &to, 1, (off_t)off, RWF_NOWAIT) >= 0
           || errno != EAGAIN;
}

void
mn_npy_begin(const struct mn_npy_file *file)
{
    if (file->map != NULL) {
        guard_enter(&file->map->guard);
    }
}

/* A page of which the file has lost a part reads as zeros there, without a signal, so the size is
 * checked as well. A file that has replaced it meanwhile says nothing about this one. */
int
mn_npy_end(const struct mn_npy_file *file, int rc, struct mn_text *text)
{
    struct stat st;
    struct mn_map *map = file->map;
    if (map == NULL) {
        return rc;
    }
    bool whole = guard_leave(&map->guard);
    bool same = stat(file->path, &st) == 0 && (uint64_t)st.st_dev == map->identity.device
                && (uint64_t)st.st_ino == map->identity.inode;
    bool shorter = same && (uint64_t)st.st_size < map->identity.size;
    if (whole && !shorter) {
        return rc;
    }
    map->lost = true;
    if (same && !shorter) {
        errno = EIO;
        return fail_errno(text, file->path, "read");
    }
    return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
}

void
mn_npy_count(struct mn_npy_count *count, uint64_t off, uint64_t length, uint64_t stride,
             uint64_t n)
{
    bool adjoin = n > 0 && stride < length + MN_NPY_BLOCK; /* no whole block between two pieces */
    count->bytes += length * n;
    if (adjoin) {
        length += (n - 1) * stride;
        n = 1;
    }
    for (uint64_t i = 0; i < n; i++, off += stride) {
        uint64_t first = off / MN_NPY_BLOCK, last = (off + length - 1) / MN_NPY_BLOCK;
        count->touched += (last + 1 - first) * MN_NPY_BLOCK;
    }
}

/* Reads up to `length` bytes, fewer only at the file's end. Returns their number. */
static int64_t
read_fully(const struct mn_npy_file *file, unsigned char *to, size_t length, uint64_t off,
           struct mn_text *text)
{
    size_t done = 0;
    while (done < length) {
        ssize_t n = pread(file->fd, to + done, length - done, (off_t)(off + done));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n < 0) {
            return file->direct && errno == EINVAL ? fail_direct(text, file->path)
                                                   : fail_errno(text, file->path, "read");
        }
        if (n == 0) {
            break;
        }
        done += (size_t)n;
        if (file->direct && done % MN_NPY_BLOCK != 0) {
            break; /* only the file's last block is read in part */
        }
    }
    return (int64_t)done;
}

int
mn_npy_read(const struct mn_npy_file *file, struct mn_npy_buffer *buffer, uint64_t off,
            size_t length, const unsigned char **bytes, struct mn_npy_count *count,
            struct mn_text *text)
{
    if (file->fd < 0 && file->map != NULL) {
        if (off > file->map->guard.size || length > file->map->guard.size - off) {
            return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
        }
        mn_npy_count(count, off, length, 0, 1);
        *bytes = file->map->guard.bytes + off;
        return 0;
    }
    size_t before = file->direct ? (size_t)(off % MN_NPY_BLOCK) : 0;
    size_t span = before + length;
    if (file->direct) {
        span = (span + MN_NPY_BLOCK - 1) / MN_NPY_BLOCK * MN_NPY_BLOCK;
    }
    int rc = buffer_grow(buffer, span, text);
    if (rc < 0) {
        return rc;
    }
    int64_t got = read_fully(file, buffer->bytes, span, off - before, text);
    if (got < 0) {
        return (int)got;
    }
    if (got > 0) {
        mn_npy_count(count, off - before, (uint64_t)got, 0, 1);
    }
    if ((uint64_t)got < before + length) {
        return mn_fail(text, EIO, "%s: became shorter while it was read", file->path);
    }
    *bytes = buffer->bytes + before;
    return 0;
}

void
mn_npy_ahead(const struct mn_npy_file *file, uint64_t off, uint64_t length)
{
    if (file->map != NULL) {
        map_ahead(file->map, off, length);
    } else {
        (void)posix_fadvise(file->fd, (off_t)off, (off_t)length, POSIX_FADV_WILLNEED);
    }
}

static int
read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer, struct mn_text *text)
{
    uint64_t need = 512;
    struct mn_npy_count ignored = {0};
    /* The first read gives the length of the header, and the second has all of it. The third is for
     * a file that was rewritten between the two. */
    for (int attempt = 0; attempt < 3; attempt++) {
        uint64_t length = need < file->identity.size ? need : file->identity.size;
        const unsigned char *head = NULL;
        int rc = mn_npy_read(file, buffer, 0, (size_t)length, &head, &ignored, text);
        if (rc < 0) {
            return rc;
        }
        rc = parse(&file->npy, head, (size_t)length, file->identity.size, file->path, &need,
                   text);
        if (rc <= 0) {
            return rc;
        }
    }
    return mn_fail(text, EINVAL, "%s: malformed .npy header", file->path);
}

int
mn_npy_read_header(struct mn_npy_file *file, struct mn_npy_buffer *buffer,
                   struct mn_text *text)
{
    mn_npy_begin(file); /* for a file that was found mapped and whose header was not cached */
    return mn_npy_end(file, read_header(file, buffer, text), text);
}
