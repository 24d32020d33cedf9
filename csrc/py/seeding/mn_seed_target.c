/* Targets of a Seeder: reading plans, writing states; see mn_seed.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/seeding/mn_seed.h"

#include <stdbool.h>
#include <string.h>

#include "base/mn_base.h"

#define MT_TOP_BIT 0x80000000u

/* torch's legacy state: seed, left, seeded, next, 624 words of 64 bits, then the caches of the
 * normal distribution, which stay zero (invalid). */
#define TORCH_SEED_OFF 0
#define TORCH_LEFT_OFF 8
#define TORCH_SEEDED_OFF 12
#define TORCH_WORDS_OFF 24
#define TORCH_BLOB_BYTES 5056

/* Longest wait for a generator that another thread is drawing from. Drawing a hundred million
 * normals takes about a second; a lock held for longer counts as lost. */
#define LOCK_WAIT_S 30.0

/* ---- reading plans ------------------------------------------------------------------ */

static PyObject *
own_unless_none(PyObject *obj)
{
    return obj == Py_None ? NULL : Py_NewRef(obj);
}

/* Checks that a run of bytes lies inside the instance struct of obj, aligned for words. */
static int
check_inside(PyObject *obj, uint32_t off, size_t bytes)
{
    size_t size = (size_t)Py_TYPE(obj)->tp_basicsize;
    if (off % 4 != 0 || off < sizeof(PyObject) || off > size || bytes > size - off) {
        return MN_RAISE(PyExc_ValueError, "offset %u does not lie inside a %s", off,
                        Py_TYPE(obj)->tp_name);
    }
    return 0;
}

static int
read_fixed(struct mn_seed_fixed_list *list, PyObject *obj, PyObject *tuple)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (n > MN_SEED_MAX_FIXED) {
        return MN_RAISE(PyExc_ValueError, "too many fixed words");
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        struct mn_seed_fixed *f = &list->at[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "II", &f->dst_off, &f->value)
            || check_inside(obj, f->dst_off, sizeof f->value) < 0) {
            return -1;
        }
    }
    list->n = (uint32_t)n;
    return 0;
}

static int
read_runs(struct mn_seed_sink *s, PyObject *obj, PyObject *tuple)
{
    Py_ssize_t n = PyTuple_GET_SIZE(tuple);
    if (n < 1 || n > MN_SEED_MAX_RUNS) {
        return MN_RAISE(PyExc_ValueError, "expected 1 to %d runs, got %zd", MN_SEED_MAX_RUNS, n);
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        struct mn_seed_run *r = &s->runs[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tuple, i), "III", &r->dst_off, &r->first,
                              &r->n)) {
            return -1;
        }
        if (r->first > s->nwords || r->n > s->nwords - r->first) {
            return MN_RAISE(PyExc_ValueError, "a run reaches past the words");
        }
        if (check_inside(obj, r->dst_off, (size_t)r->n * 4) < 0) {
            return -1;
        }
    }
    s->nruns = (uint32_t)n;
    return 0;
}

/* Reads ("fill", generator, lock or None, cache attribute or None, words, or_word, or_mask,
 *          ((dst_off, first, n), ...), ((dst_off, value), ...)). */
static int
read_fill(struct mn_seed_sink *s, PyObject *plan)
{
    PyObject *name, *obj, *lock, *attr, *runs, *fixed;
    if (!PyArg_ParseTuple(plan, "OOOOIIIO!O!", &name, &obj, &lock, &attr, &s->nwords,
                          &s->or_word, &s->or_mask, &PyTuple_Type, &runs, &PyTuple_Type,
                          &fixed)) {
        return -1;
    }
    if (s->nwords < 1 || s->nwords > MN_SEED_MT_WORDS || s->or_word >= s->nwords) {
        return MN_RAISE(PyExc_ValueError,
                        "expected 1 to %d words, one of them or_word, got %u and or_word %u",
                        MN_SEED_MT_WORDS, s->nwords, s->or_word);
    }
    if (read_runs(s, obj, runs) < 0 || read_fixed(&s->fixed, obj, fixed) < 0) {
        return -1;
    }
    s->kind = MN_SEED_FILL;
    s->obj = Py_NewRef(obj);
    s->lock = own_unless_none(lock);
    s->cache_attr = own_unless_none(attr);
    return 0;
}

