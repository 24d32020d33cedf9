/* mn_fuzz.h - what the fuzz targets share: one function each, which libFuzzer or mn_fuzz_main.c
 * calls.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_FUZZ_H
#define MN_FUZZ_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define MUST(condition)                                                                \
    do {                                                                               \
        if (!(condition)) {                                                            \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);    \
            abort();                                                                   \
        }                                                                              \
    } while (0)

/* A copy that ends where the bytes end, so that a sanitizer sees reads past it. */
static inline void *
copied(const void *bytes, size_t n)
{
    void *copy = malloc(n + (n == 0));
    MUST(copy != NULL);
    memcpy(copy, bytes, n);
    return copy;
}

/* Takes a number off the front of the input; 0 where there is not enough left. */
static inline uint64_t
number(const uint8_t **data, size_t *n)
{
    uint64_t value = 0;
    if (*n >= sizeof(value)) {
        memcpy(&value, *data, sizeof(value));
        *data += sizeof(value);
        *n -= sizeof(value);
    }
    return value;
}

#endif
