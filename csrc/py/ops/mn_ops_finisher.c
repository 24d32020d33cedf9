/* minato._ops.Finisher: the kernel that finishes samples, on one CUDA device.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The driver is found at run time. Nothing of CUDA is linked and none of its headers is needed: its
 * library is opened by name, and the few functions that are called are declared here as in its ABI.
 * So this is built everywhere and works where there is a driver. Only cuda/mn_finish.cu needs a
 * compiler for devices; it comes as an image: code for several devices in one file.
 *
 * A struct mn_driver never changes once it is open: any thread may use it. Its module stays loaded,
 * and the device's primary context retained, until the process ends. Kernels may still be running,
 * and that context is the one that torch uses.
 */
#include "py/ops/mn_ops.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "ops/mn_recipe.h"
#include "minato/ops.h"
#include "ops/mn_fail.h"

struct mn_driver {
    void *context, *kernel;
    int (*push)(void *context);
    int (*pop)(void **context);
    int (*launch)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                  unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                  void *stream, void **parameters, void **extra);
    int (*name_of)(int code, const char **name);
};

/* The driver's own limits lie above these. Beyond them a thread handles several voxels, and a row
 * of blocks several samples. */
#define BLOCKS_MAX 65535u
#define SAMPLES_MAX 65535u

/* The head of an image. The driver does not get the image's length as an argument; it reads it
 * here. */
struct image_head {
    uint32_t magic;
    uint16_t version, head_bytes;
    uint64_t body_bytes;
};

#define IMAGE_MAGIC 0xBA55ED50u

/* Functions that are called only once. */
struct opening {
    int (*init)(unsigned flags);
    int (*device_get)(int *device, int ordinal);
    int (*retain)(void **context, int device);
    int (*load)(void **module, const void *image);
    int (*function)(void **kernel, void *module, const char *name);
};

static int
failed(const struct mn_driver *driver, struct mn_text *text, const char *what, int code)
{
    const char *name = NULL;
    if (driver->name_of(code, &name) != 0 || name == NULL) {
        name = "an error without a name";
    }
    return mn_fail(text, EIO, "%s: %s (%d)", what, name, code);
}

/* Looks a function up. Turns a data pointer into a function pointer, which POSIX allows. */
static bool
find(void *library, const char *name, void *function)
{
    void *address = dlsym(library, name);
    memcpy(function, &address, sizeof(address));
    return address != NULL;
}

static bool
find_all(void *library, struct mn_driver *driver, struct opening *opening)
{
    return find(library, "cuInit", &opening->init)
           && find(library, "cuDeviceGet", &opening->device_get)
           && find(library, "cuDevicePrimaryCtxRetain", &opening->retain)
           && find(library, "cuModuleLoadData", &opening->load)
           && find(library, "cuModuleGetFunction", &opening->function)
           && find(library, "cuCtxPushCurrent_v2", &driver->push)
           && find(library, "cuCtxPopCurrent_v2", &driver->pop)
           && find(library, "cuLaunchKernel", &driver->launch)
           && find(library, "cuGetErrorName", &driver->name_of);
}

/* Returns whether the driver would read no further than to the image's end. */
static bool
is_whole(const void *image, size_t length)
{
    struct image_head head;
    if (length < sizeof(head)) {
        return false;
    }
    memcpy(&head, image, sizeof(head));
    return head.magic == IMAGE_MAGIC && head.head_bytes >= sizeof(head)
           && head.head_bytes <= length && head.body_bytes <= length - head.head_bytes;
}

static int
load(struct mn_driver *driver, const struct opening *opening, const void *image,
     struct mn_text *text)
{
    void *module = NULL, *before = NULL;
    int rc = driver->push(driver->context);
    if (rc != 0) {
        return failed(driver, text, "cuCtxPushCurrent", rc);
    }
    const char *what = "cuModuleLoadData";
    rc = opening->load(&module, image);
    if (rc == 0) {
        what = "cuModuleGetFunction";
        rc = opening->function(&driver->kernel, module, "mn_finish_kernel");
    }
    (void)driver->pop(&before);
    return rc == 0 ? 0 : failed(driver, text, what, rc);
}

