/* One volume of each sample of a batch, to be finished on a device: what a kernel is given.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Processors fill it in (cuda/mn_driver.c), and devices read it (cuda/mn_finish.cu), so it has
 * no pointers to anything but memory of the device, and the same layout for both.
 *
 * What is to be finished lies in `source`, sample after sample, or is a window of a whole case
 * that the device keeps: then each sample has a window (ops/mn_recipe.h), and `cases` say where
 * they are. A window that makes no sense is read within its case all the same.
 */
#ifndef MN_FINISH_H
#define MN_FINISH_H

#include <stdint.h>

/* Threads of a block, and voxels of a sample at most: places in a volume have 32 bits. */
#define MN_FINISH_THREADS 256u
#define MN_FINISH_VOXELS UINT32_MAX

/* A volume that stays on the device, C contiguous. */
struct mn_resident {
    const unsigned char *voxels;
    int64_t shape[3]; /* depth, height, width: at least a window's; the channels are the job's */
};

struct mn_finish {
    const unsigned char *source; /* volumes, C contiguous, one after the other; NULL: windows */
    unsigned char *target;       /* the same voxels, finished; shares nothing with source */
    const uint64_t *recipes;     /* MN_RECIPE_WORDS(steps) words of each sample */
    const int64_t *windows;      /* MN_WINDOW_WORDS words of each sample */
    const struct mn_resident *cases;
    uint32_t n_cases;
    uint32_t samples, steps;
    uint32_t voxels;                /* of a sample: channels * depth * height * width */
    uint32_t depth, height, width;
    int32_t from, to; /* enum mn_dtype of source and target */
    int32_t which;    /* 0: the image, 1: the label */
};

#endif /* MN_FINISH_H */
