/* minato/ops.h: the public C interface of minato's native operators.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Two things are public:
 *   1. struct mn_operator, in a capsule named MN_OPERATOR_CAPSULE: your own operator in C.
 *      ops.Pipeline runs it between its own operators, without the GIL.
 *   2. struct mn_native_pipeline, in a capsule named MN_NATIVE_CAPSULE: the result of a dataset's
 *      native_pipeline(). C threads make the dataset's samples with it.
 *
 * This header needs neither Python.h nor a library. Structures grow only at the end. `size` is
 * the size of the structure as its maker compiled it. Any other change increases `abi`. The memory
 * that a capsule points to must live as long as the capsule.
 *
 * Volumes are channel first: shape {channel, depth, height, width}.
 * Functions return 0 or a negative errno. On failure they write a zero-terminated message into
 * err. They are called without the GIL, by several threads at once.
 */
#ifndef MINATO_OPS_H
#define MINATO_OPS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MN_OPS_ABI 1u
#define MN_OPERATOR_CAPSULE "minato.operator.v1"
#define MN_NATIVE_CAPSULE "minato.native_pipeline.v1"
#define MN_VOLUME_DIMS 4
#define MN_NATIVE_DIMS 8
#define MN_NATIVE_FIELDS 8

enum mn_dtype {
    MN_DTYPE_NONE = 0, /* no volume */
    MN_DTYPE_U8 = 1,
    MN_DTYPE_I16 = 2,
    MN_DTYPE_U16 = 3,
    MN_DTYPE_I32 = 4,
    MN_DTYPE_F32 = 5,
    MN_DTYPE_F64 = 6
};

/* -- Random numbers ------------------------------------------------------------------- */

/* Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
 * The Philox key is key_lo. The counter is {block, number | stream << 16, key_hi}, so two
 * different tuples never share a counter. A draw of an operator is one block of stream 0.
 * Stream 1 is the operators' bulk noise. Streams from 256 on are free for your operators. */
