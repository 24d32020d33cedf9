/* One row of voxels from any supported dtype to another.
 * SPDX-License-Identifier: Apache-2.0
 *
 * To float32: C's conversion (nearest, ties to even). To uint8: truncation toward zero, as
 * NumPy does for what fits. Values outside 0..255 become 0 or 255 and NaN becomes 0, where NumPy's
 * result depends on the machine.
 */
#ifndef MN_CONVERT_H
#define MN_CONVERT_H

#include <stdint.h>

#include "ops/mn_kernels.h"

/* Converts n voxels of dtype `from`, `stride` bytes apart, to adjacent ones of dtype `to`, which is
 * `from`, uint8 or float32. dst is aligned for `to`; src need not be. */
void
mn_convert_row(const struct mn_kernels *kernels, void *dst, int to, const void *src,
               int from, int64_t stride, int64_t n);

#endif
