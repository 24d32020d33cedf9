/* Counter-based generator states: the pure arithmetic of per-sample seeding.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Three levels, each a function of its input alone:
 *
 *   key     = (base_seed, epoch, position, domain) absorbed into 2 x 64 bits. Two
 *             chains of one 64-bit bijection (Pelle Evensen's "moremur" constants)
 *             with different offsets. With the other inputs fixed each chain is a bijection of the
 *             one that varies. So two positions of an epoch can never share a key.
 *   stream  = (key, stream number) mixed into 128 bits k0..k3; with the key fixed
 *             the first half is a bijection of the stream number.
 *   word i  = the low-bias 32-bit finaliser applied to i * (k3 | 1) + k0, with k1 added between its
 *             halves and k2 xored to its result. It has two multiplications, with the constants
 *             0x21f0aaad and 0x735a2d97 of Chris Wellons' and "TheIronBorn"'s search.
 *
 * No level is cryptographic. The two multiplications are enough because a word only has to differ
 * from its neighbours in one state. Everything that distinguishes samples and generators has been
 * through the 64-bit mixer before. The results are part of minato's reproducibility promise:
 * changing any constant changes every seeded run. So tests/seeding/test_seeding.py pins them with
 * a second implementation in Python.
 *
 * Word i depends neither on the number of words requested nor on the instruction set: both variants
 * below are one body compiled twice.
 *
 * When several ranks load one epoch, no two of them may use the same key. If it is known how the
 * sampler deals samples to ranks, the key takes the sample's position in the whole epoch. Otherwise
 * it takes the rank together with the base seed (struct mn_seed_share).
 */
#ifndef MN_SEED_MIX_H
#define MN_SEED_MIX_H

#include <stddef.h>
#include <stdint.h>

#include "workers/mn_records.h"

/* Words in the state of a Mersenne Twister (MT19937), the largest state filled. */
#define MN_SEED_MT_WORDS 624

/* The purpose of a seed, so that no two draws share one. */
enum mn_seed_domain {
    MN_SEED_SAMPLE = 0,   /* position: that of the sample in the sampler's order, or its index */
    MN_SEED_GETITEMS = 1, /* position: the batch's number */
    MN_SEED_COLLATE = 2,  /* the same */
    MN_SEED_SET_EPOCH = 3, /* position: the epoch that the dataset is told */
};

/* In place of a position: MN_SEED_BY_INDEX + the sample's index, where timing decides the order.
 * Ranks that the sampler deals to have different indices, so these take no part in the key. */
#define MN_SEED_BY_INDEX (UINT64_C(1) << 63)

struct mn_seed_key {
    uint64_t lo;
    uint64_t hi;
};

struct mn_seed_stream {
    uint32_t k0;
    uint32_t k1;
    uint32_t k2;
    uint32_t k3;
    uint64_t seed;              /* 63 bits, for targets that take a number as their seed */
};

/* The part of an epoch that this process makes when several ranks load it.
 *
 * world > 0: the sampler deals blocks of consecutive samples to the ranks in turn. So the position
 * of each sample in the whole epoch is known, and the key takes that. Batches count likewise: batch
 * n of this rank is batch n * world + rank of the epoch.
 * world == 0: only the rank is known. The key takes it with the base seed; rank 0 changes
 * nothing. */
struct mn_seed_share {
    uint64_t rank;
    uint64_t world; /* ranks that the sampler deals to, or 0 */
    uint64_t block; /* consecutive samples that one rank gets at a time, at least 1 */
};

/* The share of a process that loads the whole epoch: it changes nothing. */
#define MN_SEED_WHOLE ((struct mn_seed_share){.rank = 0, .world = 1, .block = 1})

/* How words are written: one uint32_t each, or each in the low half of a uint64_t (as torch's state
 * stores them). */
struct mn_seed_isa {
    void (*words)(const struct mn_seed_stream *s, uint32_t *dst, size_t n);
    void (*wide)(const struct mn_seed_stream *s, uint64_t *dst, size_t n);
};

/* The position of a row's sample for its key, or its index, as the block is seeded. */
uint64_t
mn_seed_place(struct mn_block *b, uint32_t row);

struct mn_seed_key
mn_seed_key_make(uint64_t base_seed, uint64_t epoch, uint64_t position,
                 uint32_t domain);

/* Makes the key for a position among those of this rank. */
struct mn_seed_key
mn_seed_key_of_share(const struct mn_seed_share *share, uint64_t base_seed, uint64_t epoch,
                     uint64_t position, uint32_t domain);

struct mn_seed_stream
mn_seed_stream_make(struct mn_seed_key key, uint64_t number);

/* Returns the fastest variant that this processor runs, or the baseline if vector is 0. */
const struct mn_seed_isa *
mn_seed_isa_pick(int vector);

#endif
