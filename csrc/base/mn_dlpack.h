/* mn_dlpack.h - the part of the DLPack ABI (version 1) by which tensors cross to torch.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Declared here by layout, so that the core needs no header of torch and is not tied to one version
 * of torch. Source of the layout: the DLPack specification, C API, "DLPackExchangeAPI".
 */
#ifndef MN_DLPACK_H
#define MN_DLPACK_H

#include <stdbool.h>
#include <stdint.h>

#include "base/mn_base.h"

enum { MN_DL_CPU = 1 };

enum mn_dl_code {
    MN_DL_INT = 0,
    MN_DL_UINT = 1,
    MN_DL_FLOAT = 2,
    MN_DL_BFLOAT = 4,
    MN_DL_COMPLEX = 5,
    MN_DL_BOOL = 6,
};

struct mn_dl_dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct mn_dl_tensor {
    void *data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    struct mn_dl_dtype dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL: C order */
    uint64_t byte_offset;
};
MN_STATIC_ASSERT(sizeof(struct mn_dl_tensor) == 48, "DLTensor of the DLPack ABI");

struct mn_dl_version {
    uint32_t major;
    uint32_t minor;
};

struct mn_dl_managed {
    struct mn_dl_version version;
    void *manager_ctx;
    void (*deleter)(struct mn_dl_managed *self);
    uint64_t flags;
    struct mn_dl_tensor tensor;
};

typedef void (*mn_dl_set_error)(void *ctx, const char *kind, const char *message);

/* torch's functions. Each returns 0, or -1 after a failure. All but allocate need the GIL and leave
 * a Python exception set when they fail; allocate reports its failure by set_error(error_ctx, ...),
 * which takes the GIL if it needs it. */
struct mn_dl_api {
    struct mn_dl_version version;
    const void *prev_api;
    int (*allocate)(struct mn_dl_tensor *prototype, struct mn_dl_managed **out, void *error_ctx,
                    mn_dl_set_error set_error);
    int (*managed_from_object)(void *object, struct mn_dl_managed **out);
    /* owns the tensor from now on: torch calls its deleter even if this fails */
    int (*object_from_managed)(struct mn_dl_managed *tensor, void **out_object);
    int (*tensor_from_object)(void *object, struct mn_dl_tensor *out);
    int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
};

/* The functions of minato._torch, where it is built; a capsule of this name holds a pointer to this
 * struct. All need the GIL.
 * inspect: returns 1 and fills *out (valid until the tensor is changed) for a dense tensor whose
 * bytes are its values, 0 for any other. Raises no exception.
 * copy: returns a new tensor (a PyObject) in torch's own memory, in C order, with these bytes; NULL
 * with an exception set.
 * profiled: returns whether a profiler or another observer of torch's record_function is active. */
#define MN_PLAIN_TENSOR "minato._torch.plain_tensor"

struct mn_plain_tensor {
    int (*inspect)(void *object, struct mn_dl_tensor *out);
    void *(*copy)(const void *data, struct mn_dl_dtype dtype, int ndim, const int64_t *shape,
                  uint64_t bytes);
    bool (*profiled)(void);
};

#endif
