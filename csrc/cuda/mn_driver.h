/* The driver of CUDA devices, found at run time: loads the kernel of mn_finish.cu, and starts it.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Nothing of CUDA is linked and none of its headers is needed. The driver's library is opened by
 * name, and the few functions that are called are declared here as in its ABI. So this is built
 * everywhere and works where there is a driver. Only the kernel needs a compiler for devices; it
 * comes as an image: code for several devices in one file.
 *
 * A struct mn_driver never changes once it is open: any thread may use it. Its module stays loaded,
 * and the device's primary context retained, until the process ends. Kernels may still be running,
 * and that context is the one that torch uses.
 */
#ifndef MN_DRIVER_H
#define MN_DRIVER_H

#include "cuda/mn_finish.h"
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

/* Opens the driver's library and loads the image for one device. Initialises the driver, and leaves
 * the thread's current context unchanged. Returns 0; EINVAL: not an image, or it is cut short;
 * ENOENT: there is no such library; EIO: an error of the driver. */
int
mn_driver_open(struct mn_driver *driver, const char *library, int ordinal, const void *image,
               size_t length, struct mn_text *text);

/* Starts the job in the order of this stream (a CUstream of that device). The memory that the job
 * names must live until the stream has passed it. Returns 0; EINVAL: the job makes no sense; EIO:
 * an error of the driver. */
int
mn_driver_finish(const struct mn_driver *driver, void *stream, const struct mn_finish *job,
                 struct mn_text *text);

#endif
