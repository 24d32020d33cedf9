/* The type Seeder; see mn_seed.h.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/seeding/mn_seed.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "py/seeding/mn_seed_mix.h"

/* ---- finding out, after each sample, that the dataset has made new generators ----
 *
 * A look runs no code of the program's. The owner sets find and the counters.
 */

/* The kinds of change of attributes. Each has its own pause: a cache that grows with every sample
 * must not hide that an attribute has got a generator. */
enum { MN_SEED_TYPES, MN_SEED_LENGTHS, MN_SEED_COUNTS, MN_SEED_VALUES, MN_SEED_CHANGES };

struct mn_seed_change {
    uint64_t print; /* at the last look */
    uint32_t pause; /* samples until the next look */
    uint32_t wait;  /* the pause after the next walk in vain; 0: one */
};

/* The objects that are checked after each sample. */
struct mn_seed_watch {
    PyObject *dicts;   /* tuple of dicts; NULL: nothing is watched */
    PyObject *counted; /* likewise, but only their number of entries is checked */
    PyObject *find;    /* (changes, as bits) -> None or (entries, dicts, counted, types) */
    PyObject *types;   /* tuple of generator types; another object of these is a change, too */
    struct mn_seed_change changes[MN_SEED_CHANGES];
    uint32_t renewals;
};

/* After a walk that found nothing, a number of samples pass before the next walk. The number
 * doubles each time, up to this: attributes of changing types must not cost a walk per sample. */
#define PAUSE_MOST 4096u

static bool
is_one_of(PyObject *types, PyTypeObject *type)
{
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); i++) {
        if (PyTuple_GET_ITEM(types, i) == (PyObject *)type) {
            return true;
        }
    }
    return false;
}

/* Its type is no part of Python's interface in C. It has its size as lists have. */
static bool
is_deque(PyTypeObject *type)
{
    return type->tp_itemsize == 0 && strcmp(type->tp_name, "collections.deque") == 0;
}

/* Adds the prints of one of the dicts; see mn_seed_watch_prints(). */
static void
add_prints(const struct mn_seed_watch *w, PyObject *dict, uint64_t *types, uint64_t *lengths,
           uint64_t *values)
{
    PyObject *value;
    Py_ssize_t place = 0;
    /* counted, because the call that finds no entry takes as long as one that does */
    for (Py_ssize_t left = PyDict_GET_SIZE(dict);
         left > 0 && PyDict_Next(dict, &place, NULL, &value); left--) {
        PyTypeObject *type = Py_TYPE(value);
        if (type == &PyLong_Type || type == &PyFloat_Type) {
            *values += (uint64_t)(uintptr_t)value; /* += makes another object */
        }
        if (value == Py_None || type == &PyLong_Type || type == &PyFloat_Type
            || type == &PyUnicode_Type) {
            continue; /* values that cannot contain a generator come and go */
        }
        if (type == &PyList_Type && PyList_GET_SIZE(value) > 0) {
            *values += (uint64_t)(uintptr_t)PyList_GET_ITEM(value, 0);
        }
        uint64_t one = (uint64_t)(uintptr_t)type;
        if (is_one_of(w->types, type)) {
            one += (uint64_t)(uintptr_t)value;
        }
        /* sums, whose parts the processor computes in parallel */
        *types += one * UINT64_C(0x9E3779B97F4A7C15);
        *lengths += type == &PyDict_Type   ? (uint64_t)PyDict_GET_SIZE(value)
                    : type == &PyList_Type ? (uint64_t)PyList_GET_SIZE(value)
                    : type == &PySet_Type  ? (uint64_t)PySet_GET_SIZE(value)
                    : is_deque(type)       ? (uint64_t)Py_SIZE(value)
                                           : 0;
    }
}

/* Computes four fingerprints. The first is of the types of attributes that may contain something,
 * with generators' addresses. The second is of the lengths of lists, dicts, sets and deques among
 * them. The third is of the numbers of entries of the counted dicts. The fourth is of ints and
 * floats, and of the first elements of lists. */
