"""``check_determinism()``: each way of depending on more than the seed is seen and named."""

from __future__ import annotations

import collections
import os
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch

import minato
from minato.determinism import _Probe

MODULE_RNG = np.random.default_rng(1)
MODULE_TORCH = torch.Generator()
Pair = collections.namedtuple("Pair", "left right")


class Base(torch.utils.data.Dataset):
    length = 20

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {"image": torch.zeros(2), "label": self.draw(index)}

    def draw(self, index: int) -> Any:
        raise NotImplementedError


class Seeded(Base):
    """Everything that seeding reaches."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()
        self.private = random.Random()

    def draw(self, index: int) -> Any:
        drawn = random.random(), np.random.rand(3), torch.rand(2)
        return [*drawn, self.rng.random(), self.private.random()]


class InModule(Base):
    """By a name that is no name in the code: seeding does not find it."""

    def draw(self, index: int) -> Any:
        return float(globals()["MODULE_RNG"].random())


class InModuleTorch(Base):
    def draw(self, index: int) -> Any:
        return torch.rand(1, generator=globals()["MODULE_TORCH"])


class OfGlobals:
    hidden = np.random.RandomState(3)


class InClass(Base):

    def draw(self, index: int) -> Any:
        return Pair(index, OfGlobals.hidden.rand())


class Counting(Base):
    count = 0

    def draw(self, index: int) -> Any:
        self.count += 1
        return self.count


class Entropy(Base):
    def draw(self, index: int) -> Any:
        return os.urandom(4)


class Reset(Counting):
    """The remedy that the page recommends."""

    def seed_sample(self, seed: int) -> None:
        self.count = seed


class Batched(Base):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        noise = torch.rand(1)
        return [{"label": noise + i} for i in indices]


class BatchedBadly(Base):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"label": globals()["MODULE_RNG"].random()} for _ in indices]


class Failing(Base):
    def draw(self, index: int) -> Any:
        raise KeyError("no such case")


@pytest.mark.parametrize("dataset", [Seeded(), Reset(), Batched()])
def test_seeded_generators_pass(dataset: Base) -> None:
    report = minato.check_determinism(dataset)
    assert report and not report.fields and not report.indices, str(report)
    assert report.samples == 20 and "the same" in str(report)


def test_found_generators_are_listed() -> None:
    assert set(minato.check_determinism(Seeded(), 4).found) == {"Generator", "Random"}


@pytest.mark.parametrize(
    "dataset, field, name",
    [
        (InModule(), "['label']", "test_determinism.MODULE_RNG (numpy Generator)"),
        (InModuleTorch(), "['label']", "test_determinism.MODULE_TORCH (torch Generator)"),
        (InClass(), "['label'].right", "test_determinism.OfGlobals.hidden (numpy RandomState)"),
        (BatchedBadly(), "['label']", "test_determinism.MODULE_RNG (numpy Generator)"),
    ],
)
def test_a_hidden_generator_is_named(dataset: Base, field: str, name: str) -> None:
    report = minato.check_determinism(dataset)
    assert not report and list(report.fields) == [field]
    assert len(report.indices) >= 18  # the middle one may have drawn the same
    assert report.repeatable
    assert any(s.endswith(name) for s in report.suspects), report.suspects
    assert "MODULE" in str(report) or "hidden" in str(report)


def test_counter_is_distinguished_from_generator() -> None:
    report = minato.check_determinism(Counting())
    assert not report and not report.suspects and report.repeatable
    assert "a counter" in str(report)


def test_entropy_is_distinguished_from_order() -> None:
    report = minato.check_determinism(Entropy())
    assert not report and not report.repeatable and not report.suspects
    assert "entropy" in str(report)


def test_samples_are_spread_and_bounded() -> None:
    report = minato.check_determinism(Entropy(), samples=5)
    assert report.samples == 5 and report.indices == (0, 4, 8, 12, 16)


def test_check_works_with_spawned_workers() -> None:
    probe = pickle.loads(pickle.dumps(_Probe(Seeded(), [[0], [1]], range(2))))
    samples, moved, *_rest = probe[0]
    assert len(samples) == 2 and not moved


def test_the_datasets_error_is_raised() -> None:
    with pytest.raises(KeyError, match="no such case"):
        minato.check_determinism(Failing())


def test_invalid_arguments_are_refused() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(TypeError, match="map-style"):
        minato.check_determinism(Stream())
    with pytest.raises(ValueError, match="needs two samples or more"):
        minato.check_determinism(Seeded(), samples=1)


class Offset(Base):
    def draw(self, index: int) -> Any:
        dataset = torch.utils.data.get_worker_info().dataset
        assert dataset is self
        return index + self.offset


def set_offset(_number: int) -> None:
    torch.utils.data.get_worker_info().dataset.offset = 3


def test_worker_init_fn_finds_the_dataset() -> None:
    assert minato.check_determinism(Offset(), worker_init_fn=set_offset)


def test_the_sample_that_fails_is_named() -> None:
    class Fails(Base):
        def draw(self, index: int) -> Any:
            if index == 13:
                raise KeyError("no such case")
            return index

    with pytest.raises(KeyError) as raised:
        minato.check_determinism(Fails())
    notes = "".join(getattr(raised.value, "__notes__", []))
    assert "sample index 13." in str(raised.value) + notes


def test_tensors_with_lazy_bits() -> None:
    class Lazy(Base):
        def draw(self, index: int) -> Any:
            value = torch.full((2,), complex(index, 1)).conj()
            return [value, value.imag]

    assert minato.check_determinism(Lazy())


class Whole(Base):
    """Makes batches and no lists of samples."""

    drawn = 0

    def __getitems__(self, indices: list[int]) -> Any:
        self.drawn += len(indices)
        return {"index": torch.tensor(indices), "drawn": self.drawn, "c": 0}


def test_determinism_accepts_batches_without_lists() -> None:
    report = minato.check_determinism(Whole())
    assert set(report.fields) == {"['drawn']"}


class Hinted(torch.utils.data.Dataset):
    """draw(draws): what the hint draws from minato.draws(seed)."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return random.random(), np.random.rand(), torch.rand(1).item(), random.getrandbits(7)

    def cost_hint(self, index, *, seed=None, epoch=None):
        return 1.0 if seed is None else abs(float(self.draw(minato.draws(seed))))


@pytest.mark.parametrize("draw", [
    lambda draws: draws.random.random(),
    lambda draws: draws.numpy.rand(),
    lambda draws: torch.rand(1, generator=draws.torch),
    lambda draws: draws.random.random() + draws.random.getrandbits(7) + draws.numpy.rand(),
], ids=["random", "numpy", "torch", "several"])  # fmt: skip
def test_hint_drawing_like_its_sample_is_accepted(draw):
    report = minato.check_determinism(Hinted(draw), 4)
    assert report and report.hints == ()


@pytest.mark.parametrize(("draw", "library"), [
    (lambda draws: draws.random.getrandbits(7), "random"),
    (lambda draws: draws.numpy.rand(5).sum(), "numpy"),
    (lambda draws: torch.rand(2, generator=draws.torch).sum(), "torch"),
], ids=["random", "numpy", "torch"])  # fmt: skip
def test_hint_that_draws_something_else_is_named(draw, library):
    report = minato.check_determinism(Hinted(draw), 4)
    assert not report and report.hints == (library,) and report.fields == {}
    assert f"cost_hint() draws from {library} what its sample does not draw first" in str(report)
