/* Normal numbers from Philox blocks, MN_LANES blocks at a time. mn_kernels.c includes this file
 * once per instruction set, before mn_kernels_body.h; so does cuda/mn_finish.cu. For that reason it
 * has no include guard.
 * SPDX-License-Identifier: Apache-2.0
 *
 * MN_LANES 1 is plain C, and C++ for CUDA devices. Otherwise it uses the compiler's vector
 * extension, because the vectorisers give up on the bit patterns below. The order of operations is
 * the same in all versions, so the bytes are the same. MN_MUL_EVEN(a, b) multiplies the even lanes
 * of a to 64 bits, MN_SQRT is the exactly rounded square root.
 *
 * Box and Muller's transform. The maths is Taylor series on reduced ranges, accurate to float's
 * precision for all practical purposes. A table or a library call would differ by machine.
 */

#if MN_LANES == 1
typedef uint32_t MN_K(u32);
typedef int32_t MN_K(i32);
typedef float MN_K(f32);
#define MN_TO_F32(v) ((float)(v))
#else
typedef uint32_t MN_K(u32) __attribute__((vector_size(MN_LANES * 4), may_alias));
typedef int32_t MN_K(i32) __attribute__((vector_size(MN_LANES * 4), may_alias));
typedef float MN_K(f32) __attribute__((vector_size(MN_LANES * 4), may_alias));
typedef uint64_t MN_K(u64) __attribute__((vector_size(MN_LANES * 4), may_alias));
#define MN_TO_F32(v) __builtin_convertvector(v, MN_K(f32))
#endif

/* One of the two multiplications of a Philox round: *high and *low of *a times m. */
MN_VOXEL void
MN_K(multiply)(const MN_K(u32) *a, uint32_t m, MN_K(u32) *high, MN_K(u32) *low)
{
#if MN_LANES == 1
    uint64_t product = (uint64_t)*a * m;
    *high = (uint32_t)(product >> 32);
    *low = (uint32_t)product;
#else
    MN_K(u64) even = MN_MUL_EVEN((MN_K(u64))*a, (MN_K(u64)){0} + m);
    MN_K(u64) odd = MN_MUL_EVEN((MN_K(u64))*a >> 32, (MN_K(u64)){0} + m);
    const MN_K(u64) upper = (MN_K(u64)){0} + 0xFFFFFFFF00000000u;
    *high = (MN_K(u32))((even >> 32) | (odd & upper));
    *low = (MN_K(u32))((even & ~upper) | (odd << 32));
#endif
}

/* -2 log(a / 2^31), a = the word's upper 31 bits, at least 1: exactly 0 at a = 2^31, which
 * the conversion's rounding can give. */
MN_VOXEL void
MN_K(minus_two_log)(const MN_K(u32) *word, MN_K(f32) *result)
{
    MN_K(f32) a = MN_TO_F32((MN_K(i32))((*word >> 1) | 1u));
    MN_K(i32) bits, exponent;
    memcpy(&bits, &a, sizeof(a));
    /* 0x3f3504f3 is sqrt(1/2): the mantissa lands in [sqrt(1/2), sqrt(2)). */
    exponent = (bits - 0x3f3504f3) >> 23;
    bits = (MN_K(i32))((MN_K(u32))bits - ((MN_K(u32))exponent << 23));
    memcpy(&a, &bits, sizeof(a));
    MN_K(f32) s = (a - 1.0f) / (a + 1.0f), q = s * s;
    /* log a = 2 atanh s; q < 0.0295, so the next term is under 1e-9 of the sum. */
    MN_K(f32) sum = q * (1.0f / 9) + 1.0f / 7;
    sum = q * sum + 1.0f / 5;
    sum = q * sum + 1.0f / 3;
    sum = q * sum + 1.0f;
    MN_K(f32) log = 2.0f * s * sum + MN_TO_F32(exponent - 31) * 0.69314718f;
    *result = -2.0f * log;
}

/* Turns two words into two normals. */
MN_VOXEL void
MN_K(box_muller)(const MN_K(u32) *a, const MN_K(u32) *b, float *first, float *second)
{
    MN_K(f32) radius;
    MN_K(minus_two_log)(a, &radius);
    radius = MN_SQRT(radius);
    /* The lower 30 bits: an angle t in [-pi/4, pi/4). The upper 2: the quarter. */
    MN_K(f32) t = MN_TO_F32((MN_K(i32))((*b << 2) ^ 0x80000000u))
                  * (float)(3.14159265358979 / 4 / 0x1p31);
    MN_K(f32) q = t * t;
    MN_K(f32) sine = q * (1.0f / 362880) + -1.0f / 5040;
    sine = q * sine + 1.0f / 120;
    sine = q * sine + -1.0f / 6;
    sine = (q * sine + 1.0f) * t;
    MN_K(f32) cosine = q * (-1.0f / 3628800) + 1.0f / 40320;
    cosine = q * cosine + -1.0f / 720;
    cosine = q * cosine + 1.0f / 24;
    cosine = q * cosine + -1.0f / 2;
    cosine = q * cosine + 1.0f;
    MN_K(f32) x = radius * cosine, y = radius * sine;
    MN_K(u32) xb, yb;
    memcpy(&xb, &x, sizeof(x));
    memcpy(&yb, &y, sizeof(y));
    /* Quarter 0: (x, y), 1: (-y, x), 2: (-x, -y), 3: (y, -x). */
    MN_K(u32) quarter = *b >> 30;
    MN_K(u32) differ = (xb ^ yb) & (0u - (quarter & 1u));
    xb = (xb ^ differ) ^ (((quarter + 1u) & 2u) << 30);
    yb = (yb ^ differ) ^ ((quarter & 2u) << 30);
    memcpy(first, &xb, sizeof(xb));
    memcpy(second, &yb, sizeof(yb));
}

/* Makes the normals of MN_LANES blocks: the four of a block go to out, out + step and so on. */
MN_VOXEL void
MN_K(normals_of)(const uint32_t *blocks, const struct mn_key *key, float *out, int step)
{
    uint32_t k0 = (uint32_t)key->lo, k1 = (uint32_t)(key->lo >> 32);
    MN_K(u32) c0, c1 = {0}, c2 = {0}, c3 = {0};
    memcpy(&c0, blocks, sizeof(c0));
    c1 += (key->number & 0xFFFFu) | MN_STREAM_NOISE << 16;
    c2 += (uint32_t)key->hi;
    c3 += (uint32_t)(key->hi >> 32);
#if defined(__clang__)
#pragma clang loop unroll(full)
#elif defined(__CUDACC__)
#pragma unroll
#else
#pragma GCC unroll 10
#endif
    for (int round = 0; round < 10; round++) {
        MN_K(u32) h0, l0, h1, l1;
        MN_K(multiply)(&c0, 0xD2511F53u, &h0, &l0);
        MN_K(multiply)(&c2, 0xCD9E8D57u, &h1, &l1);
        c0 = h1 ^ c1 ^ k0;
        c2 = h0 ^ c3 ^ k1;
        c1 = l1;
        c3 = l0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    MN_K(box_muller)(&c0, &c1, out, out + step);
    MN_K(box_muller)(&c2, &c3, out + 2 * step, out + 3 * step);
}

#undef MN_TO_F32