/* Reads ("torch", set_state, tensor, address of its data, bytes, whether its seed stays). */
static int
read_torch(struct mn_seed_sink *s, PyObject *plan)
{
    PyObject *name, *function, *tensor;
    unsigned long long address;
    Py_ssize_t bytes;
    int keeps_seed;
    if (!PyArg_ParseTuple(plan, "OOOKnp", &name, &function, &tensor, &address, &bytes,
                          &keeps_seed)) {
        return -1;
    }
    if (bytes != TORCH_BLOB_BYTES || address == 0 || address % 8 != 0) {
        return MN_RAISE(PyExc_ValueError, "not a state tensor");
    }
    s->kind = MN_SEED_TORCH;
    s->blob = (char *)(uintptr_t)address;
    s->keeps_seed = keeps_seed != 0;
    s->obj = Py_NewRef(tensor);
    s->function = Py_NewRef(function);
    return 0;
}

/* Reads ("call", function of words and seed, words) or ("hook", function of a seed). */
static int
read_call(struct mn_seed_sink *s, PyObject *plan, enum mn_seed_kind kind)
{
    PyObject *name, *function;
    if (!PyArg_ParseTuple(plan, kind == MN_SEED_CALL ? "OOI" : "OO", &name, &function,
                          &s->nwords)) {
        return -1;
    }
    s->kind = kind;
    s->function = Py_NewRef(function);
    return 0;
}

static bool
plan_is(PyObject *plan, const char *name)
{
    PyObject *first = PyTuple_Check(plan) && PyTuple_GET_SIZE(plan) > 0
                          ? PyTuple_GET_ITEM(plan, 0)
                          : NULL;
    return first && PyUnicode_Check(first)
           && PyUnicode_CompareWithASCIIString(first, name) == 0;
}

static int
read_sink(struct mn_seed_sink *s, PyObject *plan)
{
    if (plan_is(plan, "fill")) {
        return read_fill(s, plan);
    }
    if (plan_is(plan, "torch")) {
        return read_torch(s, plan);
    }
    if (plan_is(plan, "call")) {
        return read_call(s, plan, MN_SEED_CALL);
    }
    if (plan_is(plan, "hook")) {
        return read_call(s, plan, MN_SEED_HOOK);
    }
    if (plan_is(plan, "none")) {
        return 0;
    }
    return MN_RAISE(PyExc_ValueError, "not a seeding plan: %R", plan);
}

static PyObject *
bitgen_now(const struct mn_seed_target *t)
{
    PyObject *bitgen;
    memcpy(&bitgen, (char *)t->owner + t->bitgen_off, sizeof bitgen);
    return bitgen;
}

/* Reads ("state", RandomState, offset of its bit generator, fixed words, plan for that). */
static int
read_state(struct mn_seed_target *t, PyObject *plan)
{
    PyObject *name, *owner, *fixed, *inner;
    if (!PyArg_ParseTuple(plan, "OOIO!O", &name, &owner, &t->bitgen_off, &PyTuple_Type,
                          &fixed, &inner)
        || check_inside(owner, t->bitgen_off, sizeof(PyObject *)) < 0
        || read_fixed(&t->owner_fixed, owner, fixed) < 0
        || read_sink(&t->sink, inner) < 0) {
        return -1;
    }
    t->owner = Py_NewRef(owner);
    t->bitgen = Py_XNewRef(bitgen_now(t));
    return 0;
}

static void
close_sink(struct mn_seed_sink *s)
{
    s->kind = MN_SEED_NONE;
    Py_CLEAR(s->obj);
    Py_CLEAR(s->lock);
    Py_CLEAR(s->cache_attr);
    Py_CLEAR(s->function);
}