static inline void
mn_philox(uint64_t key_hi, uint64_t key_lo, uint32_t number, uint32_t stream,
          uint32_t block, uint32_t out[4])
{
    uint32_t k0 = (uint32_t)key_lo, k1 = (uint32_t)(key_lo >> 32);
    uint32_t c0 = block, c1 = (number & 0xFFFFu) | (stream << 16);
    uint32_t c2 = (uint32_t)key_hi, c3 = (uint32_t)(key_hi >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)c0 * 0xD2511F53u;
        uint64_t p1 = (uint64_t)c2 * 0xCD9E8D57u;
        c0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* Returns draw number `draw` of operator `number`: 64 random bits. */
static inline uint64_t
mn_draw_bits(uint64_t key_hi, uint64_t key_lo, uint32_t number, uint32_t draw)
{
    uint32_t w[4];
    mn_philox(key_hi, key_lo, number, 0, draw, w);
    return (uint64_t)w[0] << 32 | w[1];
}

/* Returns the same draw as a double in [0, 1): its upper 53 bits. */
static inline double
mn_draw_uniform(uint64_t key_hi, uint64_t key_lo, uint32_t number, uint32_t draw)
{
    return (double)(mn_draw_bits(key_hi, key_lo, number, draw) >> 11) * 0x1p-53;
}

/* Returns the same draw as an integer in 0..bound-1, for bound from 1 to 2^32. It is the draw
 * times bound, divided by 2^64. The bias is under bound / 2^64. */
static inline uint64_t
mn_draw_below(uint64_t key_hi, uint64_t key_lo, uint32_t number, uint32_t draw,
              uint64_t bound)
{
    uint64_t bits = mn_draw_bits(key_hi, key_lo, number, draw);
    uint64_t low = (bits & 0xFFFFFFFFu) * bound >> 32;
    return ((bits >> 32) * bound + low) >> 32;
}

/* -- Operators of your own ------------------------------------------------------------ */

struct mn_op_volume {
    void *data;      /* first voxel; NULL in plan, or if there is no such volume */
    int32_t dtype;   /* enum mn_dtype; MN_DTYPE_NONE: there is no such volume */
    int32_t reserved;
    int64_t shape[MN_VOLUME_DIMS];   /* voxels */
    int64_t strides[MN_VOLUME_DIMS]; /* bytes; operators always get C contiguous volumes */
};

struct mn_op_call {
    uint32_t size;   /* sizeof(struct mn_op_call) of the caller */
    uint32_t number; /* this operator's place in its pipeline, from 0: for mn_draw_* */
    uint64_t key_hi, key_lo; /* the sample's key: for mn_draw_* */
    struct mn_op_volume image, label;
};

/* plan  NULL: the operator works in place, and run gets out == in. Otherwise plan sets dtype and
 *       shape of out->image and out->label, which are preset to those of in. data is NULL in both,
 *       and strides are not used. The result may depend on dtypes and shapes only, not on the key:
 *       plan is called before any sample is known.
 * run   Writes every voxel of out. It must not store a pointer, and must not change dtype, shape or
 *       strides. The result may depend on `in` and `state` only.
 * `state` is passed to both. It must outlive the capsule, or the capsule's destructor frees it. */
struct mn_operator {
    uint32_t abi;  /* MN_OPS_ABI */
    uint32_t size; /* sizeof(struct mn_operator) */
    const char *name;
    void *state;
    int (*plan)(void *state, const struct mn_op_call *in, struct mn_op_call *out,
                char *err, size_t errlen);
    int (*run)(void *state, const struct mn_op_call *in, struct mn_op_call *out, char *err,
               size_t errlen);
};

/* -- A dataset's samples from C threads ----------------------------------------------- */

struct mn_native_field {
    char kind;        /* as in NumPy: 'f' float, 'u' unsigned, 'i' signed */
    uint8_t itemsize; /* bytes per element */
    uint16_t reserved;
    int32_t ndim;     /* 0: a scalar of kind 'i' and 8 bytes; Python code gets an int */
    int64_t shape[MN_NATIVE_DIMS];
    uint64_t bytes; /* of the whole field, C contiguous */
};

/* What run returns for a sample that only the dataset's own __getitem__ can make. */
#define MN_NATIVE_ASK_PYTHON 1

/* How the key of a sample is made; see mn_native_key. */
enum mn_native_keying {
    MN_KEYED_BY_EPOCH = 0, /* from the dataset's seed, the epoch and the index */
    MN_KEYED_BY_SAMPLE = 1 /* from the seed that the loader gives the sample */
};

struct mn_native_pipeline {
    uint32_t abi;  /* MN_OPS_ABI */
    uint32_t size; /* sizeof(struct mn_native_pipeline) */
    void *state;
    int64_t length;  /* samples: valid indices are 0..length-1 */
    uint32_t keying; /* enum mn_native_keying */
    int32_t n_fields;
    uint64_t seed; /* of the dataset; used by MN_KEYED_BY_EPOCH */
    struct mn_native_field fields[MN_NATIVE_FIELDS];
    /* Writes sample `index` to out[0..n_fields-1]: out[i] has fields[i].bytes bytes, aligned to
     * at least itemsize. Any number of threads may call it at once. After a failure, and with
     * MN_NATIVE_ASK_PYTHON, the content of out is undefined. */
    int (*run)(void *state, int64_t index, uint64_t key_hi, uint64_t key_lo, void **out,
               char *err, size_t errlen);
    /* MN_KEYED_BY_EPOCH: the address of the dataset's epoch number, aligned, read before each
     * sample. NULL: the epoch of the loader's last set_epoch(), or 0. */
    const uint64_t *epoch;
};

/* Computes the key of a sample. Python uses this function, too, so a sample has the same bytes in
 * every kind of worker. epoch and index are taken modulo 2^32. */
static inline void
mn_native_key(uint32_t keying, uint64_t dataset_seed, uint64_t epoch, int64_t index,
              uint64_t sample_seed, uint64_t *key_hi, uint64_t *key_lo)
{
    if (keying == MN_KEYED_BY_SAMPLE) {
        *key_hi = sample_seed;
        *key_lo = UINT64_MAX;
    }
    else {
        *key_hi = dataset_seed;
        *key_lo = (epoch & 0xFFFFFFFFu) << 32 | ((uint64_t)index & 0xFFFFFFFFu);
    }
}

#ifdef __cplusplus
}
#endif

#endif /* MINATO_OPS_H */
