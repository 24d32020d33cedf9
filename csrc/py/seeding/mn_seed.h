/* Seeder: puts random generators into the state that belongs to one sample.
 * SPDX-License-Identifier: Apache-2.0
 *
 * A Seeder holds *targets*: the three global generators, the private ones of a
 * dataset, and functions that take a seed.  Seeding computes the words of each
 * target's state (mn_seed_mix.h) and puts them there by one of
 *
 *   fill   written straight into the generator object's memory, at offsets that
 *          minato/seeding/generator_states.py found by search and checked against the public API
 *   torch  written into a tensor that torch's own Generator.set_state takes
 *   call   handed to a Python function that goes through the generator's public API
 *   hook   no words: a function that takes a 63-bit seed
 *
 * A Seeder may watch the attributes of a dataset and of what it holds: a generator that is
 * made while a sample is made is found by a new walk when the types of attributes change, or
 * the generators themselves, and is seeded from then on. Looking at that costs some nanoseconds
 * an attribute.
 *
 * A private generator is left as the program left it until a sample draws from it, and that
 * sample is made again, with seeds: so what a dataset builds when it is first asked for, it
 * builds from the same state in each worker.
 *
 * A Seeder knows which ranks share the epoch (struct mn_seed_share): positions that it is given
 * are those of its own rank.
 *
 * Both ways to the same generator end in the same state.  A Seeder belongs to one
 * thread at a time; the generators are protected as their libraries do it.
 */
#ifndef MN_SEED_H
#define MN_SEED_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "py/seeding/mn_seed_mix.h"

/* Adds the type Seeder to the module. 0, or -1 with an exception. */
int
mn_seed_add_types(PyObject *module);

/* Seeds every target. seeder must be a Seeder (unchecked: this is the worker's inner
 * loop). With the GIL. 0, or -1 with an exception. */
int
mn_seeder_seed(PyObject *seeder, uint64_t base_seed, uint64_t epoch, uint64_t position,
               uint32_t domain);

/* Reads a tuple (rank, world, block). 0, or -1 with an exception. */
int
mn_seed_share_parse(PyObject *ranks, struct mn_seed_share *share);

/* Looks, after a sample was made, whether it has made a generator that is not seeded yet, or
 * has drawn from one that was left as it was. seeder must be a Seeder (unchecked). 1: it is seeded
 * from now on, the sample is to be seeded and made again, and this to be asked again; 0: no; -1
 * with an exception. */
int
mn_seeder_renew(PyObject *seeder);

/* The second of these alone, also after a sample that has failed. */
int
mn_seeder_drawn(PyObject *seeder);

/* Looks for generators whatever the attributes say, as after code of the dataset's that is there
 * to change it. 1: there are others, which are seeded from now on; 0: no; -1. */
int
mn_seeder_look(PyObject *seeder);

#endif
