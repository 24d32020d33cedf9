/* minato._ops.Pipeline: operators from Python's description, run without the GIL.
 * SPDX-License-Identifier: Apache-2.0
 */
#include "py/ops/mn_ops.h"

#include <errno.h>
#include <string.h>

static struct mn_ops_pipeline *
self_of(PyObject *object)
{
    return (struct mn_ops_pipeline *)(void *)object;
}

/* -- Making ---------------------------------------------------------------------------- */

static int
take_operator(PyObject *capsule, struct mn_op *op)
{
    const struct mn_operator *user = PyCapsule_GetPointer(capsule, MN_OPERATOR_CAPSULE);
    if (user == NULL) {
        return -1;
    }
    if (user->abi != MN_OPS_ABI || user->size < sizeof(*user) || user->run == NULL
        || user->name == NULL) {
        PyErr_Format(PyExc_ValueError,
                     "the operator was built for ABI %u with a structure of %u bytes; this "
                     "minato has ABI %u with %zu bytes, and needs name and run",
                     user->abi, user->size, MN_OPS_ABI, sizeof(*user));
        return -1;
    }
    op->user = user;
    return 0;
}

/* Reads (kind, flag, keep_boxes, dtypes, size, p, per_axis, values, capsule or None). */
static int
take_op(PyObject *item, struct mn_op *op)
{
    int kind;
    long long size[3];
    PyObject *capsule;
    memset(op, 0, sizeof(*op));
    int flag, keep_boxes;
    if (!PyArg_ParseTuple(item, "ipp(ii)(LLL)d(ddd)(dddd)O", &kind, &flag, &keep_boxes,
                          &op->dtypes[0], &op->dtypes[1], &size[0], &size[1], &size[2],
                          &op->p, &op->per_axis[1], &op->per_axis[2], &op->per_axis[3],
                          &op->values[0], &op->values[1], &op->values[2], &op->values[3],
                          &capsule)) {
        return -1;
    }
    if (kind < 0 || kind >= MN_OP_KINDS) {
        return MN_RAISE(PyExc_ValueError, "unknown operator %d", kind);
    }
    op->kind = (enum mn_op_kind)kind;
    op->flag = flag != 0;
    op->keep_boxes = keep_boxes != 0;
    for (int axis = 0; axis < 3; axis++) {
        op->size[axis + 1] = size[axis];
    }
    return op->kind == MN_OP_USER ? take_operator(capsule, op) : 0;
}

static int
fill_pipeline(struct mn_ops_pipeline *self, PyObject *specs, int level)
{
    Py_ssize_t n = PyTuple_GET_SIZE(specs);
    MN_OPS_NEW_TEXT(text);
    const struct mn_kernels *kernels = level < 0 ? NULL : mn_kernels_get(level);
    if (n > UINT16_MAX || (level >= 0 && kernels == NULL)) {
        return MN_RAISE(PyExc_ValueError, "too many operators, or no such instruction set");
    }
    struct mn_op *ops = PyMem_Calloc((size_t)n + 1, sizeof(*ops));
    if (ops == NULL) {
        return (PyErr_NoMemory(), -1);
    }
    int rc = 0;
    for (Py_ssize_t i = 0; rc == 0 && i < n; i++) {
        rc = take_op(PyTuple_GET_ITEM(specs, i), &ops[i]);
    }
    if (rc == 0) {
        rc = mn_pipeline_open(&self->pipeline, ops, (int)n, kernels, &text);
        if (rc < 0) {
            mn_ops_raise(rc, &text);
        }
    }
    PyMem_Free(ops);
    return rc < 0 ? -1 : 0;
}

static PyObject *
new_pipeline(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"specs", "level", NULL};
    PyObject *specs;
    int level = -1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|i", names, &PyTuple_Type, &specs,
                                     &level)) {
        return NULL;
    }
    PyObject *object = type->tp_alloc(type, 0);
    if (object == NULL) {
        return NULL;
    }
    self_of(object)->capsules = Py_NewRef(specs); /* they own the capsules */
    if (fill_pipeline(self_of(object), specs, level) < 0) {
        Py_DECREF(object);
        return NULL;
    }
    return object;
}

static int
traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self_of(object)->capsules);
    return 0;
}

/* No tp_clear: the pipeline points into the capsules until it is closed, and a capsule has no
 * reference that could be part of a cycle. */
static void
dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    mn_pipeline_close(self_of(object)->pipeline);
    Py_XDECREF(self_of(object)->capsules);
    mn_free_object(object);
}

/* -- Running --------------------------------------------------------------------------- */

/* References that a call borrows from its arguments. */
struct inputs {
    struct mn_source source;
    PyObject *paths[2]; /* bytes */
    Py_buffer buffers[2];
};