/* Opens the driver's library and loads the image for one device. Initialises the driver, and leaves
 * the thread's current context unchanged. Returns 0; EINVAL: not an image, or it is cut short;
 * ENOENT: there is no such library; EIO: an error of the driver. */
static int
open_driver(struct mn_driver *driver, const char *library, int ordinal, const void *image,
               size_t length, struct mn_text *text)
{
    struct opening opening;
    int device = 0, rc;
    if (!is_whole(image, length)) {
        return mn_fail(text, EINVAL,
                       "the kernels that were built are damaged or cut short: build minato again");
    }
    void *handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        return mn_fail(text, ENOENT, "there is no %s, the driver's library", library);
    }
    /* It is never closed: drivers do not expect that. */
    if (!find_all(handle, driver, &opening)) {
        return mn_fail(text, EIO, "%s is too old", library);
    }
    const char *what = "cuInit";
    rc = opening.init(0);
    if (rc == 0) {
        what = "cuDeviceGet";
        rc = opening.device_get(&device, ordinal);
    }
    if (rc == 0) {
        what = "cuDevicePrimaryCtxRetain";
        rc = opening.retain(&driver->context, device);
    }
    return rc == 0 ? load(driver, &opening, image, text) : failed(driver, text, what, rc);
}

static bool
makes_sense(const struct mn_finish *job)
{
    bool changes = job->to == MN_DTYPE_F32 || job->to == MN_DTYPE_U8;
    uint64_t plane = (uint64_t)job->height * job->width;
    return job->from >= MN_DTYPE_U8 && job->from <= MN_DTYPE_F64
           && (changes || job->to == job->from) && (job->which == 0 || job->which == 1)
           && plane <= MN_FINISH_VOXELS && plane * job->depth != 0
           && job->voxels % (plane * job->depth) == 0
           && (job->source != NULL || (job->windows != NULL && job->n_cases > 0));
}

/* Starts the job in the order of this stream (a CUstream of that device). The memory that the job
 * names must live until the stream has passed it. Returns 0; EINVAL: the job makes no sense; EIO:
 * an error of the driver. */
static int
start_job(const struct mn_driver *driver, void *stream, const struct mn_finish *job,
                 struct mn_text *text)
{
    struct mn_finish copy = *job; /* the driver takes pointers even to what it only reads */
    void *parameters[] = {&copy}, *before = NULL;
    if (job->samples == 0 || job->voxels == 0) {
        return 0;
    }
    if (!makes_sense(job)) {
        return mn_fail(text, EINVAL, "a device cannot finish volumes of these shapes or dtypes");
    }
    uint32_t blocks = (job->voxels - 1) / MN_FINISH_THREADS + 1;
    blocks = blocks < BLOCKS_MAX ? blocks : BLOCKS_MAX;
    uint32_t samples = job->samples < SAMPLES_MAX ? job->samples : SAMPLES_MAX;
    int rc = driver->push(driver->context);
    if (rc != 0) {
        return failed(driver, text, "cuCtxPushCurrent", rc);
    }
    rc = driver->launch(driver->kernel, blocks, samples, 1, MN_FINISH_THREADS, 1, 1, 0, stream,
                        parameters, NULL);
    (void)driver->pop(&before);
    return rc == 0 ? 0 : failed(driver, text, "cuLaunchKernel", rc);
}

struct mn_ops_finisher {
    PyObject_HEAD
    struct mn_driver driver;
};

static struct mn_ops_finisher *
self_of(PyObject *object)
{
    return (struct mn_ops_finisher *)(void *)object;
}