static void
mn_seed_watch_prints(const struct mn_seed_watch *w, uint64_t prints[MN_SEED_CHANGES])
{
    uint64_t types = 0, lengths = 0, counts = 0, values = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w->dicts); i++) {
        PyObject *dict = PyTuple_GET_ITEM(w->dicts, i);
        Py_BEGIN_CRITICAL_SECTION(dict);
        add_prints(w, dict, &types, &lengths, &values);
        Py_END_CRITICAL_SECTION();
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(w->counted); i++) {
        uint64_t one = (uint64_t)PyDict_GET_SIZE(PyTuple_GET_ITEM(w->counted, i));
        counts += one * (2 * (uint64_t)i + 1);
    }
    prints[MN_SEED_TYPES] = types;
    prints[MN_SEED_LENGTHS] = lengths;
    prints[MN_SEED_COUNTS] = counts;
    prints[MN_SEED_VALUES] = values;
}

/* Takes the present state as the one without change. */
static void
mn_seed_watch_note(struct mn_seed_watch *w)
{
    uint64_t prints[MN_SEED_CHANGES];
    mn_seed_watch_prints(w, prints);
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        w->changes[i].print = prints[i];
    }
}

/* Returns NULL with an exception. */
static PyObject *
tuple_of_dicts(PyObject *dicts)
{
    PyObject *tuple = PySequence_Tuple(dicts);
    for (Py_ssize_t i = 0; tuple != NULL && i < PyTuple_GET_SIZE(tuple); i++) {
        if (!PyDict_Check(PyTuple_GET_ITEM(tuple, i))) {
            PyErr_SetString(PyExc_TypeError, "the watched objects must be dicts");
            Py_CLEAR(tuple);
        }
    }
    return tuple;
}

/* Sets what is watched. Returns 0; -1 with an exception, and nothing has changed. */
static int
mn_seed_watch_set(struct mn_seed_watch *w, PyObject *dicts, PyObject *counted, PyObject *types)
{
    PyObject *near = tuple_of_dicts(dicts), *far = NULL, *kinds = NULL;
    if (near == NULL || (far = tuple_of_dicts(counted)) == NULL
        || (kinds = PySequence_Tuple(types)) == NULL) {
        Py_XDECREF(near);
        Py_XDECREF(far);
        return -1;
    }
    Py_XSETREF(w->types, kinds);
    Py_XSETREF(w->counted, far);
    Py_XSETREF(w->dicts, near);
    mn_seed_watch_note(w);
    return 0;
}

/* Returns which prints are due to be checked and have changed; one bit each. */
static unsigned
mn_seed_watch_changes(struct mn_seed_watch *w)
{
    uint64_t prints[MN_SEED_CHANGES];
    unsigned changed = 0;
    mn_seed_watch_prints(w, prints);
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        struct mn_seed_change *c = &w->changes[i];
        if (c->pause > 0) {
            c->pause--;
        }
        else if (c->print != prints[i]) {
            changed |= 1u << i;
        }
    }
    return changed;
}

/* Delays the next look at these changes, because the walk after them has found nothing. */
static void
mn_seed_watch_pause(struct mn_seed_watch *w, unsigned changed)
{
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        struct mn_seed_change *c = &w->changes[i];
        if (changed & 1u << i) {
            c->pause = c->wait > 0 ? c->wait : 1;
            c->wait = c->pause < PAUSE_MOST ? 2 * c->pause : PAUSE_MOST;
        }
    }
}

