/* The state of one sample in a pipeline: views of its volumes, its memory, and facts about files.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_pipeline_sample.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"
#include "minato/ops.h"
#include "ops/mn_recipe.h"

/* ---- One row of voxels from any supported dtype to another ----
 *
 * To float32: C's conversion (nearest, ties to even). To uint8: truncation toward zero, as
 * NumPy does for what fits. Values outside 0..255 become 0 or 255 and NaN becomes 0, where NumPy's
 * result depends on the machine.
 */

/* memcpy, because the source may be unaligned. */
#define MN_CONVERT(name, S, T, how)                                                     \
    static void name(void *dst, const char *src, int64_t stride, int64_t n)             \
    {                                                                                   \
        T *to = dst;                                                                    \
        for (int64_t i = 0; i < n; i++) {                                               \
            S v;                                                                        \
            memcpy(&v, src + i * stride, sizeof(v));                                    \
            to[i] = how(v);                                                             \
        }                                                                               \
    }

MN_CONVERT(f32_from_u8, uint8_t, float, (float))
MN_CONVERT(f32_from_i16, int16_t, float, (float))
MN_CONVERT(f32_from_u16, uint16_t, float, (float))
MN_CONVERT(f32_from_i32, int32_t, float, (float))
MN_CONVERT(f32_from_f64, double, float, (float))
MN_CONVERT(u8_from_i16, int16_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_u16, uint16_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_i32, int32_t, uint8_t, mn_u8_of_int)
MN_CONVERT(u8_from_f32, float, uint8_t, mn_u8_of_float)
MN_CONVERT(u8_from_f64, double, uint8_t, mn_u8_of_float)

typedef void converter(void *dst, const char *src, int64_t stride, int64_t n);

static converter *const to_f32[] = {
    [MN_DTYPE_U8] = f32_from_u8,   [MN_DTYPE_I16] = f32_from_i16, [MN_DTYPE_U16] = f32_from_u16,
    [MN_DTYPE_I32] = f32_from_i32, [MN_DTYPE_F64] = f32_from_f64,
};
static converter *const to_u8[] = {
    [MN_DTYPE_I16] = u8_from_i16, [MN_DTYPE_U16] = u8_from_u16, [MN_DTYPE_I32] = u8_from_i32,
    [MN_DTYPE_F32] = u8_from_f32, [MN_DTYPE_F64] = u8_from_f64,
};

static void
same_dtype(const struct mn_kernels *kernels, char *dst, const char *src, int64_t item,
           int64_t stride, int64_t n)
{
    if (stride == item) {
        memcpy(dst, src, (size_t)(n * item));
    }
    else if (stride == -item && item == 4) {
        kernels->reverse_4(dst, src + (n - 1) * stride, n);
    }
    else if (stride == -item && item == 1) {
        kernels->reverse_1(dst, src + (n - 1) * stride, n);
    }
    else {
        for (int64_t i = 0; i < n; i++) {
            memcpy(dst + i * item, src + i * stride, (size_t)item);
        }
    }
}

/* Converts n voxels of dtype `from`, `stride` bytes apart, to adjacent ones of dtype `to`, which is
 * `from`, uint8 or float32. dst is aligned for `to`; src need not be. */
static void
convert_row(const struct mn_kernels *kernels, void *dst, int to, const void *src,
               int from, int64_t stride, int64_t n)
{
    if (from == to) {
        same_dtype(kernels, dst, src, (int64_t)mn_dtype_size(from), stride, n);
    }
    else {
        (to == MN_DTYPE_F32 ? to_f32 : to_u8)[from](dst, src, stride, n);
    }
}

/* If more unwanted bytes than this lie between two wanted rows, the rows are read one by one. It is
 * about what a pread of cached pages copies in the time of one more call. A direct read goes to the
 * device each time, so it tolerates more. */
#define GAP_CACHED 4096
#define GAP_DIRECT 65536

/* Planes between two checks of whether a mapped file's pages had to be waited for. The check is a
 * system call of some 200 ns, a plane of the usual patch takes some 7 us. */
#define LOOK_EVERY 8

void
mn_strides_of(int64_t *strides, const int64_t *shape, size_t itemsize)
{
    int64_t stride = (int64_t)itemsize;
    for (int axis = MN_VOLUME_DIMS - 1; axis >= 0; axis--) {
        strides[axis] = stride;
        stride *= shape[axis];
    }
}

void
mn_view_of_memory(struct mn_view *view, int dtype, const void *base, const int64_t *shape,
                  const int64_t *strides)
{
    view->source = view->dtype = dtype;
    view->file = NULL;
    view->base = base;
    view->first_off = 0;
    view->writable = false;
    view->n_points = 0;
    memcpy(view->shape, shape, sizeof(view->shape));
    memcpy(view->strides, strides, sizeof(view->strides));
}

