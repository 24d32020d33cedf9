/* The state of one sample in a pipeline.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_pipeline_sample.h"

#include <errno.h>
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

/* Returns what is known of this state of the file, or NULL. It stays valid as long as the table. */
static const struct mn_filecache_entry *
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

/* Bytes of a label volume that are read and scanned at a time: they stay in the second level cache
 * in between. */
#define SCAN_BYTES ((int64_t)256 << 10)

struct mn_key
mn_work_key(const struct mn_work *work, uint32_t number)
{
    return (struct mn_key){work->key_hi, work->key_lo, number};
}

int
mn_work_alloc(struct mn_work *work, size_t bytes, void **memory)
{
    size_t total = (sizeof(struct mn_work_block) + bytes + 63) / 64 * 64;
    struct mn_work_block *block = total > bytes ? aligned_alloc(64, total) : NULL;
    if (block == NULL) {
        return mn_fail_memory(work->reader.text, bytes);
    }
    block->next = work->blocks;
    work->blocks = block;
    *memory = block->bytes;
    return 0;
}

static bool
is_settled(const struct mn_view *view)
{
    int64_t strides[MN_VOLUME_DIMS];
    mn_strides_of(strides, view->shape, mn_dtype_size(view->dtype));
    return view->file == NULL && view->n_points == 0 && view->source == view->dtype
           && memcmp(strides, view->strides, sizeof(strides)) == 0
           && (uintptr_t)view->base % mn_dtype_size(view->dtype) == 0;
}

static int
store_in_block(struct mn_work *work, struct mn_view *view)
{
    void *memory = NULL;
    int rc = mn_work_alloc(work, mn_view_bytes(view), &memory);
    if (rc < 0) {
        return rc;
    }
    int64_t strides[MN_VOLUME_DIMS];
    mn_strides_of(strides, view->shape, mn_dtype_size(view->dtype));
    rc = mn_view_store(view, memory, strides, &work->reader);
    if (rc == 0) {
        mn_view_of_block(view, view->dtype, memory, view->shape);
        view->writable = true;
    }
    return rc;
}

int
mn_work_settle(struct mn_work *work, struct mn_view *view)
{
    bool done = view->dtype == MN_DTYPE_NONE || is_settled(view);
    return done ? 0 : store_in_block(work, view);
}

int
mn_work_settle_own(struct mn_work *work, struct mn_view *view)
{
    bool done = view->dtype == MN_DTYPE_NONE || (view->writable && is_settled(view));
    return done ? 0 : store_in_block(work, view);
}

static int
learn_header(struct mn_work *work, struct mn_npy_file *file)
{
    const struct mn_filecache_entry *known = mn_filecache_find(
        work->cache, MN_CACHED_HEADER, file->path, &file->identity);
    if (known != NULL) {
        file->npy = known->npy;
        return 0;
    }
    int rc = mn_npy_read_header(file, &work->reader.buffer, work->reader.text);
    if (rc == 0) {
        work->headers_parsed++;
        mn_filecache_add(work->cache, file->path, &file->identity, &file->npy, NULL);
    }
    return rc;
}

int
mn_work_open(struct mn_work *work, int which, const char *path, bool direct, int expected)
{
    struct mn_npy_file *file = &work->files[which];
    int rc = mn_npy_open(file, work->maps, path, direct, work->reader.text);
    if (rc == 0) {
        work->files_mapped += file->newly_mapped;
        rc = learn_header(work, file);
        mn_npy_header_known(file);
    }
    if (rc < 0) {
        return rc;
    }
    if (file->npy.dtype != expected) {
        return mn_fail(work->reader.text, EINVAL, "%s: has dtype %s where %s is expected",
                       path, mn_dtype_name(file->npy.dtype), mn_dtype_name(expected));
    }
    mn_view_of_file(which == 0 ? &work->image : &work->label, file);
    return mn_view_check(file->npy.shape, work->reader.text);
}

/* From where a mapped file is not in the page cache, it is read by calls. They read ahead, and into
 * larger pieces of memory, whereas faults would wait page by page. */
static int
scan_rows(struct mn_work *work, struct mn_scan *scan)
{
    const struct mn_npy_file *file = &work->files[1];
    int64_t width = file->npy.shape[3];
    int64_t rows = (int64_t)(file->npy.data_bytes / (uint64_t)width);
    int64_t at_once = SCAN_BYTES > width ? SCAN_BYTES / width : 1;
    struct mn_npy_file called = {.fd = -1};
    int rc = 0;
    bool cached = file->map != NULL;
    if (cached) {
        mn_npy_open_again(&called, file);
    }
    for (int64_t row = 0; rc == 0 && row < rows; row += at_once) {
        int64_t count = rows - row < at_once ? rows - row : at_once;
        uint64_t off = file->npy.data_off + (uint64_t)(row * width);
        const unsigned char *bytes = NULL;
        size_t length = (size_t)(count * width);
        cached = cached && mn_npy_is_cached(&called, off + length - 1);
        rc = mn_npy_read(cached || called.fd < 0 ? file : &called, &work->reader.buffer, off,
                         length, &bytes, &work->reader.count, work->reader.text);
        if (rc == 0) {
            rc = mn_scan_rows(scan, bytes, count, work->reader.text);
        }
    }
    mn_npy_close(&called, NULL);
    return rc;
}