static void
release_inputs(struct inputs *in)
{
    for (int i = 0; i < 2; i++) {
        Py_CLEAR(in->paths[i]);
        if (in->buffers[i].obj != NULL) {
            PyBuffer_Release(&in->buffers[i]);
        }
    }
}

static int
take_input(struct inputs *in, int which, PyObject *object)
{
    struct mn_op_volume *volume = which == 0 ? &in->source.image : &in->source.label;
    if (object == Py_None && which == 1) {
        return 0;
    }
    if (PyUnicode_Check(object) || PyBytes_Check(object)) {
        if (!PyUnicode_FSConverter(object, &in->paths[which])) {
            return -1;
        }
        const char *path = PyBytes_AS_STRING(in->paths[which]);
        *(which == 0 ? &in->source.image_path : &in->source.label_path) = path;
        return 0;
    }
    return mn_ops_volume(object, 0, &in->buffers[which], volume);
}

static int
take_inputs(struct inputs *in, PyObject *image, PyObject *label)
{
    memset(in, 0, sizeof(*in));
    if (take_input(in, 0, image) < 0 || take_input(in, 1, label) < 0) {
        release_inputs(in);
        return -1;
    }
    if (label != Py_None && (in->paths[0] == NULL) != (in->paths[1] == NULL)) {
        PyErr_SetString(PyExc_TypeError, "image and label must both be paths or both arrays");
        release_inputs(in);
        return -1;
    }
    return 0;
}

/* Asks allocate(dtype, shape) for an output and checks it. Returns the output, or None if there is
 * no volume. */
static PyObject *
make_output(const struct mn_view *view, PyObject *allocate, int which, Py_buffer *buffer)
{
    if (view->dtype == MN_DTYPE_NONE) {
        return Py_NewRef(Py_None);
    }
    PyObject *array = PyObject_CallFunction(
        allocate, "is(LLLL)", which, mn_dtype_code(view->dtype),
        (long long)view->shape[0], (long long)view->shape[1], (long long)view->shape[2],
        (long long)view->shape[3]);
    struct mn_op_volume volume;
    if (array == NULL || mn_ops_volume(array, 1, buffer, &volume) < 0) {
        Py_XDECREF(array);
        return NULL;
    }
    if (volume.dtype != view->dtype
        || memcmp(volume.shape, view->shape, sizeof(volume.shape)) != 0) {
        PyErr_Format(PyExc_ValueError,
                     "the output must be %s of shape (%lld, %lld, %lld, %lld)",
                     mn_dtype_name(view->dtype), (long long)view->shape[0],
                     (long long)view->shape[1], (long long)view->shape[2],
                     (long long)view->shape[3]);
        PyBuffer_Release(buffer);
        Py_DECREF(array);
        return NULL;
    }
    return array;
}

/* Stores the work's views into new outputs. Returns (image, label). */
static PyObject *
store_outputs(struct mn_work *work, PyObject *allocate)
{
    Py_buffer buffers[2] = {{0}, {0}};
    const struct mn_view *views[2] = {&work->image, &work->label};
    PyObject *arrays[2] = {NULL, NULL};
    int rc = 0;
    for (int i = 0; rc == 0 && i < 2; i++) {
        arrays[i] = make_output(views[i], allocate, i, &buffers[i]);
        rc = arrays[i] == NULL ? -1 : 0;
    }
    if (rc == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (int i = 0; rc == 0 && i < 2; i++) {
            rc = views[i]->dtype != MN_DTYPE_NONE
                     ? mn_work_store(work, views[i], buffers[i].buf)
                     : 0;
        }
        Py_END_ALLOW_THREADS
        if (rc < 0) {
            mn_ops_raise(rc, work->reader.text);
        }
    }
    for (int i = 0; i < 2; i++) {
        if (buffers[i].obj != NULL) {
            PyBuffer_Release(&buffers[i]);
        }
    }
    PyObject *result = rc == 0 ? PyTuple_Pack(2, arrays[0], arrays[1]) : NULL;
    Py_XDECREF(arrays[0]);
    Py_XDECREF(arrays[1]);
    return result;
}

PyDoc_STRVAR(apply_doc,
             "apply(image, label, key_hi, key_lo, allocate) -> (image, label)\n\n"
             "Runs the operators on two paths or two arrays (label may be None). "
             "allocate(which, dtype, shape) returns the array to write image (0) or label "
             "(1) to.");

