/* One generator (or seed function) that a Seeder seeds; see mn_seed.h.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Offsets come from minato/seeding/generator_states.py and are checked here only against the size
 * of the object that they point into.
 */
#ifndef MN_SEED_TARGET_H
#define MN_SEED_TARGET_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>
#include <stdint.h>

#include "py/seeding/mn_seed_mix.h"

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
    PyObject *label;
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
mn_seed_target_visit(struct mn_seed_target *t, visitproc visit, void *arg);

/* Seeds a target. plan_bitgen: bit generator -> plan, for one that was exchanged. */
int
mn_seed_target_seed(struct mn_seed_target *t, struct mn_seed_key key,
                    const struct mn_seed_isa *isa, PyObject *plan_bitgen);

/* Returns "filled", "setstate", "called" or "absent". */
const char *
mn_seed_target_path(const struct mn_seed_target *t);

#endif
