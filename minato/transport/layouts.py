"""The structure of a dataset's samples, learned from the first batch.

``describe`` turns one sample into the description that ``_core.Layout`` compiles; the numbers
are those of csrc/py/transport/mn_layout.h. A layout is used only after a check on a whole batch:
torch's own ``default_collate`` of the same samples must give its dtypes and shapes.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from .. import _core
from .torch_bridge import DLPACK_CODES

DICT, LIST, TUPLE, NAMED = _core.NODE_DICT, _core.NODE_LIST, _core.NODE_TUPLE, _core.NODE_NAMED
TENSOR, ARRAY, SCALAR, OBJECT = _core.NODE_TENSOR, _core.NODE_ARRAY, _core.NODE_SCALAR, _core.NODE_OBJECT
INT, BOOL, FLOAT = _core.NODE_INT, _core.NODE_BOOL, _core.NODE_FLOAT

#: torch's own function, even if a program has replaced the name
_DEFAULT_COLLATE = torch_collate.default_collate
#: torch's own entries of its registry; a program may have replaced some before this import
_TORCHS = {
    kind: function
    for kind, function in torch_collate.default_collate_fn_map.items()
    if getattr(function, "__module__", None) == torch_collate.__name__
}
#: for these types and their subclasses, no other collate functions may be registered. Rows hold
#: them, or they are converted to plain types on the way
_HELD = (int, float, str, bytes, np.generic, np.ndarray, dict, list, tuple)
#: a description of a sample, as csrc/py/transport/mn_layout.h reads it
Spec = tuple[Any, ...]


class NoLayout(Exception):
    """The samples cannot be written as rows."""


def is_default_collate(collate_fn: Any) -> bool:
    """Whether rows written in place give the same batch as this collate_fn, for samples that rows
    can hold."""
    registry = torch_collate.default_collate_fn_map
    return (
        collate_fn is _DEFAULT_COLLATE
        and _DEFAULT_COLLATE.__module__ == torch_collate.__name__  # not replaced before minato
        and _TORCHS.items() <= registry.items()
        and not any(map(_may_be_held, registry.keys() - _TORCHS.keys()))
    )


def collates_more() -> bool:
    """Whether classes were added to default_collate, as importing DALI's plugin for torch,
    tensordict or MONAI does. Their objects are collated by the worker that makes them: a DALI
    proxy, for example, must be asked for a batch's samples in their order."""
    return torch_collate.default_collate_fn_map.keys() != _TORCHS.keys()


def _may_be_held(entry: Any) -> bool:
    """Whether a registered class (or tuple of classes) may match a value in a row."""
    try:
        return any(
            issubclass(torch.Tensor, kind)
            or any(issubclass(kind, held) or issubclass(held, kind) for held in _HELD)
            for kind in (entry if isinstance(entry, tuple) else (entry,))
        )
    except TypeError:  # not a class
        return True


def _dtype_of(array_dtype: np.dtype) -> tuple[int, int]:
    if not array_dtype.isnative or array_dtype.hasobject or array_dtype.kind not in "biufc":
        raise NoLayout(f"arrays of {array_dtype}")
    try:
        dtype = torch.as_tensor(np.zeros(0, array_dtype)).dtype
        return DLPACK_CODES[dtype]
    except (TypeError, KeyError):
        raise NoLayout(f"arrays of {array_dtype}") from None


def describe(sample: Any, *, in_sequence: bool = False) -> Spec:
    """The description of a sample; raises NoLayout if rows cannot hold it.

    in_sequence: default_collate turns strings in a sequence into a tuple, others into a list.
    """
    kind = type(sample)
    if kind is dict:
        return DICT, tuple(sample), tuple(describe(v) for v in sample.values())
    if kind is list:
        return LIST, tuple(describe(v, in_sequence=True) for v in sample)
    if kind is tuple:
        return TUPLE, tuple(describe(v, in_sequence=True) for v in sample)
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return NAMED, kind, tuple(describe(v, in_sequence=True) for v in sample)
    if kind is torch.Tensor:
        if sample.layout is not torch.strided or sample.device.type != "cpu":
            raise NoLayout("tensors that are not dense or not on the CPU")
        if sample.is_nested or sample.requires_grad or sample.dtype not in DLPACK_CODES:
            raise NoLayout("tensors that need torch's own care")
        if sample.is_conj() or sample.is_neg():
            raise NoLayout("tensors whose bytes are not their values")
        return TENSOR, *DLPACK_CODES[sample.dtype], tuple(sample.shape)
    if kind is np.ndarray:
        if any(stride < 0 for stride in sample.strides):
            raise NoLayout("arrays with negative strides")
        return ARRAY, *_dtype_of(sample.dtype), sample.shape, sample.dtype
    if kind is int:
        return (INT,)
    if kind is bool:
        return (BOOL,)
    if kind is float:
        return (FLOAT,)
    if isinstance(sample, np.generic):
        return SCALAR, *_dtype_of(sample.dtype), (), kind
    if kind is str or kind is bytes:
        return OBJECT, in_sequence
    raise NoLayout(f"samples with a {kind.__name__}")


