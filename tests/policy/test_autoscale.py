"""Worker count: grows only when that can help, shrinks when full, never oscillates."""

from __future__ import annotations

import policies
from hypothesis import strategies as st

from . import given

(STEADY, SETTLING, GROW_CORES, GROW_WAITING, SHRINK, UNDO, NO_TASKS, CPU_BUSY, AT_MAX,
 AT_CEILING, AT_MIN, AT_FLOOR, OUT_OF_RANGE, NO_MEMORY,
 FULL_BUSY) = range(15)

permille = st.integers(0, 1000)


def steps(count: int, start: int = 4, **given_input: int) -> list[tuple[int, int]]:
    """(target, reason) of each update on constant input, targets carried out."""
    policy = policies.Autoscale()
    values = dict(min_workers=1, max_workers=16, occupancy=500, cpu=500, cores=16000,
                  wait=0, backlog=100, rate=1000) | given_input
    out, workers = [], start
    for _ in range(count):
        workers, reason, text = policy.update(workers=workers, **values)
        assert text
        out.append((workers, reason))
    return out


@given(permille, st.integers(0, 1200), st.integers(500, 64000), permille,
       st.integers(0, 100), st.integers(0, 10**9), st.integers(1, 16))
def test_constant_input_ends_in_rest(occupancy, cpu, cores, wait, backlog, rate, start):
    run = steps(200, start, occupancy=occupancy, cpu=cpu, cores=cores, wait=wait,
                backlog=backlog, rate=rate)
    assert all(1 <= w <= 16 for w, _ in run)
    counts = [start] + [w for w, _ in run]
    assert len(set(counts[-50:])) == 1
    turns = [b - a for a, b in zip(counts, counts[1:]) if b != a]
    changes = sum((x > 0) != (y > 0) for x, y in zip(turns, turns[1:]))
    assert changes <= 1  # at most: growth tried, did not pay, undone


@given(st.integers(0, 250), permille, st.integers(1, 16))
def test_never_grows_at_cpu_saturation(occupancy, wait, start):
    run = steps(50, start, occupancy=occupancy, cpu=1000, wait=wait)
    assert {w for w, _ in run} == {start}
    assert all(r in (SETTLING, CPU_BUSY, AT_MAX) for _, r in run)


@given(st.integers(251, 899), permille, permille)
def test_rests_between_the_thresholds(occupancy, cpu, wait):
    assert set(steps(30, occupancy=occupancy, cpu=cpu, wait=wait)) == {(4, STEADY)}


