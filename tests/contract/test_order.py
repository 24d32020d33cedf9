"""Order of batches, samplers of every kind, and how far a sampler is read ahead."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any, Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .datasets import GATE_S, Blocking, Gate, Numbers
from .support import Kind, assert_same, flat, remembered


def _generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kwargs", [
    {}, {"batch_size": 3}, {"batch_size": 3, "drop_last": True}, {"batch_size": 100},
    {"batch_size": 100, "drop_last": True}, {"batch_size": None},
    {"shuffle": True, "batch_size": 4}, {"shuffle": True, "batch_size": None},
    {"shuffle": True, "batch_size": 4, "drop_last": True},
], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_order_is_torchs(loader: Kind, kwargs: dict[str, Any], workers: int) -> None:
    def epochs(make: Any) -> list[Any]:
        made = make(Numbers(23), num_workers=workers, generator=_generator(), **kwargs)
        return [list(made), list(made)]

    want = remembered(f"order {kwargs} {workers}", lambda: epochs(DataLoader))
    assert_same(epochs(loader), want)


def test_order_follows_the_global_seed(loader: Kind) -> None:
    def epochs(make: Any) -> list[list[int]]:
        torch.manual_seed(3)
        made = make(Numbers(20), batch_size=3, shuffle=True, num_workers=2)
        return [flat(made), flat(made)]

    assert epochs(loader) == epochs(DataLoader)


SAMPLERS = {
    "list": lambda: [3, 1, 2],
    "tuple": lambda: (3, 1, 2),
    "range": lambda: range(6, 0, -2),
    "array": lambda: np.array([3, 1, 2]),
    "tensor": lambda: torch.tensor([3, 1, 2]),
    "dict": lambda: {3: "x", 1: "y"},
    "random": lambda: RandomSampler(range(9), generator=_generator()),
    "replacement": lambda: RandomSampler(range(9), True, 20, generator=_generator()),
    "few": lambda: RandomSampler(range(9), num_samples=4, generator=_generator()),
    "subset": lambda: SubsetRandomSampler([1, 4, 7], generator=_generator()),
    "weighted": lambda: WeightedRandomSampler([0.1, 0.9, 0.5], 12,
                                              generator=_generator()),
    "distributed": lambda: DistributedSampler(Numbers(9), 2, 1, seed=4),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_order_of_samplers_equals_torch(loader: Kind, name: str) -> None:
    def batches(make: Any) -> list[Any]:
        made = make(Numbers(10), sampler=SAMPLERS[name](), batch_size=2, num_workers=2)
        return [*made, *made]

    want = remembered(f"sampler {name}", lambda: batches(DataLoader))
    assert_same(batches(loader), want)


def test_one_pass_samplers(loader: Kind) -> None:
    made = loader(Numbers(10), sampler=(i for i in [4, 2, 0]), batch_size=2,
                  num_workers=2)
    assert flat(made) == [4, 2, 0]
    assert flat(made) == []
    cuts = loader(Numbers(10), batch_sampler=iter([[1], [5, 6]]), num_workers=2)
    assert [batch.tolist() for batch in cuts] == [[1], [5, 6]]


def test_duplicates_and_empty_batches(loader: Kind) -> None:
    made = loader(Numbers(4), batch_sampler=[[0, 0], [0], [3, 3, 3]], num_workers=2)
    assert [batch.tolist() for batch in made] == [[0, 0], [0], [3, 3, 3]]
    made = loader(Numbers(4), batch_sampler=[[], [1]], num_workers=2, collate_fn=list)
    assert list(made) == [[], [1]]


def test_distributed_sampler_follows_set_epoch(loader: Kind) -> None:
    def epochs(make: Any) -> list[list[int]]:
        sampler = DistributedSampler(Numbers(10), 2, 0, seed=2)
        made = make(Numbers(10), sampler=sampler, batch_size=2, num_workers=1)
        found = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            found.append(flat(made))
        return found

    got = epochs(loader)
    assert got == epochs(DataLoader)
    assert got[0] != got[1]


class Endless:
    """Batches without end and without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([i % 4] for i in itertools.count())


