"""Messages between worker and loader: pickle with tensors and arrays out of band.

Plain pickle puts tensors in band and includes their whole storages. torch's reducers for
queues use a file descriptor for every tensor. Here a tensor travels as exactly its bytes,
which the core copies once into the arena. Tensors that share elements still share them when they
arrive, as with torch: writing to one shows in the other. Objects with their own reducers
(multiprocessing's, sparse and nested tensors, anything registered with ``ForkingPickler``)
keep them.
"""

from __future__ import annotations

import io
import pickle
import time
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
    keeps its order, an expanded tensor and overlapping windows stay small. Gaps are dropped."""
    if tensor.is_contiguous() or _span(tensor) > tensor.numel():
        return tensor, None
    return tensor.as_strided((_span(tensor),), (1,)), tensor.stride()


def _span(tensor: torch.Tensor) -> int:
    """Elements from the first in memory to the last."""
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


#: bytes: a multiple of the size of every element
_ALIGNED = 16
#: by the address of a storage object: the parts of it that several tensors share, each with the
#: number of its first byte
_Parts = dict[int, list[tuple[int, torch.Tensor]]]


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """The first byte in the storage, the one after the last, and how many are sent."""
    size, span = tensor.itemsize, _span(tensor)
    begin = int(tensor.storage_offset()) * size
    return begin, begin + span * size, min(span, tensor.numel()) * size


def _shared_parts(tensors: list[torch.Tensor]) -> _Parts:
    """The parts of storages in which tensors overlap, where sending the part takes no more than
    sending each tensor."""
    by_storage: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    parts: _Parts = {}
    for storage, several in by_storage.items():
        places = sorted(map(_bytes_of, several)) if len(several) > 1 else []
        while places:
            begin, end, sent = places.pop(0)
            alone = True
            while places and places[0][0] < end:
                _begin, last, more = places.pop(0)
                end, sent, alone = max(end, last), sent + more, False
            begin -= begin % _ALIGNED
            if not alone and end - begin <= sent + _ALIGNED:
                part = torch.empty(0, dtype=torch.uint8, device="cpu")
                part.set_(several[0].untyped_storage(), begin, (end - begin,), (1,))
                parts.setdefault(storage, []).append((begin, part))
    return parts


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


def _rebuild_view(
    part: torch.Tensor,
    offset: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    """offset: bytes in the part, which several tensors share."""
    view = torch.empty(0, dtype=dtype, device="cpu")
    view.set_(part.untyped_storage(), offset // dtype.itemsize, shape, strides)
    return view.requires_grad_(requires_grad)


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
    *rest, requires_grad = state
    rebuild: Any = _rebuild_view if isinstance(rest[0], torch.Tensor) else _rebuild_tensor
    return torch.nn.Parameter(rebuild(*rest, False), requires_grad)


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
    parts: _Parts = {}

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tensors: list[torch.Tensor] = []

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
            shape = tuple(obj.shape)
            if data.numel() > 0:
                self.tensors.append(data)
                if self.parts and (found := self._within(data, obj)) is not None:
                    view = _rebuild_view if kind is torch.Tensor else _rebuild_parameter
                    return view, (*found, obj.dtype, shape, tuple(obj.stride()), obj.requires_grad)
            rebuild = _rebuild_tensor if kind is torch.Tensor else _rebuild_parameter
            dense, strides = _dense(data)
            return rebuild, (_as_bytes(dense), obj.dtype, shape, strides, obj.requires_grad)
        if kind is np.ndarray and not obj.dtype.hasobject:
            return self._array(obj)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(obj)
            return _rebuild_storage, (_as_bytes(data), obj.nbytes())
        return NotImplemented

    def _within(self, data: torch.Tensor, obj: torch.Tensor) -> tuple[torch.Tensor, int] | None:
        """The part that the tensor shares with others, and its first byte in there."""
        first, end, _sent = _bytes_of(data)
        for begin, part in self.parts.get(data.untyped_storage()._cdata, ()):
            if part is not obj and begin <= first and end <= begin + len(part):
                return part, first - begin
        return None

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
    data, buffers, tensors = _pickled(obj, samples, {})
    if len(tensors) > 1 and (parts := _shared_parts(tensors)):
        data, buffers, _ = _pickled(obj, samples, parts)
    return data, buffers


def _pickled(
    obj: Any, samples: bool, parts: _Parts
) -> tuple[bytes, list[memoryview], list[torch.Tensor]]:
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
    pickler.samples, pickler.parts = samples, parts
    pickler.dump(obj)
    return out.getvalue(), [b.raw() for b in buffers], pickler.tensors


def loads(data: bytes, buffers: list[Any]) -> Any:
    """Unpickles an object; its large tensors and arrays share the given buffers."""
    return pickle.loads(data, buffers=buffers)


# ---- whether another worker than the one that made a sample may collate it --------------------
#
# A batch with a custom collate_fn is split over workers only if that changes nothing
# (csrc/schedule/mn_costs.c decides when). A sample must come out of a message bit for
# bit as it went in, including its memory order, on which sums may depend.

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
#: depth to which nested containers are examined
_DEPTH = 8
#: nanoseconds for a byte that is copied twice, into the message and out of it. The figure is for
#: memory of which a part is used for the first time
_BYTE_NS = 1


def sendable(sample: Any, depth: int = _DEPTH) -> bool:
    """Whether a sample consists only of plain numbers, text, dense arrays and tensors."""
    kind = type(sample)
    if kind in _SCALARS:
        return True
    if kind is torch.Tensor:
        return (
            _is_plain(sample)
            and not sample.requires_grad
            and not sample.is_conj()
            and not sample.is_neg()
            and sample.is_contiguous()
        )
    if kind is np.ndarray:
        flags = sample.flags
        return (
            not sample.dtype.hasobject
            and sample.dtype.isnative
            and (flags.c_contiguous or flags.f_contiguous)
        )
    if isinstance(sample, np.generic):
        return not sample.dtype.hasobject
    if depth == 0:
        return False
    if kind is dict:
        return all(
            type(key) in _SCALARS and sendable(value, depth - 1)
            for key, value in sample.items()
        )
    if kind is list or kind is tuple or (isinstance(sample, tuple) and hasattr(kind, "_fields")):
        return all(sendable(value, depth - 1) for value in sample)
    return False


def sending_ns(samples: list[Any]) -> int:
    """Nanoseconds for sending one of these samples, or -1 if some cannot be sent."""
    if not samples or not all(sendable(sample) for sample in samples):
        return -1
    try:
        took = min(_round_trip(samples) for _ in range(2))  # the first one warms up
    except Exception:
        return -1
    return took // len(samples)


def _round_trip(samples: list[Any]) -> int:
    begin = time.thread_time_ns()
    data, buffers = dumps(samples)
    loads(data, buffers)
    bytes_sent = len(data) + sum(buffer.nbytes for buffer in buffers)
    return time.thread_time_ns() - begin + _BYTE_NS * bytes_sent
