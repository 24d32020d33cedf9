/* A driver of CUDA devices that is none: its device is the processor.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Compiled as a library with the few functions that minato/device/provider.py calls, and with
 * the very source of the kernel. A launch runs it at once, thread after thread of block after
 * block. A test can have any function fail.
 */
#include <cstdint>
#include <cstring>

struct extent {
    unsigned x, y, z;
};

static thread_local extent gridDim, blockDim, blockIdx, threadIdx;
static thread_local int contexts;

#define __global__
#define __launch_bounds__(threads)
#include "cuda/mn_finish.cu"

static char failing[64];
static int failure, loads, launches;
static unsigned widest;

#define FAIL(name)                                                                         \
    if (strcmp(failing, name) == 0) {                                                      \
        return failure;                                                                    \
    }

extern "C" {

void
emulated_fails(const char *name, int code)
{
    strncpy(failing, name, sizeof(failing) - 1);
    failure = code;
}

/* Contexts of this thread, images loaded, launches, blocks in the widest of them. */
void
emulated_counts(int *counts)
{
    counts[0] = contexts;
    counts[1] = loads;
    counts[2] = launches;
    counts[3] = (int)widest;
}

int
cuInit(unsigned)
{
    FAIL("cuInit")
    return 0;
}

int
cuDeviceGet(int *device, int ordinal)
{
    FAIL("cuDeviceGet")
    *device = ordinal;
    return ordinal == 0 ? 0 : 101;
}

int
cuDevicePrimaryCtxRetain(void **context, int)
{
    FAIL("cuDevicePrimaryCtxRetain")
    *context = failing;
    return 0;
}

int
cuCtxPushCurrent_v2(void *context)
{
    FAIL("cuCtxPushCurrent")
    contexts++;
    return context == failing ? 0 : 201;
}

int
cuCtxPopCurrent_v2(void **context)
{
    *context = failing;
    contexts--;
    return 0;
}

int
cuModuleLoadData(void **module, const void *image)
{
    FAIL("cuModuleLoadData")
    loads++;
    *module = failing;
    return contexts == 1 && memcmp((const char *)image + 16, "code", 4) == 0 ? 0 : 200;
}

int
cuModuleGetFunction(void **kernel, void *, const char *name)
{
    FAIL("cuModuleGetFunction")
    *kernel = (void *)mn_finish_kernel;
    return strcmp(name, "mn_finish_kernel") == 0 ? 0 : 500;
}

int
cuLaunchKernel(void *kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
               unsigned bz, unsigned, void *, void **parameters, void **)
{
    FAIL("cuLaunchKernel")
    if (contexts != 1 || kernel != (void *)mn_finish_kernel || bx > 1024 || gy > 65535) {
        return 1;
    }
    gridDim = {gx, gy, gz};
    blockDim = {bx, by, bz};
    for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++) {
        for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++) {
            for (threadIdx.x = 0; threadIdx.x < bx; threadIdx.x++) {
                mn_finish_kernel(*(const struct mn_finish *)parameters[0]);
            }
        }
    }
    launches++;
    widest = gx > widest ? gx : widest;
    return 0;
}

int
cuGetErrorName(int code, const char **name)
{
    *name = code == 200 ? "CUDA_ERROR_INVALID_IMAGE" : "CUDA_ERROR_MADE_UP";
    return 0;
}
}