def test_endless_batch_sampler(loader: Kind) -> None:
    made = loader(Numbers(4), batch_sampler=Endless(), num_workers=2)
    assert flat(itertools.islice(made, 11)) == [i % 4 for i in range(11)]


# ---------------------------------------------------------- reading ahead


class Watched(Sampler):
    """Notes each index drawn and where it was drawn."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.drawn: list[int] = []
        self.places: set[tuple[int, int]] = set()

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        for index in range(self.length):
            self.drawn.append(index)
            self.places.add((os.getpid(), threading.get_ident()))
            yield index


@pytest.mark.parametrize("workers, prefetch, size", [(1, 1, 1), (1, 3, 2), (2, 2, 3)])
def test_indices_drawn_ahead(loader: Kind, workers, prefetch, size) -> None:
    sampler = Watched(40)
    made = loader(Numbers(40), sampler=sampler, batch_size=size, num_workers=workers,
                  prefetch_factor=prefetch)
    assert sampler.drawn == []
    iterator = iter(made)
    window = workers * prefetch
    assert len(sampler.drawn) == window * size
    for taken in range(1, 6):
        next(iterator)
        assert len(sampler.drawn) == (window + taken) * size
    list(iterator)
    assert sampler.drawn == list(range(40))
    assert sampler.places == {(os.getpid(), threading.get_ident())}


def test_indices_drawn_without_workers(loader: Kind) -> None:
    sampler = Watched(10)
    iterator = iter(loader(Numbers(10), sampler=sampler, batch_size=2))
    assert sampler.drawn == []
    next(iterator)
    assert len(sampler.drawn) == 2


def test_custom_batch_sampler_is_read_only_within_window(loader: Kind) -> None:
    drawn: list[int] = []

    class Cuts:
        def __iter__(self) -> Iterator[list[int]]:
            for number in range(10):
                drawn.append(number)
                yield [number]

    iterator = iter(loader(Numbers(10), batch_sampler=Cuts(), num_workers=2))
    assert drawn == [0, 1, 2, 3]
    next(iterator)
    assert drawn == [0, 1, 2, 3, 4]


class Eager:
    """Draws its permutation in __iter__ itself, not in a generator."""

    def __init__(self, length: int) -> None:
        self.length, self.entered = length, 0

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        self.entered += 1
        return iter(torch.randperm(self.length).tolist())


@pytest.mark.parametrize("persistent", [False, True])
def test_eager_sampler_is_iterated_as_often_as_torch(loader, persistent) -> None:
    def run(make: Any) -> tuple[list[list[int]], int]:
        torch.manual_seed(8)
        sampler = Eager(12)
        made = make(Numbers(12), sampler=sampler, batch_size=3, num_workers=2,
                    persistent_workers=persistent)
        return [flat(made), flat(made)], sampler.entered

    assert run(loader) == run(DataLoader)


class Broken(Sampler):
    """Raises after some batches."""

    def __init__(self, after: int) -> None:
        self.after = after

    def __iter__(self) -> Iterator[int]:
        yield from range(self.after)
        raise LookupError("sampler")


@pytest.mark.parametrize("after", [0, 1, 7])
def test_error_in_sampler(loader: Kind, after: int) -> None:
    def run(make: Any) -> Any:
        found: list[Any] = []
        try:
            for batch in make(Numbers(9), sampler=Broken(after), num_workers=1):
                found.append(batch.tolist())
        except LookupError as error:
            found.append(str(error))
        return found

    assert run(loader) == run(DataLoader)


def test_large_sampler_items(loader: Kind) -> None:
    class Big(Numbers):
        def __getitem__(self, index: Any) -> int:
            return len(index)

    items = [list(range(200_000 + i)) for i in range(6)]
    made = loader(Big(6), sampler=items, batch_size=1, num_workers=2)
    assert flat(made) == [200_000 + i for i in range(6)]
    half = iter(loader(Big(6), sampler=items, batch_size=1, num_workers=2))
    next(half)
    del half


class Told(Numbers):
    """Samples that hold the index they were asked for."""

    def __getitem__(self, index: Any) -> str:
        return repr(index)


@pytest.mark.parametrize("size", [2, None])
def test_unusual_indices_are_passed_through(loader: Kind, size: int | None) -> None:
    items = [2**80, -(2**63), -1, 2**63, None, [1, [2]], {3: {4}}, 1.5, "x", (), slice(3), b"\0"]

    def run(make: Any) -> list[Any]:
        made = make(Told(3), sampler=items, batch_size=size, num_workers=2)
        return [list(made), list(made)]

    assert run(loader) == run(DataLoader)


class ReEnters(Sampler):
    """Iterates once over the loader that is reading it, in the middle of its own iteration."""

    def __init__(self) -> None:
        self.loader: Any = None
        self.inner: list[int] = []

    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        for index in range(9):
            if index == 4 and not self.inner:
                self.inner = [-1]
                self.inner = flat(self.loader)
            yield index


def test_sampler_that_reads_its_own_loader(loader: Kind) -> None:
    sampler = ReEnters()
    sampler.loader = loader(Numbers(9), sampler=sampler, batch_size=2, num_workers=2)
    assert flat(sampler.loader) == list(range(9)) and sampler.inner == list(range(9))


kept: list[Any] = []


def keep_and_empty(samples: list[Any]) -> list[Any]:
    """A collate_fn that modifies its argument."""
    kept.append(samples)
    found = [sample.clone() for sample in samples]
    samples[0].fill_(-1)
    samples.clear()
    return found


class Filled(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((20_000,), float(index))


@pytest.mark.parametrize("workers", [0, 2])
def test_collate_fn_that_keeps_and_empties_its_samples(loader: Kind, workers: int) -> None:
    def run(make: Any) -> list[Any]:
        made = make(Filled(9), batch_size=2, num_workers=workers, collate_fn=keep_and_empty)
        return [list(made), list(made)]

    assert_same(run(loader), run(DataLoader))
    kept.clear()


class Bulk(Numbers):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [indices[0]]


def test_large_batches_are_not_drawn_far_ahead(loader: Kind) -> None:
    size = 1 << 16
    iterator = iter(loader(Bulk(100 * size), batch_size=size, num_workers=1))
    assert [next(iterator).item() for _ in range(2)] == [0, size]
    assert iterator._send_idx <= 2 + 4


# ---------------------------------------------------------------- in_order


class Handover(Numbers):
    """Sample 0 cannot end before sample 1 has run."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.event = Gate()

    def __getitem__(self, index: int) -> int:
        if index == 0:
            assert self.event.wait(GATE_S)
        if index == 1:
            self.event.set()
        return index


