/* Crops of JPEG photos.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The parts of libjpeg's structures that this file uses are declared here, so that the build needs
 * no header of it. They are the same in all versions of libjpeg-turbo's interface. Only the size of
 * the whole differs, which jpeg_CreateDecompress() compares with its own.
 */
#include "ops/mn_jpeg.h"

#include <dlfcn.h>
#include <errno.h>
#include <setjmp.h>
#include <stdlib.h>
#include <string.h>

#include "base/mn_base.h"

/* ---- Resizing of photos by antialiased bilinear interpolation, in the integers of Pillow ----
 *
 * The results are those of Pillow's Image.resize(size, BILINEAR) on an RGB image, bit for bit: each
 * axis is one pass with coefficients of 22 fractional bits, and the result of a pass is rounded to
 * 8 bits. The order of the passes matters for the last bit, so the caller chooses it.
 *
 * Rows are read when they are needed, and a row that no later result needs is overwritten. A pixel
 * of a row has 4 bytes, the last of which is not used. A result is planar: red, green, blue.
 */

/* One axis: `size` pixels become `to` pixels, of which results from..from+n-1 are wanted. They
 * begin `part` of a pixel after the first of `most_used` pixels that may be used. In photos that
 * are not decoded at a smaller scale, all are whole pixels. */
struct mn_axis {
    double size, part;
    uint32_t most_used, to, from, n;
    /* Computed by plan_axis(). */
    uint32_t begin, end; /* source pixels that are needed */
    uint32_t most;       /* coefficients of each result, an even number; the last may be 0 */
    uint32_t *first;     /* [n]: the first source pixel of a result, counted from begin */
    uint32_t *used;      /* [n]: number of source pixels of a result */
    int32_t *weights;    /* [n][most][copies] */
};

struct mn_resize {
    /* Set by the caller. */
    struct mn_axis across, down;
    const struct mn_jpeg_job *job;
    bool down_first; /* whether the vertical pass is the first */
    void *out;       /* [3][down.n][across.n] entries */
    /* Computed. */
    void *memory;
    const uint8_t **rows;
};

#define PIXEL 4u /* bytes, the last of which is not used */

/* Bytes of a row are a multiple of this, which the kernels use as the size of a block. */
#define ROW_BLOCK 64u

/* The source pixels of one result, with the roundings of Pillow (Resample.c, bilinear filter). */
struct window {
    double center, scale; /* scale: source pixels for each pixel that counts, at least 1 */
    uint32_t first, used;
};

static struct window
window_of(const struct mn_axis *axis, uint32_t result)
{
    double scale = axis->size / axis->to;
    struct window w = {.center = axis->part + (result + 0.5) * scale,
                       .scale = scale < 1.0 ? 1.0 : scale};
    int64_t low = (int64_t)(w.center - w.scale + 0.5), high = (int64_t)(w.center + w.scale + 0.5);
    low = low < 0 ? 0 : low;
    high = high > axis->most_used ? axis->most_used : high;
    w.first = (uint32_t)low;
    w.used = (uint32_t)(high - low);
    return w;
}

static double
weight_of(const struct window *w, uint32_t i)
{
    double at = ((double)w->first + i - w->center + 0.5) * (1.0 / w->scale);
    at = at < 0.0 ? -at : at;
    return at < 1.0 ? 1.0 - at : 0.0;
}

/* Computes which source pixels are needed, and their weights. `copies`: how often each is stored.
 * Returns 0 or -ENOMEM. Call mn_resize_fini() either way. */
static int
plan_axis(struct mn_axis *axis, uint32_t copies)
{
    axis->begin = window_of(axis, axis->from).first;
    for (uint32_t x = 0; x < axis->n; x++) {
        struct window w = window_of(axis, axis->from + x);
        axis->most = w.used > axis->most ? w.used : axis->most;
        axis->end = w.first + w.used;
    }
    axis->most += axis->most % 2;
    axis->first = calloc(axis->n, 2 * sizeof(*axis->first));
    axis->weights = calloc((size_t)axis->n * axis->most, copies * sizeof(*axis->weights));
    if (axis->first == NULL || axis->weights == NULL) {
        return -ENOMEM;
    }
    axis->used = axis->first + axis->n;
    for (uint32_t x = 0; x < axis->n; x++) {
        struct window w = window_of(axis, axis->from + x);
        int32_t *weights = axis->weights + (size_t)x * axis->most * copies;
        double sum = 0.0;
        for (uint32_t i = 0; i < w.used; i++) {
            sum += weight_of(&w, i);
        }
        for (uint32_t i = 0; i < w.used * copies; i++) {
            double weight = weight_of(&w, i / copies) / sum;
            weights[i] = (int32_t)(0.5 + weight * (1 << MN_WEIGHT_BITS));
        }
        axis->first[x] = w.first - axis->begin;
        axis->used[x] = w.used;
    }
    return 0;
}

