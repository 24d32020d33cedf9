"""The order in which a job takes cached samples: each exactly once, and few reads of all jobs together."""

from __future__ import annotations

import heapq
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minato.cache.order import NO_KEY, Following, Keys, Order
from minato.cache.order import share_of

from .support import new_cache


def drawn(order: Order, count: int | None = None) -> list[int]:
    out: list[int] = []
    for _ in range(len(order) if count is None else count):
        order.draw(out)
    return out


# ---- one epoch ----


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_order_with_any_cache_draws_each_once(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 40))
    positions = st.lists(st.integers(0, n - 1), unique=True)
    seen, apart = data.draw(positions), data.draw(positions)
    order = Order(n, seen, apart, data.draw(st.integers(0, 9)))
    out: list[int] = []
    while len(order):
        found = data.draw(st.lists(st.tuples(st.integers(0, n - 1), st.integers(1, 6)), max_size=4))
        order.cached(found, data.draw(st.integers(0, 7)))
        order.draw(out)
    assert sorted(out) == sorted(set(range(n)) - set(seen))
    assert order.drawn == len(out)


def test_order_without_cached_samples_is_the_samplers() -> None:
    assert drawn(Order(50)) == list(range(50))


def test_order_takes_cached_samples_first() -> None:
    order = Order(100)
    order.cached([(position, 1) for position in range(60, 80)])
    first = drawn(order, 20)
    assert sorted(first) == list(range(60, 80)) != first
    assert drawn(order, 3) == [0, 1, 2]
    assert order.swaps == 20


