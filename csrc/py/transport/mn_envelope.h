/* mn_envelope.h - how a pickled message with out-of-band buffers lies in the arena.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The records are in workers/mn_records.h. Big parts (MN_FIELD_BIG and more) begin on pages of
 * their own, so each can be handed to the caller and freed by itself. The small ones are copied
 * out. The envelope begins at the start of a page.
 */
#ifndef MN_ENVELOPE_H
#define MN_ENVELOPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "engine/mn_checked_results.h"
#include "workers/mn_worker.h"

/* The kinds of entries in an envelope of rows that C makes; see minato/workers/answers.py. */
enum mn_extra {
    MN_EXTRA_SAMPLE = 0,
    MN_EXTRA_ERROR = 1,
    MN_EXTRA_OBJECTS = 2,
    MN_EXTRA_FATAL = 6, /* like ERROR, for no sample: none of the task was tried */
};

/* Writes pickle and buffers (a list of objects, C-contiguous) for the current task into the
 * worker's lease. Releases the GIL meanwhile. Returns 0 (also if the memory limit leaves no room:
 * the task then says so), 1 if the loader stopped, -1 with an exception. */
int
mn_envelope_send(struct mn_worker_side *side, uint32_t task, const char *pickle,
                 Py_ssize_t pickle_bytes, PyObject *list);

/* Copies the parts' records of an envelope: [env->nparts], to be freed with PyMem_Free. env: from
 * mn_envelope_look(), for the len bytes there. Returns NULL with an exception if a part does not
 * lie within them any more. */
struct mn_envelope_part *
mn_envelope_open(const void *at, uint64_t len, const struct mn_envelope *env);

#endif
