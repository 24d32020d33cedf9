/* Compiler attributes and compile-time checks used by every layer.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose: one spelling for what gcc and clang call by different names.
 * Knows nothing: no OS, no Python, no allocation.
 */
#ifndef MN_ATTR_H
#define MN_ATTR_H

#include <stdbool.h>
#include <stdint.h>

/* ---- arithmetic ---- */

static inline int64_t
mn_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

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

/* 64 is the line size of every x86-64 and of most AArch64 cores. It is a constant and not queried,
 * because it decides the layout of memory that processes share. */
#define MN_CACHELINE 64

#define MN_ALIGNED(n) __attribute__((aligned(n)))
#define MN_UNUSED __attribute__((unused))
#define MN_NORETURN __attribute__((noreturn))
#define MN_PRINTF(fmt, first) __attribute__((format(printf, fmt, first)))

#define mn_likely(x) __builtin_expect(!!(x), 1)

#ifdef __cplusplus
#define MN_STATIC_ASSERT(cond, msg) static_assert(cond, msg)
#else
#define MN_STATIC_ASSERT(cond, msg) _Static_assert(cond, msg)
#endif

#endif
