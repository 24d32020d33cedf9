"""Static and iterable batches whose samples are written to rows equal torch's, bit for bit."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from contract.support import assert_same
from torch.utils.data import Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import minato
from minato.iterators.loader_memo import memo_of
from minato.iterators.static_and_iterable import StaticIterator

SIZE, BATCH = 30, 4


def numbers(index: int) -> Any:
    return torch.full((3,), index), index


def drawn(index: int) -> Any:
    return {"torch": torch.rand(2), "numpy": np.random.rand(2), "large": torch.rand(9000), "i": index}


def worded(index: int) -> Any:
    return f"sample {index}", np.float32(index), torch.tensor(index), bytes([index])


class Made(Dataset):
    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Listed(Made):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.make(index) for index in indices]


class Streamed(IterableDataset):
    """Each worker has every n-th sample, so that the last batch of each is not full."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        return map(self.make, range(info.id, SIZE, info.num_workers))


KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "static": (Made, {}),
    "lists": (Listed, {}),
    "iterable": (Streamed, {}),
    "iterable, drop_last": (Streamed, {"drop_last": True}),
}


def epochs(cls: Any, dataset: Any, count: int, **options: Any) -> tuple[list[Any], Any]:
    torch.manual_seed(5)
    loader = cls(dataset, BATCH, num_workers=2, persistent_workers=True, **options)
    return [list(loader) for _ in range(count)], loader


def compared(
    dataset: Any, count: int = 3, own: dict[str, Any] | None = None, **options: Any
) -> Any:
    """The loader, after a check that its batches are torch's. own: options that torch lacks."""
    own = dict(own or {})
    if not isinstance(dataset, IterableDataset):
        own["scheduling"] = "static"
    found, loader = epochs(minato.DataLoader, dataset, count, **own, **options)
    assert_same(found, epochs(torch.utils.data.DataLoader, dataset, count, **options)[0])
    return loader


@pytest.mark.parametrize("make", [numbers, drawn, worded])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_torchs_batches(kind: str, make: Callable[[int], Any]) -> None:
    cls, options = KINDS[kind]
    shape = memo_of(compared(cls(make), **options)).shape
    assert shape.layout is not None and not shape.whole
    assert shape.misfits and not any(shape.misfits)


@pytest.mark.parametrize("cls", [Made, Listed])
@pytest.mark.parametrize("mode", ["raise", "skip", "replace"])
def test_rows_need_no_envelope(mode: str, cls: type) -> None:
    loader = compared(cls(numbers), 4, {"on_error": mode})
    # a running mean with weight 1/4: there were some messages at the beginning
    assert loader._iterator._engine.memory()["envelope_bytes"] < 10


class Buffered:
    """One tensor that all samples share, as no dataset should."""

    def __init__(self) -> None:
        self.buffer = torch.zeros(3)

    def __call__(self, index: int) -> Any:
        return self.buffer.fill_(index)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_copied_when_all_are_made(kind: str) -> None:
    cls, options = KINDS[kind]
    assert memo_of(compared(cls(Buffered()), **options)).shape.layout is not None


def uneven(index: int) -> Any:
    """As large as the others of its batch, if batches have four."""
    return torch.full((1 + index // BATCH,), index)


def now_and_then(index: int) -> Any:
    return torch.full((1 + index // BATCH // 6,), index)


class Odd:
    """A type that default_collate rejects."""


def impossible(index: int) -> Any:
    return torch.tensor(index), Odd()


def test_samples_that_rarely_fit_are_collated_by_workers() -> None:
    assert memo_of(compared(Made(uneven))).shape.whole


def test_occasional_misfit_is_collated_once() -> None:
    shape = memo_of(compared(Made(now_and_then), 1)).shape
    assert any(shape.misfits) and not shape.whole


def ordered(index: int) -> Any:
    return OrderedDict(number=torch.tensor(index))


def test_samples_that_rows_cannot_hold() -> None:
    assert memo_of(compared(Made(ordered))).shape.whole


def test_samples_that_torch_refuses() -> None:
    loader = minato.DataLoader(Made(impossible), BATCH, num_workers=1, scheduling="static")
    with pytest.raises(TypeError, match="default_collate: batch must contain .* found .*Odd"):
        next(iter(loader))


def doubled(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.stack(batch) * 2


def teach(_worker: int) -> None:
    default_collate_fn_map[torch.Tensor] = doubled


def test_types_registered_by_worker_init_fn_are_collated() -> None:
    compared(Made(numbers), worker_init_fn=teach)


@pytest.mark.parametrize("options", [{}, {"scheduling": "static"}])
def test_replaced_default_collate_is_called(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.setattr(torch_collate, "default_collate", doubled)  # torch looks it up there
    for workers in (0, 2):
        loader = minato.DataLoader(torch.arange(8), 4, num_workers=workers, **options)
        assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6], [8, 10, 12, 14]]


def test_the_next_iterator_knows_the_layout() -> None:
    loader = minato.DataLoader(Made(numbers), BATCH, num_workers=2, scheduling="static")
    first = list(loader)
    iterator = iter(loader)
    assert isinstance(iterator, StaticIterator)
    assert all(sent.layout is not None for sent in iterator._blocks.values())
    assert_same(list(iterator), first)


def large(index: int) -> Any:
    return torch.full((1 << 18,), index, dtype=torch.uint8)


@pytest.mark.parametrize("dataset", [Made(large), Streamed(large)], ids=["static", "iterable"])
def test_batches_past_memory_limit_have_no_rows(dataset: Any) -> None:
    """A window of eight under a limit of three: most travel in envelopes."""
    shape = memo_of(compared(dataset, 2, {"memory_limit": "3MiB"}, prefetch_factor=4)).shape
    assert shape.layout is not None and not shape.whole


class Equal(Dataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.005)
        return torch.tensor(index)


def test_mixed_batches_before_layout_keep_rows() -> None:
    """With as many workers as samples in a batch, most batches of the first second mix
    samples sent before the layout was known and rows. They must not end the use of rows."""
    loader = minato.DataLoader(Equal(), 8, num_workers=8, in_order=False, batching="ready")
    assert sorted(torch.cat(list(loader)).tolist()) == list(range(400))
    shape = memo_of(loader).shape
    assert shape.layout is not None and not shape.whole and not any(shape.misfits)
