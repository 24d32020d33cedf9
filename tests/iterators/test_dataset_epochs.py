"""The epoch of a dataset: its copies in workers get it, however it was set."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, Sampler

import minato
from minato.iterators.across_iterators import epoch_of


class Plain:
    """Its samples are the epoch that its copy is in."""

    epoch = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Told(Plain):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Telling(Sampler):
    """Calls the dataset's set_epoch when it is iterated, or with its first index."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.begun = dataset, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        self.dataset.set_epoch(self.begun)
        self.begun += 1
        yield from range(len(self.dataset))


class Stream(IterableDataset):
    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 3


def seen(loader: Any) -> list[int]:
    return sorted(set(torch.cat(list(loader)).tolist()))


LIVES_ON = {"persistent_workers": True}


@pytest.mark.parametrize("options", [
    {}, LIVES_ON, {**LIVES_ON, "prefetch_next_epoch": True},
    {**LIVES_ON, "batching": "ready", "in_order": False},
    {**LIVES_ON, "multiprocessing_context": "spawn"},
], ids=["new", "persistent", "early", "ready", "spawn"])  # fmt: skip
def test_sampler_tells_the_epoch_in_time(options: dict[str, Any]) -> None:
    dataset = Told()
    loader = minato.DataLoader(dataset, batch_size=2, num_workers=2, sampler=Telling(dataset),
                               **options)  # fmt: skip
    assert [seen(loader) for _ in range(3)] == [[0], [1], [2]]


@pytest.mark.parametrize("dataset", [Told, Stream])
@pytest.mark.parametrize("method", [True, False], ids=["method", "attribute"])
def test_persistent_workers_get_the_programs_epoch(dataset: Any, method: bool) -> None:
    made = dataset()
    loader = minato.DataLoader(made, batch_size=2, num_workers=2, persistent_workers=True)
    found = []
    for epoch in (0, 3, 3, 1):
        if method:
            made.set_epoch(epoch)
        else:
            made.epoch = epoch
        found.append(seen(loader))
    assert found == [[0], [3], [3], [1]]
    loader.set_epoch(7)
    assert seen(loader) == [7]


@pytest.mark.parametrize(("dataset", "scheduling"), [(Plain, "balanced"), (Told, "static")])
def test_epoch_missed_by_copies_warns_once(dataset: Any, scheduling: str) -> None:
    made = dataset()
    loader = minato.DataLoader(made, batch_size=2, num_workers=1, persistent_workers=True,
                               scheduling=scheduling)  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for epoch in range(3):
            made.epoch = epoch
            assert seen(loader) == [0]
    [text] = [str(one.message) for one in told]
    assert f"{dataset.__name__}.epoch is 1 in the program now" in text
    assert ("give Plain a method set_epoch(epoch)" in text) == (dataset is Plain)
    if dataset is Told:
        loader.set_epoch(5)  # as the warning says
        assert seen(loader) == [5]


def test_epoch_is_read_without_running_dataset_code() -> None:
    class Odd:
        current_epoch = property(lambda self: pytest.fail())
        epoch = True

        def __getattr__(self, name: str) -> Any:
            pytest.fail()

    odd = Odd()
    assert epoch_of(odd) is None
    vars(odd)["_epoch"] = 4
    assert epoch_of(odd) == ("_epoch", 4)
    assert epoch_of(torch.arange(3)) is None