/* Feeds the whole file to the scan. */
static int
scan_file(struct mn_work *work, struct mn_scan *scan)
{
    mn_npy_begin(&work->files[1]);
    return mn_npy_end(&work->files[1], scan_rows(work, scan), work->reader.text);
}

/* Feeds a view in memory to the scan; a row at a time if its rows are not adjacent. */
static int
scan_memory(struct mn_work *work, const struct mn_view *view, struct mn_scan *scan)
{
    int64_t depth = view->shape[1], height = view->shape[2], width = view->shape[3];
    int64_t at_once = view->strides[2] == width && view->strides[3] == 1 ? height : 1;
    void *row = NULL;
    int rc = view->strides[3] != 1 ? mn_work_alloc(work, (size_t)width, &row) : 0;
    for (int64_t z = 0; rc == 0 && z < depth; z++) {
        for (int64_t y = 0; rc == 0 && y < height; y += at_once) {
            const unsigned char *at = view->base + z * view->strides[1]
                                      + y * view->strides[2];
            for (int64_t x = 0; row != NULL && x < width; x++) {
                ((unsigned char *)row)[x] = at[x * view->strides[3]];
            }
            rc = mn_scan_rows(scan, row != NULL ? row : at, at_once, work->reader.text);
        }
    }
    return rc;
}

/* Returns whether the view shows its whole file, unchanged. */
static bool
is_whole_file(const struct mn_view *view)
{
    int64_t strides[MN_VOLUME_DIMS];
    mn_strides_of(strides, view->shape, mn_dtype_size(view->source));
    return view->file != NULL && view->source == view->dtype
           && memcmp(view->shape, view->file->npy.shape, sizeof(view->shape)) == 0
           && memcmp(view->strides, strides, sizeof(strides)) == 0;
}

static int
scan_label(struct mn_work *work, bool whole_file, struct mn_boxes **boxes)
{
    struct mn_scan *scan = NULL;
    int rc = mn_scan_open(&scan, &work->label.shape[1], work->reader.kernels,
                          work->reader.text);
    if (rc == 0) {
        rc = whole_file ? scan_file(work, scan) : scan_memory(work, &work->label, scan);
    }
    if (rc == 0) {
        rc = mn_scan_finish(scan, boxes, work->reader.text);
        work->scans++;
    }
    mn_scan_close(scan);
    return rc;
}

static int
check_label(const struct mn_work *work)
{
    const struct mn_view *label = &work->label;
    if (label->dtype != MN_DTYPE_U8) {
        return mn_fail(work->reader.text, EINVAL,
                       "a balanced crop needs a uint8 label, found %s",
                       mn_dtype_name(label->dtype));
    }
    if (label->shape[0] != 1) {
        return mn_fail(work->reader.text, EINVAL,
                       "a balanced crop needs a label of one channel, found %lld",
                       (long long)label->shape[0]);
    }
    return 0;
}

int
mn_work_boxes(struct mn_work *work, bool use_cache, const struct mn_boxes **boxes)
{
    const struct mn_npy_file *file = work->label.file;
    bool whole_file = is_whole_file(&work->label);
    int rc = check_label(work);
    if (rc == 0 && use_cache && whole_file) {
        const struct mn_filecache_entry *known = mn_filecache_find(
            work->cache, MN_CACHED_BOXES, file->path, &file->identity);
        if (known != NULL) {
            *boxes = known->boxes;
            return 0;
        }
    }
    if (rc == 0 && !whole_file
        && (file != NULL || work->label.source != work->label.dtype)) {
        rc = mn_work_settle(work, &work->label);
    }
    free(work->boxes);
    work->boxes = NULL;
    if (rc == 0) {
        rc = scan_label(work, whole_file, &work->boxes);
    }
    *boxes = work->boxes;
    if (rc == 0 && use_cache && whole_file
        && mn_filecache_add(work->cache, file->path, &file->identity, &file->npy,
                            work->boxes)
               != NULL) {
        work->boxes = NULL; /* owned by the cache now */
    }
    return rc;
}

void
mn_work_clear(struct mn_work *work)
{
    for (int which = 0; which < 2; which++) {
        mn_npy_close(&work->files[which], work->maps);
        work->files[which].path = NULL;
    }
    while (work->blocks != NULL) {
        struct mn_work_block *block = work->blocks;
        work->blocks = block->next;
        free(block);
    }
    free(work->boxes);
    work->boxes = NULL;
    work->image.source = work->image.dtype = MN_DTYPE_NONE;
    work->label.source = work->label.dtype = MN_DTYPE_NONE;
}