int
mn_seed_target_open(struct mn_seed_target *t, PyObject *entry)
{
    PyObject *label, *plan;
    unsigned long long stream, own_seed = 0;
    memset(t, 0, sizeof *t);
    if (!PyArg_ParseTuple(entry, "OKO|K", &label, &stream, &plan, &own_seed)) {
        return -1;
    }
    t->stream = stream;
    t->own_seed = own_seed;
    int rc = plan_is(plan, "state") ? read_state(t, plan) : read_sink(&t->sink, plan);
    if (rc < 0) {
        mn_seed_target_close(t);
    }
    return rc;
}

void
mn_seed_target_close(struct mn_seed_target *t)
{
    close_sink(&t->sink);
    Py_CLEAR(t->owner);
    Py_CLEAR(t->bitgen);
}

/* ---- locks -------------------------------------------------------------------------- */

/* NumPy draws large arrays with its lock held and the GIL released, and its generator reads past
 * its words if the position changes meanwhile. A process with one Python thread need not wait for
 * another. Then the lock is not touched, also because a lock that another thread held at a fork
 * would never be released here. */
static bool
have_company(void)
{
#ifdef Py_GIL_DISABLED
    return true;
#else
    PyThreadState *head = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    return head != NULL && PyThreadState_Next(head) != NULL;
#endif
}

static int
take_lock(PyObject *lock)
{
    PyObject *got = PyObject_CallMethod(lock, "acquire", "id", 1, LOCK_WAIT_S);
    if (got == NULL) {
        return -1;
    }
    int ok = PyObject_IsTrue(got);
    Py_DECREF(got);
    if (ok == 0) {
        PyErr_SetString(PyExc_RuntimeError,
                        "cannot seed a NumPy generator: its lock has been held for 30 s by "
                        "another thread, or by one that did not survive a fork");
    }
    return ok > 0 ? 0 : -1;
}

static int
drop_lock(PyObject *lock)
{
    PyObject *none = PyObject_CallMethod(lock, "release", NULL);
    Py_XDECREF(none);
    return none != NULL ? 0 : -1;
}

/* ---- seeding ------------------------------------------------------------------------ */

static void
put_fixed(PyObject *obj, const struct mn_seed_fixed_list *list)
{
    for (uint32_t i = 0; i < list->n; i++) {
        memcpy((char *)obj + list->at[i].dst_off, &list->at[i].value, 4);
    }
}

static void
put_words(const struct mn_seed_sink *s, const struct mn_seed_stream *stream,
          const struct mn_seed_isa *isa)
{
    uint32_t scratch[MN_SEED_MT_WORDS];
    bool direct = s->nruns == 1 && s->runs[0].first == 0 && s->runs[0].n == s->nwords;
    uint32_t *words =
        direct ? (uint32_t *)(void *)((char *)s->obj + s->runs[0].dst_off) : scratch;
    isa->words(stream, words, s->nwords);
    words[s->or_word] |= s->or_mask;
    for (uint32_t i = 0; !direct && i < s->nruns; i++) {
        const struct mn_seed_run *r = &s->runs[i];
        memcpy((char *)s->obj + r->dst_off, words + r->first, (size_t)r->n * 4);
    }
    put_fixed(s->obj, &s->fixed);
}

/* The attribute is nearly always None, and reading is cheaper than writing. */
static int
clear_cache(PyObject *obj, PyObject *attr)
{
    PyObject *value = PyObject_GetAttr(obj, attr);
    if (value == NULL) {
        return -1;
    }
    int rc = value == Py_None ? 0 : PyObject_SetAttr(obj, attr, Py_None);
    Py_DECREF(value);
    return rc;
}

static int
seed_fill(struct mn_seed_target *t, const struct mn_seed_stream *stream,
          const struct mn_seed_isa *isa)
{
    const struct mn_seed_sink *s = &t->sink;
    PyObject *lock = s->lock != NULL && have_company() ? s->lock : NULL;
    if (lock != NULL && take_lock(lock) < 0) {
        return -1;
    }
    Py_BEGIN_CRITICAL_SECTION(s->obj);
    put_words(s, stream, isa);
    if (t->owner != NULL) {
        put_fixed(t->owner, &t->owner_fixed);
    }
    Py_END_CRITICAL_SECTION();
    if (lock != NULL && drop_lock(lock) < 0) {
        return -1;
    }
    return s->cache_attr != NULL ? clear_cache(s->obj, s->cache_attr) : 0;
}

