/* Assertions.
 * SPDX-License-Identifier: Apache-2.0
 *
 * mn_assert(cond)  Active unless NDEBUG. Calls mn_assert_hook and aborts if that returns.
 *
 * The hook is process-wide and is set before any thread that may meet it starts; it is a plain
 * pointer for that reason. Only tests set it.
 */
#ifndef MN_ASSERT_H
#define MN_ASSERT_H

#include "base/mn_attr.h"

/* Called with the place and text of a failed assertion. By default it prints to stderr. */
extern void (*mn_assert_hook)(const char *file, int line, const char *text);

MN_NORETURN void
mn_assert_failed(const char *file, int line, const char *text);

#ifdef NDEBUG
#define mn_assert(cond) ((void)sizeof((cond) ? 1 : 0))
#else
#define mn_assert(cond)                                                                 \
    (mn_likely(cond) ? (void)0 : mn_assert_failed(__FILE__, __LINE__, #cond))
#endif

#endif
