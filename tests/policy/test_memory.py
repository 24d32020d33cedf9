"""Memory budget: never over the limit but for what cannot be avoided; no deadlock."""

from __future__ import annotations

import random

import pytest
from hypothesis import strategies as st

from minato import _policy

from . import given

NO, YES, ALONE, HEAD = range(4)


def deliver_all(sizes: list[list[int]], limit: int, seed: int, honest: bool = True):
    """Starts samples of random batches as far as allowed; delivers the head when it is
    complete. Returns the budget after the last batch."""
    rng = random.Random(seed)
    memory = _policy.PolicyMemory(limit)
    if honest:
        memory.batch(max(map(sum, sizes)))
    waiting = [list(batch) for batch in sizes]
    held = [0] * len(sizes)
    for head in range(len(sizes)):
        while True:
            refused = 0
            for number in rng.sample(range(head, len(sizes)), len(sizes) - head):
                if waiting[number] and rng.random() < 0.7:
                    size = waiting[number][-1]
                    answer = memory.may(size, number == head, held[head])
                    if answer == NO:
                        refused += 1
                        assert number != head
                        continue
                    if answer == ALONE:
                        assert memory.used == 0
                    if answer in (ALONE, HEAD):
                        assert memory.used + size > limit and number == head
                    waiting[number].pop()
                    held[number] += size
                    memory.charge(size)
            if not waiting[head]:
                break
        memory.release(held[head])
        if not honest:
            memory.batch(held[head])
        held[head] = 0
    return memory


batches = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=6), min_size=1,
                   max_size=12)


@given(batches, st.integers(1, 600), st.integers(0, 10**6))
def test_the_limit_holds_when_a_batch_fits(sizes, limit, seed):
    memory = deliver_all(sizes, limit, seed)
    assert memory.used == 0
    largest = max(map(sum, sizes))
    if largest <= limit:
        assert memory.peak <= limit and memory.overruns == 0
    else:
        # Only the head batch went over, alone but for what was charged within the limit.
        assert memory.peak <= limit + largest


@given(batches, st.integers(1, 600), st.integers(0, 10**6))
def test_nothing_hangs_when_sizes_were_not_known(sizes, limit, seed):
    memory = deliver_all(sizes, limit, seed, honest=False)
    assert memory.used == 0 and memory.peak <= limit + max(map(sum, sizes))


amounts = st.one_of(st.integers(0, 1000), st.integers(0, 2**63 - 1))


@given(st.integers(1, 2**63 - 1), amounts, amounts, amounts, st.booleans(), amounts)
def test_answers(limit, used, room, size, head, head_used):
    """Any numbers: what is allowed fits, what the head needs is never refused."""
    used = min(used, limit)
    memory = _policy.PolicyMemory(limit)
    memory.batch(room)
    memory.charge(used)
    head_used = min(head_used, used)
    answer = memory.may(size, head, head_used)
    fits = used + size <= limit
    if head:
        assert answer == (YES if fits else ALONE if used == 0 else HEAD)
    else:
        assert answer == (YES if fits and used - head_used + size + room <= limit else NO)
        # Whoever is smaller, or asks while less is held, is not refused where this one is not.
        if answer == YES:
            assert memory.may(size // 2, False, head_used) == YES
            memory.release(used - head_used)
            assert memory.may(size, False, head_used) == YES
    assert memory.peak == used and memory.overruns == 0


@given(st.integers(1, 500), st.lists(st.integers(-300, 300), max_size=40))
def test_what_is_charged_is_given_back(limit, steps):
    memory, used, peak, overruns = _policy.PolicyMemory(limit), 0, 0, 0
    for step in steps:
        if step >= 0:
            memory.charge(step)
            used += step
            peak, overruns = max(peak, used), overruns + (used > limit)
        else:
            memory.release(-step)
            used = max(0, used + step)
        assert (memory.used, memory.peak, memory.overruns) == (used, peak, overruns)


def test_one_sample_over_the_budget_passes_alone():
    memory = _policy.PolicyMemory(10)
    memory.batch(25)
    assert memory.may(25, True, 0) == ALONE
    memory.charge(25)
    assert memory.may(1, False, 25) == NO and memory.may(0, False, 25) == NO
    memory.release(25)
    assert memory.may(5, True, 0) == YES
    assert memory.peak == 25 and memory.overruns == 1


def test_room_for_the_head_is_kept():
    memory = _policy.PolicyMemory(100)
    memory.batch(40)
    assert memory.may(60, False, 0) == YES
    assert memory.may(61, False, 0) == NO
    assert memory.may(61, True, 0) == YES


def test_extreme_sizes_do_not_overflow():
    big = 2**63 - 1
    memory = _policy.PolicyMemory(big)
    memory.charge(big)
    assert memory.may(big, False, 0) == NO and memory.may(big, True, 0) == HEAD
    with pytest.raises(ValueError):
        _policy.PolicyMemory(0)
