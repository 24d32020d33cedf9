/* What a failed assertion does, and the hook of fault points.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "base/mn_base.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

void (*mn_fault_hook)(const char *name) = NULL;

void
mn_assert_failed(const char *file, int line, const char *text)
{
    (void)fprintf(stderr, "minato: %s:%d: assertion failed: %s\n", file, line, text);
    (void)fflush(stderr);
    abort();
}
