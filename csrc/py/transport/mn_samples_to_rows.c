/* mn_samples_to_rows.c - builds a layout from its description, and encodes samples into rows.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/transport/mn_layout.h"

#include <string.h>

#define NO_IMPORT_ARRAY
#include "py/module/mn_numpy.h"

/* ---- building ---------------------------------------------------------------------- */

static int
set_shape(struct mn_node *n, PyObject *shape)
{
    Py_ssize_t nd = shape == NULL ? 0 : PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : -1;
    if (nd < 0 || nd > MN_LAYOUT_MAX_DIMS) {
        return MN_RAISE(PyExc_ValueError,
                        "layout: the shape must be a tuple of at most %d lengths, got %R",
                        MN_LAYOUT_MAX_DIMS, shape);
    }
    n->shape = PyMem_Calloc((size_t)nd + 1, sizeof(*n->shape));
    if (n->shape == NULL) {
        return (PyErr_NoMemory(), -1);
    }
    n->ndim = (int)nd;
    n->bytes = n->itemsize;
    for (Py_ssize_t i = 0; i < nd; i++) {
        long long d = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i));
        if (d < 0) {
            if (!PyErr_Occurred()) {
                PyErr_Format(PyExc_ValueError, "layout: dimension %zd is negative (%lld)", i, d);
            }
            return -1;
        }
        n->shape[i] = d;
        n->bytes *= (uint64_t)d;
    }
    return 0;
}

static int
set_leaf(struct mn_layout *l, struct mn_node *n, int code, int bits, PyObject *shape)
{
    if (l->nfields == MN_LAYOUT_MAX_FIELDS) {
        return MN_RAISE(PyExc_ValueError, "layout: too many fields");
    }
    n->dtype = (struct mn_dl_dtype){(uint8_t)code, (uint8_t)bits, 1};
    n->itemsize = (uint32_t)bits / 8;
    n->field = l->nfields++;
    int rc = set_shape(n, shape);
    l->row_bytes[n->field] = n->bytes;
    l->all_bytes += n->bytes;
    return rc;
}

static int
add_node(struct mn_layout *l, PyObject *spec, int depth);

static int
add_children(struct mn_layout *l, uint32_t at, PyObject *children, int depth)
{
    if (!PyTuple_Check(children)) {
        return MN_RAISE(PyExc_TypeError, "layout: children must be a tuple");
    }
    l->nodes[at].children = (uint32_t)PyTuple_GET_SIZE(children);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); i++) {
        if (add_node(l, PyTuple_GET_ITEM(children, i), depth + 1) < 0) {
            return -1;
        }
    }
    return 0;
}

static int
add_node(struct mn_layout *l, PyObject *spec, int depth)
{
    if (!PyTuple_Check(spec) || PyTuple_GET_SIZE(spec) == 0 || depth > 32
        || l->nnodes == MN_LAYOUT_MAX_NODES) {
        return MN_RAISE(PyExc_ValueError, "layout: too deep or too large");
    }
    long kind;
    PyObject *a = NULL, *b = NULL, *c = NULL, *d = NULL;
    if (!PyArg_ParseTuple(spec, "l|OOOO", &kind, &a, &b, &c, &d)) {
        return -1;
    }
    uint32_t at = l->nnodes++;
    struct mn_node *n = &l->nodes[at];
    n->kind = (enum mn_node_kind)kind;
    int rc = 0;
    switch (n->kind) {
    case MN_NODE_DICT:
    case MN_NODE_NAMED:
        n->extra = Py_XNewRef(a);
        rc = b != NULL ? add_children(l, at, b, depth) : -1;
        break;
    case MN_NODE_LIST:
    case MN_NODE_TUPLE:
        rc = a != NULL ? add_children(l, at, a, depth) : -1;
        break;
    case MN_NODE_TENSOR:
    case MN_NODE_ARRAY:
    case MN_NODE_SCALAR:
        n->extra = Py_XNewRef(d);
        rc = c != NULL ? set_leaf(l, n, (int)PyLong_AsLong(a), (int)PyLong_AsLong(b), c) : -1;
        break;
    case MN_NODE_INT:
        rc = set_leaf(l, n, MN_DL_INT, 64, NULL);
        break;
    case MN_NODE_BOOL:
        rc = set_leaf(l, n, MN_DL_BOOL, 8, NULL);
        break;
    case MN_NODE_FLOAT:
        rc = set_leaf(l, n, MN_DL_FLOAT, 64, NULL);
        break;
    case MN_NODE_OBJECT:
        n->extra = Py_XNewRef(a);
        l->nobjects++;
        break;
    default:
        rc = -1;
    }
    if (rc < 0 && !PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "layout: malformed description");
    }
    l->nodes[at].end = l->nnodes;
    return rc;
}

