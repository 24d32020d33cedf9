"""Messages between worker and loader: pickle with tensors and arrays out of band.

Plain pickle puts tensors in band and includes their whole storages. torch's reducers for
queues use a file descriptor for every tensor. Here a tensor travels as exactly its bytes,
which the core copies once into the arena. Objects with their own reducers
(multiprocessing's, sparse and nested tensors, anything registered with ``ForkingPickler``)
keep them.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import numpy as np
import torch

from .torch_bridge import DLPACK_CODES, tensor_over


def _as_bytes(tensor: torch.Tensor) -> pickle.PickleBuffer:
    if tensor.numel() == 0:
        return pickle.PickleBuffer(b"")
    # in a dimension of length 1, a stride of 0 also counts as contiguous
    flat: Any = tensor.detach().contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    return pickle.PickleBuffer(flat.numpy())


def _dense(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...] | None]:
    """The tensor's elements in memory order, and the strides to restore it: a channels_last batch
    keeps its order, an expanded tensor stays small. Gaps are dropped."""
    if tensor.is_contiguous():
        return tensor, None
    whole, strides = tensor, tensor.stride()
    for d, stride in enumerate(strides):
        if stride == 0:
            tensor = tensor.narrow(d, 0, 1)
    order = sorted(range(tensor.dim()), key=lambda d: (-strides[d], d))
    dense = tensor.permute(order)
    return (dense, strides) if dense.is_contiguous() else (whole, None)


def _rebuild_tensor(
    buffer: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    requires_grad: bool,
) -> torch.Tensor:
    if strides is None:
        tensor = tensor_over(buffer, dtype, shape)
    else:
        elements = memoryview(buffer).nbytes // dtype.itemsize
        tensor = tensor_over(buffer, dtype, (elements,)).as_strided_(shape, strides)
    return tensor.requires_grad_(requires_grad)


def _rebuild_lazy(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor.conj() if conj else tensor


def _rebuild_flipped(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.flip(array, axes)


def _rebuild_packed(array: np.ndarray) -> np.ndarray:
    """Copies to a field of packed records, with strides that no item size divides."""
    field: np.ndarray = np.empty(array.shape, [("value", array.dtype), ("", "u1")])["value"]
    field[...] = array
    return field


def _rebuild_writable(
    buffer: Any, dtype: np.dtype, shape: tuple[int, ...], order: Literal["C", "F"]
) -> np.ndarray:
    """A writable array: pickle marks the buffer of a read-only array read-only, but this memory
    belongs to the program."""
    whole: Any = buffer.obj if isinstance(buffer, memoryview) else bytearray(buffer)
    return np.ndarray(shape, dtype, whole, order=order)


def _rebuild_parameter(*state: Any) -> torch.nn.Parameter:
    buffer, dtype, shape, strides, requires_grad = state
    data = _rebuild_tensor(buffer, dtype, shape, strides, False)
    return torch.nn.Parameter(data, requires_grad)


def _rebuild_storage(buffer: Any, nbytes: int) -> torch.UntypedStorage:
    return tensor_over(buffer, torch.uint8, (nbytes,)).untyped_storage()


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.dtype in DLPACK_CODES
        and (tensor.is_leaf or not tensor.requires_grad)
    )


class _Pickler(ForkingPickler):
    samples = False

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not _is_plain(obj):
                return NotImplemented
            data = obj.detach()
            if self.samples:
                data = data.resolve_conj().resolve_neg()  # default_collate refuses them in workers
            if data.is_conj() or data.is_neg():
                plain = data.conj() if data.is_conj() else data
                plain = torch._neg_view(plain) if plain.is_neg() else plain
                return _rebuild_lazy, (plain, data.is_conj(), data.is_neg())
            rebuild = _rebuild_tensor if kind is torch.Tensor else _rebuild_parameter
            dense, strides = _dense(data)
            shape = tuple(obj.shape)
            return rebuild, (_as_bytes(dense), obj.dtype, shape, strides, obj.requires_grad)
        if kind is np.ndarray and not obj.dtype.hasobject:
            return self._array(obj)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
            return _rebuild_storage, (_as_bytes(data), obj.nbytes())
        return NotImplemented

    def _array(self, array: np.ndarray) -> Any:
        """Arrays arrive as from torch's workers: contiguous, writable, in native byte order.

        In a sample, properties that default_collate checks are preserved: it rejects arrays that
        cannot become tensors.
        """
        if any(stride < 0 for stride in array.strides):
            axes = tuple(i for i, stride in enumerate(array.strides) if stride < 0)
            if not self.samples:
                return np.ascontiguousarray(array).__reduce_ex__(5)
            return _rebuild_flipped, (np.ascontiguousarray(np.flip(array, axes)), axes)
        if self.samples and any(stride % (array.itemsize or 1) for stride in array.strides):
            return _rebuild_packed, (np.ascontiguousarray(array),)
        if not array.dtype.isnative and array.dtype.kind in "iufcMmU":
            if self.samples and array.flags.forc:
                return NotImplemented
            if self.samples:  # otherwise NumPy's pickle would change the byte order
                return array.copy().__reduce_ex__(5)
            return array.astype(array.dtype.newbyteorder("=")).__reduce_ex__(5)
        if not self.samples and not array.flags.forc:
            return np.ascontiguousarray(array).__reduce_ex__(5)  # NumPy's pickle keeps the order
        if array.flags.writeable or array.dtype.kind not in "biufcMmSUV":
            return NotImplemented
        if not array.flags.forc or array.nbytes == 0:
            return array.copy().__reduce_ex__(5)
        order = "C" if array.flags.c_contiguous else "F"
        flat: Any = array.ravel(order="K").view(np.uint8)
        return _rebuild_writable, (pickle.PickleBuffer(flat), array.dtype, array.shape, order)


def dumps(obj: Any, samples: bool = False) -> tuple[bytes, list[memoryview]]:
    """Pickles obj. Returns the pickle and its out-of-band buffers (all C-contiguous).

    samples: obj holds samples that default_collate has not processed yet.
    """
    buffers: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffer.raw()
        except BufferError:  # neither C nor Fortran contiguous: in band
            return True
        buffers.append(buffer)
        return False

    out = io.BytesIO()
    pickler = _Pickler(out, 5, True, keep)
    pickler.samples = samples
    pickler.dump(obj)
    return out.getvalue(), [b.raw() for b in buffers]


def loads(data: bytes, buffers: list[Any]) -> Any:
    """Unpickles an object; its large tensors and arrays share the given buffers."""
    return pickle.loads(data, buffers=buffers)