static PyObject *
apply(PyObject *object, PyObject *args)
{
    struct mn_pipeline *pipeline = self_of(object)->pipeline;
    PyObject *image, *label, *allocate, *result = NULL;
    unsigned long long hi, lo;
    MN_OPS_NEW_TEXT(text);
    struct inputs in;
    struct mn_work *work = NULL;
    int rc;
    if (!PyArg_ParseTuple(args, "OOKKO", &image, &label, &hi, &lo, &allocate)
        || take_inputs(&in, image, label) < 0) {
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    rc = mn_work_begin(pipeline, &work, &text);
    if (rc == 0) {
        rc = mn_pipeline_apply(pipeline, work, 0, &in.source, hi, lo);
    }
    Py_END_ALLOW_THREADS
    result = rc < 0 ? mn_ops_raise(rc, &text) : store_outputs(work, allocate);
    if (work != NULL) {
        mn_work_end(pipeline, work);
    }
    release_inputs(&in);
    return result;
}

/* -- Boxes ----------------------------------------------------------------------------- */

static PyObject *
box_tuple(const struct mn_box *b)
{
    return Py_BuildValue("((iii)(iii))", b->low[0], b->low[1], b->low[2], b->high[0],
                         b->high[1], b->high[2]);
}

static PyObject *
boxes_list(const struct mn_boxes *boxes)
{
    PyObject *list = PyList_New(boxes->n_classes);
    for (int32_t i = 0; list != NULL && i < boxes->n_classes; i++) {
        const struct mn_class_boxes *c = &boxes->classes[i];
        PyObject *item = c->n_boxes > 1
                             ? Py_BuildValue("(iL(NN))", c->value, (long long)c->components,
                                             box_tuple(&c->boxes[0]), box_tuple(&c->boxes[1]))
                             : Py_BuildValue("(iL(N))", c->value, (long long)c->components,
                                             box_tuple(&c->boxes[0]));
        if (item == NULL) {
            Py_CLEAR(list);
            break;
        }
        PyList_SET_ITEM(list, i, item);
    }
    return list;
}

PyDoc_STRVAR(boxes_doc,
             "boxes(label) -> [(value, components, ((low, high), ...)), ...]\n\n"
             "The up to two largest boxes of each class of a uint8 label, path or array, the "
             "largest last. Those of a file are cached for later crops.");

static PyObject *
boxes(PyObject *object, PyObject *label)
{
    struct mn_pipeline *pipeline = self_of(object)->pipeline;
    MN_OPS_NEW_TEXT(text);
    const struct mn_boxes *found = NULL;
    struct mn_work *work = NULL;
    struct inputs in = {0};
    if (take_input(&in, 1, label) < 0) {
        return NULL;
    }
    int rc;
    Py_BEGIN_ALLOW_THREADS
    rc = mn_work_begin(pipeline, &work, &text);
    if (rc == 0 && in.source.label_path != NULL) {
        rc = mn_work_open(work, 1, in.source.label_path, false, MN_DTYPE_U8);
    }
    else if (rc == 0) {
        mn_view_of_memory(&work->label, in.source.label.dtype, in.source.label.data,
                          in.source.label.shape, in.source.label.strides);
    }
    if (rc == 0) {
        rc = mn_work_boxes(work, true, &found);
    }
    Py_END_ALLOW_THREADS
    PyObject *result = rc < 0 ? mn_ops_raise(rc, &text) : boxes_list(found);
    if (work != NULL) {
        mn_work_end(pipeline, work);
    }
    release_inputs(&in);
    return result;
}

static int
export_entry(const struct mn_filecache_entry *entry, void *list)
{
    const struct mn_npy_identity *id = &entry->identity;
    PyObject *path = PyUnicode_DecodeFSDefault(entry->path);
    PyObject *item = path == NULL
                         ? NULL
                         : Py_BuildValue("(O(KKKL)y#)", path, (unsigned long long)id->device,
                                         (unsigned long long)id->inode,
                                         (unsigned long long)id->size,
                                         (long long)id->mtime_ns, (char *)entry->boxes,
                                         (Py_ssize_t)mn_boxes_bytes(entry->boxes->n_classes));
    int rc = item == NULL ? -1 : PyList_Append(list, item);
    Py_XDECREF(path);
    Py_XDECREF(item);
    return rc;
}

PyDoc_STRVAR(export_boxes_doc, "export_boxes() -> what import_boxes takes");

static PyObject *
export_boxes(PyObject *object, PyObject *Py_UNUSED(args))
{
    PyObject *list = PyList_New(0);
    if (list != NULL
        && mn_filecache_each_boxes(&self_of(object)->pipeline->cache, export_entry, list) < 0) {
        Py_CLEAR(list);
    }
    return list;
}

static bool
is_sound(const char *bytes, Py_ssize_t length)
{
    struct mn_boxes head;
    if ((size_t)length < sizeof(head)) {
        return false;
    }
    memcpy(&head, bytes, sizeof(head));
    if (head.n_classes < 0 || head.n_classes > 255
        || (size_t)length != mn_boxes_bytes(head.n_classes)) {
        return false;
    }
    for (int32_t i = 0; i < head.n_classes; i++) {
        struct mn_class_boxes c;
        memcpy(&c, bytes + mn_boxes_bytes(i), sizeof(c));
        if (c.n_boxes < 1 || c.n_boxes > 2) {
            return false;
        }
    }
    return true;
}

PyDoc_STRVAR(import_boxes_doc, "import_boxes(list): what another pipeline exported");

static PyObject *
import_boxes(PyObject *object, PyObject *list)
{
    struct mn_filecache *cache = &self_of(object)->pipeline->cache;
    const struct mn_npy no_header = {0};
    if (!PyList_Check(list)) {
        return PyErr_Format(PyExc_TypeError, "expected a list, got %s", Py_TYPE(list)->tp_name);
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); i++) {
        PyObject *path = NULL;
        const char *bytes;
        Py_ssize_t length;
        unsigned long long device, inode, size;
        long long mtime;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(list, i), "O&(KKKL)y#", PyUnicode_FSConverter,
                              &path, &device, &inode, &size, &mtime, &bytes, &length)) {
            return NULL;
        }
        bool sound = is_sound(bytes, length);
        struct mn_boxes *copy = sound ? malloc((size_t)length) : NULL;
        if (copy == NULL) {
            Py_DECREF(path);
            if (!sound) {
                return PyErr_Format(PyExc_ValueError, "not a list of boxes");
            }
            return PyErr_NoMemory();
        }
        memcpy(copy, bytes, (size_t)length);
        struct mn_npy_identity id = {device, inode, size, mtime};
        if (mn_filecache_add(cache, PyBytes_AS_STRING(path), &id, &no_header, copy) == NULL) {
            free(copy); /* the cache is full: the boxes will be computed again */
        }
        Py_DECREF(path);
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(stats_doc, "stats() -> dict of counters since the pipeline was made");

