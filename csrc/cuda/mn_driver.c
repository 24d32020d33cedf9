/* The driver of CUDA devices, found at run time.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cuda/mn_driver.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "minato/ops.h"

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

int
mn_driver_open(struct mn_driver *driver, const char *library, int ordinal, const void *image,
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

int
mn_driver_finish(const struct mn_driver *driver, void *stream, const struct mn_finish *job,
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
