/* mn_min.h - the smaller of two numbers.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_MIN_H
#define MN_MIN_H

#include <stdint.h>

static inline int64_t
mn_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

#endif