/* Makes a C-contiguous view, which is to get its memory or file. */
static void
view_of_block(struct mn_view *view, int dtype, const int64_t *shape)
{
    int64_t strides[MN_VOLUME_DIMS];
    mn_strides_of(strides, shape, mn_dtype_size(dtype));
    mn_view_of_memory(view, dtype, NULL, shape, strides);
}

int
mn_view_check(const int64_t *shape, struct mn_text *text)
{
    int64_t bytes = sizeof(double);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        if (shape[axis] > 0 && __builtin_mul_overflow(bytes, shape[axis], &bytes)) {
            return mn_fail(text, EINVAL, "the volume would need more than 2^63 bytes");
        }
    }
    return 0;
}

size_t
mn_view_bytes(const struct mn_view *view)
{
    size_t bytes = mn_dtype_size(view->dtype);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        bytes *= (size_t)view->shape[axis];
    }
    return bytes;
}

static void
move_start(struct mn_view *view, int64_t bytes)
{
    if (view->file != NULL) {
        view->first_off += bytes;
    }
    else {
        view->base += bytes;
    }
}

void
mn_view_window(struct mn_view *view, const int64_t *start, const int64_t *size)
{
    for (int axis = 1; axis < MN_VOLUME_DIMS; axis++) {
        move_start(view, start[axis] * view->strides[axis]);
        view->shape[axis] = size[axis];
    }
}

void
mn_view_flip(struct mn_view *view, int axis)
{
    move_start(view, (view->shape[axis] - 1) * view->strides[axis]);
    view->strides[axis] = -view->strides[axis];
}

/* The rows of one plane: `at` is the first voxel of the first row. */
struct rows {
    const unsigned char *at;
    int64_t stride; /* between rows */
};

static int64_t
magnitude(int64_t a)
{
    return a < 0 ? -a : a;
}

/* A range of bytes of a file. */
struct span {
    int64_t low, length;
};

/* Returns the range from the first to the last voxel (in the file) of the `count` rows from the row
 * at `off`. */
static struct span
span_of(const struct mn_view *view, int64_t off, int64_t count)
{
    int64_t down = (count - 1) * view->strides[2];
    int64_t across = (view->shape[3] - 1) * view->strides[3];
    return (struct span){off + mn_min_i64(down, 0) + mn_min_i64(across, 0),
                         magnitude(down) + magnitude(across)
                             + (int64_t)mn_dtype_size(view->source)};
}

/* Reads `count` rows from the row at `off` on, in one piece. */
static int
read_rows(const struct mn_view *view, int64_t off, int64_t count, struct rows *rows,
          struct mn_reader *reader)
{
    struct span band = span_of(view, off, count);
    const unsigned char *bytes = NULL;
    int rc = mn_npy_read(view->file, &reader->buffer, (uint64_t)band.low,
                         (size_t)band.length, &bytes,
                         &reader->count, reader->text);
    if (rc == 0) {
        rows->at = bytes + (off - band.low);
        rows->stride = view->strides[2];
    }
    return rc;
}

static void
convert_rows(const struct mn_view *view, const struct rows *rows, int64_t count,
             unsigned char *to, int64_t to_stride, struct mn_reader *reader)
{
    for (int64_t y = 0; y < count; y++) {
        convert_row(reader->kernels, to + y * to_stride, view->dtype,
                       rows->at + y * rows->stride, view->source, view->strides[3],
                       view->shape[3]);
    }
}

/* Returns how many rows to read at once: all, or one if too much lies between them. */
static int64_t
rows_at_once(const struct mn_view *view)
{
    int64_t wanted = view->shape[3] * (int64_t)mn_dtype_size(view->source);
    int64_t gap = magnitude(view->strides[2]) - wanted;
    return gap > (view->file->direct ? GAP_DIRECT : GAP_CACHED) ? 1 : view->shape[2];
}

/* Returns the rows of a plane in the mapping. */
static const unsigned char *
mapped_rows(const struct mn_view *view, int64_t place, struct mn_reader *reader)
{
    struct span band = span_of(view, view->first_off + place, view->shape[2]);
    int64_t wanted = view->shape[3] * (int64_t)mn_dtype_size(view->source);
    mn_npy_count(&reader->count, (uint64_t)band.low, (uint64_t)wanted,
                 (uint64_t)magnitude(view->strides[2]), (uint64_t)view->shape[2]);
    return view->file->map->guard.bytes + view->first_off + place;
}

/* Asks for planes of a channel together, so that storage is waited for once and not once per page
 * or plane. */
static void
ask_ahead(const struct mn_view *view, int64_t place, int64_t planes)
{
    for (int64_t z = 0; z < planes; z++) {
        int64_t off = view->first_off + place + z * view->strides[1];
        struct span band = span_of(view, off, view->shape[2]);
        mn_npy_ahead(view->file, (uint64_t)band.low, (uint64_t)band.length);
    }
}