static PyObject *
layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"spec", "description", NULL};
    PyObject *spec, *description = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|S", names, &spec, &description)) {
        return NULL;
    }
    struct mn_layout *l = (struct mn_layout *)type->tp_alloc(type, 0);
    if (l != NULL) {
        l->description = Py_XNewRef(description);
        if (add_node(l, spec, 0) < 0) {
            Py_CLEAR(l);
        }
    }
    return (PyObject *)l;
}

static int
layout_traverse(PyObject *self, visitproc visit, void *arg)
{
    struct mn_layout *l = (struct mn_layout *)self;
    Py_VISIT(Py_TYPE(self));
    for (uint32_t i = 0; i < l->nnodes; i++) {
        Py_VISIT(l->nodes[i].extra);
    }
    return 0;
}

static int
layout_clear(PyObject *self)
{
    struct mn_layout *l = (struct mn_layout *)self;
    for (uint32_t i = 0; i < l->nnodes; i++) {
        Py_CLEAR(l->nodes[i].extra);
    }
    return 0;
}

static void
layout_dealloc(PyObject *self)
{
    struct mn_layout *l = (struct mn_layout *)self;
    PyObject_GC_UnTrack(self);
    layout_clear(self);
    Py_XDECREF(l->description);
    for (uint32_t i = 0; i < l->nnodes; i++) {
        PyMem_Free(l->nodes[i].shape);
    }
    mn_free_object(self);
}

/* ---- encoding ---------------------------------------------------------------------- */

struct encoder {
    struct mn_state *st;
    struct mn_layout *l;
    const struct mn_shm *shm;
    const uint64_t *fields;
    uint32_t row;
    PyObject *objects;
};

static inline char *
row_of(const struct encoder *en, const struct mn_node *n)
{
    return (char *)mn_at(en->shm, en->fields[n->field]) + n->bytes * en->row;
}

/* Copies a strided array of nd dimensions into C order. Strides in bytes. */
static char *
copy_strided(char *dst, const char *src, int nd, const int64_t *shape, const int64_t *stride,
             uint32_t itemsize)
{
    if (nd == 0) {
        memcpy(dst, src, itemsize);
        return dst + itemsize;
    }
    if (nd == 1 && stride[0] == (int64_t)itemsize) {
        memcpy(dst, src, (size_t)shape[0] * itemsize);
        return dst + (size_t)shape[0] * itemsize;
    }
    for (int64_t i = 0; i < shape[0]; i++) {
        dst = copy_strided(dst, src + i * stride[0], nd - 1, shape + 1, stride + 1, itemsize);
    }
    return dst;
}

/* Larger values are copied without the GIL, because other threads may wait for it. Such a copy
 * takes some ten microseconds, far more than releasing and taking the GIL. */
#define COPY_WITHOUT_GIL (256u * 1024u)

/* Copies a row's field out of an object to which the caller has a reference. strides NULL: it is
 * dense. */
static void
copy_values(struct encoder *en, const struct mn_node *n, const char *src,
            const int64_t *strides)
{
    char *dst = row_of(en, n);
    PyThreadState *saved = NULL;
    if (n->bytes >= COPY_WITHOUT_GIL) {
        saved = PyEval_SaveThread();
    }
    if (strides == NULL) {
        memcpy(dst, src, n->bytes);
    }
    else {
        (void)copy_strided(dst, src, n->ndim, n->shape, strides, n->itemsize);
    }
    if (saved != NULL) {
        PyEval_RestoreThread(saved);
    }
}