#define SPREAD(type)                                                                    \
    do {                                                                                \
        const type *table = (const type *)resize->job->table + (size_t)256 * colour;         \
        type *out = (type *)resize->out + ((size_t)colour * resize->down.n + y) * n;    \
        for (uint32_t x = 0; x < n; x++, from += step) {                                \
            out[x] = table[*from];                                                      \
        }                                                                               \
    } while (0)

/* Writes row y of the result. */
static void
spread(const struct mn_resize *resize, uint32_t y, const uint8_t *row)
{
    uint32_t n = resize->across.n;
    ptrdiff_t step = resize->job->flip ? -(ptrdiff_t)PIXEL : (ptrdiff_t)PIXEL;
    for (uint32_t colour = 0; colour < 3; colour++) {
        const uint8_t *from = row + colour + (resize->job->flip ? PIXEL * (n - 1) : 0);
        if (resize->job->item == 4) {
            SPREAD(uint32_t);
        }
        else if (resize->job->item == 2) {
            SPREAD(uint16_t);
        }
        else {
            SPREAD(uint8_t);
        }
    }
}

static size_t
row_bytes(uint32_t pixels)
{
    return ((size_t)pixels * PIXEL + ROW_BLOCK - 1) / ROW_BLOCK * ROW_BLOCK;
}

/* Reads the rows from down.begin on with `read`, and writes the result. A row has `width` pixels,
 * and pixel across.begin is its pixel number `shift`. Returns 0 or -ENOMEM. `read` may leave by
 * longjmp. */
static int
mn_resize_run(struct mn_resize *resize, const struct mn_kernels *kernels, uint32_t width,
              uint32_t shift, void (*read)(void *from, uint8_t *row), void *from)
{
    const struct mn_axis *across = &resize->across, *down = &resize->down;
    /* The horizontal pass reads up to across->most pixels more than there are. */
    size_t wide = row_bytes(width + across->most), narrow = row_bytes(across->n);
    size_t kept = resize->down_first ? wide : narrow;
    resize->memory = calloc(1, kept * down->most + wide + narrow + PIXEL);
    resize->rows = calloc(down->most, sizeof(*resize->rows));
    if (resize->memory == NULL || resize->rows == NULL) {
        return -ENOMEM;
    }
    /* At aligned addresses, libjpeg-turbo writes past the caches, which we would wait for. */
    uint8_t *ring = (uint8_t *)resize->memory + PIXEL;
    uint8_t *line = ring + kept * down->most, *result = line + wide;
    uint32_t have = 0; /* rows read */
    for (uint32_t y = 0; y < down->n; y++) {
        for (; have < down->first[y] + down->used[y]; have++) {
            uint8_t *row = ring + kept * (have % down->most);
            if (resize->down_first) {
                read(from, row);
                continue;
            }
            read(from, line);
            kernels->resize_row(row, line + (size_t)4 * shift, across->first, across->weights,
                                across->most / 2, across->n);
        }
        for (uint32_t i = 0; i < down->used[y]; i++) {
            resize->rows[i] = ring + kept * ((down->first[y] + i) % down->most);
        }
        kernels->mix_rows(resize->down_first ? line : result, resize->rows,
                          down->weights + (size_t)y * down->most, down->used[y],
                          (int64_t)(resize->down_first ? row_bytes(width) : narrow));
        if (resize->down_first) {
            kernels->resize_row(result, line + (size_t)4 * shift, across->first,
                                across->weights, across->most / 2, across->n);
        }
        spread(resize, y, result);
    }
    return 0;
}

static void
mn_resize_fini(struct mn_resize *resize)
{
    free(resize->across.first);
    free(resize->across.weights);
    free(resize->down.first);
    free(resize->down.weights);
    free(resize->rows);
    free(resize->memory);
}

