"""How values from a worker arrive: memory layouts, flags, and classes that are dropped."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from .datasets import Listed, as_is
from .support import Kind, drain, remembered


def _images(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(samples).contiguous(memory_format=torch.channels_last)


TENSORS: dict[str, Any] = {
    "channels_last": _images,
    "permuted": lambda samples: torch.stack(samples).permute(3, 0, 2, 1),
    "transposed": lambda samples: torch.stack(samples).mT,
    "expanded": lambda samples: torch.stack(samples)[:, :1].clone().expand(-1, 3, -1, -1),
    "expanded_last": lambda samples: torch.stack(samples)[..., :1].clone().expand(2, 3, 4, 5),
    "parameter": lambda samples: torch.nn.Parameter(torch.stack(samples).mT),
    "empty": lambda samples: torch.stack(samples)[:0],
    "one": lambda samples: torch.ones(1).expand(1, 1),
}


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.stride(), tensor.tolist(), tensor._base is None


def _one_of_tensors(samples: list[torch.Tensor]) -> torch.Tensor:
    return [*TENSORS.values()][int(samples[0][0, 0, 0]) // 2 % len(TENSORS)](samples)


def test_strides_of_collated_batches_equal_torch(loader: Kind) -> None:
    """Two batches of each."""
    samples = [torch.arange(60.0).reshape(3, 4, 5) + i for i in range(4 * len(TENSORS))]

    def run(make: Any) -> list[Any]:
        kwargs = {"batch_size": 2, "num_workers": 1, "collate_fn": _one_of_tensors}
        return [_look(batch) for batch in make(Listed(samples), **kwargs)]

    got, want = run(loader), remembered("strides", lambda: run(DataLoader))
    for name, mine, torchs in zip([*TENSORS] * 2, got, want, strict=True):
        assert mine == torchs, name


def _read_only(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array


ARRAYS: dict[str, Any] = {
    "read_only": lambda i: _read_only(np.full(3, i)),
    "read_only_fortran": lambda i: _read_only(np.full((2, 3), i, order="F")),
    "read_only_dates": lambda i: _read_only(np.array(["2020-01-01"], "M8[D]") + i),
    "read_only_empty": lambda i: _read_only(np.empty((0, 2))),
    "broadcast": lambda i: np.broadcast_to(np.full(1, i), (2, 3)),
    "large": lambda i: _read_only(np.full(30000, i)),
    "swapped": lambda i: np.arange(i, i + 3, dtype=">f4"),
    "reversed": lambda i: np.arange(i, i + 3)[::-1],
    "records": lambda i: _read_only(np.full(2, i, dtype=[("a", "i4"), ("b", "f8")])),
}


def test_arrays_arrive_ready_for_use(loader: Kind) -> None:
    """Writable, contiguous, in native byte order, whatever the worker had."""
    samples = [make(i) for make in ARRAYS.values() for i in range(4)]
    made = loader(Listed(samples), batch_size=2, num_workers=1, collate_fn=as_is)
    kept = list(made)
    arrays = [array for batch in kept for array in batch]
    for array, sample in zip(arrays, samples, strict=True):
        assert (array.tolist(), array.shape) == (sample.tolist(), sample.shape)
        assert array.flags.writeable and array.flags.forc and array.dtype.isnative
        if array.dtype.kind in "if":
            array += 1
            assert torch.from_numpy(array).tolist() == (sample + 1).tolist()
    del made, kept
    assert [a.tolist() for a in arrays] == [
        (s + 1 if s.dtype.kind in "if" else s).tolist() for s in samples
    ]


def test_local_classes_dropped_by_collation_need_no_pickle(loader: Kind) -> None:
    """default_collate's output for these samples is plain, so it travels."""

    class Pair(tuple):
        pass

    class Colour(enum.IntEnum):
        RED = 0
        BLUE = 1

    class Metres(float):
        pass

    samples = [Pair((Colour(i % 2), {"a": [Metres(i)]}, memoryview(b"ab"))) for i in range(4)]
    for colour, rest, view in loader(Listed(samples), batch_size=2, num_workers=1):
        assert colour.tolist() == [0, 1]
        assert rest["a"][0].dtype is torch.float64
        assert [v.tolist() for v in view] == [[97, 97], [98, 98]]


@pytest.mark.parametrize("make,kind,text", [
    (lambda i: (i for _ in "ab"), TypeError, "found <class 'generator'>"),
    (lambda i: {"a": lambda: i}, TypeError, "found <class 'function'>"),
    (lambda i: torch.ones(2, requires_grad=True) * i, RuntimeError, "differentiation"),
], ids=["generator", "function", "graph"])
def test_collation_error_precedes_pickle_error(loader: Kind, make, kind, text) -> None:
    samples = [make(i) for i in range(2)]
    with pytest.raises(kind, match=text):
        next(iter(loader(Listed(samples), batch_size=2, num_workers=1, timeout=90)))


def test_array_that_cannot_become_tensor_always_raises(loader: Kind) -> None:
    samples = [np.arange(3, dtype=">i4"), np.arange(3)[::-1]] * 3
    iterator = iter(loader(Listed(samples), num_workers=1))
    assert drain(iterator) == [("error", ValueError)] * 6


@pytest.mark.parametrize("odd", [
    lambda: np.ones((1, 4), np.float32)[::-1],
    lambda: np.ones((1, 4), [("x", "<f4"), ("y", "u1")])["x"],
], ids=["an axis of one", "a packed record"])  # fmt: skip
def test_unsupported_strides_are_refused_in_later_batches(loader: Kind, odd: Any) -> None:
    samples = [np.ones((1, 4), np.float32) for _ in range(40)] + [odd()]
    iterator = iter(loader(Listed(samples), batch_size=4, num_workers=1))
    found = drain(iterator)
    assert len(found) == 11 and found[-1] == ("error", ValueError)
    assert all(isinstance(batch, torch.Tensor) for batch in found[:-1])
