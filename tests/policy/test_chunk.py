"""Chunking: bounds, amortised overhead, spreading, costly samples alone."""

from __future__ import annotations

import policies
from hypothesis import strategies as st

from . import given

US = 1000
TARGET = 300 * US

costs = st.integers(1, 10**9)
overheads = st.integers(0, 10**8)


def target(overhead: int) -> int:
    return max(TARGET, 16 * overhead)


@given(st.integers(-5, 10**12), st.integers(0, 10**15), st.integers(-3, 4096),
       st.integers(-3, 600))
def test_bounds(cost, overhead, batch, idle):
    assert 1 <= policies.chunk(cost, overhead, batch, idle) <= max(1, batch)


@given(costs, overheads, st.integers(1, 4096))
def test_steady_chunks_are_just_large_enough(cost, overhead, batch):
    size = policies.chunk(cost, overhead, batch, 0)
    want = -(-target(overhead) // cost)
    assert size <= want
    pieces = -(-batch // size)
    # No coarser than needed, and even: one piece less would make one longer than wanted.
    assert pieces == 1 or pieces == -(-batch // min(want, batch)) or size == 1
    if size < batch:
        assert 2 * size >= min(want, batch)


@given(st.integers(TARGET, 10**9), st.integers(0, TARGET // 16), st.integers(1, 4096),
       st.integers(0, 64))
def test_costly_samples_go_alone(cost, overhead, batch, idle):
    assert policies.chunk(cost, overhead, batch, idle) == 1


@given(costs, overheads, st.integers(2, 512), st.integers(2, 64))
def test_head_batch_is_spread_if_useful(cost, overhead, batch, idle):
    size = policies.chunk(cost, overhead, batch, idle)
    assert size <= policies.chunk(cost, overhead, batch, 0)
    least = target(overhead) // 16 * 2
    if cost * (batch // idle) >= 2 * least:
        assert -(-batch // size) >= min(batch, idle) * 0.5
    if size < batch:
        # Never split finer than waking a worker is worth, but for evening out.
        assert 2 * size * cost >= min(least, target(overhead))


def cut(values: list[int], overhead: int, limit: int) -> list[list[int]]:
    out = []
    while values:
        n = policies.chunk_next(values, overhead, limit)
        assert 1 <= n <= len(values)
        out.append(values[:n])
        values = values[n:]
    return out


@given(st.lists(st.integers(-2, 10**6), max_size=80), st.integers(0, 10**5),
       st.integers(1, 100))
def test_cutting_by_cost(values, overhead, limit):
    chunks = cut(values, overhead, limit)
    assert [v for c in chunks for v in c] == values
    line = target(overhead)
    for number, chunk in enumerate(chunks):
        assert len(chunk) <= limit
        paid = [max(0, v) for v in chunk]
        if len(chunk) > 1:
            assert max(paid) < line  # the costly are alone
            assert sum(paid[:-1]) < line
        elif limit > 1 and paid[0] < line and number + 1 < len(chunks):
            assert max(chunks[number + 1][0], 0) >= line  # else it had been joined


def test_cutting_nothing():
    assert policies.chunk_next([], 0, 5) == 0
