/* The state of one sample in a pipeline: its volumes in the making, the memory that it needs, and
 * facts learned about files.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A work belongs to one thread from mn_work_begin to mn_work_end. Then it rests in its pipeline's
 * pool with its buffers, so that a thread's next sample allocates nothing.
 *
 * Facts learned about files: parsed headers and foreground boxes
 *   A header is parsed once and a label volume scanned once for each state of a file. The number of
 *   threads and epochs does not matter.
 *   They are in a table of lists that only grow. An entry is made complete, then put at the head of
 *   its list by compare-and-swap. It is never changed or removed before the table ends. So there is
 *   no lock: no state that a fork could copy half done, no reclamation, no ABA.
 *   Two threads that learn the same fact at once both add it; either entry is right.
 *   Entries are found by path, kind and the file's identity (device, inode, size, mtime),
 *   so a changed file is learned anew. After MN_FILECACHE_ENTRIES nothing more is added:
 *   that bounds memory where files keep changing.
 */
#ifndef MN_PIPELINE_SAMPLE_H
#define MN_PIPELINE_SAMPLE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mn_atomic.h"
#include "ops/mn_kernels.h"
#include "ops/mn_npy.h"

/* ---- a volume in the making: where its voxels are, and which operations are pending ----
 *
 * Purpose
 *   Crops and flips only change where a view starts and its strides; casts and voxel-wise
 *   arithmetic are only noted. mn_view_store does it all in one pass, plane by plane, from
 *   memory or from the file. So a plane is still in cache when its arithmetic is done, and
 *   only the wanted rows are read.
 *
 * Ownership
 *   A view borrows its memory or file from the work of one sample. Pending
 *   noise is indexed by a voxel's place in C order. So windows and flips after noise first store
 *   the view into memory of the work (mn_work_settle).
 */

/* Voxel-wise arithmetic pending in a view; beyond this number the view is stored first. */
#define MN_POINTS_MAX 8

enum mn_point_kind { MN_POINT_SCALE, MN_POINT_NORMALIZE, MN_POINT_NOISE };

struct mn_point {
    enum mn_point_kind kind;
    double factor;               /* scale */
    float low, high, mean, std;  /* normalize; mean and std: noise */
    struct mn_key key;           /* noise */
};

struct mn_view {
    int source;  /* dtype of the stored voxels; MN_DTYPE_NONE: no volume */
    int dtype;   /* dtype of the result: source, MN_DTYPE_U8 or MN_DTYPE_F32 */
    const struct mn_npy_file *file; /* NULL: in memory */
    const unsigned char *base;      /* memory: the first voxel */
    int64_t first_off;              /* file: of the first voxel */
    int64_t shape[MN_VOLUME_DIMS];
    int64_t strides[MN_VOLUME_DIMS]; /* bytes; negative along flipped axes */
    bool writable;                   /* the memory belongs to the work alone */
    int n_points;
    struct mn_point points[MN_POINTS_MAX]; /* only with dtype float32 */
};

/* State that storing needs in addition to the view. */
struct mn_reader {
    const struct mn_kernels *kernels;
    struct mn_npy_buffer buffer; /* for the file's bytes */
    struct mn_npy_count count;
    uint64_t waited; /* for mn_map_waited */
    struct mn_text *text;
};

/* Makes a view of any strided memory. */
void
mn_view_of_memory(struct mn_view *view, int dtype, const void *base, const int64_t *shape,
                  const int64_t *strides);

/* Returns the voxels of a writable view; NULL if there is no volume. */
static inline unsigned char *
mn_view_data(const struct mn_view *view)
{
    return view->dtype == MN_DTYPE_NONE ? NULL : (unsigned char *)(uintptr_t)view->base;
}

/* Fails if a volume of this shape cannot be addressed with any dtype. An axis of -1 is not known
 * yet. */
int
mn_view_check(const int64_t *shape, struct mn_text *text);

/* Returns the bytes of the resulting voxels. This never overflows for a view's shape, which was
 * checked. A view's existence alone proves nothing, because axes may have stride 0 and files may
 * have holes. */
size_t
mn_view_bytes(const struct mn_view *view);

/* Computes the C-contiguous strides of a shape. */
void
mn_strides_of(int64_t *strides, const int64_t *shape, size_t itemsize);

/* Narrows the view to shape[axis] voxels from start[axis], axes 1 to 3. The caller has checked
 * them. */
void
mn_view_window(struct mn_view *view, const int64_t *start, const int64_t *size);

/* Reverses the view along an axis, 1 to 3. */
void
mn_view_flip(struct mn_view *view, int axis);

/* Writes the voxels to `to`, with these strides for the axes; the last axis is contiguous. `to`
 * must not overlap the source. */
