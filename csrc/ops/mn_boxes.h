/* The two largest connected components of each class of a label volume, by bounding box.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   What the balanced crop needs to know of a label volume, found in one pass over its rows in
 *   file order. Rows are cut into runs of one value > 0. Nearly all of a label volume is zeros,
 *   which are skipped a cache line or more at a time. Union-find joins runs that share a face.
 *   Only the runs of two planes are kept, so the volume itself never has to be in memory.
 *
 * Definitions
 *   Two voxels are connected if they have the same value and share a face: the default
 *   structure of scipy.ndimage.label, which the MLPerf reference uses. Components are
 *   compared by the volume of their bounding boxes. If these are equal, the component whose
 *   first voxel in C order comes later counts as larger (a stable ascending sort).
 */
#ifndef MN_BOXES_H
#define MN_BOXES_H

#include <stdint.h>

#include "ops/mn_fail.h"
#include "ops/mn_kernels.h"

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

struct mn_scan;

/* Starts a scan of a volume of this many planes, rows and columns (each below 2^31). */
int
mn_scan_open(struct mn_scan **scan, const int64_t *shape, const struct mn_kernels *kernels,
             struct mn_text *text);

/* Scans the next `count` rows, adjacent in memory, in C order. They may extend over planes. */
int
mn_scan_rows(struct mn_scan *scan, const uint8_t *rows, int64_t count,
             struct mn_text *text);

/* Returns the result after the last row; the caller frees it with free(). */
int
mn_scan_finish(struct mn_scan *scan, struct mn_boxes **boxes, struct mn_text *text);

/* Frees a scan, finished or not; NULL is allowed. */
void
mn_scan_close(struct mn_scan *scan);

#endif
