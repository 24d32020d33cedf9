"""Cost model and slow timeout: quantiles, drift, outliers, silence on constants."""

from __future__ import annotations

import json
import random

import policies
import pytest
from hypothesis import strategies as st

from minato import _core

from . import given

MS = 1_000_000

times = st.integers(0, 10**15)  # more counts as that


@given(st.lists(times, min_size=1, max_size=300), st.integers(0, 1000))
def test_quantiles_are_within_a_thirtysecond(values, permille):
    model = policies.Cost()
    for v in values:
        model.observe(-1, v)
    rank = max(1, -(-permille * len(values) // 1000))
    exact = sorted(values)[rank - 1]
    assert abs(model.quantile(permille) - exact) <= exact / 32 + 0.5


@given(st.lists(times, min_size=1, max_size=200), times)
def test_share_above_is_never_overstated(values, line):
    model = policies.Cost()
    for v in values:
        model.observe(-1, v)
    assert model.above(line) <= 1000 * sum(v > line for v in values) // len(values)
    low = sum(v > line * 17 / 16 + 1 for v in values)
    assert model.above(line) >= 1000 * low // len(values)


@given(st.lists(times, min_size=1, max_size=200), st.floats(0.3, 3), st.data())
def test_weight_is_the_share_of_all_time(values, factor, data):
    """The share clearly above a value, except for a bucket's width and rounding."""
    line = int(data.draw(st.sampled_from(values)) * factor)
    model = policies.Cost()
    for v in values:
        model.observe(-1, v)
    whole = sum(values)
    if whole == 0:
        assert model.weight(line) == 0
        return
    most = 1000 * sum(v for v in values if v > line) / whole
    least = 1000 * sum(v for v in values if v > line * 17 / 16 + 1) / whole
    assert least * 15 / 16 - 1.5 <= model.weight(line) <= most * 17 / 16 + 1
    assert model.weight(line) >= model.weight(2 * line + 1)


@given(st.lists(times, min_size=1, max_size=60), st.integers(1, 3), st.data(), max_examples=25)
def test_halving_forgets_no_class_and_bounds_the_past(values, rounds, data):
    """However long the stream, each value that still occurs keeps its place."""
    model = policies.Cost()
    for _ in range(rounds * (16384 // len(values) + 1)):
        for v in values:
            model.observe(-1, v)
    permille = data.draw(st.integers(0, 1000))
    exact = sorted(values)
    rank = max(1, -(-permille * len(values) // 1000))
    near = exact[max(0, rank - 2) : rank + 1]  # a halved count is rounded up
    assert any(abs(model.quantile(permille) - v) <= v / 32 + 0.5 for v in near)


class Cell:
    """One index of the model, from its definition."""

    def __init__(self) -> None:
        self.cost = self.age = self.side = self.seen = 0

    def observe(self, x: float) -> None:
        self.seen += 1
        side = 1 if x > 2 * self.cost else -1 if x < self.cost / 2 else 0
        if self.seen == 1 or (side and side == self.side):
            self.cost, self.age, self.side = x, 1, 0
            return
        self.side = side
        x = self.cost * 2.0**side if side else x
        self.age = min(4, self.age + 1)
        self.cost += (x - self.cost) / self.age


reports = st.lists(st.tuples(st.integers(-2, 4), st.integers(0, 10**12)), max_size=80)


@given(reports)
def test_the_model_is_its_definition(events):
    """Observations in any order; floats of 24 bits aside."""
    model, cells = policies.Cost(3), [Cell() for _ in range(3)]
    walls: list[int] = []
    for index, wall in events:
        model.observe(index, wall)
        walls.append(wall)
        if 0 <= index < 3:
            cells[index].observe(wall)
    mean = sum(walls) / max(1, len(walls))
    assert model.samples == len(walls) and model.known == sum(c.seen > 0 for c in cells)
    assert model.mean == pytest.approx(mean, rel=1e-6)
    for index in range(-1, 4):
        cell = cells[index] if 0 <= index < 3 else Cell()
        want = cell.cost if cell.seen else mean
        assert model.knows(index) == (cell.seen > 0)
        assert model.wall(index) == pytest.approx(want, rel=1e-5, abs=1.01)


def test_the_distribution_follows_a_change():
    model = policies.Cost()
    for _ in range(20_000):
        model.observe(-1, 100)
    for _ in range(60_000):
        model.observe(-1, 900)
    assert model.quantile(500) == pytest.approx(900, rel=1 / 32)
    assert model.quantile(100) == pytest.approx(900, rel=1 / 32)
    assert model.mean == pytest.approx(900, rel=0.01)


@given(st.integers(1, 10**12), st.integers(2, 12), st.floats(0.001, 1000))
def test_one_outlier_moves_a_cost_little(cost, before, factor):
    model = policies.Cost(3)
    for _ in range(before):
        model.observe(1, cost)
    model.observe(1, int(cost * factor))
    assert 0.74 * cost - 1 <= model.wall(1) <= 1.51 * cost + 1


@given(st.integers(100, 10**9), st.integers(1, 10), st.sampled_from([0.1, 0.3, 3.5, 20]))
def test_changed_cost_level_is_learned_in_two_epochs(cost, before, factor):
    model = policies.Cost(3)
    new = int(cost * factor)
    for _ in range(before):
        model.observe(1, cost)
    for _ in range(2):
        model.observe(1, new)
    assert model.wall(1) == pytest.approx(new, rel=0.02, abs=2)


def test_slow_drift_is_followed():
    model = policies.Cost(1)
    cost = 1000.0
    for _ in range(60):
        cost *= 1.05
        model.observe(0, int(cost))
    assert model.wall(0) == pytest.approx(cost, rel=0.2)


def test_unknown_index_falls_back_to_the_mean():
    model = policies.Cost(4)
    assert model.wall(0) == 0 and not model.knows(0)
    model.observe(1, 100)
    model.observe(2, 300)
    assert model.wall(0) == 200
    assert model.wall(99) == 200 and model.wall(-1) == 200
    model.observe(0, 50)
    assert model.wall(0) == 50 and model.known == 3


@given(st.dictionaries(st.integers(0, 999), st.integers(1, 2**40)))
def test_save_and_load_through_json(known):
    model = policies.Cost(1000)
    for index, wall in known.items():
        model.observe(index, wall)
    saved = json.loads(json.dumps(model.save()))
    assert saved[0] == sorted(known)
    other = policies.Cost(1000)
    assert other.load(*saved) == len(known)
    for index in known:
        assert other.wall(index) == model.wall(index)
    assert other.known == len(known) and other.save() == tuple(saved)


def test_load_ignores_indices_past_the_dataset():
    model = policies.Cost(2)
    assert model.load([0, 2, -1, 1], [1, 2, 3, 4]) == 2
    assert model.save()[0] == [0, 1]


# -- the slow timeout -----------------------------------------------------------------


def flagged(draws: list[int]) -> tuple[int, policies.Cost]:
    """How many of the draws the timeout in use at their time calls slow."""
    model = policies.Cost()
    count = 0
    for value in draws:
        count += model.is_slow(value)
        model.observe(-1, value)
        model.learn_timeout()
    return count, model


@given(st.integers(6 * MS, 60_000 * MS), st.floats(0.0, 0.25), st.integers(0, 10**6))
def test_constant_cost_with_noise_flags_nothing(cost, sigma, seed):
    rng = random.Random(seed)
    draws = [int(cost * min(1.4, max(0.75, rng.gauss(1.0, sigma)))) for _ in range(400)]
    count, model = flagged(draws)
    assert count == 0 and not model.tail


@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.05, 0.2]), st.integers(3, 100))
def test_a_heavy_tail_is_flagged(seed, share, factor):
    rng = random.Random(seed)
    draws = [20 * MS * (factor if rng.random() < share else 1) for _ in range(1500)]
    _, model = flagged(draws)
    slow = sum(v > 20 * MS for v in draws) / len(draws)
    if slow >= 0.006:
        assert model.tail and model.is_slow(20 * MS * factor)
    assert not model.is_slow(20 * MS)


def test_first_slow_sample_is_eventually_found():
    _, model = flagged([10 * MS] * 200)
    assert not model.tail
    assert not model.is_slow(20 * MS) and model.is_slow(500 * MS)


def test_bimodal_costs_flag_no_sample():
    count, _ = flagged([40 * MS, 6 * MS] * 300)
    assert count == 0


def test_no_verdict_without_evidence():
    _, model = flagged([10 * MS] * 31)
    assert model.timeout is None and not model.is_slow(10**15)


def test_microseconds_are_never_slow():
    count, model = flagged([1000] * 100 + [4 * MS] * 20 + [1000] * 500)
    assert count == 0 and model.timeout >= 5 * MS


def test_the_timeout_moves_only_when_two_updates_agree():
    _, model = flagged([10 * MS] * 100)
    before = model.timeout
    for _ in range(400):
        model.observe(-1, 100 * MS)
    assert model.learn_timeout() == before
    assert model.learn_timeout() > 2 * before


@given(st.lists(st.integers(MS, 100 * MS), min_size=40, max_size=80))
def test_the_timeout_rests_once_the_distribution_does(values):
    """No oscillation: without new samples it settles after two updates."""
    _, model = flagged(values)
    for _ in range(3):
        model.learn_timeout()
    settled = model.timeout
    assert all(model.learn_timeout() == settled for _ in range(8))


def learned(model: policies.Cost, tail: bool) -> tuple[int, bool]:
    """(timeout, tail) by the rule in mn_costs.c, from the same distribution."""
    norm = model.quantile(500)
    if model.above(2 * norm) > 333:
        norm = model.quantile(900)
    tail = model.above(2 * norm) >= (2 if tail else 5)
    return max(5 * MS, 2 * norm if tail else 3 * model.quantile(990)), tail


@given(st.lists(st.tuples(st.integers(0, 2000).map(lambda ms: ms * MS), st.integers(1, 60)),
                min_size=1, max_size=12), st.integers(1, 40))  # fmt: skip
def test_the_timeout_is_the_rules(stretches, every):
    """Any stream and any number of checks: moves only by the rule, never at the first dissent."""
    model = policies.Cost()
    timeout, tail, dissent, seen = None, False, 0, 0
    for value in (v for v, count in stretches for _ in range(count)):
        model.observe(-1, value)
        seen += 1
        if seen % every:
            continue
        model.learn_timeout()
        if seen >= 32:
            wanted, now = learned(model, tail)
            if timeout is not None and now == tail and abs(wanted - timeout) <= timeout // 4:
                dissent = 0
            else:
                dissent += 1
                if timeout is None or dissent == 2:
                    timeout, tail, dissent = wanted, now, 0
        assert (model.timeout, model.tail) == (timeout, tail)
        assert timeout is None or (not model.is_slow(timeout) and model.is_slow(timeout + 1))


def test_extreme_times_and_lengths_are_bounded():
    """Unlimited times, and datasets with a false length."""
    model = _core.CostModel(2)
    model.observe(1, 2**63 - 1)
    assert model.slowest(2) == [(1, pytest.approx(10**15))]
    with pytest.raises(MemoryError):
        _core.CostModel(2**64 // 12 + 4)
