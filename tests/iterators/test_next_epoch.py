"""The program changes a sampler after the next epoch was started early."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import minato
from minato.iterators.planner import NextEpoch
from minato.iterators.position import Recorded

SIZE, BATCH = 40, 4
#: the last samples alone
LAST = torch.tensor([0.0] * 30 + [1.0] * 10)


class Numbers(torch.utils.data.Dataset[int]):
    size = SIZE

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return int(index)


def seeded() -> torch.Generator:
    """Planning again restores a sampler's own generator, and leaves the program's as they are."""
    return torch.Generator().manual_seed(1)


class Listed(Sampler[int]):
    """The attributes that a custom sampler may have; it counts and pops while it is drawn from."""

    def __init__(self, held: Any) -> None:
        self.held, self.drawn, self.left = held, 0, [0]

    def __iter__(self) -> Iterator[int]:
        self.left = [0] * SIZE
        for index in list(self.held):
            self.drawn += 1
            self.left.pop()
            yield int(index)

    def __len__(self) -> int:
        return SIZE


class First(Listed):
    """Those of its list from a number on."""

    first = 0

    def __iter__(self) -> Iterator[int]:
        return (i for i in super().__iter__() if i >= self.first or not self.first)


class Told(Sampler[int]):
    """Stores the epoch that it is given, in one of several ways."""

    def __init__(self, way: str) -> None:
        self.way, self.rng, self.text, self.order = way, random.Random(0), "0", list(range(SIZE))

    def set_epoch(self, epoch: int) -> None:
        if self.way == "a generator":
            self.rng = random.Random(1000 + epoch)
        elif self.way == "a text":
            self.text = str(epoch)
        elif self.way == "an order":
            self.order = random.Random(epoch).sample(range(SIZE), SIZE)
        else:
            self.rng.seed(1000 + epoch)

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(self.text) if self.way == "a text" else self.rng
        return iter(self.order if self.way == "an order" else rng.sample(self.order, SIZE))


class Around(Listed):
    """Passes the epoch on to the sampler that it wraps."""

    def set_epoch(self, epoch: int) -> None:
        self.held.set_epoch(epoch)


def tell(sampler: Any) -> None:
    sampler.set_epoch(1)


def in_place(held: Any) -> None:
    held[:] = [SIZE - 1] * SIZE


def assign(name: str, value: Any) -> Callable[[Any], None]:
    return lambda sampler: setattr(sampler, name, value)


#: a sampler, and the program's change to it between two epochs
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "weights replaced": (lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, generator=seeded()),
        assign("weights", LAST)),
    "weights in place": (
        lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, generator=seeded()),
        lambda s: s.weights.copy_(LAST)),
    "weights by numpy": (
        lambda: WeightedRandomSampler(np.ones(SIZE), SIZE, generator=seeded()),
        lambda s: s.weights.numpy().__setitem__(slice(0, 30), 0)),
    "subset replaced": (
        lambda: SubsetRandomSampler([*range(20)], generator=seeded()),
        assign("indices", [30, 31, 32])),
    "subset in place": (lambda: SubsetRandomSampler([0] * SIZE), lambda s: in_place(s.indices)),
    "dataset shrunk": (
        lambda: RandomSampler(Numbers(), generator=seeded()),
        lambda s: setattr(s.data_source, "size", 8)),
    "number replaced": (
        lambda: RandomSampler(range(SIZE), num_samples=8, generator=seeded()),
        assign("_num_samples", 30)),
    "own list in place": (lambda: Listed([0] * SIZE), lambda s: in_place(s.held)),
    "own array in place": (lambda: Listed(np.zeros(SIZE)), lambda s: in_place(s.held)),
    "own tensor in place": (lambda: Listed(torch.zeros(SIZE)), lambda s: s.held.fill_(7)),
    "own number replaced": (lambda: First([*range(SIZE)]), assign("first", 35)),
    "a list of indices": (lambda: [0] * SIZE, in_place),
    "an array of indices": (lambda: np.zeros(SIZE, int), in_place),
    "generator replaced": (
        lambda: RandomSampler(range(SIZE), generator=seeded()),
        lambda s: setattr(s, "generator", torch.Generator().manual_seed(9))),
    "epoch of torch's": (lambda: DistributedSampler(range(SIZE), 1, 0), tell),
    "epoch as a seed": (lambda: Told("a seed"), tell),
    "epoch as a generator": (lambda: Told("a generator"), tell),
    "epoch as a text": (lambda: Told("a text"), tell),
    "epoch as an order": (lambda: Told("an order"), tell),
    "epoch of one within": (lambda: Around(Told("a seed")), tell),
}  # fmt: skip


def epochs(module: Any, sampler: Any, change: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Four epochs, with a change before the second, and once more before the last."""
    torch.manual_seed(5)
    loader = module.DataLoader(
        Numbers(), BATCH, sampler=sampler, num_workers=1, persistent_workers=True, **options
    )
    result = [torch.cat(list(loader)).tolist()]
    change(sampler)
    result += [torch.cat(list(loader)).tolist() for _ in range(2)]
    change(sampler)
    return [*result, torch.cat(list(loader)).tolist()]


