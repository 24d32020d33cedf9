/* Headers of .npy files: the size of the file, then its first bytes.
 * SPDX-License-Identifier: Apache-2.0
 */
#define _GNU_SOURCE
#include "mn_fuzz.h"

#include <errno.h>

#include "ops/mn_npy.c"

static void
must_fit(const struct mn_npy *npy, uint64_t file_size)
{
    uint64_t voxels = mn_dtype_size(npy->dtype);
    MUST(voxels != 0);
    for (int axis = 0; axis < MN_VOLUME_DIMS; axis++) {
        MUST(npy->shape[axis] > 0);
        MUST(!__builtin_mul_overflow(voxels, (uint64_t)npy->shape[axis], &voxels));
    }
    MUST(voxels == npy->data_bytes);
    MUST(npy->data_off <= file_size && npy->data_bytes == file_size - npy->data_off);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
    char chars[64];
    struct mn_text text = {chars, sizeof(chars)};
    struct mn_npy npy = {0};
    uint64_t file_size = number(&data, &n), need = 0;
    unsigned char *head = copied(data, n);
    file_size = file_size < n ? n : file_size;
    int rc = parse(&npy, head, n, file_size, "a.npy", &need, &text);
    MUST(rc == 0 || rc == 1 || rc == -EINVAL);
    if (rc == 0) {
        must_fit(&npy, file_size);
    }
    if (rc == 1) {
        MUST(need > n && need <= file_size && need <= MN_NPY_HEADER_MAX);
    }
    if (rc < 0) {
        MUST(memchr(chars, '\0', sizeof(chars)) != NULL && chars[0] != '\0');
    }
    free(head);
    return 0;
}
