/* See mn_cache_copy.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "cache/mn_cache_copy.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "cache/mn_cache_data.h"

#define SPAN (UINT64_C(256) << 10) /* read at once from a disk, of which runs are copied */

int
mn_cache_copy(const struct mn_cache_found *found, uint64_t off, void *to, uint64_t bytes)
{
    if (off > found->bytes || bytes > found->bytes - off) {
        return -EINVAL;
    }
    return mn_cache_data_read(found->map, found->payload + off, to, bytes);
}

/* Copies n runs of bytes, a stride apart. scratch, for a disk: SPAN bytes, into which neighbouring
 * runs are read at once; NULL: each is copied by itself. */
static int
copy_runs(const struct mn_cache_found *found, uint64_t off, uint64_t run, uint64_t stride,
          uint64_t n, char *to, char *scratch)
{
    uint64_t most = scratch == NULL || run > SPAN / 2 ? 1 : (SPAN - run) / stride + 1, k;
    for (uint64_t done = 0; done < n; done += k) {
        k = n - done < most ? n - done : most;
        uint64_t at = off + done * stride, span = (k - 1) * stride + run;
        int rc = mn_cache_copy(found, at, k == 1 ? to + done * run : scratch, span);
        if (rc != 0) {
            return rc;
        }
        for (uint64_t i = 0; k > 1 && i < k; i++) {
            memcpy(to + (done + i) * run, scratch + i * stride, run);
        }
    }
    return 0;
}

int
mn_cache_copy_box(const struct mn_cache_found *found, uint64_t off,
                  const struct mn_cache_box *box, void *to)
{
    uint64_t run = box->itemsize, stride = box->itemsize, runs = 1;
    int inner = box->ndim; /* dimensions from here on are copied whole, in one run */
    while (inner > 0 && box->count[inner - 1] == box->shape[inner - 1]) {
        inner--;
        run *= box->shape[inner];
        stride *= box->shape[inner];
    }
    if (inner > 0) { /* and of the next one a range */
        inner--;
        off += box->start[inner] * stride;
        run *= box->count[inner];
        stride *= box->shape[inner];
    }
    uint64_t rows = 1, row = stride; /* runs that are neighbours, and from one to the next */
    if (inner > 0) {
        inner--;
        off += box->start[inner] * stride;
        rows = box->count[inner];
        stride *= box->shape[inner];
    }
    for (int d = inner - 1; d >= 0; d--) {
        runs *= box->count[d];
    }
    char *scratch = found->map->data == NULL ? malloc(SPAN) : NULL;
    int rc = 0;
    for (uint64_t r = 0; r < runs && rc == 0; r++) {
        uint64_t left = r, at = off, step = stride;
        for (int d = inner - 1; d >= 0; d--) {
            at += (box->start[d] + left % box->count[d]) * step;
            left /= box->count[d];
            step *= box->shape[d];
        }
        rc = copy_runs(found, at, run, row, rows, (char *)to + r * rows * run, scratch);
    }
    free(scratch);
    return rc;
}