int
mn_view_store(const struct mn_view *view, void *to, const int64_t *strides,
              struct mn_reader *reader);

/* ---- facts about files, and the work ---- */

struct mn_box {
    int32_t low[3], high[3]; /* depth, height, width; high is one past the last voxel */
};

struct mn_class_boxes {
    uint8_t value;
    uint8_t n_boxes;     /* 1 or 2 */
    uint8_t reserved[6];
    int64_t components;
    struct mn_box boxes[2]; /* ascending by volume: the largest is the last */
};

/* Immutable once made. */
struct mn_boxes {
    int32_t n_classes; /* up to 255, ascending by value */
    int32_t reserved;
    struct mn_class_boxes classes[];
};

static inline size_t
mn_boxes_bytes(int32_t n_classes)
{
    return sizeof(struct mn_boxes) + (size_t)n_classes * sizeof(struct mn_class_boxes);
}

/* Heads of lists: 8 KiB, and lists of about a hundred entries for 100 000 files. */
#define MN_FILECACHE_LISTS 1024
#define MN_FILECACHE_ENTRIES 4000000u

enum mn_filecache_kind { MN_CACHED_HEADER, MN_CACHED_BOXES };

struct mn_filecache_entry {
    struct mn_filecache_entry *next; /* written only before the entry is published */
    uint64_t hash;
    enum mn_filecache_kind kind;
    struct mn_npy_identity identity;
    struct mn_npy npy;      /* MN_CACHED_HEADER */
    struct mn_boxes *boxes; /* MN_CACHED_BOXES, owned */
    char path[];
};

/* Zeroed memory is an empty table. */
struct mn_filecache {
    mn_a64 heads[MN_FILECACHE_LISTS]; /* struct mn_filecache_entry *, or 0 */
    mn_a64 n_entries;
};

/* Frees all entries; no thread may use the table any more. */
void
mn_filecache_fini(struct mn_filecache *cache);

/* Adds a header (boxes NULL) or boxes, which then belong to the table. Returns the entry. Returns
 * NULL if the table is full, which is no error: boxes then still belong to the caller. */
const struct mn_filecache_entry *
mn_filecache_add(struct mn_filecache *cache, const char *path,
                 const struct mn_npy_identity *identity, const struct mn_npy *npy,
                 struct mn_boxes *boxes);

/* Calls `visit` for each entry that has boxes until it returns nonzero, and returns that. */
int
mn_filecache_each_boxes(const struct mn_filecache *cache,
                        int (*visit)(const struct mn_filecache_entry *entry, void *arg),
                        void *arg);

struct mn_work_block {
    struct mn_work_block *next;
    unsigned char bytes[] MN_ALIGNED(64);
};

struct mn_work {
    struct mn_reader reader;
    struct mn_filecache *cache;
    struct mn_maps *maps;
    uint64_t key_hi, key_lo;
    struct mn_npy_file files[2]; /* image, label */
    struct mn_view image, label;
    struct mn_work_block *blocks; /* memory allocated for this sample */
    struct mn_boxes *boxes;  /* found for this sample and not in the cache */
    uint64_t scans, headers_parsed, files_mapped; /* for the pipeline's statistics */
};

/* Returns the key of the draws of operator `number`. */
struct mn_key
mn_work_key(const struct mn_work *work, uint32_t number);

/* Allocates memory until the sample ends; contents undefined. */
int
mn_work_alloc(struct mn_work *work, size_t bytes, void **memory);

/* Makes a C contiguous volume in memory of the work, which may be written; contents undefined. */
int
mn_work_volume(struct mn_work *work, struct mn_view *view, int dtype, const int64_t *shape);

/* Replaces a view by its voxels in memory, C contiguous: no operation is pending afterwards. Does
 * nothing if that is so already. own: the memory is the work's own, which may be written to. */
int
mn_work_settle(struct mn_work *work, struct mn_view *view, bool own);

/* Settles a view before a window or a flip if an operation is pending that depends on the places of
 * voxels, as noise does. Others are then done for the window alone. */
int
mn_work_settle_places(struct mn_work *work, struct mn_view *view);

/* Opens a file and makes it the view. which: 0 for the image, 1 for the label. direct: bypass the
 * page cache. expected: the dtype that it must have. */
int
mn_work_open(struct mn_work *work, int which, const char *path, bool direct, int expected);

/* Finds the boxes of the label volume in its current state, valid until the next call or the
 * sample's end. With use_cache, looks up and stores boxes of an unchanged file in the cache. */
int
mn_work_boxes(struct mn_work *work, bool use_cache, const struct mn_boxes **boxes);

/* Closes files and frees blocks; keeps the reader's buffer. */
void
mn_work_clear(struct mn_work *work);

#endif /* MN_PIPELINE_SAMPLE_H */
