/* mn_envelope.c - writes a worker's message into its lease, and reads it.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/module/mn_state.h"

#include <errno.h>
#include <string.h>

#include "base/mn_base.h"
#include "os/mn_memfd.h"
#include "workers/mn_records.h"

static uint64_t
up_to(uint64_t n, uint64_t a)
{
    return (n + a - 1) / a * a;
}

/* Places the parts, big ones last and on pages of their own. Returns the total size. */
static uint64_t
place(Py_buffer *bufs, Py_ssize_t n, uint64_t pickle_bytes, struct mn_envelope *env,
      struct mn_envelope_part *parts)
{
    env->nparts = (uint64_t)n;
    env->pickle_at = sizeof(*env) + (uint64_t)n * sizeof(*parts);
    env->pickle_bytes = pickle_bytes;
    uint64_t at = env->pickle_at + pickle_bytes;
    for (Py_ssize_t i = 0; i < n; i++) {
        parts[i].bytes = (uint64_t)bufs[i].len;
        if (parts[i].bytes < MN_FIELD_BIG) {
            parts[i].at = up_to(at, 16);
            at = parts[i].at + parts[i].bytes;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        if (parts[i].bytes >= MN_FIELD_BIG) {
            parts[i].at = up_to(at, MN_PAGE);
            at = up_to(parts[i].at + parts[i].bytes, MN_PAGE);
        }
    }
    return at;
}

static int
write_all(struct mn_worker_side *side, uint32_t task, const char *pickle,
          Py_ssize_t pickle_bytes, Py_buffer *bufs, Py_ssize_t n)
{
    struct mn_task *t = mn_task_at(&side->shm, task);
    struct mn_envelope env;
    struct mn_envelope_part *parts = PyMem_Calloc((size_t)n + 1, sizeof(*parts));
    if (parts == NULL) {
        return (PyErr_NoMemory(), -1);
    }
    uint64_t total = place(bufs, n, (uint64_t)pickle_bytes, &env, parts), off;
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = mn_worker_lease(side, total, &off);
    if (rc == 0) {
        char *base = mn_at(&side->shm, off);
        if (total >= 16 * MN_PAGE) {
            (void)mn_memfd_populate(base, total); /* one call instead of a fault per page */
        }
        memcpy(base, &env, sizeof(env));
        memcpy(base + sizeof(env), parts, (size_t)n * sizeof(*parts));
        memcpy(base + env.pickle_at, pickle, (size_t)pickle_bytes);
        for (Py_ssize_t i = 0; i < n; i++) {
            if (bufs[i].len != 0) {
                memcpy(base + parts[i].at, bufs[i].buf, (size_t)bufs[i].len);
            }
        }
        t->env_off = off;
        t->env_len = total;
        t->flags = MN_FLAG_ENVELOPE;
    }
    Py_END_ALLOW_THREADS
    PyMem_Free(parts);
    if (rc == -ENOMEM) {
        t->flags = MN_FLAG_NO_ROOM;
    }
    return rc == MN_CLOSED ? 1 : 0;
}

int
mn_envelope_send(struct mn_worker_side *side, uint32_t task, const char *pickle,
                 Py_ssize_t pickle_bytes, PyObject *list)
{
    Py_ssize_t n = PyList_GET_SIZE(list), got = 0;
    Py_buffer *bufs = PyMem_Calloc((size_t)n + 1, sizeof(*bufs));
    if (bufs == NULL) {
        return (PyErr_NoMemory(), -1);
    }
    while (got < n
           && PyObject_GetBuffer(PyList_GET_ITEM(list, got), &bufs[got], PyBUF_C_CONTIGUOUS)
                  == 0) {
        got++;
    }
    int rc = got == n ? write_all(side, task, pickle, pickle_bytes, bufs, n) : -1;
    for (Py_ssize_t i = 0; i < got; i++) {
        PyBuffer_Release(&bufs[i]);
    }
    PyMem_Free(bufs);
    return rc;
}

PyObject *
mn_envelope_read(const char *at, uint64_t len, const struct mn_envelope *env,
                 PyObject *(*make)(void *arg, const struct mn_envelope_part *part), void *arg)
{
    PyObject *list = PyList_New(0);
    for (uint64_t i = 0; list != NULL && i < env->nparts; i++) {
        struct mn_envelope_part part;
        if (mn_envelope_part_look(at, len, env, i, &part)) {
            mn_list_add(&list, make(arg, &part));
        }
        else { /* it was sound when accepted, but its worker may still write there */
            PyErr_SetString(PyExc_RuntimeError,
                            "the result that a DataLoader worker sent is damaged. Code in the "
                            "worker writes to memory where it must not, most likely a C extension "
                            "that the dataset uses");
            Py_CLEAR(list);
        }
    }
    return list == NULL ? NULL
                        : Py_BuildValue("(y#N)", at + env->pickle_at,
                                        (Py_ssize_t)env->pickle_bytes, list);
}