def test_order_forgets_recycled_entries() -> None:
    order = Order(10)
    order.cached([(7, 1), (8, 2), (9, 3)], oldest=1)
    order.cached([], oldest=3)
    assert drawn(order) == [9, 0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_samples_that_cannot_be_cached_are_spread_evenly() -> None:
    apart = list(range(0, 100, 5))
    order = Order(100, apart=apart)
    order.cached([(position, 1) for position in range(100) if position % 5])
    out = drawn(order)
    assert sorted(out) == list(range(100))
    places = [place for place, position in enumerate(out) if position in apart]
    assert np.diff([-1, *places]).tolist() == [5] * 20


def test_sample_thought_uncacheable_may_come_when_cached() -> None:
    order = Order(20, apart=range(0, 20, 2))
    order.cached([(position, 1) for position in range(20)])
    assert sorted(drawn(order)) == list(range(20))


# ---- keys ----


def test_keys_find_every_index_of_a_key() -> None:
    words = np.array([7, 3, 7, NO_KEY, 9], np.uint64)
    keys = Keys(words)
    indices, which = keys.indices_of(np.array([9, 5, 7], np.uint64))
    assert sorted(zip(indices.tolist(), which.tolist())) == [(0, 2), (2, 2), (4, 0)]


def test_sample_made_and_never_stored_is_apart() -> None:
    keys = Keys(np.array([7, 3, NO_KEY, 9], np.uint64))
    everything = np.arange(4)
    assert keys.apart(everything).tolist() == [False, False, True, False]
    keys.made[:] = True
    keys.stored[[0, 3]] = True
    assert keys.apart(everything).tolist() == [False, True, True, False]


def test_following_reports_entries_stored_since() -> None:
    cache = new_cache()
    store = cache._attached()
    assert store is not None
    digests = [bytes([n]) * 16 for n in range(1, 9)]
    for digest in digests[:3]:
        store.put(digest, 1, b"x", ())
    keys = Keys(np.array([int.from_bytes(digest[:8], "little") for digest in digests], np.uint64))
    following = Following(store, keys, np.array([6, 2, 0, 4]), share=1)

    def positions() -> list[int]:
        return sorted(position for position, _generation in following.news()[0])

    assert positions() == [1, 2]
    assert positions() == []
    store.put(digests[4], 1, b"x", ())
    store.put(b"another data set", 1, b"x", ())
    assert positions() == [3]
    assert keys.stored.tolist() == [True, True, True, False, True, False, False, False]


# ---- several jobs, in virtual time ----


class Job:
    """Makes one sample after another, at its speed. Chooses as many ahead as window says."""

    def __init__(self, n: int, speed: float, chance: random.Random, window: int = 1) -> None:
        self.n, self.speed, self.chance, self.window = n, speed, chance, window
        self.epochs, self.active = 0, False
        self.chosen: list[int] = []

    def begin(self, ring: Ring) -> None:
        self.active = True
        self.epochs += 1
        self.indices = self.chance.sample(range(self.n), self.n)
        self.position = {index: position for position, index in enumerate(self.indices)}
        self.order = Order(self.n, seed=self.chance.randrange(1 << 30))
        self.follows = ring.jobs() > 1
        self.cursor = ring.begin

    def next(self, ring: Ring) -> int:
        while len(self.chosen) < self.window and len(self.order):
            self.chosen.append(self.draw(ring))
        return self.chosen.pop(0)

    def draw(self, ring: Ring) -> int:
        if self.follows:
            news = ring.stored[max(self.cursor, ring.begin) :]
            self.cursor = len(ring.stored)
            self.order.cached(((self.position[i], g) for i, g in news), ring.oldest)
        out: list[int] = []
        self.order.draw(out)
        return self.indices[out[0]]


class Ring:
    """A cache as the log makes it: 16 segments, the oldest recycled while jobs share it."""

    def __init__(self, capacity: int, all_jobs: list[Job]) -> None:
        self.segment = max(1, capacity // 16)
        self.capacity, self._jobs = capacity, all_jobs
        self.stored: list[tuple[int, int]] = []  # (index, generation)
        self.begin = 0  # of those that are there
        self.there: set[int] = set()

    def jobs(self) -> int:
        return sum(job.active for job in self._jobs)

    @property
    def oldest(self) -> int:
        return self.begin // self.segment

    def put(self, index: int) -> None:
        if len(self.there) >= self.capacity:
            if self.jobs() < 2:
                return
            end = self.begin + self.segment
            self.there -= {index for index, _ in self.stored[self.begin : end]}
            self.begin = end
        self.stored.append((index, len(self.stored) // self.segment))
        self.there.add(index)


def reads_of(
    speeds: list[float], starts: list[float], n: int = 1000, share: float = 0.2, window: int = 1
) -> float:
    """Reads of all jobs together, in data sets for each epoch of the first job, once it is steady."""
    chance = random.Random(5)
    jobs = [Job(n, speed, chance, window) for speed in speeds]
    ring = Ring(int(share * n), jobs)
    events = [(start * n, number) for number, start in enumerate(starts)]
    heapq.heapify(events)
    reads = 0
    marks: list[int] = []
    while len(marks) < 9:
        now, number = heapq.heappop(events)
        job = jobs[number]
        if not job.active or not (job.chosen or len(job.order)):
            if number == 0:
                marks.append(reads)
            job.begin(ring)
        index = job.next(ring)
        if index not in ring.there:
            reads += 1
            ring.put(index)
        heapq.heappush(events, (now + chance.uniform(0.95, 1.05) / job.speed, number))
    return (marks[8] - marks[4]) / 4 / n


@pytest.mark.parametrize("speeds, starts, expected", [
    ([1], [0], 0.80),
    ([1, 1], [0, 0], 0.80),
    ([1] * 4, [0] * 4, 0.80),
    ([1] * 4, [0, 0.25, 0.5, 0.75], 0.91),
    ([1, 1 / 2, 1 / 4], [0, 0, 0], 0.80),
], ids=["one", "two", "four", "four_staggered", "unequal"])  # fmt: skip
def test_jobs_together_read_a_data_set_once(speeds: Any, starts: Any, expected: float) -> None:
    assert reads_of(speeds, starts) == pytest.approx(expected, rel=0.1)


def test_eight_jobs_of_random_starts_read_about_once() -> None:
    starts = [random.Random(number).random() for number in range(8)]
    assert 0.75 < reads_of([1] * 8, starts, n=500) < 1.15


def test_jobs_choosing_far_ahead_read_much_more() -> None:
    starts = [random.Random(number).random() for number in range(8)]
    stats = {"entries": 100, "bytes": 100, "used_bytes": 100, "jobs": 8}
    within, beyond = (
        reads_of([1] * 8, starts, n=500, window=window) for window in (share_of(stats), 32)
    )
    assert within < 1.5 < 2.2 < beyond


def test_share_of_filling_cache_counts_all_that_fit() -> None:
    stats = {"entries": 10, "bytes": 4000, "used_bytes": 1000, "jobs": 2}
    assert share_of(stats) == 20
    assert share_of({**stats, "entries": 0, "used_bytes": 0}) > 1 << 30