/* Returns the truth of an attribute or of a method without arguments: 1, 0, or -1 with an
 * exception. */
static int
is_set(PyObject *t, PyObject *name, bool call)
{
    PyObject *r = call ? PyObject_CallMethodNoArgs(t, name) : PyObject_GetAttr(t, name);
    int yes = r == NULL ? -1 : PyObject_IsTrue(r);
    Py_XDECREF(r);
    return yes;
}

/* Returns whether the bytes are not the values: then torch must copy them. */
static int
has_secrets(struct mn_state *st, PyObject *t, const struct mn_dl_dtype *dt)
{
    if (dt->code != MN_DL_FLOAT && dt->code != MN_DL_BFLOAT && dt->code != MN_DL_COMPLEX) {
        return 0; /* no gradients and no lazy signs */
    }
    int yes = is_set(t, st->str_requires_grad, false);
    if (yes == 0) {
        yes = is_set(t, st->str_is_neg, true);
    }
    if (yes == 0 && dt->code == MN_DL_COMPLEX) {
        yes = is_set(t, st->str_is_conj, true);
    }
    return yes;
}

/* Finds where a tensor's values lie. Returns 1; 0 if it is not dense or its bytes are not its
 * values; -1 with an exception. */
static int
look_at(struct mn_state *st, PyObject *o, struct mn_dl_tensor *t)
{
    if (Py_TYPE(o) != st->tensor_type) {
        return 0;
    }
    if (st->plain != NULL) {
        return st->plain->inspect(o, t);
    }
    if (st->dlpack == NULL) {
        return 0;
    }
    if (st->dlpack->tensor_from_object(o, t) != 0) {
        PyErr_Clear(); /* sparse or nested: leave it to torch */
        return 0;
    }
    int secret = has_secrets(st, o, &t->dtype);
    return secret < 0 ? -1 : secret == 0;
}

/* Each encode_ function writes an object as a node describes. Returns 1: written; 0: it does not
 * fit this layout, so the sample travels as it is; -1: an exception. */
static int
encode_tensor(struct encoder *en, const struct mn_node *n, PyObject *o)
{
    struct mn_dl_tensor t;
    int plain = look_at(en->st, o, &t);
    if (plain <= 0) {
        return plain;
    }
    if (t.device_type != MN_DL_CPU || t.ndim != n->ndim || t.dtype.code != n->dtype.code
        || t.dtype.bits != n->dtype.bits || t.dtype.lanes != 1
        || memcmp(t.shape, n->shape, (size_t)n->ndim * sizeof(int64_t)) != 0) {
        return 0;
    }
    const char *src = (const char *)t.data + t.byte_offset;
    int64_t want = 1;
    bool dense = true;
    for (int i = n->ndim - 1; i >= 0 && t.strides != NULL; i--) {
        dense = dense && (t.shape[i] == 1 || t.strides[i] == want);
        want *= t.shape[i];
    }
    if (n->bytes == 0) {
        return 1;
    }
    if (src == NULL) {
        return 0; /* zeros, or a wrapper without memory of its own: leave it to torch */
    }
    int64_t strides[MN_LAYOUT_MAX_DIMS];
    for (int i = 0; !dense && i < n->ndim; i++) {
        strides[i] = t.strides[i] * n->itemsize;
    }
    copy_values(en, n, src, dense ? NULL : strides);
    return 1;
}

