/* Seeder: puts random generators into the state that belongs to one sample.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A Seeder holds *targets*: the three global generators, the private ones of a dataset, and
 * functions that take a seed. Seeding computes the words of each target's state (mn_seed_mix.h)
 * and puts them there in one of these ways:
 *
 *   fill   written straight into the generator object's memory, at offsets that
 *          minato/seeding/generator_states.py found by search and checked against the public API
 *   torch  written into a tensor that torch's own Generator.set_state takes
 *   call   passed to a Python function that goes through the generator's public API
 *   hook   no words: a function that takes a 63-bit seed
 *
 * A Seeder may watch the attributes of a dataset and of the objects in it. A generator may be made
 * while a sample is made. Then the types of attributes change, or the generators themselves; a new
 * walk finds the generator, and it is seeded from then on. A look at that costs some nanoseconds
 * per attribute.
 *
 * A Seeder knows which ranks share the epoch (struct mn_seed_share): the positions that it is given
 * are those of its own rank.
 *
 * Both ways to the same generator end in the same state. A Seeder belongs to one thread at a time;
 * the generators are protected as their libraries do it.
 */
#ifndef MN_SEED_H
#define MN_SEED_H

#include "py/module/mn_python.h" /* first */

#include <stdbool.h>
#include <stdint.h>

#include "py/seeding/mn_seed_mix.h"

/* Seeds every target. seeder must be a Seeder (unchecked: this is the worker's inner loop). Needs
 * the GIL. Returns 0, or -1 with an exception. */
int
mn_seeder_seed(PyObject *seeder, uint64_t base_seed, uint64_t epoch, uint64_t position,
               uint32_t domain);

/* Reads a tuple (rank, world, block). Returns 0, or -1 with an exception. */
int
mn_seed_share_parse(PyObject *ranks, struct mn_seed_share *share);

/* Called after a sample was made. Checks whether the sample has made a new generator. seeder must
 * be a Seeder (unchecked). Returns 1: yes, and it is seeded from now on; 0: no; -1 with an
 * exception. */
int
mn_seeder_renew(PyObject *seeder);

/* Searches for generators even if no attribute has changed, as after code of the dataset that is
 * there to change it. Returns 1: there are others, which are seeded from now on; 0: no; -1. */
int
mn_seeder_look(PyObject *seeder);

/* ---- targets: each is one generator (or seed function) that a Seeder seeds ----
 *
 * Offsets come from minato/seeding/generator_states.py and are checked here only against the size
 * of the object that they point into.
 */

/* As many as the largest layouts need. Philox has two runs of words and twelve fixed words (buffer,
 * its position, the cached half). RandomState has three fixed words. */
#define MN_SEED_MAX_RUNS 2
#define MN_SEED_MAX_FIXED 12

enum mn_seed_kind {
    MN_SEED_NONE,
    MN_SEED_FILL,
    MN_SEED_TORCH,
    MN_SEED_CALL,
    MN_SEED_HOOK,
};

/* n words, from word `first` on, written at byte dst_off of an object. */
struct mn_seed_run {
    uint32_t dst_off;
    uint32_t first;
    uint32_t n;
};

/* The same 4 bytes for every sample: draw positions, empty caches. */
struct mn_seed_fixed {
    uint32_t dst_off;
    uint32_t value;
};

struct mn_seed_fixed_list {
    uint32_t n;
    struct mn_seed_fixed at[MN_SEED_MAX_FIXED];
};

/* How words reach one object. The kind decides which members are used. */
struct mn_seed_sink {
    enum mn_seed_kind kind;
    PyObject *obj;              /* fill: the generator; torch: the tensor */
    PyObject *lock;             /* fill: its lock between threads, or NULL */
    PyObject *cache_attr;       /* fill: attribute that must become None, or NULL */
    PyObject *function;         /* torch: set_state; call, hook: the function */
    char *blob;                 /* torch: the tensor's memory */
    bool keeps_seed;            /* torch: the value of initial_seed() stays as in the blob */
    uint32_t nwords;            /* fill, call */
    uint32_t or_word;           /* fill: this word gets or_mask, because the algorithm */
    uint32_t or_mask;           /* requires that of its state */
    uint32_t nruns;
    struct mn_seed_run runs[MN_SEED_MAX_RUNS];
    struct mn_seed_fixed_list fixed;
};

struct mn_seed_target {
    uint64_t stream;
    uint64_t own_seed;          /* in place of the base seed, of a generator that the program has
                                 * seeded; or 0 */
    struct mn_seed_sink sink;
    /* A NumPy RandomState around the bit generator that sink fills. Its bit generator may be
     * exchanged at any time. So its current one is compared with bitgen, a strong reference: no
     * other object can get that address. */
    PyObject *owner;
    PyObject *bitgen;
    uint32_t bitgen_off;
    struct mn_seed_fixed_list owner_fixed;
};

/* Makes a target of (label, stream, plan[, own_seed]), written by
 * minato/seeding/generator_states.py. On failure it holds nothing, and an exception is set. */
int
mn_seed_target_open(struct mn_seed_target *t, PyObject *entry);

void
mn_seed_target_close(struct mn_seed_target *t);

int
mn_seed_target_seed(struct mn_seed_target *t, struct mn_seed_key key,
                    const struct mn_seed_isa *isa);

#endif /* MN_SEED_H */