def test_in_order_waits_for_slow_sample(loader: Kind) -> None:
    assert flat(loader(Handover(9), num_workers=2)) == list(range(9))


def test_out_of_order_overtakes_slow_sample(loader: Kind) -> None:
    entered, gate = Gate(), Gate()
    dataset = Blocking(8, {0}, entered, gate)
    iterator = iter(loader(dataset, num_workers=2, in_order=False))
    early = [next(iterator).item() for _ in range(2)]
    assert 0 not in early
    gate.set()
    assert sorted(early + flat(iterator)) == list(range(8))


@pytest.mark.parametrize("kwargs", [
    {"batch_size": 3}, {"batch_size": 3, "drop_last": True},
    {"batch_size": 2, "shuffle": True}, {"batch_size": None},
    {"batch_size": 2, "persistent_workers": True},
], ids=str)
def test_out_of_order_delivers_each_sample_once(loader: Kind, kwargs) -> None:
    made = loader(Numbers(20), num_workers=2, in_order=False, **kwargs)
    reference = DataLoader(Numbers(20), batch_size=kwargs["batch_size"],
                           drop_last=kwargs.get("drop_last", False))
    sizes = sorted(np.atleast_1d(batch).size for batch in reference)
    for _ in range(3):
        batches = list(made)
        assert sorted(np.atleast_1d(batch).size for batch in batches) == sizes
        if not kwargs.get("drop_last"):
            found = [int(i) for batch in batches for i in np.atleast_1d(batch)]
            assert sorted(found) == list(range(20))


def test_batch_sampler_objects_keep_their_state(loader: Kind) -> None:
    sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
    made = loader(Numbers(5), batch_sampler=sampler, num_workers=1)
    sampler.batch_size = 4
    assert [len(batch) for batch in made] == [4, 1]