/* struct jpeg_source_mgr */
struct source {
    const uint8_t *next;
    size_t left;
    void (*init)(struct mn_jpeg_info *info);
    int (*fill)(struct mn_jpeg_info *info);
    void (*skip)(struct mn_jpeg_info *info, long n);
    int (*resync)(struct mn_jpeg_info *info, int desired);
    void (*term)(struct mn_jpeg_info *info);
};

/* struct jpeg_error_mgr */
struct errors {
    void (*exit)(struct mn_jpeg_info *info);
    void (*emit)(struct mn_jpeg_info *info, int level);
    void *others[19];
};

/* struct jpeg_decompress_struct */
struct mn_jpeg_info {
    struct errors *errors;
    void *others[4];
    struct source *source;
    unsigned width, height;
    int components, space, out_space;
    unsigned scale, of_scale; /* scale_num, scale_denom */
    char rest[580];
};

MN_STATIC_ASSERT(sizeof(struct source) == 56, "the size of jpeg_source_mgr");
MN_STATIC_ASSERT(sizeof(struct errors) == 168, "the size of jpeg_error_mgr");
MN_STATIC_ASSERT(offsetof(struct mn_jpeg_info, source) == 40, "the place of src");
MN_STATIC_ASSERT(offsetof(struct mn_jpeg_info, out_space) == 64, "the place of out_color_space");
MN_STATIC_ASSERT(sizeof(struct mn_jpeg_info) == 656, "the size in the largest version, 80");

/* Versions of the interface: sizes of the decoder's and the encoder's struct, and the place of
 * optimize_coding in the latter. */
static const struct {
    int version;
    size_t size, output_size, optimize;
} interfaces[] = {{62, 632, 520, 264}, {80, 656, 584, 296}, {70, 640, 568, 296}};

#define SPACE_RGBX 7 /* JCS_EXT_RGBX: 4 bytes for each pixel */

/* Pixels on each side that are decoded, too: at the edge of a decoded region, libjpeg-turbo
 * computes colours from fewer neighbours. */
#define MARGIN 2u

/* One decoding. */
struct decoder {
    struct mn_jpeg_info info; /* first: libjpeg passes its address */
    struct errors errors;
    struct source source;
    jmp_buf jump;
    const struct mn_jpeg_library *library;
    const struct mn_kernels *kernels;
    struct mn_resize resize;
    unsigned scale;     /* 1, 2, 4 or 8 pixels of the photo become one */
    unsigned left, top; /* where the resized region begins, in decoded pixels */
    unsigned unwanted;  /* rows to read before the first that is needed */
};

static void
leave(struct mn_jpeg_info *info)
{
    longjmp(((struct decoder *)(void *)info)->jump, 1);
}

static void
emit(struct mn_jpeg_info *info, int level)
{
    if (level < 0) { /* a warning: Pillow may raise an error */
        leave(info);
    }
}

static int
fill(struct mn_jpeg_info *info) /* is called at the end of the bytes */
{
    leave(info);
    return 0;
}

static void
skip(struct mn_jpeg_info *info, long n)
{
    struct source *source = info->source;
    if (n > 0 && (size_t)n > source->left) {
        leave(info);
    }
    if (n > 0) {
        source->next += n;
        source->left -= (size_t)n;
    }
}

static void
nothing(struct mn_jpeg_info *info MN_UNUSED)
{
}

/* Call it within setjmp. */
static void
create(struct decoder *d)
{
    d->info.errors = &d->errors;
    d->library->std_error(&d->errors);
    d->errors.exit = leave;
    d->errors.emit = emit;
    d->library->create(&d->info, d->library->version, d->library->size);
}

static void
read_row(void *from, uint8_t *row)
{
    struct decoder *d = from;
    for (unsigned n = d->unwanted + 1; n != 0; n--) {
        if (d->library->read(&d->info, &row, 1) != 1) {
            leave(&d->info);
        }
    }
    d->unwanted = 0;
}

