"""The structure of a dataset's samples, learned from the first batch, and how they travel: as rows of
a layout, or as batches made whole by one worker.

``describe`` turns one sample into the description that ``_core.Layout`` compiles; the numbers
are those of csrc/py/transport/mn_layout.h. A layout is used only after a check on a whole batch:
torch's own ``default_collate`` of the same samples must give its dtypes and shapes.
"""

from __future__ import annotations

import pickle
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as torch_collate

from .. import _core
from ..errors import text_of
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


# ---- rows, or whole batches ----------------------------------------------------------------

#: rows are given up after this many misfits (second) among this many batches (first)
MISFIT_WINDOW, MISFIT_LIMIT = 16, 4


class SampleTransport:
    """What is known of how a loader's samples travel: nothing yet, as rows, or only whole. Survives its
    iterators."""

    def __init__(self) -> None:
        self.layout: Layout | None = None
        self._found: dict[str, Layout] = {}
        self.whole = False
        self.unsure = False  # whole until a batch was examined
        self.misfits: deque[bool] = deque(maxlen=MISFIT_WINDOW)

    def learn(self, layout: Layout) -> None:
        """Sets the first layout that is found. Iterators in several threads may find one at the
        same time, and each must read its rows by the layout that they were written with."""
        self.layout = self._found.setdefault("layout", layout)  # atomic among threads

    def doubt(self) -> None:
        """Assumes that only the worker that makes the samples may collate them."""
        if self.layout is None and not self.whole:
            self.whole = self.unsure = True

    def seen(self, plain: bool) -> None:
        """Records whether a batch's samples contain only what rows can hold."""
        if self.unsure:
            self.whole, self.unsure = not plain, plain

    def fits(self) -> None:
        """Records that a batch's samples were in rows."""
        self.misfits.append(False)

    def misfit(self) -> None:
        """Records that they were not. Samples that often do not fit are collated by the worker that
        makes them, as in torch."""
        self.misfits.append(True)
        if sum(self.misfits) >= MISFIT_LIMIT:
            self.whole = True


class EngineTransport:
    """Passes on to the engine of one iterator what is known about a loader's samples."""

    def __init__(self, shape: SampleTransport, in_parts: bool = False) -> None:
        self.shape = shape
        self.layout: Layout | None = None  # of the rows in new batches
        self.in_parts = in_parts  # no batch is made whole by one worker
        self._sent: tuple[bool, Layout | None] | None = None

    def update(self, engine: _core.Engine) -> None:
        """Updates the engine before planning, if anything has changed. After an interrupt, it may
        get the same again, because _sent is set last."""
        now = self.shape.whole, self.shape.layout
        if now == self._sent:
            return
        self.layout = layout = None if now[0] else now[1]
        engine.set_form(None if layout is None else layout.core)
        self._sent = now

    def makes_whole(self, index: object) -> bool:
        """Whether one worker fetches and collates the batch."""
        if self.in_parts:
            return False
        return self.shape.whole or type(index) not in (list, tuple) or not index


# ---- why default_collate has failed: torch's texts name neither sample nor key ----------------

#: how many elements of each mapping or sequence are examined
_MOST = 64


def why(samples: Sequence[Any], name: Callable[[int], str]) -> str:
    """The explanation, or an empty text. name: names a sample by its position in the batch."""
    try:
        return _why(list(samples), name, "") if samples else ""
    except Exception:  # samples of the program's own classes: torch's error must do
        return ""


def by_index(indices: Any) -> Callable[[int], str]:
    """Names samples by the sampler's indices."""
    return lambda row: f"sample index {text_of(indices[row])}"


def _why(values: list[Any], name: Callable[[int], str], path: str) -> str:
    """Explains what is wrong with the samples' values at this path."""
    kinds = [_kind(value) for value in values]
    usual, count = Counter(kinds).most_common(1)[0]
    what = path or "the sample"
    for row, kind in enumerate(kinds):
        if kind != usual:
            others = "in most others" if count > 1 else f"in {name(kinds.index(usual))}"
            if kind[0] != usual[0]:
                return f"{what} is {type_name(kind)} in {name(row)} and {type_name(usual)} {others}"
            return f"{what} has {type_name(kind)} in {name(row)} and {type_name(usual)} {others}"
    first = values[0]
    for row, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return (
                f"{what} requires grad in {name(row)}, but gradients cannot travel from "
                "a worker to the program: return its detach() from the dataset"
            )
    if isinstance(first, Mapping):
        places = [(f"{path}[{key!r}]", key) for key in list(first)[:_MOST]]
    elif _is_sequence(first):
        places = [(f"{path}[{at}]", at) for at in range(min(len(first), _MOST))]
    elif usual[0] == "other":
        return (
            f"{what} is {type_name(usual)} in {name(0)}, which default_collate cannot make a batch of: "
            "return a tensor, an array, a number or a text, or give the loader a collate_fn"
        )
    else:
        return ""
    found = (_why([value[key] for value in values], name, place) for place, key in places)
    return next(filter(None, found), "")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _kind(value: Any) -> tuple[str, Hashable]:
    """The property that the values at one path must share."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return "shape", tuple(value.shape)
    if isinstance(value, Mapping):
        return "keys", tuple(value)
    if isinstance(value, (str, bytes)):
        return "text", None
    if isinstance(value, (int, float, np.number, np.bool_)):
        return "number", None
    if _is_sequence(value):
        return "length", len(value)
    return "other", type(value).__name__


def type_name(kind: tuple[str, Any]) -> str:
    name, value = kind
    if name == "shape":
        return f"shape {list(value)}"
    if name == "keys":
        return f"keys {list(value)}"
    if name == "length":
        return f"length {value}"
    return f"a {value}" if name == "other" else f"a {name}"
