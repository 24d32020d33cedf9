/* The state of one sample in a pipeline, and the memory that it needs.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A work belongs to one thread from mn_work_begin to mn_work_end. Then it rests in its pipeline's
 * pool with its buffers, so that a thread's next sample allocates nothing.
 */
#ifndef MN_PIPELINE_SAMPLE_H
#define MN_PIPELINE_SAMPLE_H

#include "ops/mn_filecache.h"
#include "ops/mn_view.h"

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

/* Replaces a view by its voxels in memory of the work, C contiguous: no operation is pending
 * afterwards. Does nothing if that is so already. */
int
mn_work_settle(struct mn_work *work, struct mn_view *view);

/* Opens a file and makes it the view. which: 0 for the image, 1 for the label. direct: bypass the
 * page cache. expected: the dtype that it must have. */
int
mn_work_open(struct mn_work *work, int which, const char *path, bool direct, int expected);

/* Does the same, and the memory is the work's own, which may be written to. */
int
mn_work_settle_own(struct mn_work *work, struct mn_view *view);

/* Finds the boxes of the label volume in its current state, valid until the next call or the
 * sample's end. With use_cache, looks up and stores boxes of an unchanged file in the cache. */
int
mn_work_boxes(struct mn_work *work, bool use_cache, const struct mn_boxes **boxes);

/* Closes files and frees blocks; keeps the reader's buffer. */
void
mn_work_clear(struct mn_work *work);

#endif