/* Call it within setjmp. */
static int
decode(struct decoder *d)
{
    const struct mn_jpeg_library *library = d->library;
    const struct mn_jpeg_job *job = d->resize.job;
    create(d);
    d->info.source = &d->source;
    if (library->read_header(&d->info, 1) != 1 || d->info.width < job->left + job->width
        || d->info.height < job->top + job->height) {
        return MN_JPEG_UNUSUAL;
    }
    d->info.out_space = SPACE_RGBX;
    d->info.scale = 1;
    d->info.of_scale = d->scale;
    if (!library->start(&d->info)) {
        return MN_JPEG_UNUSUAL;
    }
    unsigned first = d->left + d->resize.across.begin, end = d->left + d->resize.across.end;
    unsigned whole = (d->info.width + d->scale - 1) / d->scale;
    unsigned left = first > MARGIN ? first - MARGIN : 0;
    unsigned width = (end + MARGIN < whole ? end + MARGIN : whole) - left;
    if (width < whole) {
        library->crop(&d->info, &left, &width);
    }
    d->unwanted = d->top + d->resize.down.begin;
    if (d->unwanted > MARGIN) {
        d->unwanted -= library->skip(&d->info, d->unwanted - MARGIN);
    }
    return mn_resize_run(&d->resize, d->kernels, width, first - left, read_row, d);
}

static int
guarded(struct decoder *d)
{
    return setjmp(d->jump) == 0 ? decode(d) : MN_JPEG_UNUSUAL;
}

/* Sets an axis for a region of a photo of which `scale` pixels become one. Returns where it
 * begins. */
static unsigned
set_axis(struct mn_axis *axis, uint32_t begin, uint32_t size, unsigned scale)
{
    axis->size = (double)size / scale;
    axis->part = (double)(begin % scale) / scale;
    axis->most_used = (begin + size + scale - 1) / scale - begin / scale;
    return begin / scale;
}

/* Returns the largest scale at which a region still covers what it is resized to, as
 * Image.draft() does. */
static unsigned
scale_of(const struct mn_jpeg_job *job)
{
    unsigned scale = 1;
    while (job->scaled && scale < 8 && job->width >= 2 * scale * job->to_width
           && job->height >= 2 * scale * job->to_height) {
        scale *= 2;
    }
    return scale;
}

/* Returns whether Pillow 13 resizes the region vertically first. */
static bool
is_tall(const struct mn_jpeg_job *job)
{
    int64_t narrower = 2 * ((int64_t)job->width - job->to_width);
    int64_t lower = (int64_t)job->height - job->to_height;
    return (narrower > 0 ? narrower : 0) < lower;
}

int
mn_jpeg_crop(const struct mn_jpeg_library *library, const struct mn_kernels *kernels,
             const uint8_t *bytes, size_t n, const struct mn_jpeg_job *job, void *out)
{
    struct decoder d = {
        .library = library,
        .kernels = kernels,
        .source = {bytes, n, nothing, fill, skip, library->resync, nothing},
        .resize = {
            .across = {.to = job->to_width, .from = job->window_left, .n = job->window_width},
            .down = {.to = job->to_height, .from = job->window_top, .n = job->window_height},
            .job = job,
            .down_first = job->tall_down_first && is_tall(job),
            .out = out,
        },
    };
    d.scale = scale_of(job);
    d.left = set_axis(&d.resize.across, job->left, job->width, d.scale);
    d.top = set_axis(&d.resize.down, job->top, job->height, d.scale);
    int rc = plan_axis(&d.resize.across, 4);
    rc = rc == 0 ? plan_axis(&d.resize.down, 1) : rc;
    if (rc == 0) {
        rc = guarded(&d);
        library->destroy(&d.info);
    }
    mn_resize_fini(&d.resize);
    return rc;
}

/* -- Without a loss to a baseline file ---------------------------------------------------- */

/* struct jpeg_destination_mgr */
struct destination {
    uint8_t *next;
    size_t left;
    void (*init)(struct mn_jpeg_output *output);
    int (*empty)(struct mn_jpeg_output *output);
    void (*term)(struct mn_jpeg_output *output);
};

/* struct jpeg_compress_struct */
struct mn_jpeg_output {
    struct errors *errors;
    void *others[2];
    void *caller; /* client_data */
    void *flags;
    struct destination *destination;
    char rest[536];
};

MN_STATIC_ASSERT(offsetof(struct mn_jpeg_output, destination) == 40, "the place of dest");
MN_STATIC_ASSERT(sizeof(struct mn_jpeg_output) == 584, "the size in the largest version, 80");