static int
encode_array(struct encoder *en, const struct mn_node *n, PyObject *o)
{
    if (!PyArray_CheckExact(o)) {
        return 0; /* masked, memory-mapped, matrix: leave it to torch */
    }
    PyArrayObject *a = (PyArrayObject *)o;
    if (PyArray_NDIM(a) != n->ndim
        || ((PyObject *)PyArray_DESCR(a) != n->extra
            && !PyArray_EquivTypes(PyArray_DESCR(a), (PyArray_Descr *)n->extra))) {
        return 0;
    }
    for (int i = 0; i < n->ndim; i++) {
        if (PyArray_DIM(a, i) != (npy_intp)n->shape[i]) {
            return 0;
        }
    }
    int64_t strides[MN_LAYOUT_MAX_DIMS], item = PyArray_ITEMSIZE(a);
    for (int i = 0; i < n->ndim; i++) {
        strides[i] = PyArray_STRIDE(a, i);
        if (strides[i] < 0 || strides[i] % item != 0) {
            return 0; /* torch refuses these with its own message, even for an axis of one */
        }
    }
    if (n->bytes != 0) {
        copy_values(en, n, PyArray_DATA(a), PyArray_IS_C_CONTIGUOUS(a) ? NULL : strides);
    }
    return 1;
}

static int
encode_scalar(struct encoder *en, const struct mn_node *n, PyObject *o)
{
    char *dst = row_of(en, n);
    if (n->kind == MN_NODE_INT) {
        if (!PyLong_CheckExact(o)) {
            return 0;
        }
        int overflow;
        int64_t v = PyLong_AsLongLongAndOverflow(o, &overflow);
        memcpy(dst, &v, sizeof(v));
        return overflow == 0;
    }
    if (n->kind == MN_NODE_BOOL) {
        *dst = o == Py_True;
        return PyBool_Check(o);
    }
    if (n->kind == MN_NODE_FLOAT) {
        if (!PyFloat_CheckExact(o)) {
            return 0;
        }
        double v = PyFloat_AS_DOUBLE(o);
        memcpy(dst, &v, sizeof(v));
        return 1;
    }
    if ((PyObject *)Py_TYPE(o) != n->extra) {
        return 0;
    }
    PyArray_ScalarAsCtype(o, dst);
    return 1;
}

static int
encode_node(struct encoder *en, uint32_t at, PyObject *o);

/* PyDict_Next with our own references: called code, and other threads, may change the
 * dictionary. */
static int
next_entry(PyObject *dict, Py_ssize_t *pos, PyObject **key, PyObject **value)
{
    int more;
    Py_BEGIN_CRITICAL_SECTION(dict);
    more = PyDict_Next(dict, pos, key, value);
    if (more) {
        Py_INCREF(*key);
        Py_INCREF(*value);
    }
    Py_END_CRITICAL_SECTION();
    return more;
}

/* Returns whether this is the key that the layout has in this place: the batch's order is that of
 * its first sample. */
static bool
is_key(PyObject *key, PyObject *want)
{
    return key == want
           || (PyUnicode_CheckExact(key) && PyUnicode_CheckExact(want)
               && PyUnicode_Compare(key, want) == 0);
}

static int
encode_dict(struct encoder *en, uint32_t at, PyObject *o)
{
    const struct mn_node *n = &en->l->nodes[at];
    if (!PyDict_CheckExact(o) || PyDict_GET_SIZE(o) != (Py_ssize_t)n->children) {
        return 0;
    }
    Py_ssize_t pos = 0;
    PyObject *key, *value;
    uint32_t child = at + 1;
    for (uint32_t i = 0; i < n->children; i++) {
        if (!next_entry(o, &pos, &key, &value)) {
            return 0;
        }
        int rc = is_key(key, PyTuple_GET_ITEM(n->extra, i)) ? encode_node(en, child, value) : 0;
        Py_DECREF(key);
        Py_DECREF(value);
        if (rc <= 0) {
            return rc;
        }
        child = en->l->nodes[child].end;
    }
    return 1;
}

/* Returns an item of a list, a tuple or a subclass of tuple. NULL if a list has become shorter. */
static PyObject *
item_of(PyObject *o, uint32_t i)
{
    PyObject *item = PyList_CheckExact(o) ? PyList_GetItemRef(o, i)
                                          : Py_NewRef(PyTuple_GET_ITEM(o, i));
    if (item == NULL) {
        PyErr_Clear();
    }
    return item;
}

