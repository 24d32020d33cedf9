/* Input of the kernel that finishes one volume of each sample of a batch on a device.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Processors fill it in (py/ops/mn_ops_finisher.c), and devices read it (cuda/mn_finish.cu). So its
 * only pointers are to memory of the device, and its layout is the same for both.
 *
 * The unfinished voxels lie in `source`, sample after sample. Or they are a window of a whole case
 * that stays on the device. Then each sample has a window (ops/mn_recipe.h), and `cases` say where
 * the cases are. A window that makes no sense is still read within its case.
 */
#ifndef MN_FINISH_H
#define MN_FINISH_H

#include <stdint.h>

/* Threads of a block, and most voxels of a sample: places in a volume have 32 bits. */
#define MN_FINISH_THREADS 256u
#define MN_FINISH_VOXELS UINT32_MAX

/* A volume that stays on the device, C contiguous. */
struct mn_resident {
    const unsigned char *voxels;
    int64_t shape[3]; /* depth, height, width: at least a window's; the job has the channels */
};

struct mn_finish {
    const unsigned char *source; /* volumes, C contiguous, one after the other; NULL: use windows */
    unsigned char *target;       /* the same voxels, finished; must not overlap source */
    const uint64_t *recipes;     /* MN_RECIPE_WORDS(steps) words for each sample */
    const int64_t *windows;      /* MN_WINDOW_WORDS words for each sample */
    const struct mn_resident *cases;
    uint32_t n_cases;
    uint32_t samples, steps;
    uint32_t voxels;                /* per sample: channels * depth * height * width */
    uint32_t depth, height, width;
    int32_t from, to; /* enum mn_dtype of source and target */
    int32_t which;    /* 0: the image, 1: the label */
};

#endif
