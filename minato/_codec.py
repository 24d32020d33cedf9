"""Messages between worker and loader: pickle with tensors and arrays out of band.

Plain pickle puts tensors in band and drags whole storages along; torch's reducers for
queues make a file descriptor of every tensor.  Here a tensor travels as exactly its bytes,
which the core copies once into the arena.  Objects with reducers of their own
(multiprocessing's, sparse and nested tensors, anything registered with ``ForkingPickler``)
keep them.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch

from ._torch_bridge import DLPACK_CODES, tensor_over


def _as_bytes(tensor: torch.Tensor) -> pickle.PickleBuffer:
    if tensor.numel() == 0:
        return pickle.PickleBuffer(b"")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return pickle.PickleBuffer(flat.numpy())


def _rebuild_tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    return tensor_over(buffer, dtype, shape).requires_grad_(requires_grad)


def _rebuild_lazy(tensor: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor.conj() if conj else tensor


def _rebuild_flipped(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    return np.flip(array, axes)


def _rebuild_parameter(buffer: Any, dtype: torch.dtype, shape, requires_grad: bool):
    return torch.nn.Parameter(tensor_over(buffer, dtype, shape), requires_grad)


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
    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not _is_plain(obj):
                return NotImplemented
            data = obj.detach()
            if data.is_conj() or data.is_neg():
                # torch's collate treats the lazy bits specially: they must arrive
                plain = data.conj() if data.is_conj() else data
                plain = torch._neg_view(plain) if plain.is_neg() else plain
                return _rebuild_lazy, (plain, data.is_conj(), data.is_neg())
            rebuild = _rebuild_tensor if kind is torch.Tensor else _rebuild_parameter
            state = (_as_bytes(data), obj.dtype, tuple(obj.shape), obj.requires_grad)
            return rebuild, state
        if kind is np.ndarray and any(stride < 0 for stride in obj.strides):
            # torch refuses such arrays; a pickled copy would hide what they were
            axes = tuple(i for i, stride in enumerate(obj.strides) if stride < 0)
            return _rebuild_flipped, (np.ascontiguousarray(np.flip(obj, axes)), axes)
        if kind is torch.UntypedStorage and obj.device.type == "cpu":
            data = torch.empty(0, dtype=torch.uint8).set_(obj)
            return _rebuild_storage, (_as_bytes(data), obj.nbytes())
        return NotImplemented


def dumps(obj: Any) -> tuple[bytes, list[pickle.PickleBuffer]]:
    """Pickles obj: the pickle, and the buffers that go beside it (all C-contiguous)."""
    buffers: list[pickle.PickleBuffer] = []

    def keep(buffer: pickle.PickleBuffer) -> bool:
        try:
            buffer.raw()
        except BufferError:  # neither C nor Fortran contiguous: in band
            return True
        buffers.append(buffer)
        return False

    out = io.BytesIO()
    _Pickler(out, 5, True, keep).dump(obj)
    return out.getvalue(), [b.raw() for b in buffers]


def loads(data: bytes, buffers: list[Any]) -> Any:
    """The object again; its large tensors and arrays share the given buffers."""
    return pickle.loads(data, buffers=buffers)
