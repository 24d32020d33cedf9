/* JPEG files, decoded by the libjpeg-turbo that the environment variable MN_FUZZ_JPEG names.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "mn_fuzz.h"

#include <errno.h>

#include "ops/mn_jpeg.h"

enum { SIDE = 24 };

static struct mn_jpeg_library library;

static void
open_library(void)
{
    char chars[256];
    struct mn_text text = {chars, sizeof(chars)};
    const char *path = getenv("MN_FUZZ_JPEG");
    if (library.size == 0 && mn_jpeg_open(&library, path != NULL ? path : "", &text) != 0) {
        fprintf(stderr, "%s\n", chars);
        abort();
    }
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    uint8_t table[3 * 256] = {0}, *out = malloc(3 * SIDE * SIDE);
    uint64_t drawn = number(&data, &n);
    uint8_t *file = copied(data, n);
    uint32_t width = 0, height = 0;
    MUST(out != NULL);
    open_library();
    int rc = mn_jpeg_measure(file, n, &width, &height);
    MUST(rc == 0 || rc == MN_JPEG_UNUSUAL);
    if (rc == 0) {
        MUST(width > 0 && height > 0 && width <= 65535 && height <= 65535);
    }
    if (rc == 0 && (uint64_t)width * height < 1 << 20) { /* larger ones take long */
        struct mn_jpeg_job job = {
            .left = (uint32_t)(drawn % width),
            .top = (uint32_t)(drawn / 7 % height),
            .to_width = SIDE,
            .to_height = SIDE,
            .window_width = SIDE,
            .window_height = SIDE,
            .flip = drawn & 1,
            .tall_down_first = drawn & 2,
            .scaled = drawn & 4,
            .table = table,
            .item = 1,
        };
        job.width = 1 + (uint32_t)(drawn / 5 % (width - job.left));
        job.height = 1 + (uint32_t)(drawn / 3 % (height - job.top));
        rc = mn_jpeg_crop(&library, mn_kernels_best(), file, n, &job, out);
        MUST(rc == 0 || rc == MN_JPEG_UNUSUAL || rc == -ENOMEM);
        uint8_t *baseline = NULL;
        size_t bytes = 0;
        rc = mn_jpeg_baseline(&library, file, n, &baseline, &bytes);
        MUST(rc == 0 || rc == MN_JPEG_UNUSUAL || rc == -ENOMEM);
        free(baseline);
    }
    free(file);
    free(out);
    return 0;
}
