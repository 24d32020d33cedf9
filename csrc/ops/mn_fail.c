/* Error texts of the operators.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "ops/mn_fail.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>

int
mn_fail(struct mn_text *text, int code, const char *format, ...)
{
    if (text != NULL && text->size > 0) {
        va_list args;
        va_start(args, format);
        vsnprintf(text->chars, text->size, format, args);
        va_end(args);
    }
    return -code;
}

int
mn_fail_memory(struct mn_text *text, size_t bytes)
{
    return mn_fail(text, ENOMEM, "out of memory: cannot allocate %zu bytes", bytes);
}