static int
encode_sequence(struct encoder *en, uint32_t at, PyObject *o)
{
    const struct mn_node *n = &en->l->nodes[at];
    bool right = n->kind == MN_NODE_LIST    ? PyList_CheckExact(o)
                 : n->kind == MN_NODE_TUPLE ? PyTuple_CheckExact(o)
                                            : (PyObject *)Py_TYPE(o) == n->extra;
    uint32_t child = at + 1;
    for (uint32_t i = 0; right && i < n->children; i++) {
        /* checked each time: called code, and other threads, may change a list */
        bool fits = PySequence_Fast_GET_SIZE(o) == (Py_ssize_t)n->children;
        PyObject *item = fits ? item_of(o, i) : NULL;
        int rc = item != NULL ? encode_node(en, child, item) : 0;
        Py_XDECREF(item);
        if (rc <= 0) {
            return rc;
        }
        child = en->l->nodes[child].end;
    }
    return right && PySequence_Fast_GET_SIZE(o) == (Py_ssize_t)n->children;
}

static int
encode_node(struct encoder *en, uint32_t at, PyObject *o)
{
    const struct mn_node *n = &en->l->nodes[at];
    switch (n->kind) {
    case MN_NODE_DICT:
        return encode_dict(en, at, o);
    case MN_NODE_LIST:
    case MN_NODE_TUPLE:
    case MN_NODE_NAMED:
        return encode_sequence(en, at, o);
    case MN_NODE_TENSOR:
        return encode_tensor(en, n, o);
    case MN_NODE_ARRAY:
        return encode_array(en, n, o);
    case MN_NODE_OBJECT:
        if (!PyUnicode_CheckExact(o) && !PyBytes_CheckExact(o)) {
            return 0;
        }
        return PyList_Append(en->objects, o) < 0 ? -1 : 1;
    default:
        return encode_scalar(en, n, o);
    }
}

int
mn_layout_encode(struct mn_state *st, struct mn_layout *l, PyObject *sample,
                 const struct mn_shm *shm, struct mn_block *block, uint32_t row,
                 PyObject *objects)
{
    struct encoder en = {st, l, shm, mn_block_fields(block), row, objects};
    return encode_node(&en, 0, sample);
}

int
mn_layout_encode_list(struct mn_state *st, struct mn_layout *l, PyObject *samples,
                      const struct mn_shm *shm, struct mn_block *block, uint32_t n,
                      PyObject *objects)
{
    int rc = 1;
    for (uint32_t row = 0; rc == 1 && row < n; row++) {
        PyObject *sample = PyList_GetItemRef(samples, row); /* called code may change the list */
        PyObject *own = l->nobjects != 0 ? PyList_New(0) : NULL;
        bool kept = l->nobjects == 0 || (own != NULL && PyList_Append(objects, own) == 0);
        rc = sample != NULL && kept ? mn_layout_encode(st, l, sample, shm, block, row, own) : -1;
        Py_XDECREF(sample);
        Py_XDECREF(own);
    }
    return rc;
}

/* ---- the type ---------------------------------------------------------------------- */

static PyMemberDef layout_members[] = {
    {"row_bytes", T_ULONGLONG, offsetof(struct mn_layout, all_bytes), READONLY,
     PyDoc_STR("bytes of one row, all fields")},
    {"objects", T_UINT, offsetof(struct mn_layout, nobjects), READONLY,
     PyDoc_STR("leaves that are no row data")},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot layout_slots[] = {
    {Py_tp_new, layout_new},
    {Py_tp_dealloc, layout_dealloc},
    {Py_tp_traverse, layout_traverse},
    {Py_tp_clear, layout_clear},
    {Py_tp_members, layout_members},
    {Py_tp_doc, PyDoc_STR("Layout(spec, description=None): how samples lie in rows; see\n"
                          "transport/layouts.py. description: bytes from which workers open it.")},
    {0, NULL},
};

PyType_Spec mn_layout_spec = {"minato._core.Layout", sizeof(struct mn_layout), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC
                                  | Py_TPFLAGS_IMMUTABLETYPE, layout_slots};