def plain(sample: Any) -> Any:
    """A sample for which default_collate makes the same batch, without the classes that it drops.
    A class defined in a function or in ``__main__`` may not pickle."""
    for kind in (int, float):
        if isinstance(sample, kind) and type(sample) is not bool:
            return kind(sample)
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return type(sample)(*map(plain, sample))
    if isinstance(sample, tuple):
        return tuple(map(plain, sample))
    if type(sample) is dict:
        return {key: plain(value) for key, value in sample.items()}
    if type(sample) is list:
        return [plain(value) for value in sample]
    if isinstance(sample, memoryview):
        return list(sample)
    return sample


def alike(samples: list[Any]) -> bool:
    """Whether all samples have the same description."""
    try:
        first = describe(samples[0])
        return all(describe(s) == first for s in samples[1:])
    except NoLayout:
        return False


def _agrees(spec: Spec, batch: Any, rows: int) -> bool:
    """Whether default_collate's batch of such samples equals a batch decoded from rows."""
    kind = spec[0]
    if kind == DICT:
        return (
            type(batch) is dict
            and tuple(batch) == spec[1]
            and all(_agrees(s, v, rows) for s, v in zip(spec[2], batch.values()))
        )
    if kind in (LIST, TUPLE, NAMED):
        children = spec[2] if kind == NAMED else spec[1]
        return (
            type(batch) is (spec[1] if kind == NAMED else list)
            and len(batch) == len(children)
            and all(_agrees(s, v, rows) for s, v in zip(children, batch))
        )
    if kind == OBJECT:
        return type(batch) is (tuple if spec[1] else list) and len(batch) == rows
    code_bits, shape = {
        INT: ((0, 64), ()),
        BOOL: ((6, 8), ()),
        FLOAT: ((2, 64), ()),
    }.get(kind) or (spec[1:3], spec[3])
    return (
        type(batch) is torch.Tensor
        and DLPACK_CODES.get(batch.dtype) == tuple(code_bits)
        and tuple(batch.shape) == (rows, *shape)
    )


class Layout:
    """A verified description, its compiled form, and its pickle for workers."""

    def __init__(self, spec: Spec) -> None:
        self.pickled = pickle.dumps(spec)
        self.core = _core.Layout(spec, self.pickled)

    @classmethod
    def prove(cls, sample: Any, batch: Any, rows: int) -> Layout:
        """The layout of a sample, given default_collate's batch; raises NoLayout."""
        spec = describe(sample)
        if not _agrees(spec, batch, rows):
            raise NoLayout("default_collate makes a different batch of the samples")
        try:
            layout = cls(spec)
        except (ValueError, pickle.PicklingError, AttributeError) as error:
            raise NoLayout(str(error)) from None
        if layout.core.row_bytes == 0:
            raise NoLayout("samples without row data")
        return layout

    @classmethod
    def sent(cls, pickled: bytes) -> Layout:
        """A layout from a worker. Raises any exception if the bytes are not valid."""
        return cls(pickle.loads(pickled))


def open_layout(pickled: bytes) -> Any:
    """In a worker: compiles a description that the trainer has posted."""
    return _core.Layout(pickle.loads(pickled))


def proven(samples: Any, batch: Any) -> bytes | None:
    """In a worker: the layout of samples, given default_collate's batch of them, for the trainer.
    Empty if there is none; None if only other samples can tell."""
    try:
        if type(samples) is not list:
            raise NoLayout("samples that are not a list")
        layout = Layout.prove(samples[0], batch, len(samples))
        return layout.pickled if alike(samples) else None
    except NoLayout:
        return b""
