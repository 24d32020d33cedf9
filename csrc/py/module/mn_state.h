/* mn_state.h - state of the module minato._core, and what its files share.
 * SPDX-License-Identifier: Apache-2.0
 *
 * No mutable globals: each module object has one of these.
 */
#ifndef MN_STATE_H
#define MN_STATE_H

#include "py/module/mn_python.h" /* first */

#include <stdbool.h>
#include <stdint.h>

#include "base/mn_dlpack.h"
#include "engine/mn_batches.h"
#include "engine/mn_engine.h"
#include "os/mn_proc.h"
#include "workers/mn_tasks_and_retries.h"

struct mn_pending;

/* The types of minato._core, of mn_<name>_spec each. */
#define MN_STATE_TYPES(X)                                                                \
    X(engine) X(block) X(segment) X(worker) X(layout) X(arena_view) X(pagelock) X(costs) \
    X(hands_out) X(seeder)

/* Names that are looked up often. */
#define MN_STATE_NAMES(X)                                                                \
    X(str_requires_grad, "requires_grad") X(str_is_neg, "is_neg")                        \
    X(str_is_conj, "is_conj") X(str_next, "__next__") X(str__next, "_next")              \
    X(str_head, "head") X(str_popleft, "popleft")

/* Other objects of the state: types of tuples whose items have names; torch, bound by bind_torch(),
 * because the core itself is built without its headers. */
#define MN_STATE_OBJECTS(X)                                                              \
    X(task_type) X(envelope_type) X(loss_type) X(span_type) X(decision_type) X(epoch_type) \
    X(tensor_type)    /* torch.Tensor */                                                 \
    X(from_view)      /* (view, code, bits, shape) -> tensor, fallback */                \
    X(weak_ref)       /* tensor -> int, a weak reference to its storage */               \
    X(torch_iterator) /* torch's class for iterators with workers, ... */                \
    X(torch_next)     /* ... and its __next__ */

struct mn_state {
#define MN_TYPE(name) PyTypeObject *name##_type;
#define MN_NAME(name, text) PyObject *name;
    MN_STATE_TYPES(MN_TYPE)
    MN_STATE_NAMES(MN_NAME)
#undef MN_TYPE
#undef MN_NAME
    PyTypeObject *task_type, *envelope_type, *loss_type, *span_type, *decision_type, *epoch_type;
    PyTypeObject *tensor_type;
    PyObject *from_view, *weak_ref, *torch_iterator, *torch_next;
    const struct mn_dl_api *dlpack;      /* torch's C exchange interface, or NULL */
    const struct mn_plain_tensor *plain; /* of minato._torch; NULL: use dlpack */
    struct mn_pending *pending;          /* ranges whose storage may still be visible */
};

extern struct PyModuleDef mn_core_module;

/* ---- tuples whose items have names ---- */

/* Finds the types of mn_state, which are those of minato/_records.py. Called for an Engine or a
 * Worker, because the module itself can be loaded without the package. Returns 0, or -1 with an
 * exception. */
int
mn_find_records(struct mn_state *st);

/* Makes one of the types of mn_state from values as for Py_BuildValue, in two pairs of
 * parentheses. Returns NULL with an exception. */
PyObject *
mn_named_tuple(PyTypeObject *type, const char *format, ...);

/* Makes a task that Python must handle. Takes over both objects. Either may be NULL with an
 * exception; then so is the result. */
PyObject *
mn_task_tuple(const struct mn_state *st, const struct mn_task *t, const struct mn_block *b,
              PyObject *indices, PyObject *extras);

/* ---- the pipeline in C of a Worker: mn_native_worker_type.c ---- */

/* Returns the indices that the sampler gave for a block, those of spare samples at the end: a list
 * of int, or the bytes that dumps() has made of them. NULL with an exception. */
PyObject *
mn_sent_indices(struct mn_block *b);

struct mn_native_part;
struct mn_worker_clock;
struct mn_worker_side;

/* Opens it from a tuple (capsule, number of the stream of samples' seeds, ranks as Seeder.share()
 * takes them, indices of a subset or None). Returns NULL with an exception. */
struct mn_native_part *
mn_native_open(PyObject *parts);

void
mn_native_close(struct mn_native_part *o);

/* Makes samples until a task needs Python. Returns that Task, which is RUNNING, with indices as
 * bytes of pickle or a list of int, and a sample's error as extras. False: it is over. NULL with an
 * exception. */
PyObject *
mn_native_next(struct mn_state *st, struct mn_native_part *o, struct mn_worker_side *side,
               struct mn_worker_clock *clock, uint32_t *task);

