"""Dispatch order: exactly once, least slack, equal costs in order, the window, the end."""

from __future__ import annotations

import random
from typing import NamedTuple

import policies
import pytest
from hypothesis import strategies as st

from . import given

WINDOW, EARLY, AHEAD, FINALE, ORDER = 1, 2, 3, 4, 5


class Task(NamedTuple):
    """position, batch, cost as given to insert."""

    position: int
    batch: int
    cost: int


class Choice(NamedTuple):
    """What peek answers."""

    position: int
    batch: int
    cost: int
    tag: int
    slack: int
    why: int
    node: int


class Rates(NamedTuple):
    """Arguments of retime."""

    period: int = 100
    consumer: int = 0
    typical: int = 10
    window: int = 4
    starved_below: int = 2
    workers: int = 4


def excess_slack(task: Task, rates: Rates) -> int:
    """deadline - excess, as the header defines it."""
    excess = max(0, task.cost - rates.typical) if rates.workers > 1 else 0
    return task.batch * rates.period - excess


def key(task: Task, rates: Rates) -> tuple[int, int, int, int]:
    """The order of tasks when the epoch is not near its end."""
    slack = excess_slack(task, rates)
    return max(slack, 0), task.batch, slack, task.position


def tasks_of(costs: list[int], batch: int) -> list[Task]:
    return [Task(p, p // batch, c) for p, c in enumerate(costs)]


def dispatch(tasks: list[Task], rates: Rates = Rates(), close: bool = False,
             capacity: int = 0) -> policies.Dispatch:
    d = policies.Dispatch(capacity or max(1, len(tasks)), *rates)
    for t in tasks:
        assert d.insert(*t)
    if close:
        d.close()
    return d


def peek(d: policies.Dispatch, head: int, ready: int, *last: int) -> Choice | None:
    found = d.peek(head, ready, *last)
    return found and Choice(*found)


def drain(d: policies.Dispatch, batch: int = 1) -> list[Choice]:
    """Takes everything, delivering a batch as soon as all before it is taken."""
    out: list[Choice] = []
    while len(d):
        left = d.first()[1]
        choice = peek(d, left, 0)
        assert choice is not None
        d.take(choice.node)
        out.append(choice)
    return out


costs = st.lists(st.integers(0, 2000), min_size=1, max_size=60)
rates_strategy = st.builds(Rates, period=st.integers(1, 500), consumer=st.integers(0, 500),
                           typical=st.integers(0, 300), window=st.integers(1, 8),
                           starved_below=st.integers(0, 4), workers=st.integers(1, 16))


@given(st.integers(1, 60), st.integers(0, 2000), st.integers(1, 5), rates_strategy,
       st.booleans(), st.randoms(use_true_random=False))
def test_equal_costs_keep_the_samplers_order(n, cost, batch, rates, close, rng):
    tasks = tasks_of([cost] * n, batch)
    shuffled = list(tasks)
    rng.shuffle(shuffled)
    out = drain(dispatch(shuffled, rates._replace(starved_below=max(1, rates.starved_below)), close))
    assert [c.position for c in out] == list(range(n))


@given(costs, st.integers(1, 5), rates_strategy, st.booleans())
def test_one_worker_keeps_the_samplers_order(values, batch, rates, close):
    rates = rates._replace(starved_below=max(1, rates.starved_below), workers=1)
    out = drain(dispatch(tasks_of(values, batch), rates, close))
    assert [c.position for c in out] == list(range(len(values)))


@given(costs, st.integers(1, 5), rates_strategy)
def test_tasks_are_ordered_anew_once_a_worker_is_alone(values, batch, rates):
    rates = rates._replace(starved_below=max(1, rates.starved_below), workers=2)
    d = dispatch(tasks_of(values, batch), rates)
    d.retime(*rates._replace(workers=1))
    assert [c.position for c in drain(d)] == list(range(len(values)))


@given(costs, st.integers(1, 5), rates_strategy)
def test_least_slack_first(values, batch, rates):
    tasks = tasks_of(values, batch)
    rates = rates._replace(starved_below=max(1, rates.starved_below))
    out = drain(dispatch(tasks, rates))
    assert [Task(*c[:3]) for c in out] == sorted(tasks, key=lambda t: key(t, rates))
    assert all(c.slack == excess_slack(Task(*c[:3]), rates) for c in out)


@given(costs, st.integers(1, 5), rates_strategy, st.randoms(use_true_random=False))
def test_order_does_not_depend_on_insertion(values, batch, rates, rng):
    rates = rates._replace(starved_below=max(1, rates.starved_below))
    tasks = tasks_of(values, batch)
    shuffled = list(tasks)
    rng.shuffle(shuffled)
    first = [c.position for c in drain(dispatch(tasks, rates, True))]
    assert sorted(first) == [t.position for t in tasks]
    assert [c.position for c in drain(dispatch(shuffled, rates, True))] == first


@given(costs, st.integers(1, 5), rates_strategy, st.integers(0, 20), st.integers(0, 6),
       st.integers(0, 30))
def test_the_window(values, batch, rates, head, ready, last):
    tasks = [t for t in tasks_of(values, batch) if t.batch >= head]
    d = dispatch(tasks, rates)
    choice = peek(d, head, ready, last)
    edge = (head + rates.window - 1) * rates.period
    allowed = [t for t in tasks
               if t.batch <= last or excess_slack(t, rates) <= last * rates.period]
    starts = [t for t in allowed
              if t.batch < head + rates.window or excess_slack(t, rates) <= edge]
    if choice is None:
        # Nothing may start: there is nothing, or the window is full and no worker is starved. A
        # task past last_batch at the top hides no task of the head batch.
        assert not [t for t in starts if t.batch == head]
        assert not allowed or ready >= rates.starved_below
        return
    task = Task(*choice[:3])
    assert task in allowed
    slack = excess_slack(task, rates)
    assert choice.why == (WINDOW if task.batch < head + rates.window else
                          EARLY if slack <= edge else AHEAD)
    if choice.why == AHEAD:
        assert ready < rates.starved_below


@given(st.integers(0, 3000), st.integers(1, 300), st.integers(1, 10))
def test_slow_sample_moves_ahead_just_enough(excess, period, window):
    rates = Rates(period=period, typical=10, window=window, starved_below=0)
    batch = 200
    d = dispatch([Task(0, batch, 10 + excess)], rates)
    heads = [h for h in range(batch + 1) if peek(d, h, 0) is not None]
    # Its slack must be inside the window; without excess that is the steady window.
    need = batch - window + 1 - excess // period
    assert heads[0] == max(0, need)
    assert heads == list(range(heads[0], batch + 1))


def test_ordinary_samples_start_only_in_the_window():
    rates = Rates(window=3, starved_below=1)
    d = dispatch(tasks_of([10] * 20, 2), rates)
    taken = 0
    while (choice := peek(d, 0, 1)) is not None:
        assert choice.why == WINDOW
        d.take(choice.node)
        taken += 1
    assert taken == 6  # 3 batches of 2
    ahead = peek(d, 0, 0)
    assert ahead is not None and (ahead.why, ahead.batch) == (AHEAD, 3)


def test_overdue_slow_samples_do_not_delay_head():
    values = [10, 10, 900, 10, 900, 10]  # batches 0, 1, 2
    out = drain(dispatch(tasks_of(values, 2)))
    assert [c.position for c in out] == [0, 1, 2, 4, 3, 5]


# -- the end of the epoch -------------------------------------------------------------


def test_last_slow_sample_starts_first_in_finale():
    rates = Rates(period=1000, workers=2, window=100)
    d = dispatch(tasks_of([10] * 12 + [100], 1), rates)
    first = peek(d, 0, 0)
    assert first is not None and first.position == 0  # more may come
    d.close()
    first = peek(d, 0, 0)
    assert first is not None and (first.position, first.why) == (12, FINALE)


def test_no_finale_with_enough_cheap_samples_left():
    rates = Rates(period=1000, workers=2, window=1000)
    d = dispatch(tasks_of([10] * 100 + [100], 1), rates, close=True)
    out = drain(d)
    at = [c.position for c in out].index(100)
    assert out[at].why == FINALE
    rest = sum(c.cost for c in out[at + 1:])
    # Cheap work for the other workers is left until it ends, and not much more.
    assert 2 * 100 - 2 * 10 <= rest <= 2 * 100 + 2 * 10


def makespan(order: list[int], workers: int) -> int:
    """When the last of these ends, each started by the first worker that is free."""
    free = [0] * workers
    for cost in order:
        free[free.index(min(free))] += cost
    return max(free)


@given(st.lists(st.sampled_from([10, 40, 160, 640]), min_size=1, max_size=40),
       st.integers(1, 8))
def test_known_costs_nearly_match_longest_first(values, workers):
    """Delivery in order loses little of the gain from sorting the whole epoch."""
    rates = Rates(period=max(1, sum(values) // len(values) // workers), typical=10,
                  window=len(values), workers=workers)
    out = drain(dispatch(tasks_of(values, 1), rates, close=True))
    longest_first = makespan(sorted(values, reverse=True), workers)
    assert makespan([c.cost for c in out], workers) <= longest_first * 4 / 3


def test_only_known_slow_samples_start_past_last_batch():
    rates = Rates(period=100, typical=10, window=50, starved_below=1)
    d = dispatch(tasks_of([10] * 20 + [510] + [10], 1), rates)
    taken = []
    while (choice := peek(d, 0, 0, 14)) is not None:
        d.take(choice.node)
        taken.append(choice.position)
    assert taken == list(range(15))
    # Its excess is five periods: it starts with those of batch 15, past the others.
    for position in (15, 20):
        choice = peek(d, 0, 0, 15)
        assert choice.position == position
        d.take(choice.node)
    assert peek(d, 0, 0, 15) is None


def test_the_finale_reaches_past_the_last_batch():
    d = dispatch(tasks_of([10] * 5 + [100], 1), Rates(window=100), close=True)
    assert peek(d, 0, 0, 2).why == FINALE
    d.take(peek(d, 0, 0, 2).node)
    assert peek(d, 0, 0, 2).position == 0


def test_finale_is_short_without_cheap_samples():
    rates = Rates(period=1000, workers=2, window=1000)
    out = drain(dispatch(tasks_of([400, 640] * 50, 1), rates, close=True))
    finale = [c for c in out if c.why == FINALE]
    start = out.index(finale[0])
    assert sum(c.cost for c in out[start:]) <= 2 * 2 * 640
    assert [c.position for c in out[:start]] == list(range(start))


def test_no_finale_for_slow_consumer():
    rates = Rates(period=1000, consumer=1000, workers=2, window=100)
    d = dispatch(tasks_of([10] * 12 + [100], 1), rates, close=True)
    first = peek(d, 0, 0)
    assert first is not None and first.why == WINDOW and first.position == 0


@given(st.lists(st.integers(100, 149), min_size=1, max_size=60), st.integers(1, 4))
def test_noise_around_a_constant_cost_starts_no_finale(values, batch):
    d = dispatch(tasks_of(values, batch), Rates(typical=100, window=100), close=True)
    assert all(c.why != FINALE for c in drain(d))


# -- structure ------------------------------------------------------------------------


@given(st.integers(0, 10_000))
def test_against_a_model(seed):
    """Random insertions, removals and rates, against a list searched from end to end."""
    rng = random.Random(seed)
    rates = Rates()
    d = policies.Dispatch(16, *rates)
    held: dict[int, Task] = {}
    position = 0
    for _ in range(120):
        what = rng.random()
        if what < 0.5:
            task = Task(position, position // 3, rng.choice([5, 10, 200, 900]))
            assert d.insert(*task) == (len(held) < 16)
            if len(held) < 16:
                held[position] = task
            position += 1
        elif what < 0.9 and held:
            choice = Choice(*(d.first() if rng.random() < 0.3 else d.peek(0, 0)))
            least = min(held.values(), key=lambda t: key(t, rates))
            if choice.why == ORDER:
                assert choice.position == min(held)
            else:
                assert choice.position == least.position
            d.take(choice.node)
            del held[choice.position]
        elif what > 0.97:
            new = rates._replace(period=rng.choice([1, 50, 100, 105, 1000]),
                                 typical=rng.choice([0, 10, 150]))
            if d.retime(*new):
                rates = new
            else:
                assert abs(new.period - rates.period) <= rates.period // 8
                assert abs(new.typical - rates.typical) <= rates.typical // 8
        assert len(d) == len(held)
        assert d.work == sum(t.cost for t in held.values())


@given(costs, st.integers(1, 5), rates_strategy, st.booleans())
def test_reopened_plan_equals_open_plan(values, batch, rates, clear):
    """And clearing as if nothing had ever been there."""
    rates = rates._replace(starved_below=max(1, rates.starved_below))
    tasks = tasks_of(values, batch)
    d = dispatch(tasks, rates, close=True)
    if clear:
        d.clear()
        assert len(d) == d.work == 0 and d.first() is None and d.peek(0, 0) is None
        assert all(d.insert(*t) for t in tasks)
    d.reopen()
    want = [c[:-1] for c in drain(dispatch(tasks, rates))]
    assert [c[:-1] for c in drain(d)] == want
    assert not [c for c in want if c[-1] == FINALE]


@given(costs, st.integers(1, 5), rates_strategy, st.booleans(), st.sets(st.integers(0, 20)))
def test_dropped_batches_leave_no_trace(values, batch, rates, close, gone):
    rates = rates._replace(starved_below=max(1, rates.starved_below))
    tasks = tasks_of(values, batch)
    d = dispatch(tasks, rates, close)
    for number in sorted(gone):
        d.drop(number)
    left = [t for t in tasks if t.batch not in gone]
    assert len(d) == len(left) and d.work == sum(t.cost for t in left)
    fresh = dispatch(left, rates, close, capacity=len(tasks))
    assert [c[:-1] for c in drain(d)] == [c[:-1] for c in drain(fresh)]
    assert all(d.insert(*t) for t in tasks)  # the room is free again


@pytest.mark.parametrize("bad", [(0, 1, 0, 0, 1, 0, 1), (1, 0, 0, 0, 1, 0, 1),
                                 (1, 1, -1, 0, 1, 0, 1), (1, 1, 0, -1, 1, 0, 1),
                                 (1, 1, 0, 0, 0, 0, 1), (1, 1, 0, 0, 1, -1, 1),
                                 (1, 1, 0, 0, 1, 0, 0)])
def test_refuses_rates_out_of_range(bad):
    with pytest.raises(ValueError):
        policies.Dispatch(*bad)


def test_negative_position_is_refused() -> None:
    with pytest.raises(ValueError):
        dispatch([]).insert(-1, 0, 1)


def test_survives_extreme_numbers():
    big = 2**62
    rates = Rates(period=big, consumer=big, typical=0, window=big, starved_below=big, workers=9)
    d = dispatch([Task(0, big, big), Task(1, 0, 0)], rates, close=True)
    assert sorted(c.position for c in drain(d)) == [0, 1]


@given(st.integers(-5, 10**12), st.integers(-5, 10**12), st.integers(1, 512),
       st.integers(0, 512))
def test_period_is_that_of_the_slower_side(consumer, mean, batch, workers):
    supply = max(mean, 0) * batch // max(workers, 1)
    assert policies.period(consumer, mean, batch, workers) == max(1, consumer, supply)
