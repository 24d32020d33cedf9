/* Crops of JPEG photos, decoded by the libjpeg-turbo that is found at run time.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Only the rows and columns that a result needs are decoded (except the Huffman codes before them),
 * and resized while they are decoded. The pixels are those of a whole decoding, bit
 * for bit, unless it is scaled.
 *
 * Only files of the usual kind are decoded: baseline or progressive, 8 bits, gray or three colours,
 * well formed from the first to the last marker. For all others, and at any error or warning of
 * libjpeg, functions return MN_JPEG_UNUSUAL, and the caller asks Pillow, which has the last word on
 * what is an error. libjpeg's errors never end the process.
 */
#ifndef MN_JPEG_H
#define MN_JPEG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "ops/mn_fail.h"
#include "ops/mn_kernels.h"

#define MN_JPEG_UNUSUAL 1
#define MN_JPEG_LONGEST 65535u /* no side is longer */

struct mn_jpeg_info;
struct mn_jpeg_output;

/* The functions of a library, and the version and layout of its structs. */
struct mn_jpeg_library {
    void *(*std_error)(void *errors);
    void (*create)(struct mn_jpeg_info *info, int version, size_t size);
    int (*read_header)(struct mn_jpeg_info *info, int require_image);
    int (*start)(struct mn_jpeg_info *info);
    void (*crop)(struct mn_jpeg_info *info, unsigned *left, unsigned *width);
    unsigned (*skip)(struct mn_jpeg_info *info, unsigned rows);
    unsigned (*read)(struct mn_jpeg_info *info, uint8_t **rows, unsigned n);
    int (*resync)(struct mn_jpeg_info *info, int desired);
    void (*destroy)(struct mn_jpeg_info *info);
    void (*create_output)(struct mn_jpeg_output *output, int version, size_t size);
    void *(*read_codes)(struct mn_jpeg_info *info);
    void (*copy_parameters)(struct mn_jpeg_info *info, struct mn_jpeg_output *output);
    void (*write_codes)(struct mn_jpeg_output *output, void *codes);
    void (*finish_output)(struct mn_jpeg_output *output);
    void (*destroy_output)(struct mn_jpeg_output *output);
    int version;
    size_t size, output_size; /* of the decoder's and the encoder's struct */
    size_t optimize;          /* place of the encoder's optimize_coding */
};

/* A region of the photo is resized; a window of the result is wanted. */
struct mn_jpeg_job {
    uint32_t left, top, width, height;
    uint32_t to_width, to_height;
    uint32_t window_left, window_top, window_width, window_height;
    bool flip;   /* whether left and right are exchanged in the end */
    bool tall_down_first; /* whether a tall region is resized vertically first, as by Pillow 13 */
    bool scaled; /* whether a photo may be decoded at 1/2, 1/4 or 1/8 of its size */
    const void *table; /* [3][256]: what each value of each colour becomes */
    size_t item;       /* bytes of its entries: 1, 2 or 4 */
};

/* Opens a library by path or name. It is never closed. Returns 0 or a negative errno. */
int
mn_jpeg_open(struct mn_jpeg_library *library, const char *path, struct mn_text *text);

/* Reads the size of a photo from its markers. Returns 0 or MN_JPEG_UNUSUAL. */
int
mn_jpeg_measure(const uint8_t *bytes, size_t n, uint32_t *width, uint32_t *height);

/* Writes [3][window_height][window_width] entries to `out`. The bytes must have been measured, and
 * the job must fit the photo. Any number of threads may call it. Returns 0, MN_JPEG_UNUSUAL or
 * -ENOMEM. */
int
mn_jpeg_crop(const struct mn_jpeg_library *library, const struct mn_kernels *kernels,
             const uint8_t *bytes, size_t n, const struct mn_jpeg_job *job, void *out);

/* Writes a photo's codes as one baseline scan with tables of its own, without its APP and COM
 * markers: *out is to be freed. The pixels are the same, bit for bit. Returns as mn_jpeg_crop(). */
int
mn_jpeg_baseline(const struct mn_jpeg_library *library, const uint8_t *bytes, size_t n,
                 uint8_t **out, size_t *out_bytes);

#endif
