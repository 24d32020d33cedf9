/* Arithmetic that policies share.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_POLICY_ARITHMETIC_H
#define MN_POLICY_ARITHMETIC_H

#include <stdbool.h>
#include <stdint.h>

/* Returns a * b, or INT64_MAX on overflow. Both must not be negative. */
static inline int64_t
mn_times(int64_t a, int64_t b)
{
    int64_t out;
    return __builtin_mul_overflow(a, b, &out) ? INT64_MAX : out;
}

/* Returns whether a value has moved by more than a share of what it was: 4 for a quarter. */
static inline bool
mn_moved(int64_t was, int64_t now, int64_t share)
{
    int64_t by = was > now ? was - now : now - was;
    return by > was / share;
}

#endif