static PyObject *
stats(PyObject *object, PyObject *Py_UNUSED(args))
{
    const struct mn_pipeline *p = self_of(object)->pipeline;
#define COUNTER(name) #name, (unsigned long long)mn_a64_load_relaxed(&p->name)
    return Py_BuildValue("{ss sK sK sK sK sK sK}", "instruction_set", p->kernels->name,
                         COUNTER(samples), COUNTER(bytes_read), COUNTER(bytes_touched),
                         COUNTER(scans), COUNTER(headers_parsed), COUNTER(files_mapped));
}

PyDoc_STRVAR(tail_most_doc, "tail_most() -> operators at the end that may be left as a recipe");

static PyObject *
tail_most(PyObject *object, PyObject *Py_UNUSED(args))
{
    return PyLong_FromLong(mn_pipeline_tail_most(self_of(object)->pipeline));
}

PyDoc_STRVAR(recipe_doc,
             "recipe(tail, key_hi, key_lo) -> bytes: what the last operators do to a sample");

static PyObject *
recipe(PyObject *object, PyObject *args)
{
    const struct mn_pipeline *pipeline = self_of(object)->pipeline;
    unsigned long long hi, lo;
    int tail;
    if (!PyArg_ParseTuple(args, "iKK", &tail, &hi, &lo)) {
        return NULL;
    }
    if (tail < 0 || tail > mn_pipeline_tail_most(pipeline)) {
        return PyErr_Format(PyExc_ValueError,
                            "tail is %d, but only %d trailing operators are steps", tail,
                            mn_pipeline_tail_most(pipeline));
    }
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, 8 * (Py_ssize_t)MN_RECIPE_WORDS(tail));
    if (bytes != NULL) {
        mn_pipeline_recipe(pipeline, tail, hi, lo, PyBytes_AS_STRING(bytes));
    }
    return bytes;
}

static PyMethodDef methods[] = {
    {"apply", apply, METH_VARARGS, apply_doc},
    {"recipe", recipe, METH_VARARGS, recipe_doc},
    {"tail_most", tail_most, METH_NOARGS, tail_most_doc},
    {"boxes", boxes, METH_O, boxes_doc},
    {"export_boxes", export_boxes, METH_NOARGS, export_boxes_doc},
    {"import_boxes", import_boxes, METH_O, import_boxes_doc},
    {"stats", stats, METH_NOARGS, stats_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot type_slots[] = {
    {Py_tp_new, new_pipeline},
    {Py_tp_dealloc, dealloc},
    {Py_tp_traverse, traverse},
    {Py_tp_methods, methods},
    {Py_tp_doc, "Pipeline(specs, level=-1): operators as minato.ops describes them."},
    {0, NULL},
};

PyType_Spec mn_ops_pipeline_spec = {"minato._ops.Pipeline", sizeof(struct mn_ops_pipeline), 0,
                                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC
                                        | Py_TPFLAGS_IMMUTABLETYPE, type_slots};
