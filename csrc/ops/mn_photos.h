/* The samples of a folder of JPEG photos, for C threads: the file is read, and the part of the
 * photo that the sample shows is decoded into the batch (mn_jpeg.h).
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_PHOTOS_H
#define MN_PHOTOS_H

#include <minato/ops.h>

#include "ops/mn_jpeg.h"

/* Which part of a photo a sample shows: as torchvision's RandomResizedCrop with a random flip, or
 * as Resize and CenterCrop. */
struct mn_photo_part {
    bool random;
    bool scaled;          /* mn_jpeg.h */
    bool tall_down_first; /* tall parts are resized vertically first, as by Pillow 13 */
    uint32_t size;        /* centre: the shorter edge of the resized photo */
    uint32_t width, height; /* of the sample */
    double scale[2], ratio[2], log_ratio[2], flip;
};

/* Sets the job's region, sizes, window, flip and order for a photo of this size; the rest is left
 * alone. Random numbers: attempt n draws its area, ratio, top and left as numbers 4n to 4n + 3 of
 * operator 0, and the flip is its number 40. */
void
mn_photo_set_job(const struct mn_photo_part *part, uint32_t width, uint32_t height,
                 uint64_t key_hi, uint64_t key_lo, struct mn_jpeg_job *job);

/* All is borrowed, except `paths` and each of them. `native` has two fields: the pixels, and the
 * target. Its run() asks Python for photos that mn_jpeg.h does not decode, that cannot be read, or
 * that have more pixels than `most_pixels`. */
struct mn_photos {
    struct mn_native_pipeline native;
    struct mn_photo_part part;
    const struct mn_jpeg_library *library;
    const struct mn_kernels *kernels;
    const void *table; /* [3][256] entries of fields[0].itemsize bytes */
    uint64_t most_pixels;
    const int64_t *targets;
    char **paths; /* [native.length] */
};

/* Sets `native` from the other members, where `item` and `kind` are of a pixel's entries. */
void
mn_photos_describe(struct mn_photos *photos, int64_t length, size_t item, char kind);

#endif
