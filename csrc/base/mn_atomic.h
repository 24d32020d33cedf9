/* Atomic words whose operations carry their memory order in their name.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Purpose
 *   The only file that includes stdatomic.h. A reader of any other file sees the order of
 *   every shared access in the call itself, and no access is seq_cst by accident.
 *
 * Types
 *   mn_a32, mn_a64: _Atomic uint32_t and uint64_t without a separate lock. So they mean the same in
 *   memory mapped by several processes, built by either compiler.
 *
 * Operations (T is uint32_t or uint64_t, W is mn_a32 or mn_a64)
 *   T    W_load_relaxed / _acquire / _seqcst     (const W *)
 *   void W_store_relaxed / _release / _seqcst    (W *, T)
 *   T    W_xchg_acqrel / _seqcst                 (W *, T)              returns the old
 *   bool W_cas_acqrel / _seqcst                  (W *, T *expected, T desired)
 *   T    W_add_relaxed / _acqrel / _seqcst       (W *, T)              returns the old
 *
 *   The compare-and-swap is the strong one: false means that another value was there,
 *   which is then in *expected, read with acquire (seq_cst for _seqcst).
 *   There are no fences: ThreadSanitizer does not follow them, so the order belongs on the
 *   operation.
 *
 * A crash leaves each word either old or new, never torn.
 */
#ifndef MN_ATOMIC_H
#define MN_ATOMIC_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/mn_base.h"

typedef _Atomic uint32_t mn_a32;
typedef _Atomic uint64_t mn_a64;

MN_STATIC_ASSERT(sizeof(mn_a32) == 4 && _Alignof(mn_a32) == 4, "mn_a32 is a bare word");
MN_STATIC_ASSERT(sizeof(mn_a64) == 8 && _Alignof(mn_a64) == 8, "mn_a64 is a bare word");
MN_STATIC_ASSERT(ATOMIC_INT_LOCK_FREE == 2 && sizeof(int) == 4, "32 bits lock free");
MN_STATIC_ASSERT(ATOMIC_LLONG_LOCK_FREE == 2 && sizeof(long long) == 8,
                 "64 bits lock free");

#define MN_ATOMIC_LOAD(W, T, name, order)                                               \
    static inline T W##_load_##name(const W *p)                                         \
    {                                                                                   \
        return atomic_load_explicit(p, order);                                          \
    }

#define MN_ATOMIC_STORE(W, T, name, order)                                              \
    static inline void W##_store_##name(W *p, T value)                                  \
    {                                                                                   \
        atomic_store_explicit(p, value, order);                                         \
    }

#define MN_ATOMIC_XCHG(W, T, name, order)                                               \
    static inline T W##_xchg_##name(W *p, T value)                                      \
    {                                                                                   \
        return atomic_exchange_explicit(p, value, order);                               \
    }

#define MN_ATOMIC_CAS(W, T, name, order, order_failed)                                  \
    static inline bool W##_cas_##name(W *p, T *expected, T desired)                     \
    {                                                                                   \
        return atomic_compare_exchange_strong_explicit(p, expected, desired, order,     \
                                                       order_failed);                   \
    }

#define MN_ATOMIC_ADD(W, T, name, order)                                                \
    static inline T W##_add_##name(W *p, T value)                                       \
    {                                                                                   \
        return atomic_fetch_add_explicit(p, value, order);                              \
    }

#define MN_ATOMIC_WORD(W, T)                                                            \
    MN_ATOMIC_LOAD(W, T, relaxed, memory_order_relaxed)                                 \
    MN_ATOMIC_LOAD(W, T, acquire, memory_order_acquire)                                 \
    MN_ATOMIC_LOAD(W, T, seqcst, memory_order_seq_cst)                                  \
    MN_ATOMIC_STORE(W, T, relaxed, memory_order_relaxed)                                \
    MN_ATOMIC_STORE(W, T, release, memory_order_release)                                \
    MN_ATOMIC_STORE(W, T, seqcst, memory_order_seq_cst)                                 \
    MN_ATOMIC_XCHG(W, T, acqrel, memory_order_acq_rel)                                  \
    MN_ATOMIC_XCHG(W, T, seqcst, memory_order_seq_cst)                                  \
    MN_ATOMIC_CAS(W, T, acqrel, memory_order_acq_rel, memory_order_acquire)             \
    MN_ATOMIC_CAS(W, T, seqcst, memory_order_seq_cst, memory_order_seq_cst)             \
    MN_ATOMIC_ADD(W, T, relaxed, memory_order_relaxed)                                  \
    MN_ATOMIC_ADD(W, T, acqrel, memory_order_acq_rel)                                   \
    MN_ATOMIC_ADD(W, T, seqcst, memory_order_seq_cst)

MN_ATOMIC_WORD(mn_a32, uint32_t)
MN_ATOMIC_WORD(mn_a64, uint64_t)

#undef MN_ATOMIC_WORD
#undef MN_ATOMIC_ADD
#undef MN_ATOMIC_CAS
#undef MN_ATOMIC_XCHG
#undef MN_ATOMIC_STORE
#undef MN_ATOMIC_LOAD

/* Tells the core that this is a spinning loop. It orders nothing. */
static inline void
mn_cpu_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__) || defined(__arm__)
    __asm__ __volatile__("yield");
#endif
}

#endif