/* The static method itself: words of one stream, for probes and tests. */
static PyObject *
seeder_words(PyObject *Py_UNUSED(type), PyObject *args)
{
    unsigned long long base_seed, epoch, position, number;
    unsigned int domain;
    Py_ssize_t n;
    int vector = 1, wide = 0;
    if (!PyArg_ParseTuple(args, "KKKIKn|pp", &base_seed, &epoch, &position, &domain, &number, &n,
                          &vector, &wide)) {
        return NULL;
    }
    struct mn_seed_stream s =
        mn_seed_stream_make(mn_seed_key_make(base_seed, epoch, position, domain), number);
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, n * (wide ? 8 : 4));
    if (bytes == NULL) {
        return NULL;
    }
    void *data = PyBytes_AS_STRING(bytes);
    const struct mn_seed_isa *isa = mn_seed_isa_pick(vector);
    if (wide) {
        isa->wide(&s, data, (size_t)n);
    }
    else {
        isa->words(&s, data, (size_t)n);
    }
    return Py_BuildValue("(NK)", bytes, (unsigned long long)s.seed);
}

/* After this many walks, a dataset that makes generators again and again is no longer watched. */
#define RENEWALS_MOST 16

/* The stream of the first seed_sample(), and what the next ones' are apart:
 * minato/seeding/generator_states.py has the same numbers. */
#define STREAM_HOOK 4
#define STREAM_STEP (UINT64_C(1) << 32)

struct mn_seeder {
    PyObject_HEAD
    const struct mn_seed_isa *isa;
    struct mn_seed_share share; /* the part of the epoch that this process makes */
    Py_ssize_t ntargets;
    Py_ssize_t nglobal;         /* the first ones, which no new walk changes */
    struct mn_seed_target *targets;
    struct mn_seed_watch watch;
};

/* ---- building ----------------------------------------------------------------------- */

/* Replaces the targets from the keep-th on by those of the entries. */
static int
load_targets(struct mn_seeder *self, PyObject *entries, Py_ssize_t keep)
{
    PyObject *list = PySequence_Fast(entries, "the plans must be a sequence");
    if (list == NULL) {
        return -1;
    }
    Py_ssize_t n = PySequence_Fast_GET_SIZE(list), made = 0;
    struct mn_seed_target *targets = PyMem_Calloc((size_t)(keep + n) + 1, sizeof *targets);
    if (targets == NULL) {
        PyErr_NoMemory();
    }
    while (targets != NULL && made < n
           && mn_seed_target_open(&targets[keep + made], PySequence_Fast_GET_ITEM(list, made))
                  == 0) {
        made++;
    }
    Py_DECREF(list);
    if (targets == NULL || made < n) {
        while (made > 0) {
            mn_seed_target_close(&targets[keep + --made]);
        }
        PyMem_Free(targets);
        return -1;
    }
    if (keep > 0) {
        memcpy(targets, self->targets, (size_t)keep * sizeof *targets);
    }
    struct mn_seed_target *old = self->targets;
    Py_ssize_t nold = self->ntargets;
    self->targets = targets;
    self->ntargets = keep + n;
    while (nold > keep) {
        mn_seed_target_close(&old[--nold]); /* may run code of the program's */
    }
    PyMem_Free(old);
    return 0;
}

