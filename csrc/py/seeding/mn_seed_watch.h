/* Detects, after each sample, that a Seeder's dataset has made new generators.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A look runs no code of the program's. The owner sets find and the counters.
 */
#ifndef MN_SEED_WATCH_H
#define MN_SEED_WATCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* The kinds of change of attributes. Each has its own pause: a cache that grows with every sample
 * must not hide that an attribute has got a generator. */
enum { MN_SEED_TYPES, MN_SEED_LENGTHS, MN_SEED_COUNTS, MN_SEED_CHANGES };

struct mn_seed_change {
    uint64_t print; /* at the last look */
    uint32_t pause; /* samples until the next look */
    uint32_t wait;  /* the pause after the next walk in vain; 0: one */
};

/* The objects that are checked after each sample. */
struct mn_seed_watch {
    PyObject *dicts;   /* tuple of dicts; NULL: nothing is watched */
    PyObject *counted; /* likewise, but only their number of entries is checked */
    PyObject *find;    /* (after set_epoch) -> None or (entries, dicts, counted, types) */
    PyObject *types;   /* tuple of generator types; another object of these is a change, too */
    struct mn_seed_change changes[MN_SEED_CHANGES];
    uint32_t renewals;
};

/* Computes three fingerprints. The first is of the types of attributes that may contain something,
 * with generators' addresses. The second is of the lengths of lists, dicts, sets and deques among
 * them. The third is of the numbers of entries of the counted dicts. */
void
mn_seed_watch_prints(const struct mn_seed_watch *w, uint64_t prints[MN_SEED_CHANGES]);

/* Takes the present state as the one without change. */
void
mn_seed_watch_note(struct mn_seed_watch *w);

/* Sets what is watched. Returns 0; -1 with an exception, and nothing has changed. */
int
mn_seed_watch_set(struct mn_seed_watch *w, PyObject *dicts, PyObject *counted, PyObject *types);

/* Returns which prints are due to be checked and have changed; one bit each. */
unsigned
mn_seed_watch_changes(struct mn_seed_watch *w);

/* Delays the next look at these changes, because the walk after them has found nothing. */
void
mn_seed_watch_pause(struct mn_seed_watch *w, unsigned changed);

#endif
