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

#define PY_SSIZE_T_CLEAN
#include <Python.h>

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

#endif
