/* mn_envelope.h - how a pickled message with buffers out of band lies in the arena.
 * SPDX-License-Identifier: Apache-2.0
 *
 * The records are in workers/mn_records.h.  Big parts (MN_FIELD_BIG and more) begin on pages of
 * their own, so each can be handed to the caller and freed by itself; the small ones are copied
 * out.  The envelope's first byte is on a page, and a seal tells whether it was damaged.
 */
#ifndef MN_ENVELOPE_H
#define MN_ENVELOPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "engine/mn_checked_results.h"
#include "workers/mn_worker.h"

/* What an entry of an envelope of rows is: those that C makes, of minato/workers/answers.py. */
enum mn_extra {
    MN_EXTRA_SAMPLE = 0,
    MN_EXTRA_ERROR = 1,
    MN_EXTRA_OBJECTS = 2,
    MN_EXTRA_FATAL = 6, /* as ERROR, of no sample: none of the task was tried */
};

/* Writes pickle and buffers (a list of objects, C-contiguous) for the task in hand into the
 * worker's lease; the GIL is released meanwhile. 0 (also where the memory limit leaves no room:
 * the task then says so), 1 when the loader stopped, -1 with an exception. */
int
mn_envelope_send(struct mn_worker_side *side, uint32_t task, const char *pickle,
                 Py_ssize_t pickle_bytes, PyObject *list);

/* Copies of the parts' records, [env->nparts], to be freed with PyMem_Free, of an envelope that
 * answers this issue of a task and whose pickle has been copied. env: of mn_envelope_look, of the
 * len bytes there. NULL with an exception where the seal is not that of it. */
struct mn_envelope_part *
mn_envelope_open(const void *at, uint64_t len, const struct mn_envelope *env, uint64_t issue,
                 const char *pickle);

#endif