/* An error of the driver is never the fault of an argument or a file. */
static PyObject *
raise_text(int rc, const struct mn_text *text)
{
    PyErr_SetString(rc == -EINVAL ? PyExc_ValueError : PyExc_RuntimeError, text->chars);
    return NULL;
}

static PyObject *
new_finisher(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(kwargs))
{
    const char *library, *image;
    Py_ssize_t length;
    int ordinal, rc;
    MN_OPS_NEW_TEXT(text);
    if (!PyArg_ParseTuple(args, "siy#", &library, &ordinal, &image, &length)) {
        return NULL;
    }
    PyObject *object = type->tp_alloc(type, 0);
    if (object == NULL) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = open_driver(&self_of(object)->driver, library, ordinal, image,
                        (size_t)length, &text);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        Py_DECREF(object);
        return raise_text(rc, &text);
    }
    return object;
}

/* No tp_traverse: it refers only to its type. */
static void
dealloc(PyObject *object)
{
    mn_free_object(object);
}

/* Reads (samples, channels, depth, height, width). */
static int
take_shape(struct mn_finish *job, const unsigned long long *shape)
{
    unsigned long long voxels = 1;
    for (int axis = 1; axis < 5; axis++) {
        if (shape[axis] == 0 || shape[axis] > MN_FINISH_VOXELS / voxels) {
            PyErr_SetString(PyExc_ValueError,
                            "a volume needs at least 1 voxel, and fewer than 2^32");
            return -1;
        }
        voxels *= shape[axis];
    }
    if (shape[0] > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "too many samples");
        return -1;
    }
    job->samples = (uint32_t)shape[0];
    job->voxels = (uint32_t)voxels;
    job->depth = (uint32_t)shape[2];
    job->height = (uint32_t)shape[3];
    job->width = (uint32_t)shape[4];
    return 0;
}

PyDoc_STRVAR(run_doc,
             "run(stream, which, dtypes, shape, source, target, recipes, steps, windows=0, "
             "cases=0, n_cases=0)\n\n"
             "Starts to finish the images (which 0) or labels (1) of a batch in the order of this "
             "CUstream. Arguments: dtypes before and after, shape (samples, channels, depth, "
             "height, width), addresses on the device, and the steps of each recipe. Without a "
             "source, samples are windows of the cases. The memory must live until the stream has "
             "passed it.");

static PyObject *
run(PyObject *object, PyObject *args)
{
    unsigned long long stream, shape[5], source, target, recipes, windows = 0, cases = 0;
    struct mn_finish job = {0};
    MN_OPS_NEW_TEXT(text);
    int rc;
    if (!PyArg_ParseTuple(args, "Ki(ii)(KKKKK)KKKI|KKI", &stream, &job.which, &job.from, &job.to,
                          &shape[0], &shape[1], &shape[2], &shape[3], &shape[4], &source,
                          &target, &recipes, &job.steps, &windows, &cases, &job.n_cases)
        || take_shape(&job, shape) < 0) {
        return NULL;
    }
    job.source = (const unsigned char *)(uintptr_t)source;
    job.target = (unsigned char *)(uintptr_t)target;
    job.recipes = (const uint64_t *)(uintptr_t)recipes;
    job.windows = (const int64_t *)(uintptr_t)windows;
    job.cases = (const struct mn_resident *)(uintptr_t)cases;
    Py_BEGIN_ALLOW_THREADS
    rc = start_job(&self_of(object)->driver, (void *)(uintptr_t)stream, &job, &text);
    Py_END_ALLOW_THREADS
    if (rc < 0) {
        return raise_text(rc, &text);
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"run", run, METH_VARARGS, run_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_finisher},
    {Py_tp_dealloc, dealloc},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Finisher(library, ordinal, image): loads the image for one device."},
    {0, NULL},
};

PyType_Spec mn_ops_finisher_spec = {"minato._ops.Finisher", sizeof(struct mn_ops_finisher), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, type_slots};
