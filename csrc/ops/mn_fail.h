/* Error texts of the operators: a result code together with a sentence for the user.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Every function that can fail takes a struct mn_text. It returns a negative errno and has
 * written why, naming the file where there is one. Codes: EINVAL the caller's arguments or
 * the file's contents are wrong, ENOMEM, ERANGE no such index, or what the system call said.
 */
#ifndef MN_FAIL_H
#define MN_FAIL_H

#include <stddef.h>

#include "base/mn_attr.h"

struct mn_text {
    char *chars;
    size_t size; /* with the closing zero; 0: nobody wants the text */
};

/* Writes the text, cut to size, and returns -code. */
int
mn_fail(struct mn_text *text, int code, const char *format, ...) MN_PRINTF(3, 4);

int
mn_fail_memory(struct mn_text *text, size_t bytes);

#endif /* MN_FAIL_H */
