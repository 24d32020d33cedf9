/* minato._torch: a fast way for the core to see where a tensor's values lie, and to make small
 * tensors.
 * SPDX-License-Identifier: Apache-2.0
 *
 * Optional, and the only C++ of the project. It is built where torch's headers are found, against
 * torch's C++ ABI, which changes with each minor release. The module therefore refuses to load
 * with any other minor release of torch; minato works without it.
 *
 * Owner: the caller's thread. No state, no threads of its own.
 */
#include <ATen/DLConvertor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "base/mn_dlpack.h"

#include <cstdio>
#include <cstring>

namespace {

/* Translates to DLPack's numbers of dtypes. Returns false for dtypes that rows cannot hold. */
bool
dtype_of(at::ScalarType type, mn_dl_dtype *out)
{
    uint8_t code = MN_DL_INT;
    switch (type) {
    case at::kByte: case at::kUInt16: case at::kUInt32: case at::kUInt64:
        code = MN_DL_UINT;
        break;
    case at::kChar: case at::kShort: case at::kInt: case at::kLong:
        break;
    case at::kHalf: case at::kFloat: case at::kDouble:
        code = MN_DL_FLOAT;
        break;
    case at::kBFloat16:
        code = MN_DL_BFLOAT;
        break;
    case at::kComplexHalf: case at::kComplexFloat: case at::kComplexDouble:
        code = MN_DL_COMPLEX;
        break;
    case at::kBool:
        code = MN_DL_BOOL;
        break;
    default:
        return false;
    }
    *out = {code, static_cast<uint8_t>(8 * c10::elementSize(type)), 1};
    return true;
}

/* See mn_plain_tensor. Fills in what DLPack says of a tensor, and whether its bytes are its values.
 * It avoids the calls through Python that asking torch from C takes. */
int
inspect(void *object, mn_dl_tensor *out) noexcept
{
    if (!THPVariable_CheckExact(static_cast<PyObject *>(object))) {
        return 0;
    }
    const at::Tensor &t = THPVariable_Unpack(static_cast<PyObject *>(object));
    if (!t.defined() || !t.has_storage() || t.layout() != at::kStrided || !t.device().is_cpu()
        || t.is_quantized() || t.is_neg() || t.is_conj() || t.requires_grad()
        || t.unsafeGetTensorImpl()->is_python_dispatch()
        || !dtype_of(t.scalar_type(), &out->dtype)) {
        return 0;
    }
    try {
        out->data = const_cast<void *>(t.const_data_ptr());
        out->shape = const_cast<int64_t *>(t.sizes().data());
        out->strides = const_cast<int64_t *>(t.strides().data());
    }
    catch (const std::exception &) { /* symbolic sizes, or memory that was freed */
        return 0;
    }
    out->device_type = MN_DL_CPU;
    out->device_id = 0;
    out->ndim = static_cast<int32_t>(t.dim());
    out->byte_offset = 0;
    return 1;
}

/* See mn_plain_tensor. Does not use at::empty: for a small batch with cold caches, most of the cost
 * is the memory that the dispatcher touches. */
void *
copy(const void *data, mn_dl_dtype dtype, int ndim, const int64_t *shape, uint64_t bytes)
{
    HANDLE_TH_ERRORS
    at::ScalarType type = at::toScalarType(DLDataType{dtype.code, dtype.bits, dtype.lanes});
    at::Tensor made(
        at::detail::empty_cpu(at::IntArrayRef(shape, static_cast<size_t>(ndim)), type));
    if (bytes != 0) {
        std::memcpy(made.mutable_data_ptr(), data, bytes);
    }
    return THPVariable_Wrap(std::move(made));
    END_HANDLE_TH_ERRORS
}

bool
profiled()
{
    return at::hasCallbacks();
}

const mn_plain_tensor plain_tensor = {inspect, copy, profiled};

/* Returns whether version ("2.13.0+cpu") belongs to the minor release of this build ("2.13"). */
bool
same_minor(const char *version)
{
    int major, minor, ours[2];
    return std::sscanf(version, "%d.%d", &major, &minor) == 2
           && std::sscanf(MN_TORCH_VERSION, "%d.%d", &ours[0], &ours[1]) == 2
           && major == ours[0] && minor == ours[1];
}

int
exec(PyObject *module)
{
    PyObject *torch = PyImport_ImportModule("torch");
    PyObject *found = torch != nullptr ? PyObject_GetAttrString(torch, "__version__") : nullptr;
    PyObject *text = found != nullptr ? PyObject_Str(found) : nullptr;
    const char *version = text != nullptr ? PyUnicode_AsUTF8(text) : nullptr;
    int rc = -1;
    if (version != nullptr && same_minor(version)) {
        PyObject *capsule = PyCapsule_New(const_cast<mn_plain_tensor *>(&plain_tensor),
                                          MN_PLAIN_TENSOR, nullptr);
        rc = PyModule_AddStringConstant(module, "torch_version", MN_TORCH_VERSION);
        rc = rc < 0 ? rc : PyModule_AddObjectRef(module, "plain_tensor", capsule);
        Py_XDECREF(capsule);
    }
    else if (version != nullptr) {
        PyErr_Format(PyExc_ImportError,
                     "minato._torch was built for torch %s and does not load with torch %s",
                     MN_TORCH_VERSION, version);
    }
    Py_XDECREF(text);
    Py_XDECREF(found);
    Py_XDECREF(torch);
    return rc;
}

PyModuleDef_Slot slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(exec)},
#ifdef Py_MOD_GIL_NOT_USED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED}, /* it has no state */
#endif
    {0, nullptr},
};

PyModuleDef torch_module = {
    PyModuleDef_HEAD_INIT, "minato._torch",
    PyDoc_STR("A short way between torch's tensors and minato's core."),
    0, nullptr, slots, nullptr, nullptr, nullptr,
};

} // namespace

PyMODINIT_FUNC
PyInit__torch(void)
{
    return PyModuleDef_Init(&torch_module);
}