/* Asks for mapped planes once reading has had to wait. Reads by calls do not show whether they wait
 * (network file systems refuse to say), and asking costs little compared to a call. So it asks at
 * once there, unless rows are read one by one because of the gaps between them. Returns whether to
 * check again. */
static bool
look_ahead(const struct mn_view *view, int64_t place, int64_t z, struct mn_reader *reader)
{
    int64_t planes = view->shape[1] - z;
    if (view->file->map != NULL) {
        if (z % LOOK_EVERY != 1 || !mn_map_waited(&reader->waited)) {
            return true;
        }
    } else if (view->file->direct || rows_at_once(view) < view->shape[2]) {
        return false;
    }
    ask_ahead(view, place, planes);
    return false;
}

static int
store_plane(const struct mn_view *view, int64_t place, unsigned char *to,
            int64_t to_stride, struct mn_reader *reader)
{
    struct rows rows = {.stride = view->strides[2]};
    if (view->file == NULL || view->file->map != NULL) {
        rows.at = view->file == NULL ? view->base + place : mapped_rows(view, place, reader);
        convert_rows(view, &rows, view->shape[2], to, to_stride, reader);
        return 0;
    }
    int64_t count = rows_at_once(view);
    for (int64_t y = 0; y < view->shape[2]; y += count) {
        int64_t off = view->first_off + place + y * view->strides[2];
        int rc = read_rows(view, off, count, &rows, reader);
        if (rc < 0) {
            return rc;
        }
        convert_rows(view, &rows, count, to + y * to_stride, to_stride, reader);
    }
    return 0;
}

/* Does the pending arithmetic on n adjacent voxels, the first being voxel `first` in C order. */
static void
apply_points(const struct mn_view *view, float *x, int64_t n, int64_t first,
             const struct mn_kernels *kernels)
{
    for (int i = 0; i < view->n_points; i++) {
        const struct mn_point *p = &view->points[i];
        switch (p->kind) {
        case MN_POINT_SCALE:
            kernels->scale(x, n, p->factor);
            break;
        case MN_POINT_NORMALIZE:
            kernels->normalize(x, n, p->low, p->high, p->mean, p->std);
            break;
        case MN_POINT_NOISE:
            kernels->add_noise(x, n, first, &p->key, p->mean, p->std);
            break;
        }
    }
}

static void
finish_plane(const struct mn_view *view, int64_t plane, unsigned char *to,
             int64_t to_stride, const struct mn_kernels *kernels)
{
    int64_t width = view->shape[3], height = view->shape[2];
    int64_t first = plane * height * width;
    if (view->n_points == 0) {
        return;
    }
    if (to_stride == width * (int64_t)sizeof(float)) {
        apply_points(view, (float *)(void *)to, height * width, first, kernels);
        return;
    }
    for (int64_t y = 0; y < height; y++) {
        apply_points(view, (float *)(void *)(to + y * to_stride), width, first + y * width,
                     kernels);
    }
}

static int
store_channel(const struct mn_view *view, int64_t c, unsigned char *to,
              const int64_t *strides, struct mn_reader *reader)
{
    bool watch = view->file != NULL;
    for (int64_t z = 0; z < view->shape[1]; z++) {
        int64_t place = c * view->strides[0] + z * view->strides[1];
        unsigned char *plane = to + z * strides[1];
        watch = watch && look_ahead(view, place, z, reader);
        int rc = store_plane(view, place, plane, strides[2], reader);
        if (rc < 0) {
            return rc;
        }
        finish_plane(view, c * view->shape[1] + z, plane, strides[2], reader->kernels);
    }
    return 0;
}

int
mn_view_store(const struct mn_view *view, void *to, const int64_t *strides,
              struct mn_reader *reader)
{
    int rc = 0;
    if (view->file != NULL) {
        mn_npy_begin(view->file);
        (void)mn_map_waited(&reader->waited);
    }
    for (int64_t c = 0; rc == 0 && c < view->shape[0]; c++) {
        rc = store_channel(view, c, (unsigned char *)to + c * strides[0], strides, reader);
    }
    return view->file != NULL ? mn_npy_end(view->file, rc, reader->text) : rc;
}

/* ---- Facts about files ---- */

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
mn_filecache_each_boxes(const struct mn_filecache *cache,
                        int (*visit)(const struct mn_filecache_entry *entry, void *arg),
                        void *arg)
{
    int rc = 0;
    for (uint64_t list = 0; list < MN_FILECACHE_LISTS; list++) {
        const struct mn_filecache_entry *entry = head_of(cache, list);
        for (; rc == 0 && entry != NULL; entry = entry->next) {
            rc = entry->kind == MN_CACHED_BOXES ? visit(entry, arg) : 0;
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
end_plane(struct scan *scan, struct mn_text *text)
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
            rc = end_plane(scan, text);
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
    view_of_block(&made, dtype, shape);
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
    view_of_block(view, file->npy.dtype, file->npy.shape);
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
