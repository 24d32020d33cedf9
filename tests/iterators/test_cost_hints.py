"""Which datasets are asked for hints, with what, and what becomes of bad answers."""

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

import minato
from minato import time_limits
from minato.iterators import dataset_hints as cost_hints
from minato.iterators.ready import UnitPlanner

from .parts import Engine, Loader, planner_of

SIZE, BATCH = 12, 4


class Drawn(torch.utils.data.Dataset[Any]):
    """Samples are (index, their first draw); hints note what they were asked with."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.drawn: dict[int, float] = {}
        self.asked: list[tuple[int, Any]] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random()

    def cost_hint(self, index: int, *, seed: int | None = None, epoch: int | None = None) -> float:
        self.asked.append((index, epoch))
        if seed is not None:
            self.drawn[index] = minato.draws(seed).random.random()
        return 0.001


class Delegates:
    """What a wrapper with __getattr__ is like."""

    def __init__(self, inner: Drawn) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def samples(loader: Any) -> dict[int, float]:
    found = {}
    for indices, draws in loader:
        many = np.ravel(indices).tolist(), np.ravel(draws).tolist()
        found.update(zip(*many, strict=True))
    return found


@pytest.mark.parametrize("options", [
    dict(shuffle=True), dict(batch_size=None), dict(on_error="replace"),
    dict(batching="ready", in_order=False), dict(collate_fn=lambda parts: tuple(zip(*parts))),
    dict(multiprocessing_context="spawn", num_workers=1, collate_fn=None),
], ids=["shuffled", "alone", "replace", "ready", "collate", "spawn"])  # fmt: skip
def test_hint_and_sample_draw_equal_numbers(options: dict[str, Any]) -> None:
    data = Drawn()
    loader = minato.DataLoader(data, **{"batch_size": BATCH, "num_workers": 2, **options})
    for _ in range(2):
        data.drawn = {}
        assert samples(loader) == data.drawn and len(data.drawn) == SIZE


def test_every_epoch_asks_for_every_sample_once() -> None:
    data = Drawn()
    loader = minato.DataLoader(data, BATCH, num_workers=2, persistent_workers=True)
    for epoch in (3, 4):
        data.asked.clear()
        loader.set_epoch(epoch)
        samples(loader)
        assert sorted(data.asked) == [(index, epoch) for index in range(SIZE)]
    assert loader.stats()["cost"]["hinted"] == 2 * SIZE


def test_subset_asks_by_the_indices_of_its_dataset() -> None:
    data = Drawn()
    subset = Subset(Subset(data, range(2, SIZE)), [1, 3, 5])
    drawn = samples(minato.DataLoader(subset, 3, num_workers=1))
    assert sorted(drawn) == [3, 5, 7] and drawn == data.drawn


def test_concatenated_datasets_are_asked_each() -> None:
    parts = [Drawn(5), Drawn(3)]
    samples(minato.DataLoader(ConcatDataset(parts), 4, num_workers=1))
    assert [sorted(index for index, _ in part.asked) for part in parts] == [[*range(5)], [*range(3)]]


def test_dataset_behind_a_delegating_wrapper_is_asked() -> None:
    data = Drawn()
    assert samples(minato.DataLoader(Delegates(data), BATCH, num_workers=1)) == data.drawn  # type: ignore[arg-type]


def test_hint_with_index_only_is_asked_each_epoch() -> None:
    asked: list[int] = []
    kind = type("Plain", (list,), {"cost_hint": lambda _, index: asked.append(index) or 0.001})
    loader = minato.DataLoader(kind(range(SIZE)), BATCH, num_workers=1)
    for _ in range(2):
        list(loader)
    assert sorted(asked) == sorted([*range(SIZE)] * 2)


def test_unseeded_samples_have_hints_without_seeds() -> None:
    data = Drawn()
    list(minato.DataLoader(data, BATCH, num_workers=1, seed_per_sample=False))
    assert len(data.asked) == SIZE and data.drawn == {}


@pytest.mark.parametrize(("answer", "told"), [
    (math.nan, "it returned nan"), (math.inf, "it returned inf"), (-1.0, "it returned -1.0"),
    (ZeroDivisionError("no"), "ZeroDivisionError: no"), (StopIteration(), "StopIteration"),
    ("soon", "could not convert string"),
], ids=["nan", "infinity", "negative", "raises", "stops", "text"])  # fmt: skip
def test_bad_hint_is_reported_and_asked_once(answer: Any, told: str) -> None:
    asked: list[int] = []

    def hint(_self: Any, index: int) -> Any:
        asked.append(index)
        if isinstance(answer, Exception):
            raise answer
        return answer

    data = type("Bad", (list,), {"cost_hint": hint})(range(SIZE))
    loader = minato.DataLoader(data, BATCH, num_workers=1)
    with pytest.warns(UserWarning, match=rf"cost_hint\(0\) of Bad failed: .*{told}"):
        assert len(list(loader)) == SIZE // BATCH
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(loader)) == SIZE // BATCH
    assert asked == [0]


def test_hint_of_none_says_nothing_of_its_batch() -> None:
    kind = type("Some", (list,), {"cost_hint": lambda _, i: None if i < BATCH else 0.001})
    loader = minato.DataLoader(kind(range(SIZE)), BATCH, num_workers=1)
    list(loader)
    assert loader.stats()["cost"]["hinted"] == SIZE - BATCH


@pytest.mark.parametrize("answer", [0.001, None], ids=["known", "unknown"])
def test_hints_stop_when_they_take_too_long(
    answer: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, asked = [0], list[int]()

    class Slow(list[int]):
        def cost_hint(self, index: int) -> float | None:
            clock[0] += cost_hints.FIRST_NS
            asked.append(index)
            return answer

    monkeypatch.setattr(time_limits.time, "perf_counter_ns", lambda: clock[0])
    loader = Loader(20)
    loader.inner.__dict__["dataset"] = Slow(range(20))
    engine = Engine()
    planner = planner_of(loader, engine)
    first, *later = [plan.hints is not None for plan in engine.plans]
    assert first == (answer is not None) and later and not any(later)
    assert asked == ([0, 1] if first else [0, 2])
    clock[0] = round(clock[0] / cost_hints.SHARE) + 1  # by now the share allows another batch
    planner._hints_of([0], 0)
    assert asked[2:] == [0]
    assert (planner._hints_of([0], 0) is not None) == first


def test_stretches_of_resumed_batch_have_own_hints() -> None:
    """Ready mode plans what is left of a partly delivered batch in stretches."""
    loader = Loader(8, 4)
    data: Any = type("Data", (list,), {"cost_hint": lambda _, i: float(i)})
    loader.inner.__dict__["dataset"] = data(range(8))
    planner = planner_of(loader, engine := Engine(), kind=UnitPlanner)
    planner.clear()
    planner.position.progress.beyond = {1}
    planner.begin(iter(loader._index_sampler), goes_on=False)
    hints = [np.frombuffer(plan.hints or b"", np.float32).tolist() for plan in engine.plans]
    assert hints == [[0], [2, 3], [4, 5, 6, 7]]


def test_engine_without_room_is_offered_the_same_hints() -> None:
    loader = Loader(20)
    asked: list[int] = []
    data: Any = type("Data", (list,), {"cost_hint": lambda _, i: asked.append(i) or 1.0})
    loader.inner.__dict__["dataset"] = data(range(20))
    planner = planner_of(loader, engine := Engine(room=1))
    planner.fill()
    engine.room = 2
    planner.fill()
    assert asked == sorted(set(asked)) and len(engine.plans) == 2


def test_ranks_have_the_seeds_of_their_own_samples() -> None:
    """Two ranks of one sampler together draw what one alone does."""
    alone = Drawn()
    torch.manual_seed(5)
    everything = samples(minato.DataLoader(alone, BATCH, num_workers=1))
    for rank in range(2):
        data = Drawn()
        sampler: Any = torch.utils.data.DistributedSampler(data, 2, rank, shuffle=False)
        torch.manual_seed(5)
        mine = samples(minato.DataLoader(data, BATCH, sampler=sampler, num_workers=1))
        assert mine == data.drawn == {index: everything[index] for index in mine}