/* One file on its way. The library knows the addresses of `decoder.info` and `output`. */
struct transcoder {
    struct decoder decoder;
    struct mn_jpeg_output output;
    struct destination destination;
    struct errors errors;
    uint8_t *bytes;
    size_t size;
};

static void
leave_output(struct mn_jpeg_info *output)
{
    longjmp(((struct transcoder *)((struct mn_jpeg_output *)(void *)output)->caller)->decoder.jump,
            1);
}

static void
ignore(struct mn_jpeg_output *output MN_UNUSED)
{
}

static int
grow(struct mn_jpeg_output *output)
{
    struct transcoder *t = output->caller;
    uint8_t *more = realloc(t->bytes, 2 * t->size);
    if (more == NULL) {
        leave_output((void *)output);
    }
    t->destination.next = more + t->size;
    t->destination.left = t->size;
    t->bytes = more;
    t->size *= 2;
    return 1;
}

/* Call it within setjmp. */
static int
transcode(struct transcoder *t)
{
    const struct mn_jpeg_library *library = t->decoder.library;
    create(&t->decoder);
    t->decoder.info.source = &t->decoder.source;
    t->output.errors = &t->errors;
    t->output.caller = t;
    library->std_error(&t->errors);
    t->errors.exit = leave_output;
    library->create_output(&t->output, library->version, library->output_size);
    t->output.destination = &t->destination;
    if (library->read_header(&t->decoder.info, 1) != 1) {
        return MN_JPEG_UNUSUAL;
    }
    void *codes = library->read_codes(&t->decoder.info);
    if (codes == NULL) {
        return MN_JPEG_UNUSUAL;
    }
    library->copy_parameters(&t->decoder.info, &t->output);
    const int yes = 1;
    memcpy((char *)&t->output + library->optimize, &yes, sizeof(yes));
    library->write_codes(&t->output, codes);
    library->finish_output(&t->output);
    return 0;
}

static int
guarded_transcode(struct transcoder *t)
{
    return setjmp(t->decoder.jump) == 0 ? transcode(t) : MN_JPEG_UNUSUAL;
}

int
mn_jpeg_baseline(const struct mn_jpeg_library *library, const uint8_t *bytes, size_t n,
                 uint8_t **out, size_t *out_bytes)
{
    struct transcoder t = {
        .decoder = {.library = library,
                    .source = {bytes, n, nothing, fill, skip, library->resync, nothing}},
        .destination = {.init = ignore, .empty = grow, .term = ignore},
        .size = n + 4096,
    };
    t.bytes = malloc(t.size);
    if (t.bytes == NULL) {
        return -ENOMEM;
    }
    t.destination.next = t.bytes;
    t.destination.left = t.size;
    int rc = guarded_transcode(&t);
    library->destroy_output(&t.output);
    library->destroy(&t.decoder.info);
    if (rc != 0) {
        free(t.bytes);
        return rc;
    }
    *out = t.bytes;
    *out_bytes = t.size - t.destination.left;
    return 0;
}

/* -- The markers ----------------------------------------------------------------------- */

static uint32_t
big_endian(const uint8_t *bytes)
{
    return (uint32_t)bytes[0] << 8 | bytes[1];
}

/* Returns whether the Huffman codes of a file with one scan end with the photo's end. If they do
 * not, the file is cut off, or more follows, which Pillow reads. */
static bool
ends_well(const uint8_t *bytes, const uint8_t *end)
{
    while ((bytes = memchr(bytes, 0xFF, (size_t)(end - bytes))) != NULL && end - bytes >= 2) {
        if (bytes[1] != 0 && (bytes[1] & 0xF8) != 0xD0) { /* not an FF of a code, no restart */
            return bytes[1] == 0xD9;
        }
        bytes += 2;
    }
    return false;
}

/* Returns whether a frame header is of the usual kind. */
static bool
is_usual_frame(const uint8_t *body, size_t n)
{
    unsigned colours = n > 5 ? body[5] : 0;
    if ((colours != 1 && colours != 3) || n != 6 + 3 * colours || body[0] != 8
        || big_endian(body + 1) == 0 || big_endian(body + 3) == 0) {
        return false;
    }
    unsigned sampling = body[7]; /* of the first colour, relative to the others */
    return (colours == 1 && sampling == 0x11)
           || (colours == 3 && body[10] == 0x11 && body[13] == 0x11
               && (sampling == 0x11 || sampling == 0x21 || sampling == 0x22 || sampling == 0x12));
}

