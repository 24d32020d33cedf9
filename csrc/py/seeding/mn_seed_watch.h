/* What a Seeder looks at after each sample, to find generators that it has made.
 * SPDX-License-Identifier: Apache-2.0
 *
 * No code of the program's runs in a look. The owner sets find and the counters.
 */
#ifndef MN_SEED_WATCH_H
#define MN_SEED_WATCH_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

/* What may change of attributes. Each has a pause of its own: a cache that grows with every
 * sample must not hide that a generator has come to an attribute. */
enum { MN_SEED_TYPES, MN_SEED_LENGTHS, MN_SEED_COUNTS, MN_SEED_CHANGES };

struct mn_seed_change {
    uint64_t print; /* when it was looked at last */
    uint32_t pause; /* samples until the next look, */
    uint32_t wait;  /* and how many there will be after the next walk in vain; 0: one */
};

/* What is looked at after each sample. */
struct mn_seed_watch {
    PyObject *dicts;   /* tuple of dicts, or NULL: nothing is watched */
    PyObject *counted; /* the same, of which only the number of entries is looked at */
    PyObject *find;    /* () -> None or (entries, dicts, counted, types): what is there now */
    PyObject *types;   /* tuple: of generators; another one of these is a change, too */
    struct mn_seed_change changes[MN_SEED_CHANGES];
    uint32_t renewals;
};

/* Of the types of attributes that may hold something, with generators' addresses; of the lengths
 * of lists and dicts among them; and of how many attributes others have. */
void
mn_seed_watch_prints(const struct mn_seed_watch *w, uint64_t prints[MN_SEED_CHANGES]);

/* What there is now is no change. */
void
mn_seed_watch_note(struct mn_seed_watch *w);

/* -1 with an exception, and all is as it was. */
int
mn_seed_watch_set(struct mn_seed_watch *w, PyObject *dicts, PyObject *counted, PyObject *types);

/* Whether one of them is due to be looked at and is another; each in its bit. */
unsigned
mn_seed_watch_changes(struct mn_seed_watch *w);

/* Delays the next look at these changes, because a walk that they led to has found nothing. */
void
mn_seed_watch_pause(struct mn_seed_watch *w, unsigned changed);

#endif
