"""Ready-first batches: exactly once, full batches, the displacement bound, natural share."""

from __future__ import annotations

import math
import random

import policies
import pytest
from hypothesis import strategies as st

from . import given


def play(total: int, batch: int, bound: int, workers: int, seed: int, slow_share: float,
         slow_time: int = 40) -> tuple[list[list[int]], set[int], policies.Ready]:
    """Workers finish samples in a random order; batches are formed whenever possible."""
    rng = random.Random(seed)
    form = policies.Ready(batch, bound)
    form.end(total)
    running: list[tuple[int, int]] = []
    slow: set[int] = set()
    out: list[list[int]] = []
    started = clock = 0
    while True:
        while len(running) < workers and started < form.horizon:
            is_slow = rng.random() < slow_share
            if is_slow:
                slow.add(started)
            running.append((clock + rng.randint(1, 5) + slow_time * is_slow, started))
            started += 1
        while (got := form.form()) is not None:
            if not got:
                assert not running and started == total
                return out, slow, form
            out.append(got)
        if running and (len(running) == workers or started >= form.horizon):
            running.sort()
            clock, position = running.pop(0)
            form.mark(position, position in slow)


@given(st.integers(1, 120), st.integers(1, 9), st.integers(0, 6), st.integers(1, 12),
       st.integers(0, 10**6), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_once_each_full_and_within_the_bound(total, batch, bound, workers, seed, share):
    out, _, form = play(total, batch, bound, workers, seed, share)
    assert sorted(p for b in out for p in b) == list(range(total))
    assert [len(b) for b in out[:-1]] == [batch] * (len(out) - 1)
    moves = [abs(k - p // batch) for k, b in enumerate(out) for p in b]
    assert max(moves) <= bound
    assert (form.displaced_max, form.displaced_sum) == (max(moves), sum(moves))
    assert all(b == sorted(b) for b in out)


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 9), st.integers(0, 999))
def test_bound_zero_is_the_samplers_batches(total, batch, workers, seed):
    out, _, _ = play(total, batch, 0, workers, seed, 0.3)
    want = [list(range(k, min(k + batch, total))) for k in range(0, total, batch)]
    assert out == want


def test_slow_samples_arrive_neither_starved_nor_bunched():
    batch, share = 10, 0.2
    out, slow, _ = play(4000, batch, 64, 24, 7, share)
    counts = [sum(p in slow for p in b) for b in out[10:-10]]
    assert sum(counts) / len(counts) == pytest.approx(batch * share, rel=0.1)
    sampler = [sum(p in slow for p in range(k, k + batch)) for k in range(0, 4000, batch)]
    assert max(counts) <= max(sampler) + 1


@given(st.integers(2, 12), st.integers(2, 9), st.integers(1, 6), st.randoms(use_true_random=False))
def test_slow_samples_per_batch_are_bounded_by_share(batch, every, gap, rng):
    """For any times of completion: while fast samples are ready and no slow one is due, slow ones
    are at most their share of all batches so far, plus two batches carried over."""
    bound, total = 40, 30 * batch
    form = policies.Ready(batch, bound)
    form.end(total)
    slow = {p for p in range(total) if p % every == 0}
    late: list[int] = []
    marked = marked_slow = delivered_slow = 0
    for k in range(8):
        for p in range(3 * k * batch, 3 * (k + 1) * batch):
            if p in slow:
                late.append(p)
            else:
                form.mark(p, False)
                marked += 1
        if k % gap == gap - 1:  # those that were late end all at once
            rng.shuffle(late)
            for p in late:
                form.mark(p, True)
            marked_slow += len(late)
            marked += len(late)
            late = []
        got = form.form()
        assert len(got) == batch
        here = sum(p in slow for p in got)
        share = marked_slow / marked * batch
        assert here <= math.ceil(share * (1 + 2) + 1)
        delivered_slow += here
    assert delivered_slow <= 8 * batch


def test_slow_samples_that_end_together_are_spread():
    form = policies.Ready(4, 50)
    form.end(400)
    for p in range(100):
        form.mark(p, p % 10 < 2 and p < 50)
    counts = [sum(p % 10 < 2 and p < 50 for p in form.form()) for _ in range(12)]
    # 10 of 100 were slow: one for every 10 samples, not all in the first batches.
    assert max(counts) <= 2 and 4 <= sum(counts) <= 6


def test_share_not_used_for_long_is_forgotten():
    """All slow samples of a long stretch end at once: still no batch of slow ones."""
    form = policies.Ready(4, 60)
    form.end(480)
    slow = set(range(0, 120, 5))
    for p in range(240):
        if p not in slow:
            form.mark(p, False)
    before = [form.form() for _ in range(40)]
    assert all(len(b) == 4 and not slow & set(b) for b in before)
    for p in sorted(slow):
        form.mark(p, True)
    assert max(len(slow & set(form.form())) for _ in range(10)) <= 2


def test_due_samples_are_waited_for():
    form = policies.Ready(2, 1)
    form.end(8)
    for p in (1, 2):
        form.mark(p, False)
    assert form.form() == [1, 2]
    assert form.horizon == 6
    for p in (3, 4, 5):
        form.mark(p, False)
    assert form.form() is None and not form.could_mix()  # 0 is due
    form.mark(0, True)
    assert form.form() == [0, 3]


# ---- batches that are the sampler's -------------------------------------------------------


def test_whole_batches_come_first_and_oldest_first():
    """Batches delayed by a slow sample wait for it, as long as others are whole."""
    form = policies.Ready(4, 8)
    form.end(32)
    for p in (*range(1, 4), *range(4, 12), *range(13, 16), *range(16, 24)):
        form.mark(p, False)
    assert [form.form(False) for _ in range(3)] == [[4, 5, 6, 7], [8, 9, 10, 11], [16, 17, 18, 19]]
    form.mark(12, False)
    assert form.form(False) == [12, 13, 14, 15]
    form.mark(0, True)
    assert form.form(False) == [0, 1, 2, 3]


def test_batches_are_mixed_only_if_allowed():
    form = policies.Ready(4, 8)
    form.end(32)
    for p in (1, 2, 3, 5, 6, 7):
        form.mark(p, False)
    assert form.form(False) is None and form.could_mix()
    assert form.form(True) == [1, 2, 3, 5]
    # 6 and 7 are left of an open batch, which is never whole again
    form.mark(4, False)
    assert form.form(False) is None and not form.could_mix()
    form.mark(8, False)
    assert form.form(False) is None and form.could_mix()
    # but there is nothing to wait for once as many are left of open ones as a batch takes
    form.mark(0, True)
    assert form.form(False) == [0, 4, 6, 7]


def test_partial_batches_are_used_up_first():
    form = policies.Ready(4, 8)
    form.end(40)
    for p in (5, 6, 7, 9):
        form.mark(p, False)
    assert form.form() == [5, 6, 7, 9]
    for p in (1, 2, 3, 4, 8, 10, 11, *range(16, 20)):
        form.mark(p, False)
    assert form.form() == [4, 8, 10, 11]
    assert form.form() == [16, 17, 18, 19]


def test_only_the_last_batch_may_be_partial():
    form = policies.Ready(4, 8)
    form.end(10)
    for p in (8, 9, 0, 1, 2, 3):
        form.mark(p, False)
    assert form.form(False) == [0, 1, 2, 3]
    for p in range(4, 8):
        form.mark(p, False)
    assert [form.form(False) for _ in range(3)] == [[4, 5, 6, 7], [8, 9], []]


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 6), st.integers(0, 10**6))
def test_uniform_costs_give_the_samplers_batches(total, batch, bound, seed):
    """In any order of completion of its samples and their neighbours."""
    rng = random.Random(seed)
    form = policies.Ready(batch, bound)
    form.end(total)
    left, out = list(range(total)), []
    while (got := form.form(False)) != []:
        if got is not None:
            out.append(got)
            continue
        reach = [p for p in left if p < form.horizon]
        position = rng.choice(reach[: 2 * batch])
        left.remove(position)
        form.mark(position, False)
    want = [list(range(k, min(k + batch, total))) for k in range(0, total, batch)]
    assert sorted(out) == want


