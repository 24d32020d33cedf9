/* Included before all else where programs are built for an emulator. AArch64 lets no sequentially
 * consistent load (LDAR) pass such a store before it (STLR). qemu 7.2 makes plain moves of both,
 * which x86 does reorder: of two threads that store a word each and then read the other's, both
 * may see the old one, and both go to sleep. A barrier behind each store keeps what the processor
 * promises.
 * SPDX-License-Identifier: Apache-2.0
 */
#ifndef MN_EMULATOR_H
#define MN_EMULATOR_H

#include <stdatomic.h>

#undef atomic_store_explicit
#define atomic_store_explicit(at, value, order)                                         \
    (__atomic_store_n(at, value, order),                                                \
     (order) == memory_order_seq_cst ? __atomic_thread_fence(memory_order_seq_cst) : (void)0)

#endif /* MN_EMULATOR_H */
