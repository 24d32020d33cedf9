/* The state of one sample in a pipeline.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_pipeline_sample.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

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
    *cache = (struct mn_filecache){0};
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

/* ---- The two largest connected components of each class of a label volume, by bounding box ----
 *
 * What the balanced crop needs to know of a label volume, found in one pass over its rows in
 * file order. Rows are cut into runs of one value > 0. Nearly all of a label volume is zeros,
 * which are skipped a cache line or more at a time. Union-find joins runs that share a face.
 * Only the runs of two planes are kept, so the volume itself never has to be in memory.
 *
 * Definitions
 * Two voxels are connected if they have the same value and share a face: the default
 * structure of scipy.ndimage.label, which the MLPerf reference uses. Components are
 * compared by the volume of their bounding boxes. If these are equal, the component whose
 * first voxel in C order comes later counts as larger (a stable ascending sort).
 */

struct run {
    int32_t start, stop; /* columns */
    uint32_t component;
    uint32_t value;
};

/* The runs of a plane in C order; row y has first[y] to first[y + 1] - 1. */
struct plane {
    struct run *runs;
    size_t n, capacity;
    uint32_t *first;
};

struct component {
    uint32_t parent; /* itself for a root; a root is its component's earliest member */
    uint32_t value;
    struct mn_box box; /* for a root: of the whole component */
};

struct scan {
    const struct mn_kernels *kernels;
    int64_t depth, height, width;
    int64_t z, y;            /* of the next row */
    struct plane current, previous;
    struct component *components;
    size_t n_components, room_components;
};

/* Makes space for one more element; the array doubles. */
static int
grow(void **array, size_t n, size_t *capacity, size_t item, struct mn_text *text)
{
    if (n < *capacity) {
        return 0;
    }
    size_t more = *capacity == 0 ? 1024 : *capacity * 2;
    void *bigger = more < UINT32_MAX ? realloc(*array, more * item) : NULL;
    if (bigger == NULL) {
        return mn_fail_memory(text, more * item);
    }
    *array = bigger;
    *capacity = more;
    return 0;
}

static uint32_t
find_root(struct scan *scan, uint32_t c)
{
    struct component *components = scan->components;
    while (components[c].parent != c) {
        components[c].parent = components[components[c].parent].parent;
        c = components[c].parent;
    }
    return c;
}

static void
include_run(struct component *root, const struct run *run, int32_t z, int32_t y)
{
    const int32_t low[3] = {z, y, run->start}, high[3] = {z + 1, y + 1, run->stop};
    for (int axis = 0; axis < 3; axis++) {
        if (low[axis] < root->box.low[axis]) {
            root->box.low[axis] = low[axis];
        }
        if (high[axis] > root->box.high[axis]) {
            root->box.high[axis] = high[axis];
        }
    }
}

static uint32_t
join(struct scan *scan, uint32_t a, uint32_t b)
{
    a = find_root(scan, a);
    b = find_root(scan, b);
    if (a == b) {
        return a;
    }
    uint32_t keep = a < b ? a : b, gone = a < b ? b : a;
    struct mn_box *box = &scan->components[keep].box;
    const struct mn_box *other = &scan->components[gone].box;
    for (int axis = 0; axis < 3; axis++) {
        box->low[axis] = box->low[axis] < other->low[axis] ? box->low[axis]
                                                           : other->low[axis];
        box->high[axis] = box->high[axis] > other->high[axis] ? box->high[axis]
                                                              : other->high[axis];
    }
    scan->components[gone].parent = keep;
    return keep;
}

/* Joins the run with those of a neighbouring row that it touches. *from moves along: runs before it
 * end before this run and before all later runs of its row. */
static void
join_row(struct scan *scan, struct run *run, const struct plane *plane, uint32_t *from,
         uint32_t stop)
{
    while (*from < stop && plane->runs[*from].stop <= run->start) {
        (*from)++;
    }
    for (uint32_t i = *from; i < stop && plane->runs[i].start < run->stop; i++) {
        if (plane->runs[i].value != run->value) {
            continue;
        }
        uint32_t other = plane->runs[i].component;
        run->component = run->component == UINT32_MAX ? find_root(scan, other)
                                                      : join(scan, run->component, other);
    }
}

static int
new_component(struct scan *scan, struct run *run, struct mn_text *text)
{
    void *array = scan->components;
    int rc = grow(&array, scan->n_components, &scan->room_components,
                  sizeof(struct component), text);
    if (rc < 0) {
        return rc;
    }
    scan->components = array;
    run->component = (uint32_t)scan->n_components++;
    scan->components[run->component] = (struct component){
        .parent = run->component,
        .value = run->value,
        .box = {{INT32_MAX, INT32_MAX, INT32_MAX}, {0, 0, 0}},
    };
    return 0;
}