@pytest.mark.parametrize("what", CHANGES)
def test_changed_sampler_is_drawn_again(what: str) -> None:
    make, change = CHANGES[what]
    theirs = epochs(torch.utils.data, make(), change)
    ours = epochs(minato, make(), change, prefetch_next_epoch=True)
    assert ours == theirs and ours[0] != ours[1]


@pytest.mark.parametrize("held", [[*range(SIZE)], np.arange(SIZE)], ids=["list", "array"])
def test_change_during_early_epoch_is_seen(held: Any) -> None:
    """The sampler yields its content at the time of asking; the program changes it at the end."""
    loader = minato.DataLoader(
        Numbers(), BATCH, sampler=Listed(held), num_workers=1, persistent_workers=True,
        prefetch_next_epoch=True,
    )  # fmt: skip
    for number, _batch in enumerate(loader):
        if number == SIZE // BATCH - 2:  # some of the next epoch are drawn, and some not yet
            in_place(held)
    assert torch.cat(list(loader)).tolist() == [SIZE - 1] * SIZE


@pytest.mark.parametrize("sampler", [
    WeightedRandomSampler([1.0] * SIZE, SIZE), SubsetRandomSampler([*range(SIZE)]),
    Listed([*range(SIZE)]),
], ids=["weighted", "subset", "own"])  # fmt: skip
def test_unchanged_sampler_keeps_early_epoch(
    sampler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    adopted, adopt = [], NextEpoch.adopt
    monkeypatch.setattr(NextEpoch, "adopt", lambda self: adopted.append(adopt(self)) or adopted[-1])
    loader = minato.DataLoader(
        Numbers(), BATCH, sampler=sampler, num_workers=1, persistent_workers=True,
        prefetch_next_epoch=True,
    )  # fmt: skip
    for _ in range(3):
        assert sum(map(len, loader)) == SIZE
    assert adopted == [True, True]


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("value", [
    3, None, "a", [1], {1: 2}, {1}, [np.zeros(2)], np.zeros(3), np.array([object()]),
    torch.zeros(2), torch.zeros(2, requires_grad=True), torch.zeros(2).to_sparse(),
    torch.zeros(2, device="meta"), torch.zeros(2, dtype=torch.bfloat16), object(),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_seen_value_equals_itself(value: Any, whole: bool) -> None:
    seen = Recorded(value, whole)
    assert seen.is_now(value) and not seen.is_now(object())


def test_large_list_is_compared_only_on_request() -> None:
    values = [0] * (1 << 13)
    part, whole = Recorded(values, False), Recorded(values, True)
    values[5] = 1
    assert part.is_now(values) and not whole.is_now(values)
    del values[5]
    assert not part.is_now(values)
