/* The handling of failed assertions, and the hook of fault points. See mn_assert.h, mn_fault.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_assert.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/mn_fault.h"

void (*mn_fault_hook)(const char *name) = NULL;

static void
mn_assert_print(const char *file, int line, const char *text)
{
    (void)fprintf(stderr, "minato: %s:%d: assertion failed: %s\n", file, line, text);
    (void)fflush(stderr);
}

void (*mn_assert_hook)(const char *file, int line, const char *text) = mn_assert_print;

void
mn_assert_failed(const char *file, int line, const char *text)
{
    mn_assert_hook(file, line, text);
    abort();
}
