/* Included before everything else when programs are built for an emulator. AArch64 lets no
 * sequentially consistent load (LDAR) pass such a store before it (STLR). qemu 7.2 turns both into
 * plain moves, which x86 does reorder. Then two threads that each store a word and read the other's
 * may both see the old value, and both go to sleep. A barrier after each store restores the
 * processor's guarantee.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_EMULATOR_H
#define MN_EMULATOR_H

#include <stdatomic.h>

#undef atomic_store_explicit
#define atomic_store_explicit(at, value, order)                                         \
    (__atomic_store_n(at, value, order),                                                \
     (order) == memory_order_seq_cst ? __atomic_thread_fence(memory_order_seq_cst) : (void)0)

#endif
