/* What every layer uses: attributes, results, a little arithmetic, assertions, fault points.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Results
 *   A function returns 0 or a negative errno. Where "nothing there", "no space" and "over" are
 *   ordinary outcomes they are positive values, so that a caller cannot mistake them for failures.
 *   One file in py/ turns codes into exceptions; nothing below it does.
 *
 * mn_assert(cond)   Active unless NDEBUG. Prints the place and the text, and aborts.
 *
 * MN_FAULT("name")  Nothing unless built with -DMN_FAULTS. Then it calls mn_fault_hook if one is
 *                   set, which may kill the process or fail the next system call. The label is
 *                   "module.step", naming what has just been done. The hook is process-wide and is
 *                   set before any thread that may meet it starts; it is a plain pointer for that
 *                   reason. Only py/module/mn_module.c and tests set it.
 *
 * MN_BUG_NAME       Where a protocol or a promise rests on one statement, this macro turns it into
 *                   a wrong one. No normal build defines any. `make mutants` builds with each
 *                   (-DMN_BUG_NAME) and expects the runs in tests/test_mutants.py to fail.
 */
#ifndef MN_BASE_H
#define MN_BASE_H

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

/* ---- attributes: one spelling for what gcc and clang call by different names ---- */

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

/* ---- results ---- */

#define MN_OK 0
#define MN_EMPTY 1
#define MN_FULL 2
#define MN_CLOSED 3

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

/* ---- assertions and faults ---- */

MN_NORETURN void
mn_assert_failed(const char *file, int line, const char *text);

#ifdef NDEBUG
#define mn_assert(cond) ((void)sizeof((cond) ? 1 : 0))
#else
#define mn_assert(cond)                                                                 \
    (mn_likely(cond) ? (void)0 : mn_assert_failed(__FILE__, __LINE__, #cond))
#endif

/* Called with the label of each fault point; may be NULL. */
extern void (*mn_fault_hook)(const char *name);

#ifdef MN_FAULTS
#define MN_FAULT(name) (mn_fault_hook != 0 ? mn_fault_hook(name) : (void)0)
#else
#define MN_FAULT(name) ((void)0)
#endif

#endif
