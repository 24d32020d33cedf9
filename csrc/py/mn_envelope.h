/* mn_envelope.h - how a pickled message with buffers out of band lies in the arena.
 * SPDX-License-Identifier: Apache-2.0
 *
 *   struct mn_envelope | struct mn_envelope_part[nparts] | pickle | small parts | big parts
 *
 * Big parts (MN_FIELD_BIG and more) begin on pages of their own, so each can be handed to
 * the caller and freed by itself; the small ones are copied out.  Offsets are relative to
 * the envelope, whose first byte is on a page.
 */
#ifndef MN_ENVELOPE_H
#define MN_ENVELOPE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>

#include "base/mn_attr.h"
#include "load/mn_worker.h"

struct mn_envelope {
    uint64_t nparts;
    uint64_t pickle_at;
    uint64_t pickle_bytes;
    uint64_t pad0;
};

struct mn_envelope_part {
    uint64_t at;
    uint64_t bytes;
};
MN_STATIC_ASSERT(sizeof(struct mn_envelope) == 32, "layout shared between processes");

/* Writes pickle and buffers (a list of objects, C-contiguous) for the task in hand into the
 * worker's outbox; the GIL is released meanwhile. 0 (also where the memory limit leaves no room:
 * the task then says so), 1 when the loader stopped, -1 with an exception. */
int
mn_envelope_send(struct mn_worker_side *side, struct mn_task *t, const char *pickle,
                 Py_ssize_t pickle_bytes, PyObject *list);

#endif
