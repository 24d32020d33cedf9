"""Whole loaders under random costs, orders, numbers of workers and resizes: invariants."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import minato
from minato.iterators.ready import DISPLACEMENT

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

DEADLINE_S = 60


def examples(count: int) -> Any:
    return settings(deadline=None, max_examples=count,
                    suppress_health_check=[HealthCheck.too_slow])  # fmt: skip


class Costly(torch.utils.data.Dataset):
    """Sample i takes a given number of microseconds. ``runs`` counts how often each started."""

    def __init__(
        self, costs_us: list[int], die: frozenset[int] = frozenset(), held: bool = True
    ) -> None:
        """held: draws from its own generator, so each worker makes its first sample twice."""
        self.costs_us, self.die = costs_us, die
        self.runs = torch.zeros(len(costs_us), dtype=torch.int32).share_memory_()
        self.rng: Any = np.random.default_rng(3) if held else random

    def __len__(self) -> int:
        return len(self.costs_us)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.runs[index] += 1  # no race: only one worker has this index
        if index in self.die and int(self.runs[index]) == 1:
            os.kill(os.getpid(), 9)
        time.sleep(self.costs_us[index] * 1e-6)
        draws = [random.random(), np.random.rand(), float(torch.rand(())), self.rng.random()]
        return torch.tensor([index, *draws], dtype=torch.float64)


def random_collate(samples: list[torch.Tensor]) -> torch.Tensor:
    extra = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
    return torch.cat([torch.stack(samples), extra.expand(len(samples), 3)], 1)


costs = st.lists(st.sampled_from([0, 0, 200, 1000, 8000]), min_size=1, max_size=40)
sizes = st.integers(1, 7)
workers = st.integers(1, 4)
modes = st.sampled_from([
    {}, {"in_order": False}, {"in_order": False, "batching": "ready"}, {"scheduling": "static"},
    {"collate_fn": random_collate}, {"persistent_workers": True, "prefetch_next_epoch": True},
])  # fmt: skip


def shuffled(dataset: Any, seed: int) -> torch.utils.data.RandomSampler:
    generator = torch.Generator().manual_seed(seed)
    return torch.utils.data.RandomSampler(dataset, generator=generator)


def slowly(loader: Any, step_s: float) -> Any:
    for batch in loader:
        time.sleep(step_s)
        yield batch


def indices(batches: Any) -> list[list[int]]:
    return [b[:, 0].int().tolist() for b in batches]


@examples(14)
@given(costs, sizes, workers, modes, st.integers(0, 99), st.integers(1, 8), st.booleans(),
       st.sampled_from([0.0, 0.004]))  # fmt: skip
def test_exactly_once(costs_us, size, count, mode, seed, window, drop_last, step_s) -> None:
    """And nothing is run a second time, whatever is slow, known or not, the program too."""
    data = Costly(costs_us, held=False)
    loader = minato.DataLoader(
        data, size, sampler=shuffled(data, seed), num_workers=count, prefetch_factor=window,
        drop_last=drop_last, **mode,
    )  # fmt: skip
    total = len(costs_us) // size * size if drop_last else len(costs_us)
    order = shuffled(data, seed)
    for epoch in range(1, 4):
        got, expected = indices(slowly(loader, step_s)), list(order)[:total]
        flat = sum(got, [])
        if "in_order" not in mode:
            assert flat == expected
        assert len(flat) == len(set(flat)) == total
        if mode != {"in_order": False}:  # else the last one may come before others
            assert [len(b) for b in got[:-1]] == [size] * (len(got) - 1)
        if "prefetch_next_epoch" not in mode and not drop_last:
            assert data.runs.tolist() == [epoch] * len(costs_us)


@examples(10)
@given(costs, sizes, st.data())
def test_exactly_once_while_workers_come_and_go(costs_us, size, data) -> None:
    """The program asks for another number of workers whenever it likes; its kernel kills some."""
    die = frozenset(data.draw(st.sets(st.integers(0, len(costs_us) - 1), max_size=2)))
    dataset = Costly(costs_us, die, held=False)
    mode = data.draw(st.sampled_from([{}, {"in_order": False},
                                      {"in_order": False, "batching": "ready"}]))  # fmt: skip
    loader = minato.DataLoader(
        dataset, size, shuffle=True, num_workers=2, autoscale=(1, 6), straggler_threshold=0.001,
        max_retries=3, **mode,
    )  # fmt: skip
    flat = sum(indices(loader), [])
    assert sorted(flat) == list(range(len(costs_us)))
    # one that did not die may have been in a task with one that did
    again = [i for i, runs in enumerate(dataset.runs.tolist()) if runs > 1]
    assert set(die) <= set(again) and all(r <= 1 + len(die) for r in dataset.runs.tolist())
    assert die or not again


class Resizes:
    """Changes the number of workers between 1 and most for as long as an epoch runs, as if the
    worker scheduler decided again as soon as workers have started."""

    def __init__(self, iterator: Any, most: int, seed: int) -> None:
        self.engine, self.rng, self.most = iterator._engine, random.Random(seed), most
        self.over, self.moves = threading.Event(), 0
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        while not self.over.wait(0.03):
            try:
                self.engine.move_to(self.rng.randint(1, self.most))
            except RuntimeError:  # the engine is closed
                return
            self.moves += 1

    def end(self) -> None:
        self.over.set()
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()


@examples(6)
@given(st.lists(st.sampled_from([500, 3000, 9000]), min_size=30, max_size=60), sizes, modes,
       st.integers(0, 999))  # fmt: skip
def test_resizes_change_nothing(costs_us, size, mode, seed) -> None:
    """Neither the delivered data nor how often a sample is run."""
    if "scheduling" in mode:
        mode = {}
    data = Costly(costs_us, held=False)
    options = {"batch_size": size, "shuffle": True, **mode}
    torch.manual_seed(seed)
    still = {i: row for b in minato.DataLoader(data, num_workers=1, **options) for i, row in
             zip(b[:, 0].int().tolist(), b[:, 1:5].tolist())}  # fmt: skip
    data.runs.zero_()
    torch.manual_seed(seed)
    loader = minato.DataLoader(data, num_workers=2, autoscale=(1, 6), **options)
    it = iter(loader)
    resizes = Resizes(it, 6, seed)
    try:
        got = list(it)
    finally:
        resizes.end()
    moved = {i: row for b in got for i, row in zip(b[:, 0].int().tolist(), b[:, 1:5].tolist())}
    assert moved == still and sum(len(b) for b in got) == len(costs_us)
    if "prefetch_next_epoch" not in mode:
        assert data.runs.tolist() == [1] * len(costs_us)
    if mode == {}:  # what left workers did counts on in their places
        stats = loader.stats()
        assert sum(w["rows"] for w in stats["workers"]) == len(costs_us)
        assert sum(w["tasks"] for w in stats["workers"]) == sum(stats["started"].values())


@examples(6)
@given(st.lists(st.sampled_from([0, 500, 3000]), min_size=30, max_size=60), sizes,
       st.integers(0, 999))  # fmt: skip
def test_the_displacement_of_ready_batches_is_bounded(costs_us, size, seed) -> None:
    slow = [c if n % 29 else 20000 for n, c in enumerate(costs_us)]
    loader = minato.DataLoader(
        Costly(slow), size, num_workers=1 + seed % 4, persistent_workers=True, in_order=False,
        batching="ready",
    )  # fmt: skip
    for _ in range(2):
        got = indices(loader)
        assert all(abs(i // size - k) <= DISPLACEMENT for k, b in enumerate(got) for i in b)
        assert sorted(sum(got, [])) == list(range(len(slow)))
        moved = max((abs(i - (k * size + n)) for k, b in enumerate(got) for n, i in enumerate(b)))
        assert moved <= (DISPLACEMENT + 1) * size
