/* minato._ops.Photos: the samples of a folder of JPEG photos, and its capsule for C threads.
 * SPDX-License-Identifier: Apache-2.0
 *
 * C threads call run() without Python: the file is read, and the part of the photo that the sample
 * shows is decoded into the batch (ops/mn_jpeg.h).
 */
#include "py/ops/mn_ops.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ops/mn_jpeg.h"

#define ATTEMPTS 10
#define FLIP_DRAW (4 * ATTEMPTS)

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

/* Sets the job's region, sizes, window, flip and order for a photo of this size; the rest is left
 * alone. Random numbers: attempt n draws its area, ratio, top and left as numbers 4n to 4n + 3 of
 * operator 0, and the flip is its number 40. */
static void
set_job(const struct mn_photo_part *part, uint32_t width, uint32_t height,
                 uint64_t key_hi, uint64_t key_lo, struct mn_jpeg_job *job)
{
    struct draws d = {key_hi, key_lo};
    job->scaled = part->scaled;
    job->tall_down_first = part->tall_down_first;
    job->window_width = part->width;
    job->window_height = part->height;
    if (part->random) {
        draw_part(part, width, height, &d, job);
    }
    else {
        set_centre(part, width, height, job);
    }
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
        set_job(&photos->part, width, height, key_hi, key_lo, &job);
        if (job.to_width <= MN_JPEG_LONGEST && job.to_height <= MN_JPEG_LONGEST) {
            rc = mn_jpeg_crop(photos->library, photos->kernels, bytes, n, &job, out[0]);
        }
    }
    free(bytes);
    memcpy(out[1], &photos->targets[index], sizeof(int64_t));
    return rc == -ENOMEM ? mn_fail_memory(&text, pixels->bytes) : rc;
}

/* Sets `native` from the other members, where `item` and `kind` are of a pixel's entries. */
static void
describe(struct mn_photos *photos, int64_t length, size_t item, char kind)
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

struct mn_ops_photos {
    PyObject_HEAD
    struct mn_photos photos;
    Py_ssize_t n;
    PyObject *library;
    Py_buffer targets, table;
};

static struct mn_ops_photos *
self_of(PyObject *object)
{
    return (struct mn_ops_photos *)(void *)object;
}

static int
take_paths(struct mn_ops_photos *self, PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list);
    self->photos.paths = calloc((size_t)n + 1, sizeof(char *));
    if (self->photos.paths == NULL) {
        return (PyErr_NoMemory(), -1);
    }
    for (; self->n < n; self->n++) {
        self->photos.paths[self->n] = mn_ops_copy_path(PyList_GET_ITEM(list, self->n));
        if (self->photos.paths[self->n] == NULL) {
            return -1;
        }
    }
    return 0;
}

/* Reads (random, tall_down_first, scaled, size, width, height, scale, ratio, log_ratio, flip).
 * Returns 0 or -1 with an exception. */
static int
take_part(PyObject *tuple, struct mn_photo_part *part)
{
    int random, tall, scaled;
    if (!PyArg_ParseTuple(tuple, "pppIII(dd)(dd)(dd)d", &random, &tall, &scaled, &part->size,
                          &part->width, &part->height, &part->scale[0], &part->scale[1],
                          &part->ratio[0], &part->ratio[1], &part->log_ratio[0],
                          &part->log_ratio[1], &part->flip)) {
        return -1;
    }
    part->random = random;
    part->tall_down_first = tall;
    part->scaled = scaled;
    bool sound = part->width != 0 && part->height != 0 && part->width <= MN_JPEG_LONGEST
                 && part->height <= MN_JPEG_LONGEST
                 && (random || (part->size >= part->width && part->size >= part->height));
    if (!sound) {
        PyErr_SetString(PyExc_ValueError, "a sample's size must be from 1 to 65535 pixels");
    }
    return sound ? 0 : -1;
}

/* Takes what the type's documentation says. Returns 0 or -1 with an exception. */
static int
take(struct mn_ops_photos *self, PyObject *args)
{
    PyObject *library, *list, *part;
    int kind;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "OO!y*y*CKO!", &library, &PyList_Type, &list, &self->targets,
                          &self->table, &kind, &most, &PyTuple_Type, &part)) {
        return -1;
    }
    self->library = Py_NewRef(library);
    self->photos.library = PyCapsule_GetPointer(library, MN_OPS_JPEG_LIBRARY);
    if (self->photos.library == NULL || take_paths(self, list) < 0
        || take_part(part, &self->photos.part) < 0) {
        return -1;
    }
    size_t item = (size_t)self->table.len / (3 * 256);
    if ((size_t)self->table.len != 3 * 256 * item || (item != 1 && item != 2 && item != 4)
        || self->targets.len != self->n * (Py_ssize_t)sizeof(int64_t)) {
        return MN_RAISE(PyExc_ValueError, "the paths, the targets and the table do not fit");
    }
    self->photos.kernels = mn_kernels_best();
    self->photos.table = self->table.buf;
    self->photos.targets = self->targets.buf;
    self->photos.most_pixels = most;
    describe(&self->photos, self->n, item, (char)kind);
    return 0;
}

static PyObject *
new_photos(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    PyObject *object = type->tp_alloc(type, 0);
    if (object != NULL && take(self_of(object), args) < 0) {
        Py_CLEAR(object);
    }
    return object;
}

static void
dealloc(PyObject *object)
{
    struct mn_ops_photos *self = self_of(object);
    for (Py_ssize_t i = 0; i < self->n; i++) {
        free(self->photos.paths[i]);
    }
    free(self->photos.paths);
    PyBuffer_Release(&self->targets);
    PyBuffer_Release(&self->table);
    Py_XDECREF(self->library);
    mn_free_object(object);
}

PyDoc_STRVAR(job_doc,
             "job(part, width, height, key_hi, key_lo) -> (region, size, window, flip)\n\n"
             "What the sample with this key shows of a photo of this size; part as in Photos.");

static PyObject *
job(PyObject *Py_UNUSED(type), PyObject *args)
{
    struct mn_photo_part part;
    struct mn_jpeg_job j = {0};
    PyObject *tuple;
    unsigned int width, height;
    unsigned long long hi, lo;
    if (!PyArg_ParseTuple(args, "O!IIKK", &PyTuple_Type, &tuple, &width, &height, &hi, &lo)
        || take_part(tuple, &part) < 0) {
        return NULL;
    }
    if (width == 0 || height == 0) {
        return PyErr_Format(PyExc_ValueError, "a photo has at least one pixel");
    }
    set_job(&part, width, height, hi, lo, &j);
    return Py_BuildValue("(IIII)(II)(IIII)N", j.left, j.top, j.width, j.height, j.to_width,
                         j.to_height, j.window_left, j.window_top, j.window_width,
                         j.window_height, PyBool_FromLong(j.flip));
}

PyDoc_STRVAR(native_doc, "native() -> capsule of struct mn_native_pipeline (minato/ops.h)");

static PyObject *
native(PyObject *object, PyObject *Py_UNUSED(args))
{
    return mn_ops_native_capsule(object, &self_of(object)->photos.native);
}

static PyMethodDef methods[] = {
    {"job", job, METH_VARARGS | METH_STATIC, job_doc},
    {"native", native, METH_NOARGS, native_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_photos},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Photos(library, paths, targets (int64), table, kind, most_pixels, (random, "
                "tall_down_first, scaled, size, width, height, scale, ratio, log_ratio, flip))"},
    {0, NULL},
};

PyType_Spec mn_ops_photos_spec = {"minato._ops.Photos", sizeof(struct mn_ops_photos), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, type_slots};
