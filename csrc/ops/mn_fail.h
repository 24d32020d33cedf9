/* Error texts of the operators: a result code together with a sentence for the user.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every function that can fail takes a struct mn_text. On failure it returns a negative errno and
 * writes the reason, naming the file if there is one. Codes: EINVAL if the caller's arguments or
 * the file's contents are wrong, and ENOMEM. ERANGE if there is no such index. Otherwise the error
 * of the system call.
 */
#ifndef MN_FAIL_H
#define MN_FAIL_H

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include "base/mn_base.h"

struct mn_text {
    char *chars;
    size_t size; /* with the closing zero; 0: the caller does not want the text */
};

/* Writes the text, cut to size, and returns -code. */
static inline MN_PRINTF(3, 4) int
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

/* Writes that `bytes` bytes of memory could not be allocated, and returns -ENOMEM. */
static inline int
mn_fail_memory(struct mn_text *text, size_t bytes)
{
    return mn_fail(text, ENOMEM, "out of memory: cannot allocate %zu bytes", bytes);
}

#endif
