/* The random numbers of csrc/ops for tests/ops/native.py.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "minato/ops.h"
#include "ops/mn_kernels.h"

double
uniform(uint64_t hi, uint64_t lo, uint32_t number, uint32_t draw)
{
    return mn_draw_uniform(hi, lo, number, draw);
}

uint64_t
below(uint64_t hi, uint64_t lo, uint32_t number, uint32_t draw, uint64_t bound)
{
    return mn_draw_below(hi, lo, number, draw, bound);
}

void
normals(float *out, int64_t n, int64_t first, uint64_t hi, uint64_t lo, uint32_t number, int level)
{
    const struct mn_kernels *kernels = level < 0 ? mn_kernels_best() : mn_kernels_get(level);
    struct mn_key key = {hi, lo, number};
    for (int64_t i = 0; i < n; i++) {
        out[i] = -0.0f; /* the only number to which each other may be added without a change */
    }
    kernels->add_noise(out, n, first, &key, -0.0f, 1.0f);
}