extern PyMethodDef mn_native_functions[];

/* Returns the model in a CostModel; NULL with an exception for another object. */
struct mn_shared_costs *
mn_costs_of(struct mn_state *st, PyObject *costs);

extern PyMethodDef mn_process_functions[]; /* mn_process.c */

/* Returns the records of a worker, also from a copy of its entry. Takes over `running`; it may be
 * NULL with an exception. */
PyObject *
mn_worker_dict(struct mn_worker *k, PyObject *running);

/* Turns 0 or -errno into 0 or -1 with an exception that says what was attempted. */
int
mn_raise_errno(int rc, const char *what);

/* Returns the exception that is set, with its traceback, and clears it. */
PyObject *
mn_fetch_error(void);

/* Returns lengths as a tuple of int. NULL with an exception. */
PyObject *
mn_shape_tuple(int ndim, const int64_t *shape);

/* Appends an item and takes it over; it may be NULL with an exception. Sets the list to NULL if
 * there is no item, or no memory. */
void
mn_list_add(PyObject **list, PyObject *item);

/* ---- segments: one mapping, in the process that made it or in one that attached ----- */

struct mn_segment {
    PyObject_HEAD
    struct mn_shm shm;
    uint64_t bytes;
    struct mn_lifeline_end trainer; /* shows other processes that the trainer is gone */
    PyObject *owner; /* the engine that has this mapping; NULL: ours to unmap */
};

/* ---- ranges of the arena held by Python objects ------------------------------------- */

struct mn_hold;

/* Makes the program retain [off, off + bytes) of a DONE block. Returns NULL with an exception. */
struct mn_hold *
mn_hold_new(struct mn_state *st, struct mn_engine *e, uint64_t block_off, uint64_t off,
            uint64_t bytes);

/* Makes a copy of data in ordinary memory under the same rule. Memory that a NumPy array still
 * shows is not freed when share_memory_() moves the tensor. Returns NULL with an exception. */
struct mn_hold *
mn_hold_copy(struct mn_state *st, const void *data, uint64_t bytes);

/* Releases a hold. May be called from any thread, of Python's or not, and in a forked child. */
void
mn_hold_release(struct mn_hold *hold);

void *
mn_hold_data(const struct mn_hold *hold);

/* Sets the tensor that was made over a hold: its storage decides when the range may be reused. */
int
mn_hold_guard(struct mn_state *st, struct mn_hold *hold, PyObject *tensor);

/* Frees holds that are no longer visible. Calls Python, which may collect garbage and close an
 * engine: look up an engine only after this call. */
void
mn_pending_reclaim(struct mn_state *st);

/* Adds bind_torch() and the functions of holds to the module. 0, or -1 with an exception. */
int
mn_pending_open(PyObject *module, struct mn_state *st);

/* Makes a bytes-like object over a hold, which it takes over. */
PyObject *
mn_arena_view_new(struct mn_state *st, struct mn_hold *hold, uint64_t bytes);

/* ---- envelopes: how a pickled message with out-of-band buffers lies in the arena ----
 *
 * The records are in workers/mn_records.h. Big parts (MN_FIELD_BIG and more) begin on pages of
 * their own, so each can be handed to the caller and freed by itself. The small ones are copied
 * out. The envelope begins at the start of a page.
 */

/* The kinds of entries in an envelope of rows; minato/workers/answers.py describes them. */
enum mn_extra {
    MN_EXTRA_SAMPLE,
    MN_EXTRA_ERROR,
    MN_EXTRA_OBJECTS,
    MN_EXTRA_REFUSED,  /* this and the next two are made by Python alone */
    MN_EXTRA_LEFT_OUT,
    MN_EXTRA_REPLACED,
    MN_EXTRA_FATAL, /* like ERROR, for no sample: none of the task was tried */
};

/* Writes pickle and buffers (a list of objects, C-contiguous) for the current task into the
 * worker's lease. Releases the GIL meanwhile. Returns 0 (also if the memory limit leaves no room:
 * the task then says so), 1 if the loader stopped, -1 with an exception. */
int
mn_envelope_send(struct mn_worker_side *side, uint32_t task, const char *pickle,
                 Py_ssize_t pickle_bytes, PyObject *list);

/* Returns (pickle, [what make() returns for each part]) of an envelope, of len bytes. env: from
 * mn_envelope_look(). RuntimeError if a part does not lie within them any more. */
PyObject *
mn_envelope_read(const char *at, uint64_t len, const struct mn_envelope *env,
                 PyObject *(*make)(void *arg, const struct mn_envelope_part *part), void *arg);

#endif
