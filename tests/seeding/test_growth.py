"""Datasets whose samples use what their worker has loaded before."""

from __future__ import annotations

import itertools
import random
import warnings
from collections import deque

import pytest
import torch

import minato
from minato.seeding.find_generators import GENERATORS_LIMIT

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Buffer:
    def __init__(self, kind):
        self.loaded = kind()

    def add(self, index):
        (self.loaded.add if isinstance(self.loaded, set) else self.loaded.append)(index)


class Mosaic(torch.utils.data.Dataset):
    def __init__(self, kind):
        self.buffer = Buffer(kind)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.buffer.add(index)
        return torch.tensor([index, random.choice(list(self.buffer.loaded))])


class Caching(Mosaic):
    """A cache, and a table that is built at first use."""

    def __init__(self):
        self.cache, self.table = {}, []

    def __getitem__(self, index):
        if not self.table:
            self.table += range(10)
        return self.cache.setdefault(index, index)


def told(data, workers=2, seed=0, filters="always", **options):
    """The warnings of two epochs."""
    torch.seed() if seed is None else torch.manual_seed(seed)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(filters)
        loader = minato.DataLoader(data, 4, num_workers=workers, **options)
        assert [len(list(loader)) for _ in range(2)] == [16, 16]
    return [str(one.message) for one in found]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("kind", [list, set, deque])
def test_growing_attribute_warns_once_and_is_named(kind, persistent):
    (one,) = told(Mosaic(kind), persistent_workers=persistent)
    assert "'loaded'" in one and "scheduling='static'" in one


class Counting(Mosaic):
    """The number of its samples decides a sample; that of its calls does not."""

    def __init__(self):
        self.made = self.calls = self.last = 0

    def __getitem__(self, index):
        self.calls += 1
        self.last = index
        return self.number() + self.last + self.last

    def number(self):
        self.made += 1
        return self.made


class Averaging(Mosaic):
    """A sample is less the running mean of those that its worker has made."""

    def __init__(self):
        self.mean = 0.0

    def __getitem__(self, index):
        self.mean += 0.1 * (index - self.mean)
        return index - self.mean


class Shuffling(Mosaic):
    def __init__(self):
        self.order = list(range(500, 564))

    def __getitem__(self, index):
        random.shuffle(self.order)
        return self.order[0]


class Iterating(Mosaic):
    def __init__(self):
        self.backgrounds, self.unused = itertools.cycle([1, 2, 3]), iter([1])

    def __getitem__(self, index):
        return next(self.backgrounds)


class Crowd(Mosaic):
    """More generators than are seeded."""

    def __init__(self, size):
        self.rngs = [random.Random(n) for n in range(size)]

    def __getitem__(self, index):
        return self.rngs[index].random()


@pytest.mark.parametrize(
    "data, name, options",
    [
        (Counting(), "made", {}),
        (Averaging(), "mean", {}),
        (Shuffling(), "order", {}),
        (Iterating(), "backgrounds", {}),
        (Crowd(GENERATORS_LIMIT + 1), "rngs", {"persistent_workers": True}),
    ],
)
def test_attribute_that_samples_change_and_use_warns_once(data, name, options):
    (one,) = told(data, **options)
    assert repr(name) in one and "scheduling='static'" in one


class OnlyCounting(Counting):
    def number(self):
        return 0


@pytest.mark.parametrize(
    "data, options",
    [
        (Caching(), {}),
        (OnlyCounting(), {}),
        (Crowd(GENERATORS_LIMIT + 1), {}),
        (Mosaic(list), {"workers": 1}),
        (Mosaic(list), {"seed": None}),
        (Mosaic(list), {"scheduling": "static"}),
        (Mosaic(list), {"filters": "error"}),
    ],
    ids=["cache", "unused counter", "generator for each sample", "one worker", "no seed", "static", "warnings are errors"],
)
def test_harmless_growth_does_not_warn(data, options):
    assert told(data, **options) == []
