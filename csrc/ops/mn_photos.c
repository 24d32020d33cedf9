/* See mn_photos.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "ops/mn_photos.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define ATTEMPTS 10
#define FLIP_DRAW (4 * ATTEMPTS)

struct draws {
    uint64_t hi, lo;
};

static double
between(const struct draws *d, uint32_t draw, const double range[2])
{
    return range[0] + (range[1] - range[0]) * mn_draw_uniform(d->hi, d->lo, 0, draw);
}

/* The largest part in the middle whose ratio is allowed. */
static void
set_middle(const double ratio[2], uint32_t width, uint32_t height, struct mn_jpeg_job *job)
{
    job->width = width;
    job->height = height;
    if ((double)width / height < ratio[0]) {
        job->height = (uint32_t)rint(width / ratio[0]);
    }
    else if ((double)width / height > ratio[1]) {
        job->width = (uint32_t)rint(height * ratio[1]);
    }
    /* A range of ratios that one photo lacks may ask for no pixel. */
    job->width = job->width > 0 ? job->width : 1;
    job->height = job->height > 0 ? job->height : 1;
    job->left = (width - job->width) / 2;
    job->top = (height - job->height) / 2;
}

static void
draw_part(const struct mn_photo_part *part, uint32_t width, uint32_t height,
          const struct draws *d, struct mn_jpeg_job *job)
{
    set_middle(part->ratio, width, height, job);
    for (uint32_t n = 0; n < 4 * ATTEMPTS; n += 4) {
        double area = (double)height * width * between(d, n, part->scale);
        double ratio = exp(between(d, n + 1, part->log_ratio));
        double w = rint(sqrt(area * ratio)), h = rint(sqrt(area / ratio));
        if (w >= 1 && w <= width && h >= 1 && h <= height) {
            job->width = (uint32_t)w;
            job->height = (uint32_t)h;
            job->top = (uint32_t)mn_draw_below(d->hi, d->lo, 0, n + 2, height - job->height + 1);
            job->left = (uint32_t)mn_draw_below(d->hi, d->lo, 0, n + 3, width - job->width + 1);
            break;
        }
    }
    job->to_width = job->window_width;
    job->to_height = job->window_height;
    job->window_left = job->window_top = 0;
    job->flip = mn_draw_uniform(d->hi, d->lo, 0, FLIP_DRAW) < part->flip;
}

static void
set_centre(const struct mn_photo_part *part, uint32_t width, uint32_t height,
           struct mn_jpeg_job *job)
{
    uint32_t shorter = width < height ? width : height, longer = width < height ? height : width;
    uint32_t edge = (uint32_t)((double)part->size * longer / shorter);
    job->left = job->top = 0;
    job->width = width;
    job->height = height;
    job->to_width = width <= height ? part->size : edge;
    job->to_height = width <= height ? edge : part->size;
    job->window_left = (uint32_t)rint((job->to_width - job->window_width) / 2.0);
    job->window_top = (uint32_t)rint((job->to_height - job->window_height) / 2.0);
    job->flip = false;
}

void
mn_photo_set_job(const struct mn_photo_part *part, uint32_t width, uint32_t height,
                 uint64_t key_hi, uint64_t key_lo, struct mn_jpeg_job *job)
{
    struct draws d = {key_hi, key_lo};
    job->scaled = part->scaled;
    job->window_width = part->width;
    job->window_height = part->height;
    if (part->random) {
        draw_part(part, width, height, &d, job);
    }
    else {
        set_centre(part, width, height, job);
    }
    int64_t narrower = 2 * ((int64_t)job->width - job->to_width);
    int64_t lower = (int64_t)job->height - job->to_height;
    job->down_first = part->tall_down_first && (narrower > 0 ? narrower : 0) < lower;
}

/* Returns the bytes of a file; NULL: Python is to read it, and may raise the error. */
static uint8_t *
read_file(const char *path, size_t *n)
{
    struct stat found;
    uint8_t *bytes = NULL;
    ssize_t got = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return NULL;
    }
    if (fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_size > 0) {
        bytes = malloc((size_t)found.st_size);
    }
    for (*n = 0; bytes != NULL && *n < (size_t)found.st_size; *n += (size_t)got) {
        got = read(fd, bytes + *n, (size_t)found.st_size - *n);
        if (got <= 0 && (got == 0 || errno != EINTR)) {
            break;
        }
        got = got < 0 ? 0 : got;
    }
    close(fd);
    if (bytes != NULL && *n < (size_t)found.st_size) {
        free(bytes);
        return NULL;
    }
    return bytes;
}

static int
run(void *state, int64_t index, uint64_t key_hi, uint64_t key_lo, void **out, char *err,
    size_t errlen)
{
    const struct mn_photos *photos = state;
    const struct mn_native_field *pixels = &photos->native.fields[0];
    struct mn_text text = {err, errlen};
    struct mn_jpeg_job job = {.table = photos->table, .item = pixels->itemsize};
    uint32_t width, height;
    size_t n;
    uint8_t *bytes = read_file(photos->paths[index], &n);
    int rc = MN_NATIVE_ASK_PYTHON;
    if (bytes != NULL && mn_jpeg_measure(bytes, n, &width, &height) == 0
        && (uint64_t)width * height <= photos->most_pixels) {
        mn_photo_set_job(&photos->part, width, height, key_hi, key_lo, &job);
        if (job.to_width <= MN_JPEG_LONGEST && job.to_height <= MN_JPEG_LONGEST) {
            rc = mn_jpeg_crop(photos->library, photos->kernels, bytes, n, &job, out[0]);
        }
    }
    free(bytes);
    memcpy(out[1], &photos->targets[index], sizeof(int64_t));
    return rc == -ENOMEM ? mn_fail_memory(&text, pixels->bytes) : rc;
}

void
mn_photos_describe(struct mn_photos *photos, int64_t length, size_t item, char kind)
{
    const struct mn_photo_part *part = &photos->part;
    photos->native = (struct mn_native_pipeline){
        .abi = MN_OPS_ABI, .size = sizeof(photos->native), .state = photos, .run = run,
        .length = length, .keying = MN_KEYED_BY_SAMPLE, .n_fields = 2};
    photos->native.fields[0] = (struct mn_native_field){
        .kind = kind, .itemsize = (uint8_t)item, .ndim = 3,
        .shape = {3, part->height, part->width},
        .bytes = 3 * item * part->height * part->width};
    photos->native.fields[1] = (struct mn_native_field){.kind = 'i', .itemsize = 8, .bytes = 8};
}