/* Assigns components to the runs of row y of the current plane. */
static int
label_row(struct scan *scan, int64_t y, struct mn_text *text)
{
    struct plane *now = &scan->current, *before = &scan->previous;
    uint32_t above = y > 0 ? now->first[y - 1] : 0, above_stop = y > 0 ? now->first[y] : 0;
    uint32_t behind = before->first[y], behind_stop = before->first[y + 1];
    for (uint32_t i = now->first[y]; i < now->first[y + 1]; i++) {
        struct run *run = &now->runs[i];
        join_row(scan, run, now, &above, above_stop);
        join_row(scan, run, before, &behind, behind_stop);
        if (run->component == UINT32_MAX) {
            int rc = new_component(scan, run, text);
            if (rc < 0) {
                return rc;
            }
        }
        include_run(&scan->components[find_root(scan, run->component)], run,
                    (int32_t)scan->z, (int32_t)y);
    }
    return 0;
}

static int
finish_plane(struct scan *scan, struct mn_text *text)
{
    if (scan->current.n > 0) {
        for (int64_t y = 0; y < scan->height; y++) {
            int rc = label_row(scan, y, text);
            if (rc < 0) {
                return rc;
            }
        }
    }
    struct plane older = scan->previous;
    scan->previous = scan->current;
    scan->current = older;
    scan->current.n = 0;
    scan->z++;
    scan->y = 0;
    return 0;
}

static int
add_run(struct scan *scan, int64_t start, int64_t stop, uint8_t value,
        struct mn_text *text)
{
    struct plane *now = &scan->current;
    void *array = now->runs;
    int rc = grow(&array, now->n, &now->capacity, sizeof(struct run), text);
    if (rc < 0) {
        return rc;
    }
    now->runs = array;
    now->runs[now->n++] = (struct run){(int32_t)start, (int32_t)stop, UINT32_MAX, value};
    return 0;
}

/* Records that the rows from scan->y to `y` have no further runs. */
static void
close_rows(struct scan *scan, int64_t y)
{
    for (; scan->y <= y; scan->y++) {
        scan->current.first[scan->y + 1] = (uint32_t)scan->current.n;
    }
}

/* Scans `count` rows of the current plane, from scan->y on. */
static int
scan_piece(struct scan *scan, const uint8_t *rows, int64_t count, struct mn_text *text)
{
    const int64_t top = scan->y, width = scan->width, n = count * width;
    int64_t at = scan->kernels->find_nonzero(rows, 0, n);
    while (at < n) {
        int64_t row = at / width, row_end = (row + 1) * width;
        close_rows(scan, top + row - 1);
        while (at < row_end) {
            int64_t stop = scan->kernels->find_other(rows, at, row_end, rows[at]);
            int rc = add_run(scan, at - row * width, stop - row * width, rows[at], text);
            if (rc < 0) {
                return rc;
            }
            at = stop < row_end && rows[stop] != 0
                     ? stop
                     : scan->kernels->find_nonzero(rows, stop, row_end);
        }
        at = scan->kernels->find_nonzero(rows, row_end, n);
    }
    close_rows(scan, top + count - 1);
    return 0;
}

/* Scans the next `count` rows, adjacent in memory, in C order. They may extend over planes. */
static int
scan_more(struct scan *scan, const uint8_t *rows, int64_t count, struct mn_text *text)
{
    while (count > 0) {
        int64_t left = scan->height - scan->y, piece = count < left ? count : left;
        int rc = scan_piece(scan, rows, piece, text);
        if (rc == 0 && scan->y == scan->height) {
            rc = finish_plane(scan, text);
        }
        if (rc < 0) {
            return rc;
        }
        rows += piece * scan->width;
        count -= piece;
    }
    return 0;
}

/* Frees a scan, finished or not; NULL is allowed. */
static void
scan_close(struct scan *scan)
{
    if (scan == NULL) {
        return;
    }
    free(scan->current.runs);
    free(scan->current.first);
    free(scan->previous.runs);
    free(scan->previous.first);
    free(scan->components);
    free(scan);
}

/* Starts a scan of a volume of this many planes, rows and columns (each below 2^31). */
static int
scan_open(struct scan **scan, const int64_t *shape, const struct mn_kernels *kernels,
             struct mn_text *text)
{
    *scan = NULL;
    for (int axis = 0; axis < 3; axis++) {
        if (shape[axis] > INT32_MAX - 1) {
            return mn_fail(text, EINVAL, "a label volume's axis exceeds 2^31 - 2 voxels");
        }
    }
    struct scan *s = calloc(1, sizeof(*s));
    size_t rows = (size_t)shape[1] + 1;
    if (s != NULL) {
        s->kernels = kernels;
        s->depth = shape[0];
        s->height = shape[1];
        s->width = shape[2];
        s->current.first = calloc(rows, sizeof(uint32_t));
        s->previous.first = calloc(rows, sizeof(uint32_t));
    }
    if (s == NULL || s->current.first == NULL || s->previous.first == NULL) {
        scan_close(s);
        return mn_fail_memory(text, sizeof(*s) + 2 * rows * sizeof(uint32_t));
    }
    *scan = s;
    return 0;
}

