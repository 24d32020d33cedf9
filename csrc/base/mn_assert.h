/* Assertions, and labelled points at which tests can make a process die.
 * SPDX-License-Identifier: Apache-2.0
 *
 * mn_assert(cond)   Active unless NDEBUG. Calls mn_assert_hook and aborts if that returns.
 * MN_FAULT("name")  Nothing unless built with -DMN_FAULTS; then it calls mn_fault_hook if
 *                   one is set, which may kill the process or fail the next system call.
 *                   The label is "module.step", naming what has just been done.
 *
 * Both hooks are process-wide and are set before any thread that may meet them starts;
 * they are plain pointers for that reason. The product never sets either.
 */
#ifndef MN_ASSERT_H
#define MN_ASSERT_H

#include "base/mn_attr.h"

/* Told the place and text of an assertion that failed. The first one prints to stderr. */
extern void (*mn_assert_hook)(const char *file, int line, const char *text);

MN_NORETURN void
mn_assert_failed(const char *file, int line, const char *text);

#ifdef NDEBUG
#define mn_assert(cond) ((void)sizeof((cond) ? 1 : 0))
#else
#define mn_assert(cond)                                                                 \
    (mn_likely(cond) ? (void)0 : mn_assert_failed(__FILE__, __LINE__, #cond))
#endif

/* NULL, or what a fault point calls with its label. */
extern void (*mn_fault_hook)(const char *name);

#ifdef MN_FAULTS
#define MN_FAULT(name) (mn_fault_hook != 0 ? mn_fault_hook(name) : (void)0)
#else
#define MN_FAULT(name) ((void)0)
#endif

#endif /* MN_ASSERT_H */
