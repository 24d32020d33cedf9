"""set_epoch: a dataset's copies in workers get the epoch, however it was set, and so do samplers."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from resuming import N, SIZE, Noisy, indices, lists, make, take, through_json
from torch.utils.data import IterableDataset, Sampler

import minato
from minato.iterators.position import epoch_of


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
    {**LIVES_ON, "multiprocessing_context": "forkserver"},
], ids=["new", "persistent", "early", "ready", "forkserver"])  # fmt: skip
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


# ---- set_epoch of the loader ------------------------------------------------------------------


@pytest.mark.parametrize(
    "epoch", [np.int64(3), np.uint8(3), torch.tensor(3), 2**32, 2**32 + 5, 2**62]
)
def test_every_whole_number_is_an_epoch(epoch: Any) -> None:
    loader = minato.DataLoader(Told(), num_workers=1, persistent_workers=True)
    list(loader)  # set in a running worker, not before it was forked
    loader.set_epoch(epoch)
    assert seen(loader) == [int(epoch)]
    state = through_json(loader.state_dict())
    other = minato.DataLoader(Told(), num_workers=1)
    other.load_state_dict(state)
    assert other.dataset.epoch == int(epoch) and seen(other) == [int(epoch)]


@pytest.mark.parametrize(
    "epoch, error", [(-1, ValueError), (2**63, ValueError), (True, TypeError), (2.0, TypeError),
                     ("2", TypeError), (None, TypeError), (np.bool_(True), TypeError)],
)  # fmt: skip
def test_invalid_epochs_are_refused(epoch: Any, error: type) -> None:
    loader = minato.DataLoader(Told(), num_workers=1)
    with pytest.raises(error, match="set_epoch"):
        loader.set_epoch(epoch)
    assert loader.dataset.epoch == 0 and loader.state_dict()["user_epoch"] is None


def epochs_in(batches: list) -> set[int]:
    return {int(row[1]) for batch in batches for row in batch}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", ["sequence", "stream"])
@pytest.mark.parametrize("scheduling", ["balanced", "static"])
def test_every_sample_knows_the_epoch(kind: str, persistent: bool, scheduling: str) -> None:
    loader = make(kind, persistent_workers=persistent, scheduling=scheduling)
    assert epochs_in(lists(loader)) == {-1}
    for epoch in (0, 3, 4, 2):
        loader.set_epoch(epoch)
        assert loader.dataset.epoch == epoch
        assert epochs_in(lists(loader)) == {epoch}


class HandsOn(torch.utils.data.Dataset):
    """Has only samples and no other attributes."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # where it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)


@pytest.mark.parametrize("scheduling", ["balanced", "static"])
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_wrapped_datasets_in_persistent_workers_hear_of_epochs(
    method: str, scheduling: str
) -> None:
    data: Any = HandsOn(HandsOn(Told()))
    loader = minato.DataLoader(
        data, num_workers=1, persistent_workers=True, scheduling=scheduling,
        multiprocessing_context=method,
    )  # fmt: skip
    assert seen(loader) == [0]
    for epoch in (3, 1):
        loader.set_epoch(epoch)
        assert data.epoch == epoch and seen(loader) == [epoch]


def test_samplers_hear_of_the_epoch() -> None:
    loader = make("distributed", persistent_workers=True)
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        assert loader.sampler.epoch == epoch
        orders.append(indices(lists(loader)))
    assert orders[0] == orders[2] != orders[1]

    class Batches(Sampler):
        def __iter__(self) -> Any:
            return iter([[0, 1]])

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    own = minato.DataLoader(Noisy(N), batch_sampler=Batches(), num_workers=1)
    own.set_epoch(5)
    assert own.batch_sampler.epoch == 5


def test_set_epoch_in_mid_epoch_applies_later() -> None:
    # a sampler of one's own is not drawn ahead of the window, so batches are yet to be planned
    loader = make("batches of random", persistent_workers=True, prefetch_factor=1, num_workers=1)
    loader.set_epoch(1)
    it = iter(loader)
    first = take(it, 1)
    loader.set_epoch(2)
    assert epochs_in(first + lists(it)) == {1}
    assert epochs_in(lists(loader)) == {2}


class Dies(Noisy):
    """The worker that loads sample 9 first dies."""

    def __init__(self, once: Any) -> None:
        super().__init__(N)
        self.once = once

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9 and self.epoch == 3:
            with self.once.get_lock():
                self.once.value += 1
                die = self.once.value == 1
            if die:
                os.kill(os.getpid(), 9)
        return super().__getitem__(index)


def test_replaced_workers_hear_of_the_epoch() -> None:
    once = torch.multiprocessing.get_context("fork").Value("i", 0)
    loader = minato.DataLoader(Dies(once), SIZE, num_workers=1, persistent_workers=True)
    lists(loader)
    loader.set_epoch(3)
    assert epochs_in(lists(loader)) == {3}
    assert once.value == 2 and loader.stats()["deaths"] == 1


def test_set_epoch_is_part_of_state() -> None:
    loader = make("distributed")
    loader.set_epoch(4)
    it = iter(loader)
    take(it, 2)
    state = loader.state_dict()
    expected = lists(it)
    other = make("distributed")
    other.load_state_dict(state)
    assert other.sampler.epoch == 4 and other.dataset.epoch == 4
    assert lists(other) == expected and epochs_in(expected) == {4}
