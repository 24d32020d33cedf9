/* Generators that a Seeder leaves as the program left them, until a sample draws from them.
 * SPDX-License-Identifier: Apache-2.0
 *
 * What a dataset builds when a sample first needs it, it builds from such a generator, so it is the
 * same in each worker. A sample that draws from one is made again, with seeds. The owner may ask
 * for a trial first: the sample is made once more from the same states, which the owner has put
 * back. The Seeder calls the functions below around each sample, with the GIL.
 */
#ifndef MN_SEED_LEFT_H
#define MN_SEED_LEFT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdbool.h>

#include "py/seeding/mn_seed_target.h"

struct mn_seed_left {
    Py_ssize_t count; /* targets that are left */
    PyObject *trial;  /* NULL; or what says whether to try, and hears that a trial has ended */
    bool trying;      /* the sample is being made from the same states again */
};

/* Leaves private targets. states: for each a callable that returns its state, or None for one that
 * is seeded; may be shorter. 0, or -1 with an exception. */
int
mn_seed_left_set(struct mn_seed_left *left, struct mn_seed_target *targets, Py_ssize_t n,
                 PyObject *states);

/* Whether the sample that was just made, or has failed, is to be made again: it has drawn from
 * targets that are left. These are seeded from now on, or after a trial. 1, 0, or -1 with an
 * exception. */
int
mn_seed_left_drawn(struct mn_seed_left *left, struct mn_seed_target *targets, Py_ssize_t n);

#endif
