"""Splitting of batches: only where costs are uneven and samples travel cheaply."""

from __future__ import annotations

import policies
from hypothesis import strategies as st

from . import given

CANNOT = -1
MS = 10**6

costs = st.lists(st.integers(1, 10**10), min_size=0, max_size=200)


@given(costs, st.booleans())
def test_unsendable_samples_are_never_split(walls, on):
    assert not policies.split(on, walls, CANNOT)


@given(costs, st.booleans(), st.integers(0, 10**9))
def test_no_split_without_evidence(walls, on, send):
    assert not policies.split(on, walls[:31], send)


@given(st.integers(1, 10**10), st.integers(32, 300), st.booleans(), st.data())
def test_constant_costs_are_never_split(cost, count, on, data):
    """Noise of up to a third more is no unevenness, and neither are a few hiccups."""
    walls = [cost + data.draw(st.integers(0, cost // 3)) for _ in range(count)]
    walls += [4 * cost] * (count // 100)
    assert not policies.split(on, walls, 0)


@given(costs, st.integers(0, 10**9), st.integers(0, 10**9))
def test_dearer_sending_never_makes_it_worth_more(walls, send, more):
    if policies.split(False, walls, send + more):
        assert policies.split(False, walls, send)


@given(costs, st.integers(0, 10**9))
def test_started_split_continues(walls, send):
    if policies.split(False, walls, send):
        assert policies.split(True, walls, send)


@given(st.integers(1, 4), st.integers(4, 40), st.booleans())
def test_scale_does_not_matter(share, factor, on):
    """A fifth to four fifths of slow samples, in microseconds or in minutes."""
    small = ([1000] * (5 - share) + [1000 * factor] * share) * 20
    large = [10**6 * wall for wall in small]
    assert policies.split(on, small, 0) == policies.split(on, large, 0)


@given(st.lists(st.integers(10_000, 14_000), min_size=32, max_size=200),
       st.lists(st.integers(36_000, 90_000), max_size=20), st.booleans())  # fmt: skip
def test_the_share_of_time_decides(cheap, dear, on):
    """Sending costs nothing here; a histogram cannot decide cases near the threshold."""
    walls = cheap + dear
    quartile = sorted(walls)[-(-len(walls) // 4) - 1]
    whole, line = sum(walls), 80 if on else 150
    clearly = sum(w for w in walls if w > 2 * quartile * 1.15)
    perhaps = sum(w for w in walls if w > 2 * quartile * 0.9)
    if 1000 * clearly / whole * 15 / 16 > line + 2:
        assert policies.split(on, walls, 0)
    if 1000 * perhaps / whole * 17 / 16 < line - 2:
        assert not policies.split(on, walls, 0)


@given(st.lists(st.integers(1000, 10**9), min_size=32, max_size=100), st.booleans(), st.data())
def test_sending_must_be_cheap(walls, on, data):
    mean = sum(walls) // len(walls)
    most = mean / 32 * (1.5 if on else 1)
    send = data.draw(st.integers(int(most * 1.01) + 2, 10**10))
    assert not policies.split(on, walls, send)


def test_the_usual_cases():
    mixed = ([5 * MS] * 4 + [30 * MS]) * 20
    rare = [5 * MS] * 99 + [500 * MS]
    mostly_slow = ([4 * MS] * 2 + [40 * MS] * 3) * 20
    for walls in (mixed, rare, mostly_slow):
        assert policies.split(False, walls, 100_000)
        assert not policies.split(False, walls, 2 * MS)