static PyObject *
seeder_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"plans", NULL};
    PyObject *plans;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &plans)) {
        return NULL;
    }
    struct mn_seeder *self = (struct mn_seeder *)type->tp_alloc(type, 0);
    if (self == NULL) {
        return NULL;
    }
    self->isa = mn_seed_isa_pick(1);
    self->share = MN_SEED_WHOLE;
    if (load_targets(self, plans, 0) < 0) {
        Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static int
visit_target(struct mn_seed_target *t, visitproc visit, void *arg)
{
    Py_VISIT(t->owner);
    Py_VISIT(t->bitgen);
    Py_VISIT(t->sink.obj);
    Py_VISIT(t->sink.lock);
    Py_VISIT(t->sink.cache_attr);
    Py_VISIT(t->sink.function);
    return 0;
}

static int
seeder_traverse(PyObject *op, visitproc visit, void *arg)
{
    struct mn_seeder *self = (struct mn_seeder *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->watch.dicts);
    Py_VISIT(self->watch.counted);
    Py_VISIT(self->watch.find);
    Py_VISIT(self->watch.types);
    for (Py_ssize_t i = 0; i < self->ntargets; i++) {
        int rc = visit_target(&self->targets[i], visit, arg);
        if (rc != 0) {
            return rc;
        }
    }
    return 0;
}

static int
seeder_clear(PyObject *op)
{
    struct mn_seeder *self = (struct mn_seeder *)op;
    while (self->ntargets > 0) {
        mn_seed_target_close(&self->targets[--self->ntargets]);
    }
    Py_CLEAR(self->watch.dicts);
    Py_CLEAR(self->watch.counted);
    Py_CLEAR(self->watch.find);
    Py_CLEAR(self->watch.types);
    return 0;
}

static void
seeder_dealloc(PyObject *op)
{
    PyObject_GC_UnTrack(op);
    seeder_clear(op);
    PyMem_Free(((struct mn_seeder *)op)->targets);
    mn_free_object(op);
}

/* ---- seeding ------------------------------------------------------------------------ */

static int
seed_all(struct mn_seeder *self, uint64_t base_seed, uint64_t epoch, uint64_t position,
         uint32_t domain)
{
    struct mn_seed_key key =
        mn_seed_key_of_share(&self->share, base_seed, epoch, position, domain);
    for (Py_ssize_t i = 0; i < self->ntargets; i++) {
        struct mn_seed_target *t = &self->targets[i];
        struct mn_seed_key own = key;
        /* set_epoch() may be called in one worker for an epoch, in another for several */
        if (t->own_seed != 0 && domain != MN_SEED_SET_EPOCH) {
            own = mn_seed_key_of_share(&self->share, t->own_seed, epoch, position, domain);
        }
        if (mn_seed_target_seed(t, own, self->isa) < 0) {
            return -1;
        }
    }
    return 0;
}

int
mn_seeder_seed(PyObject *seeder, uint64_t base_seed, uint64_t epoch, uint64_t position,
               uint32_t domain)
{
    struct mn_seeder *self = (struct mn_seeder *)seeder;
    struct mn_seed_watch *w = &self->watch;
    Py_ssize_t n = self->ntargets;
    if (n == 0 || w->dicts == NULL || self->targets[n - 1].sink.kind != MN_SEED_HOOK) {
        return seed_all(self, base_seed, epoch, position, domain);
    }
    /* A hook may make generators, and it seeds them: such a change is not news. */
    uint64_t before[MN_SEED_CHANGES], after[MN_SEED_CHANGES];
    mn_seed_watch_prints(w, before);
    int rc = seed_all(self, base_seed, epoch, position, domain);
    mn_seed_watch_prints(w, after);
    for (int i = 0; i < MN_SEED_CHANGES; i++) {
        w->changes[i].print += after[i] - before[i];
    }
    return rc;
}

/* Applies the results of a new walk over the dataset. changed: one bit for each kind of change; 0
 * after set_epoch(). Returns what mn_seeder_renew() returns. */
static int
walk_again(struct mn_seeder *self, unsigned changed)
{
    PyObject *found = PyObject_CallFunction(self->watch.find, "I", changed);
    if (found == NULL) {
        return -1;
    }
    int rc = 0;
    PyObject *entries, *dicts, *counted, *types;
    if (found == Py_None) {
        mn_seed_watch_note(&self->watch);
    }
    else if (!PyArg_ParseTuple(found, "OOOO", &entries, &dicts, &counted, &types)
             || load_targets(self, entries, self->nglobal) < 0
             || mn_seed_watch_set(&self->watch, dicts, counted, types) < 0) {
        rc = -1;
    }
    else {
        rc = 1;
    }
    Py_DECREF(found);
    return rc;
}

int
mn_seeder_look(PyObject *seeder)
{
    struct mn_seeder *self = (struct mn_seeder *)seeder;
    return self->watch.dicts == NULL ? 0 : walk_again(self, 0);
}

int
mn_seeder_renew(PyObject *seeder)
{
    struct mn_seeder *self = (struct mn_seeder *)seeder;
    struct mn_seed_watch *w = &self->watch;
    unsigned changed =
        w->dicts != NULL && w->renewals < RENEWALS_MOST ? mn_seed_watch_changes(w) : 0;
    if (changed == 0) {
        return 0;
    }
    int rc = walk_again(self, changed);
    if (rc == 0) {
        mn_seed_watch_pause(w, changed);
    }
    w->renewals += rc == 1;
    return rc;
}

static PyObject *
seeder_renew(PyObject *self, PyObject *Py_UNUSED(ignored))
{
    int rc = mn_seeder_renew(self);
    return rc < 0 ? NULL : PyBool_FromLong(rc);
}

static PyObject *
seeder_watch(PyObject *op, PyObject *args)
{
    struct mn_seeder *self = (struct mn_seeder *)op;
    PyObject *dicts, *counted, *find, *types;
    if (!PyArg_ParseTuple(args, "OOOnO", &dicts, &counted, &find, &self->nglobal, &types)) {
        return NULL;
    }
    if (self->nglobal < 0 || self->nglobal > self->ntargets) {
        self->nglobal = self->ntargets;
    }
    Py_XSETREF(self->watch.find, Py_NewRef(find));
    return mn_none_unless(mn_seed_watch_set(&self->watch, dicts, counted, types));
}

static PyObject *
seeder_seed(PyObject *self, PyObject *args)
{
    unsigned long long base_seed, epoch, position;
    unsigned int domain = MN_SEED_SAMPLE;
    if (!PyArg_ParseTuple(args, "KKK|I", &base_seed, &epoch, &position, &domain)
        || mn_seeder_seed(self, base_seed, epoch, position, domain) < 0) {
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *
seeder_sample(PyObject *self, PyObject *args)
{
    unsigned long long base_seed, epoch, position, hook;
    if (!PyArg_ParseTuple(args, "KKKK", &base_seed, &epoch, &position, &hook)) {
        return NULL;
    }
    struct mn_seed_key key = mn_seed_key_of_share(&((struct mn_seeder *)self)->share, base_seed,
                                                  epoch, position, MN_SEED_SAMPLE);
    struct mn_seed_stream s = mn_seed_stream_make(key, STREAM_HOOK + hook * STREAM_STEP);
    return Py_BuildValue("(KKK)", (unsigned long long)s.seed, (unsigned long long)key.lo,
                         (unsigned long long)key.hi);
}

static PyObject *
seeder_put(PyObject *self, PyObject *args)
{
    struct mn_seeder *seeder = (struct mn_seeder *)self;
    unsigned long long lo, hi;
    if (!PyArg_ParseTuple(args, "KK", &lo, &hi)) {
        return NULL;
    }
    const struct mn_seed_key key = {.lo = lo, .hi = hi};
    for (Py_ssize_t i = 0; i < seeder->ntargets; i++) {
        struct mn_seed_target *t = &seeder->targets[i];
        if (mn_seed_target_seed(t, key, seeder->isa) < 0) {
            return NULL;
        }
    }
    Py_RETURN_NONE;
}

int
mn_seed_share_parse(PyObject *ranks, struct mn_seed_share *share)
{
    unsigned long long rank, world, block;
    if (!PyTuple_Check(ranks)) {
        return MN_RAISE(PyExc_TypeError, "ranks must be a tuple (rank, world, block)");
    }
    if (!PyArg_ParseTuple(ranks, "KKK;ranks must be (rank, world, block)", &rank, &world,
                          &block)) {
        return -1;
    }
    if (block == 0 || (world > 0 && rank >= world)) {
        return MN_RAISE(PyExc_ValueError, "rank must be below world, and block positive");
    }
    *share = (struct mn_seed_share){.rank = rank, .world = world, .block = block};
    return 0;
}

static PyObject *
seeder_share(PyObject *self, PyObject *ranks)
{
    return mn_none_unless(mn_seed_share_parse(ranks, &((struct mn_seeder *)self)->share));
}

static PyObject *
seeder_peek(PyObject *Py_UNUSED(type), PyObject *obj)
{
    return PyBytes_FromStringAndSize((const char *)obj, Py_TYPE(obj)->tp_basicsize);
}

/* ---- the type ----------------------------------------------------------------------- */

PyDoc_STRVAR(seed_doc,
"seed(base_seed, epoch, position, domain=0)\n\n"
"Put every generator into the state that belongs to one sample (domain 0), or to\n"
"__getitems__ (1) or collate_fn (2) of one batch. What a hook raises passes through.");
PyDoc_STRVAR(sample_doc,
"sample(base_seed, epoch, position, hook) -> (seed, lo, hi)\n\n"
"seed: the 63-bit number that the seed_sample() of this number (0: the first) gets for the sample\n"
"at this position. (lo, hi): the key that put() takes.");
PyDoc_STRVAR(put_doc,
"put(lo, hi)\n\n"
"Put every generator into the state that belongs to this key of sample().");
PyDoc_STRVAR(share_doc,
"share($self, ranks, /)\n"
"--\n\n"
"From now on, positions given to seed() are those of one rank among several. ranks: (rank,\n"
"world, block), a tuple of int: the sampler deals blocks of that many consecutive samples to\n"
"world ranks in turn. world 0: this is unknown, and the rank counts as part of the base seed.\n"
"ValueError if rank is not below world, or block is 0.");
PyDoc_STRVAR(watch_doc,
"watch(dicts, counted, find, globals, types)\n\n"
"From now on renew() checks whether values of these types in the dicts, or the numbers of\n"
"entries of the counted dicts, have changed, or numbers and first elements of lists.\n"
"find(changes) -> None, or (entries, dicts, counted, types) for new generators: plans of all\n"
"targets but the first `globals`. changes: 0 after set_epoch(); 8: only numbers and elements.");
PyDoc_STRVAR(renew_doc,
"renew() -> bool\n\n"
"After a sample was made: whether it has made a generator, which is seeded from now on.");
PyDoc_STRVAR(words_doc,
"(words, seed) of one stream: n words of 4 bytes (wide: 8), and its 63-bit seed.");
PyDoc_STRVAR(peek_doc, "The instance struct of an object as bytes, for probing layouts.");
PyDoc_STRVAR(type_doc,
"Seeder(plans)\n--\n\n"
"Seeds generators, one sample at a time. plans: (label, stream, plan[, own_seed]) of each, in\n"
"order, as plan_all() in minato/seeding/generator_states.py makes them.");

static PyMethodDef seeder_methods[] = {
    {"seed", seeder_seed, METH_VARARGS, seed_doc},
    {"share", seeder_share, METH_O, share_doc},
    {"watch", seeder_watch, METH_VARARGS, watch_doc},
    {"renew", seeder_renew, METH_NOARGS, renew_doc},
    {"_peek", seeder_peek, METH_O | METH_STATIC, peek_doc},
    {"_words", seeder_words, METH_VARARGS | METH_STATIC, words_doc},
    {"sample", seeder_sample, METH_VARARGS, sample_doc},
    {"put", seeder_put, METH_VARARGS, put_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot seeder_slots[] = {
    {Py_tp_doc, (void *)type_doc},
    {Py_tp_new, seeder_new},
    {Py_tp_dealloc, seeder_dealloc},
    {Py_tp_traverse, seeder_traverse},
    {Py_tp_clear, seeder_clear},
    {Py_tp_methods, seeder_methods},
    {0, NULL},
};

PyType_Spec mn_seeder_spec = {"minato._core.Seeder", sizeof(struct mn_seeder), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC
                                  | Py_TPFLAGS_IMMUTABLETYPE, seeder_slots};