static int64_t
box_volume(const struct mn_box *box)
{
    int64_t volume = 1;
    for (int axis = 0; axis < 3; axis++) {
        volume *= box->high[axis] - box->low[axis];
    }
    return volume;
}

/* Sorts the box into the two largest; of equal ones the later counts as larger. */
static void
rank_box(struct mn_class_boxes *c, const struct mn_box *box)
{
    int64_t volume = box_volume(box);
    c->components++;
    if (c->n_boxes == 0) {
        c->boxes[c->n_boxes++] = *box;
    }
    else if (volume >= box_volume(&c->boxes[c->n_boxes - 1])) {
        c->boxes[0] = c->boxes[c->n_boxes - 1];
        c->boxes[1] = *box;
        c->n_boxes = 2;
    }
    else if (c->n_boxes == 1) {
        c->boxes[1] = c->boxes[0];
        c->boxes[0] = *box;
        c->n_boxes = 2;
    }
    else if (volume >= box_volume(&c->boxes[0])) {
        c->boxes[0] = *box;
    }
}

/* Returns the result after the last row; the caller frees it with free(). */
static int
scan_finish(struct scan *scan, struct mn_boxes **boxes, struct mn_text *text)
{
    struct mn_class_boxes found[256];
    memset(found, 0, sizeof(found));
    int32_t n = 0;
    for (size_t i = 0; i < scan->n_components; i++) {
        const struct component *c = &scan->components[i];
        if (c->parent == i) {
            n += found[c->value].components == 0;
            rank_box(&found[c->value], &c->box);
        }
    }
    size_t bytes = mn_boxes_bytes(n);
    struct mn_boxes *result = calloc(1, bytes);
    if (result == NULL) {
        return mn_fail_memory(text, bytes);
    }
    for (int value = 1; value < 256; value++) {
        if (found[value].components > 0) {
            found[value].value = (uint8_t)value;
            result->classes[result->n_classes++] = found[value];
        }
    }
    *boxes = result;
    return 0;
}

/* ---- The memory of a sample, its files and boxes ---- */

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

int
mn_work_volume(struct mn_work *work, struct mn_view *view, int dtype, const int64_t *shape)
{
    void *memory = NULL;
    struct mn_view made;
    mn_view_of_block(&made, dtype, NULL, shape);
    int rc = mn_work_alloc(work, mn_view_bytes(&made), &memory);
    if (rc == 0) {
        made.base = memory;
        made.writable = true;
        *view = made;
    }
    return rc;
}

static int
store_in_block(struct mn_work *work, struct mn_view *view)
{
    struct mn_view stored;
    int rc = mn_work_volume(work, &stored, view->dtype, view->shape);
    if (rc == 0) {
        rc = mn_view_store(view, mn_view_data(&stored), stored.strides, &work->reader);
    }
    if (rc == 0) {
        *view = stored;
    }
    return rc;
}

int
mn_work_settle(struct mn_work *work, struct mn_view *view, bool own)
{
    bool done = view->dtype == MN_DTYPE_NONE || ((view->writable || !own) && is_settled(view));
    return done ? 0 : store_in_block(work, view);
}

int
mn_work_settle_places(struct mn_work *work, struct mn_view *view)
{
    for (int i = 0; i < view->n_points; i++) {
        if (view->points[i].kind == MN_POINT_NOISE) {
            return mn_work_settle(work, view, false);
        }
    }
    return 0;
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
    struct mn_view *view = which == 0 ? &work->image : &work->label;
    mn_view_of_block(view, file->npy.dtype, NULL, file->npy.shape);
    view->file = file;
    view->first_off = (int64_t)file->npy.data_off;
    return mn_view_check(file->npy.shape, work->reader.text);
}

/* From where a mapped file is not in the page cache, it is read by calls. They read ahead, and into
 * larger pieces of memory, whereas faults would wait page by page. */
static int
scan_rows(struct mn_work *work, struct scan *scan)
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
            rc = scan_more(scan, bytes, count, work->reader.text);
        }
    }
    mn_npy_close(&called, NULL);
    return rc;
}

/* Feeds the whole file to the scan. */
static int
scan_file(struct mn_work *work, struct scan *scan)
{
    mn_npy_begin(&work->files[1]);
    return mn_npy_end(&work->files[1], scan_rows(work, scan), work->reader.text);
}

/* Feeds a view in memory to the scan; a row at a time if its rows are not adjacent. */
static int
scan_memory(struct mn_work *work, const struct mn_view *view, struct scan *scan)
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
            rc = scan_more(scan, row != NULL ? row : at, at_once, work->reader.text);
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
    struct scan *scan = NULL;
    int rc = scan_open(&scan, &work->label.shape[1], work->reader.kernels,
                          work->reader.text);
    if (rc == 0) {
        rc = whole_file ? scan_file(work, scan) : scan_memory(work, &work->label, scan);
    }
    if (rc == 0) {
        rc = scan_finish(scan, boxes, work->reader.text);
        work->scans++;
    }
    scan_close(scan);
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
        rc = mn_work_settle(work, &work->label, false);
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
