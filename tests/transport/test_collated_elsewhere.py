"""Batches that are collated in another place than where their samples were made."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

import minato


class Made:
    def __init__(self, make: Callable[[int], Any], size: int = 16) -> None:
        self.make, self.size = make, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def float32(batch: list[float], *, collate_fn_map: Any = None) -> torch.Tensor:
    return torch.tensor(batch, dtype=torch.float32)


def teach(_worker: int) -> None:
    default_collate_fn_map[float] = float32


@pytest.fixture
def registry() -> Any:
    before = dict(default_collate_fn_map)
    yield
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


@pytest.mark.parametrize("options", [
    {}, {"batching": "ready", "in_order": False}, {"worker_type": "thread"},
    {"multiprocessing_context": "spawn"},
])  # fmt: skip
def test_default_collate_changed_only_in_workers_raises(
    options: dict[str, Any], registry: None
) -> None:
    """Its batches would have other numbers."""
    data = Made(float)
    loader = minato.DataLoader(data, 4, num_workers=2, worker_init_fn=teach, **options)
    with pytest.raises(RuntimeError, match="worker_init_fn has changed what default_collate"):
        list(loader)
    loader = minato.DataLoader(
        data, 4, num_workers=2, worker_init_fn=teach, scheduling="static"
    )
    assert all(batch.dtype is torch.float32 for batch in loader)


class Unsent(Mapping[str, Any]):
    """What default_collate makes a batch of, and pickle does not: an open npz, a group of HDF5."""

    def __init__(self, index: int) -> None:
        self.handle = threading.Lock()
        self.fields = {"n": int(index), "drawn": torch.rand(3)}

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)


def unsent(first: int) -> Callable[[int], Any]:
    """Samples of which those from this index on do not pickle."""
    return lambda index: Unsent(index) if index >= first else dict(Unsent(index))


def columns(batches: Iterable[Any]) -> list[dict[str, list[Any]]]:
    return [{key: values.tolist() for key, values in batch.items()} for batch in batches]


@pytest.mark.parametrize("first", [0, 21])
@pytest.mark.parametrize("options", [
    {},
    {"worker_type": "thread", "seed_per_sample": False, "shuffle": False},
    {"multiprocessing_context": "spawn"},
    {"persistent_workers": True},
    {"persistent_workers": True, "prefetch_next_epoch": True},
    {"persistent_workers": True, "prefetch_next_epoch": True, "prefetch_factor": 16},
    {"on_error": "skip"},
    {"num_workers": 1, "prefetch_factor": 1},
], ids=str)  # fmt: skip
def test_unpicklable_samples_are_collated_by_their_worker(
    options: dict[str, Any], first: int
) -> None:
    """With the same samples: a seed is that of a place."""

    def epochs(first: int) -> list[Any]:
        torch.manual_seed(5)
        data = Spawned(first)
        loader = minato.DataLoader(data, 4, **{"num_workers": 2, "shuffle": True, **options})
        return [columns(loader) for _ in range(3)]

    got, expected = epochs(first), epochs(64)
    if "worker_type" in options:  # threads draw from one generator
        for batch in chain(*got, *expected):
            del batch["drawn"]
    assert got == expected


class Spawned(Made):
    def __init__(self, first: int) -> None:
        self.first, self.size = first, 64

    def __getitem__(self, index: int) -> Any:
        return unsent(self.first)(index)


class Reuses(torch.utils.data.Sampler[list[int]]):
    """Gives the same list again and again."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(48):
            batch.append(index)
            if len(batch) == 4:
                yield batch
                batch.clear()

    def __len__(self) -> int:
        return 12


def test_indices_are_those_at_draw_time() -> None:
    data = Made(unsent(22), 48)
    loader = minato.DataLoader(data, batch_sampler=Reuses(), num_workers=2)
    got = [batch["n"].tolist() for batch in loader]
    assert got == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(12)]


def test_out_of_order_each_batch_comes_once() -> None:
    loader = minato.DataLoader(Made(unsent(100), 200), 4, num_workers=2, in_order=False)
    for _ in range(2):
        got = sorted(batch["n"].tolist() for batch in loader)
        assert got == [[4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3] for i in range(50)]


@pytest.mark.parametrize("delivered", [0, 1, 4, 5, 6, 9])
def test_state_around_first_unpicklable_batch(delivered: int) -> None:
    def loader() -> Any:
        torch.manual_seed(3)
        return minato.DataLoader(Made(unsent(20), 48), 4, num_workers=2)

    expected = columns(loader())
    first = loader()
    iterator = iter(first)
    for _ in range(delivered):
        next(iterator)
    second = loader()
    second.load_state_dict(first.state_dict())
    del iterator
    assert columns(second) == expected[delivered:]


def test_failing_sample_next_to_unpicklable_is_named() -> None:
    def make(index: int) -> Any:
        if index == 6:
            raise KeyError("no such sample")
        return Unsent(index)

    with pytest.raises(KeyError, match="no such sample") as error:
        list(minato.DataLoader(Made(make), 4, num_workers=2))
    notes = "\n".join(getattr(error.value, "__notes__", [str(error.value)]))
    assert "sample index 6, position 2 of batch 1" in notes
    for mode, indices in ("skip", [4, 5, 7]), ("replace", [4, 5, 7, 7]):
        loader = minato.DataLoader(Made(make), 4, num_workers=2, on_error=mode)
        assert columns(loader)[1]["n"] == indices


def test_ready_batches_suggest_sampler_batching() -> None:
    data = Made(unsent(0))
    loader = minato.DataLoader(data, 4, num_workers=1, batching="ready", in_order=False)
    with pytest.raises(TypeError, match="pickle") as error:
        list(loader)
    notes = "\n".join(getattr(error.value, "__notes__", [str(error.value)]))
    assert "sample index" in notes and "batching='sampler'" in notes


@pytest.mark.parametrize("make", [
    lambda index: {"n": index, "o": OrderedDict(f=float(index))},
    lambda index: index if index % 2 else float(index),
], ids=["OrderedDict", "mixed"])  # fmt: skip
def test_the_programs_default_device_is_not_the_batches(make: Any) -> None:
    iterator = iter(minato.DataLoader(Made(make), 4, num_workers=2))
    with torch.device("meta"):
        batches = list(iterator)
    for batch in batches:
        tensors = [batch["n"], batch["o"]["f"]] if isinstance(batch, dict) else [batch]
        assert all(tensor.device.type == "cpu" for tensor in tensors)


def boxes(samples: list[Any]) -> Any:
    return torch.zeros(0, 4), torch.tensor(samples)


def test_default_device_does_not_affect_empty_tensors() -> None:
    iterator = iter(minato.DataLoader(range(8), 4, num_workers=2, collate_fn=boxes))
    with torch.device("meta"):
        batches = list(iterator)
    assert [tensor.device.type for batch in batches for tensor in batch] == ["cpu"] * 4


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
@pytest.mark.parametrize("writable", [True, False])
def test_arrays_keep_c_or_fortran_order(scheduling: str, writable: bool) -> None:
    def make(index: int) -> Any:
        array = np.arange(24.0).reshape(2, 3, 4).transpose(0, 2, 1)
        array.flags.writeable = writable
        return array

    loader = minato.DataLoader(
        Made(make), 2, num_workers=1, collate_fn=list, scheduling=scheduling
    )
    for batch in loader:
        for array in batch:
            assert array.flags.c_contiguous and array.flags.writeable
            assert (array == make(0)).all()