def test_grows_with_idle_cores_when_it_pays():
    policy, workers, seen = policies.Autoscale(), 4, []
    for _ in range(60):
        workers, reason, _ = policy.update(
            workers=workers, min_workers=1, max_workers=12, occupancy=0,
            cpu=workers * 1000 // 16, cores=16000, wait=0, backlog=50, rate=workers * 500)
        seen.append(reason)
    assert workers == 12 and GROW_CORES in seen and seen[-1] == AT_MAX


def test_waiting_tasks_take_more_workers_than_cores():
    """Two cores, tasks that wait 90 % of their time."""
    policy, workers, seen = policies.Autoscale(), 2, set()
    for _ in range(200):
        cpu = min(1000, workers * 100 // 2)
        workers, reason, _ = policy.update(
            workers=workers, min_workers=1, max_workers=64, occupancy=0, cpu=cpu,
            cores=2000, wait=900, backlog=99, rate=workers * 100)
        seen.add(reason)
    assert GROW_WAITING in seen
    assert 16 <= workers <= 20  # as many as two cores can feed


def test_does_not_grow_without_tasks():
    assert steps(5, occupancy=0, cpu=0, backlog=0)[-1] == (4, NO_TASKS)


def test_unprofitable_growth_is_undone_and_not_repeated():
    run = steps(60, occupancy=0, cpu=100, rate=1000)
    assert UNDO in [r for _, r in run]
    assert run[-1] == (4, AT_CEILING)


def test_new_workers_may_begin_slowly():
    """A worker's first samples take long: growth is not judged by them."""
    policy, workers, since = policies.Autoscale(), 4, 0
    for _ in range(60):
        before = workers
        slow = before > 4 and since < 4  # two updates longer than it settles
        workers, reason, _ = policy.update(
            workers=workers, min_workers=1, max_workers=8, occupancy=0, cpu=100, cores=16000,
            wait=0, backlog=100, rate=workers * (300 if slow else 1000))
        since = 0 if workers != before else since + 1
        assert reason not in (UNDO, AT_CEILING)
    assert workers == 8


def test_the_ceiling_is_forgotten_when_the_workload_changes():
    policy, workers = policies.Autoscale(), 4
    base = dict(min_workers=1, max_workers=16, occupancy=0, cpu=100, cores=16000, wait=0,
                backlog=100)
    for _ in range(40):
        workers, reason, _ = policy.update(workers=workers, rate=1000, **base)
    assert (workers, reason) == (4, AT_CEILING)
    for _ in range(40):
        workers, reason, _ = policy.update(workers=workers, rate=workers * 2000, **base)
    assert workers == 16


def test_shrinks_slowly_to_the_least_that_suffices():
    """The consumer needs three workers: four fill the queue, two run it dry."""
    policy, workers, counts = policies.Autoscale(), 8, []
    for _ in range(300):
        occupancy = 1000 if workers > 3 else 600 if workers == 3 else 0
        workers, _, _ = policy.update(
            workers=workers, min_workers=1, max_workers=16, occupancy=occupancy,
            cpu=workers * 50, cores=16000, wait=0, backlog=10,
            rate=min(workers, 3) * 1000, busy=2700 // workers)
        counts.append(workers)
    assert counts[5] == 6 and counts[-1] == 3
    assert counts == sorted(counts, reverse=True)


def test_a_shrink_too_far_is_taken_back_once():
    """Four are too many and three too few: the number must not oscillate."""
    policy, workers, counts = policies.Autoscale(), 4, []
    for _ in range(400):
        workers, _, _ = policy.update(
            workers=workers, min_workers=1, max_workers=16,
            occupancy=950 if workers >= 4 else 100, cpu=workers * 50, cores=16000, wait=0,
            backlog=10, rate=min(workers, 4) * 1000)
        counts.append(workers)
    changes = sum(a != b for a, b in zip(counts, counts[1:]))
    assert counts[-1] == 4 and changes == 2


def test_limits():
    assert steps(1, start=40)[0] == (16, OUT_OF_RANGE)
    assert steps(1, start=0)[0] == (1, OUT_OF_RANGE)
    assert steps(50, occupancy=1000, cpu=0)[-1] == (1, AT_MIN)


@given(st.integers(0, 250), st.integers(500, 1000), st.integers(1, 15), st.integers(1, 10**9))
def test_growth_at_most_doubles(occupancy, wait, start, rate):
    run = steps(2, start, occupancy=occupancy, cpu=0, cores=64000, wait=wait, rate=rate)
    assert start < run[-1][0] <= 2 * start and run[-1][1] == GROW_WAITING


@given(permille, permille, permille, st.integers(0, 100), st.data())
def test_a_change_is_followed_by_rest(occupancy, cpu, wait, backlog, data):
    """Whatever the inputs do: two updates without a change after each, always in range."""
    policy, workers, since = policies.Autoscale(), 4, 9
    for _ in range(40):
        before = workers
        workers, _, _ = policy.update(
            workers=workers, min_workers=1, max_workers=16,
            occupancy=data.draw(st.sampled_from([occupancy, 0, 1000])), cpu=cpu, cores=8000,
            wait=wait, backlog=backlog, rate=data.draw(st.integers(0, 10**6)))
        assert 1 <= workers <= 16
        assert workers == before or since >= 2
        since = 0 if workers != before else since + 1


def test_waiting_tasks_are_answered_within_a_dozen_updates():
    """From two to thirty-two workers while each one more adds its share."""
    policy, workers = policies.Autoscale(), 2
    for _ in range(16):
        workers, _, _ = policy.update(
            workers=workers, min_workers=1, max_workers=32, occupancy=0, cpu=50, cores=2000,
            wait=990, backlog=200, rate=workers * 33000)
    assert workers == 32


@given(st.integers(0, 900), st.integers(2, 200))
def test_idle_workers_shrink_by_half_steps(busy, start):
    """In few steps if workers are idle, and never below the number of busy ones."""
    policy, workers, changes = policies.Autoscale(), start, 0
    work = start * busy  # of workers that had something to do
    for _ in range(200):
        share = min(1000, work // workers)
        before = workers
        workers, _, _ = policy.update(
            workers=workers, min_workers=1, max_workers=200, cpu=10, cores=16000, wait=999,
            occupancy=1000 if share < 950 else 500, backlog=10, rate=1000, busy=share)
        changes += workers != before and workers > work / 800 + 2
        assert workers >= max(1, work // 1000)
    assert workers <= work / 800 + 2
    assert changes <= 2 + start.bit_length()


def test_the_busiest_of_the_full_updates_counts():
    policy, seen = policies.Autoscale(), []
    for busy in (100, 100, 800, 100, 100, 100):
        target, _, _ = policy.update(
            workers=10, min_workers=1, max_workers=16, occupancy=1000, cpu=10, cores=8000,
            wait=900, backlog=0, rate=1000, busy=busy)
        seen.append(target)
    assert seen == [10] * 5 + [9]


def test_update_that_fills_queue_is_ignored():
    """All were busy until it was full; the consumer may still turn out to be slow."""
    policy, seen = policies.Autoscale(), []
    for busy in (1000, *[100] * 5):
        target, _, _ = policy.update(
            workers=10, min_workers=1, max_workers=16, occupancy=1000, cpu=10, cores=8000,
            wait=900, backlog=0, rate=1000, busy=busy)
        seen.append(target)
    assert seen == [10] * 5 + [6]


@given(st.integers(0, 20))
def test_growth_stops_at_memory_limit(fitting):
    """Judged by a rate that rises with the workers; each uses its share of the rest."""
    policy, workers, reasons = policies.Autoscale(), 4, set()
    for _ in range(60):
        workers, reason, _ = policy.update(
            workers=workers, min_workers=1, max_workers=16, occupancy=0, cpu=10, cores=64000,
            wait=990, backlog=99, rate=workers * 1000, fitting=4 + fitting - workers)
        reasons.add(reason)
        assert workers <= 4 + fitting
    assert workers == min(16, 4 + fitting)
    assert (NO_MEMORY in reasons) == (fitting < 12)


def test_consumer_pause_does_not_undo_growth():
    """The rate falls with the pause, the speed of busy workers does not."""
    policy, workers, seen = policies.Autoscale(), 4, []
    for n in range(20):
        workers, reason, _ = policy.update(
            workers=workers, min_workers=1, max_workers=8, occupancy=0, cpu=10, cores=8000,
            wait=990, backlog=99, rate=100 if n >= 4 else workers * 1000, speed=workers * 1000)
        seen.append(reason)
    assert workers == 8 and UNDO not in seen


@given(st.integers(1500, 30000), st.integers(0, 40), st.randoms(), max_examples=40)
def test_a_steady_consumer_ends_in_rest(need, noise, rng):
    """It needs a number of thousandths of a worker; with more workers the queue is full."""
    policy, workers, counts = policies.Autoscale(), 2, []
    for _ in range(600):
        full = workers * 1000 > need * 1.02
        workers, _, _ = policy.update(
            workers=workers, min_workers=1, max_workers=40, occupancy=950 if full else 100,
            cpu=10, cores=8000, wait=990, backlog=50,
            busy=min(1000, need // workers + rng.randint(-noise, noise)),
            rate=rng.randint(500, 2000) * min(need, workers * 1000) // 1000,
            speed=workers * 1000, taken=min(need, workers * 1000))
        counts.append(workers)
    assert len(set(counts[-200:])) == 1
    assert need <= workers * 1000 * 1.02


def test_busy_workers_stay():
    """Six of six are needed: five would run the queue dry."""
    run = steps(40, start=6, occupancy=1000, cpu=10, busy=990)
    assert {w for w, _ in run} == {6} and run[-1] == (6, FULL_BUSY)


@given(st.lists(st.tuples(st.sampled_from([0, 100, 500, 1000]), st.sampled_from([50, 500, 1000]),
                          permille, st.integers(0, 5), st.sampled_from([10, 1000, 10**6]),
                          permille, st.integers(0, 5), st.integers(1, 9)), max_size=12))
def test_reasons_have_texts_that_match_decisions(updates):
    policy, workers, before, texts = policies.Autoscale(), 4, 0, {}
    stretches = [u[:-1] for u in updates for _ in range(u[-1])]
    for occupancy, cpu, wait, backlog, speed, busy, fitting in stretches:
        target, reason, text = policy.update(
            workers=workers, min_workers=1, max_workers=12, occupancy=occupancy, cpu=cpu,
            cores=4000, wait=wait, backlog=backlog, rate=1, speed=speed, busy=busy, fitting=fitting)
        assert texts.setdefault(reason, text) == text != "unknown"
        grows = reason in (GROW_CORES, GROW_WAITING)
        shrinks = reason in (SHRINK, UNDO)
        assert grows == (target > workers) and shrinks == (target < workers)
        if grows:
            assert occupancy <= 250 and backlog > 0 and cpu < 1000
            assert target - workers <= fitting
            assert target - workers <= backlog or target == before  # a shrink is taken back
        if reason == SHRINK:
            assert occupancy >= 900
            before = workers
        workers = target
    assert len(set(texts.values())) == len(texts)
