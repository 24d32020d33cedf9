"""Batches that are collated in another place than where their samples were made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
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
def test_what_only_workers_know_of_default_collate_is_an_error(
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


@pytest.mark.parametrize("options", [{}, {"batching": "ready", "in_order": False}])
def test_a_sample_that_cannot_be_sent_tells_the_way_out(options: dict[str, Any]) -> None:
    data = Made(lambda index: OrderedDict(n=Local(index)))
    loader = minato.DataLoader(data, 4, num_workers=1, **options)
    with pytest.raises(Exception) as error:  # of pickle, whose class depends on Python's version
        list(loader)
    notes = "\n".join(getattr(error.value, "__notes__", [str(error.value)]))
    assert "sample index" in notes and "scheduling='static'" in notes
    static = minato.DataLoader(data, 4, num_workers=1, scheduling="static")
    assert [batch["n"].tolist() for batch in static][0] == [0, 1, 2, 3]


def _local() -> Any:
    class Cell(int):
        pass

    return Cell


Local = _local()


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


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
@pytest.mark.parametrize("writable", [True, False])
def test_arrays_arrive_in_c_order_unless_they_are_fortrans(scheduling: str, writable: bool) -> None:
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