static bool
are_whole_tables(const uint8_t *body, size_t n)
{
    size_t at = 0;
    while (at < n) {
        at += body[at] >> 4 != 0 ? 129 : 65;
    }
    return at == n;
}

int
mn_jpeg_measure(const uint8_t *bytes, size_t n, uint32_t *width, uint32_t *height)
{
    const uint8_t *frame = NULL, *end = bytes + n;
    if (n < 4 || bytes[0] != 0xFF || bytes[1] != 0xD8) {
        return MN_JPEG_UNUSUAL;
    }
    for (const uint8_t *at = bytes + 2; end - at >= 4 && at[0] == 0xFF;) {
        const uint8_t marker = at[1], *body = at + 4;
        size_t length = big_endian(at + 2);
        if (length < 3 || length + 2 > (size_t)(end - at)) {
            break;
        }
        at += 2 + length;
        length -= 2;
        bool is_frame = marker >= 0xC0 && marker <= 0xC2;
        bool is_named = marker == 0xE0 || marker == 0xEE; /* by JFIF or Adobe */
        if (marker == 0xDA) {
            bool one_scan = frame != NULL && frame[1] != 0xC2 && body[0] == frame[9];
            if (frame == NULL || (one_scan && !ends_well(at, end))) {
                break;
            }
            *height = big_endian(frame + 5);
            *width = big_endian(frame + 7);
            return 0;
        }
        if (is_frame ? frame != NULL || !is_usual_frame(body, length)
                     : (marker == 0xDB && !are_whole_tables(body, length))
                           || (is_named && length < 12)
                           || (marker != 0xC4 && marker != 0xDB && marker != 0xDD
                               && marker != 0xFE && (marker & 0xF0) != 0xE0)) {
            break;
        }
        frame = is_frame ? body - 4 : frame;
    }
    return MN_JPEG_UNUSUAL;
}

/* -- The library ----------------------------------------------------------------------- */

static bool
find(void *handle, const char *name, void *function)
{
    void *address = dlsym(handle, name);
    memcpy(function, &address, sizeof(address));
    return address != NULL;
}

/* Returns whether a decoder of the library's version and size can be made. */
static bool
can_create(const struct mn_jpeg_library *library)
{
    struct decoder d = {.library = library};
    if (setjmp(d.jump) != 0) {
        return false;
    }
    create(&d);
    library->destroy(&d.info);
    return true;
}

int
mn_jpeg_open(struct mn_jpeg_library *library, const char *path, struct mn_text *text)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        return mn_fail(text, ENOENT, "%s does not open: %s", path, dlerror());
    }
    if (!find(handle, "jpeg_std_error", &library->std_error)
        || !find(handle, "jpeg_CreateDecompress", &library->create)
        || !find(handle, "jpeg_read_header", &library->read_header)
        || !find(handle, "jpeg_start_decompress", &library->start)
        || !find(handle, "jpeg_crop_scanline", &library->crop)
        || !find(handle, "jpeg_skip_scanlines", &library->skip)
        || !find(handle, "jpeg_read_scanlines", &library->read)
        || !find(handle, "jpeg_resync_to_restart", &library->resync)
        || !find(handle, "jpeg_destroy_decompress", &library->destroy)
        || !find(handle, "jpeg_CreateCompress", &library->create_output)
        || !find(handle, "jpeg_read_coefficients", &library->read_codes)
        || !find(handle, "jpeg_copy_critical_parameters", &library->copy_parameters)
        || !find(handle, "jpeg_write_coefficients", &library->write_codes)
        || !find(handle, "jpeg_finish_compress", &library->finish_output)
        || !find(handle, "jpeg_destroy_compress", &library->destroy_output)) {
        return mn_fail(text, EINVAL, "%s is no libjpeg-turbo of version 1.5 or later", path);
    }
    for (size_t i = 0; i < sizeof(interfaces) / sizeof(interfaces[0]); i++) {
        library->version = interfaces[i].version;
        library->size = interfaces[i].size;
        library->output_size = interfaces[i].output_size;
        library->optimize = interfaces[i].optimize;
        if (can_create(library)) {
            return 0;
        }
    }
    return mn_fail(text, EINVAL, "%s has an unknown version of libjpeg's interface", path);
}
