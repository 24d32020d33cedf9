"""Memory budget: never over the limit unless unavoidable; no deadlock."""

from __future__ import annotations

import random

import policies
from hypothesis import strategies as st

from . import given


def deliver_all(sizes: list[list[int]], limit: int, seed: int, honest: bool = True) -> int:
    """Starts samples of random batches as allowed; delivers the head when it is
    complete. Returns the largest number of bytes charged at once."""
    rng = random.Random(seed)
    used = peak = 0
    reserve = max(map(sum, sizes)) if honest else 0
    waiting = [list(batch) for batch in sizes]
    held = [0] * len(sizes)
    for head in range(len(sizes)):
        while waiting[head]:
            for number in rng.sample(range(head, len(sizes)), len(sizes) - head):
                if waiting[number] and rng.random() < 0.7:
                    size = waiting[number][-1]
                    if not policies.memory(limit, used, reserve, size, number == head):
                        assert number != head
                        continue
                    if used + size > limit:
                        assert number == head
                    waiting[number].pop()
                    held[number] += size
                    used += size
                    peak = max(peak, used)
        used -= held[head]
        if not honest:
            reserve = max(reserve, held[head])
        held[head] = 0
    assert used == 0
    return peak


batches = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1,
                   max_size=12)


@given(batches, st.integers(1, 600), st.integers(0, 10**6))
def test_the_limit_holds_when_a_batch_fits(sizes, limit, seed):
    peak = deliver_all(sizes, limit, seed)
    largest = max(map(sum, sizes))
    # Otherwise only the head batch exceeded it, alone but for charges within the limit.
    assert peak <= (limit if largest <= limit else limit + largest)


@given(batches, st.integers(1, 600), st.integers(0, 10**6))
def test_nothing_hangs_when_sizes_were_not_known(sizes, limit, seed):
    peak = deliver_all(sizes, limit, seed, honest=False)
    assert peak <= limit + max(map(sum, sizes))


amounts = st.one_of(st.integers(0, 1000), st.integers(0, 2**63 - 1))


@given(st.integers(1, 2**63 - 1), amounts, amounts, amounts, st.booleans())
def test_allowed_memory_fits_the_limit(limit, used, reserve, size, head):
    """For any numbers: what is allowed fits, and the head's needs are never refused."""
    may = policies.memory(limit, used, reserve, size, head)
    assert may == (head or used + size + reserve <= limit)


def test_one_batch_over_the_limit_passes_alone():
    assert policies.memory(10, 0, 25, 25, True)
    assert not policies.memory(10, 25, 25, 0, False)


def test_reserve_for_the_head_is_kept():
    assert policies.memory(100, 0, 40, 60, False)
    assert not policies.memory(100, 0, 40, 61, False)
    assert policies.memory(100, 60, 40, 40, True)