static int
seed_torch(const struct mn_seed_sink *s, const struct mn_seed_stream *stream,
           const struct mn_seed_isa *isa)
{
    const uint64_t seed = stream->seed;
    const uint32_t one = 1;
    uint64_t *words = (uint64_t *)(void *)(s->blob + TORCH_WORDS_OFF);
    isa->wide(stream, words, MN_SEED_MT_WORDS);
    words[0] |= MT_TOP_BIT;
    if (!s->keeps_seed) {
        memcpy(s->blob + TORCH_SEED_OFF, &seed, sizeof seed);
    }
    memcpy(s->blob + TORCH_LEFT_OFF, &one, sizeof one);
    memcpy(s->blob + TORCH_SEEDED_OFF, &one, sizeof one);
    PyObject *result = PyObject_CallOneArg(s->function, s->obj);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

static int
seed_call(const struct mn_seed_sink *s, const struct mn_seed_stream *stream,
          const struct mn_seed_isa *isa)
{
    PyObject *words = NULL, *result = NULL;
    PyObject *seed = PyLong_FromUnsignedLongLong(stream->seed);
    if (seed == NULL) {
        return -1;
    }
    if (s->kind == MN_SEED_HOOK) {
        result = PyObject_CallOneArg(s->function, seed);
    }
    else if ((words = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)s->nwords * 4)) != NULL) {
        isa->words(stream, (uint32_t *)(void *)PyBytes_AS_STRING(words), s->nwords);
        result = PyObject_CallFunctionObjArgs(s->function, words, seed, NULL);
    }
    Py_DECREF(seed);
    Py_XDECREF(words);
    Py_XDECREF(result);
    return result != NULL ? 0 : -1;
}

/* The RandomState has another bit generator than when the plan was made: makes a new plan for
 * it. */
static int
follow_exchange(struct mn_seed_target *t)
{
    struct mn_seed_sink fresh;
    memset(&fresh, 0, sizeof fresh);
    PyObject *bitgen = Py_XNewRef(bitgen_now(t));
    if (bitgen == NULL) {
        return MN_RAISE(PyExc_RuntimeError, "a RandomState has no bit generator");
    }
    PyObject *seeding = PyImport_ImportModule("minato.seeding.generator_states");
    PyObject *plan =
        seeding != NULL ? PyObject_CallMethod(seeding, "plan_bitgen", "O", bitgen) : NULL;
    int rc = plan != NULL ? read_sink(&fresh, plan) : -1;
    Py_XDECREF(seeding);
    Py_XDECREF(plan);
    if (rc < 0) {
        Py_DECREF(bitgen);
        return -1;
    }
    struct mn_seed_sink old = t->sink;
    t->sink = fresh;
    Py_XSETREF(t->bitgen, bitgen);
    close_sink(&old);
    return 0;
}

int
mn_seed_target_seed(struct mn_seed_target *t, struct mn_seed_key key,
                    const struct mn_seed_isa *isa)
{
    if (t->owner != NULL && bitgen_now(t) != t->bitgen && follow_exchange(t) < 0) {
        return -1;
    }
    struct mn_seed_stream stream = mn_seed_stream_make(key, t->stream);
    switch (t->sink.kind) {
    case MN_SEED_FILL:
        return seed_fill(t, &stream, isa);
    case MN_SEED_TORCH:
        return seed_torch(&t->sink, &stream, isa);
    case MN_SEED_CALL:
    case MN_SEED_HOOK:
        if (t->owner != NULL) {
            put_fixed(t->owner, &t->owner_fixed);
        }
        return seed_call(&t->sink, &stream, isa);
    default:
        return 0;
    }
}