@given(st.integers(1, 120), st.integers(1, 9), st.integers(0, 6), st.integers(0, 10**6),
       st.sampled_from([0.0, 0.3, 1.0]))
def test_waiting_for_slow_samples_is_bounded(total, batch, bound, seed, mixes):
    """In any order of completion. A caller that never mixes also gets every sample, once all have
    ended."""
    rng = random.Random(seed)
    form = policies.Ready(batch, bound)
    form.end(total)
    left, out = list(range(total)), []
    while (got := form.form(rng.random() < mixes)) != []:
        if got is not None:
            out.append(got)
            continue
        reach = [p for p in left if p < form.horizon]
        if reach:
            position = rng.choice(reach)
            left.remove(position)
            form.mark(position, rng.random() < 0.2)
    assert sorted(p for b in out for p in b) == list(range(total))
    assert all(abs(k - p // batch) <= bound for k, b in enumerate(out) for p in b)
    assert [len(b) for b in out[:-1]] == [batch] * (len(out) - 1)


def test_whole_batches_do_not_starve_slow_samples():
    """A slow sample in each fourth batch, and one that takes very long."""
    form = policies.Ready(4, 60)
    form.end(400)
    for p in range(200):
        if p % 16 != 3:
            form.mark(p, p % 16 == 2)
    got = [form.form() for _ in range(40)]
    slow = [sum(p % 16 == 2 for p in b) for b in got]
    assert max(slow[:30]) <= 2 and sum(slow[:30]) >= 4


def test_violations_of_the_bound_are_refused():
    form = policies.Ready(2, 1)
    with pytest.raises(ValueError):
        form.mark(4, False)  # past the horizon
    form.mark(0, False)
    with pytest.raises(ValueError):
        form.mark(0, False)  # twice
    form.mark(1, False)
    assert form.form() == [0, 1]
    with pytest.raises(ValueError):
        form.mark(0, False)  # delivered
    with pytest.raises(ValueError):
        form.mark(-1, False)
    with pytest.raises(ValueError):
        form.end(1)
    for bad in ((0, 1), (1, -1), (2**40, 2**40)):
        with pytest.raises((ValueError, MemoryError)):
            policies.Ready(*bad)
