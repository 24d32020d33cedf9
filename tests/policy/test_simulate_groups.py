"""Samples that share an opened file, in virtual time: the engine's own plan in C.

Everything here is exact and repeatable; see ``benchmarks/simulate_groups.py``.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import shutil
from typing import Any

import pytest
import simulate_groups as groups
from hypothesis import given, settings
from hypothesis import strategies as st


MS = groups.MS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if not (shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("no C compiler is installed")
    return groups.engine(str(tmp_path_factory.mktemp("groups")))


def of_name(name: str) -> Any:
    return next(case for case in groups.CASES if groups.label(case).startswith(name))


#: torch, sample, affine: wall time over work, each group opened once
TABLE = {
    "80/20 (24": (1.15, 1.01, 1.01),
    "80/20 (4": (1.27, 1.01, 1.02),
    "log-normal": (1.05, 1.01, 1.01),
    "40/60": (1.33, 1.02, 1.03),
    "row groups of 32": (1.00, 3.28, 1.00),
    "videos of 8 (": (1.00, 3.28, 1.00),
    "row groups of 128": (3.27, 3.28, 3.28),
}


@pytest.mark.parametrize("name", TABLE)
def test_rule_reaches_the_tables_ratio(name: str) -> None:
    case = of_name(name)
    rng = random.Random(1)
    work = case.draw(rng)
    order = case.order(work, rng)
    for rule, expected in zip(groups.RULES.values(), TABLE[name], strict=True):
        held = [groups.Held(work, case.held) for _ in range(case.workers)]
        assert rule(case, work, order, held).ratio == pytest.approx(expected, abs=0.07)


def test_held_groups() -> None:
    held = groups.Held(groups.Work([1] * 4, [0, 1, 2, 0], [10, 20, 30]), 2)
    assert [held.seconds(i) for i in (0, 1, 0, 2, 3, 1)] == [11, 21, 1, 31, 1, 21]
    assert held.opened == 4


@st.composite
def cases(draw: st.DrawFn) -> tuple[Any, Any]:
    sizes = draw(st.lists(st.sampled_from([1, 1, 3, 8, 20, 50]), min_size=1, max_size=12))
    group = [g for g, size in enumerate(sizes) for _ in range(size)]
    costs = st.sampled_from([0, 10_000, MS, 5 * MS, 90 * MS])
    opening = draw(st.lists(st.sampled_from([0, MS, 30 * MS, 400 * MS]), min_size=len(sizes),
                            max_size=len(sizes)))  # fmt: skip
    same = draw(st.none() | costs)
    cost = [draw(costs) if same is None else same for _ in group]
    case = groups.Case(
        "drawn", draw(st.integers(1, 9)), draw(st.integers(1, 6)), lambda rng: None,
        held=draw(st.integers(1, 3)), mixed=draw(st.sampled_from([0, 1, 1, 2])),
        memory=draw(st.sampled_from([1, 3, 30, 512])), in_order=draw(st.booleans()),
        far=draw(st.booleans()),
        consumer=draw(st.sampled_from([0, 0, 2 * MS, 40 * MS])),
    )  # fmt: skip
    return case, groups.Work(cost, group, opening)


@settings(deadline=None, max_examples=40)
@given(cases(), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_each_sample_is_made_once_without_deadlock(library, drawn, group_neighbours, declared, rng):
    """For any costs and groups, over epochs; and within the available memory."""
    case, work = drawn
    with groups.Plan(library, case, work, group_neighbours or declared, declared) as plan:
        for _ in range(3):
            found = plan.epoch_of(case.order(work, rng))
            rows = case.batch * 4096
            assert found.most_bytes <= max(found.limit_bytes, rows)
            assert found.opened <= len(work.cost)


def epochs(
    library: ctypes.CDLL, case: Any, group_neighbours: bool, declared: bool, seed: int = 1
) -> list[Any]:
    """For each epoch, the result of torch's dispatch and of the plan."""
    rng = random.Random(seed)
    work = case.draw(rng)
    held = [groups.Held(work, case.held) for _ in range(case.workers)]
    out = []
    with groups.Plan(library, case, work, group_neighbours, declared) as plan:
        for _ in range(3):
            order = case.order(work, rng)
            for h in held:
                h.opened = 0
            out.append((groups.torch(case, work, order, held), plan.epoch(order)))
    return out


def shared(batch: int, workers: int, *work: Any, **more: Any) -> Any:
    return groups.Case("shared", batch, workers, groups.grouped(*work), **more)


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ["videos of 8 (", "videos of 8, batch 32", "long and short"])
def test_neighbours_are_kept_together(library, name: str, declared: bool) -> None:
    """Once costs are known: nearly as if each group were opened once."""
    for torch, plan in epochs(library, of_name(name), True, declared)[1:]:
        assert plan.opened < 1.3 and plan.ratio < 1.3
        assert plan.ratio < 1.05 * torch.ratio


def test_group_being_opened_is_left_to_its_worker(library) -> None:
    """Nothing is known of costs, and each worker has a declared group of one batch."""
    case = shared(4, 8, [4] * 8, 400 * MS, 5 * MS)
    torch, plan = epochs(library, case, True, True)[0]
    assert torch.opened == 1.0
    assert plan.ratio < 1.2


def test_unstarted_pieces_come_before_helping(library) -> None:
    """Groups of one batch each: an idle worker starts past the window before it enters the
    group of another worker, and the next worker does not open that group again."""
    for torch, plan in epochs(library, of_name("row groups of 32"), True, False)[1:]:
        assert plan.opened < 1.04
        assert plan.ratio < 1.04 * torch.ratio


@pytest.mark.parametrize("declared", [False, True])
def test_mixed_groups_longer_than_batches(library, declared: bool) -> None:
    """Torch's workers open each of the two that are kept once: all together four times."""
    case = shared(64, 4, [256] * 48, 20 * MS, MS // 100, held=2, mixed=2)
    first, *later = epochs(library, case, True, declared)
    assert first[1].opened <= first[0].opened
    for torch, plan in later:
        assert plan.opened < 0.9 * torch.opened
        assert plan.ratio < 0.9 * torch.ratio


def test_runs_start_at_their_beginning(library) -> None:
    """Also by the plan that does not know costs yet: a second worker rarely opens
    it."""
    _torch, plan = epochs(library, of_name("videos of 8 ("), True, False)[0]
    assert plan.opened < 1.1


@pytest.mark.parametrize("shape", [(256, 16, 40), (1024, 8, 20)])
def test_slow_samples_delay_large_batches_no_further(
    library, shape: tuple[int, int, int]
) -> None:
    """Few, and nothing is known; workers that idle help, however little room there is for
    what comes next."""
    batch, workers, batches = shape
    draw = groups.alone(batch * batches, groups.two(0.0005, 2000 * MS, MS))
    case = groups.Case("slow", batch, workers, draw, mixed=0)
    torch, anybody = epochs(library, case, False, False)[0]
    _torch, plan = epochs(library, case, True, False)[0]
    assert plan.ratio < 1.1 * anybody.ratio
    assert plan.ratio < torch.ratio


def test_opening_sample_is_not_taken_for_slow(library) -> None:
    """Nor an unknown sample, because some known ones were expensive to open."""
    for _torch, plan in epochs(library, of_name("row groups of 32"), True, False):
        assert plan.ahead <= 8  # two batches a worker


def uneven(draw: Any, sigma: float) -> Any:
    """No two groups take the same time to open, and no two samples to make."""
    def work(rng: random.Random) -> Any:
        w = draw(rng)
        cost, opening = ([int(ns * rng.lognormvariate(0.0, sigma)) for ns in each]
                         for each in (w.cost, w.opening))  # fmt: skip
        return groups.Work(cost, w.group, opening)

    return work


def test_groups_of_one_batch_are_rarely_opened_twice(library) -> None:
    """Also by the first plan, which knows nothing yet. An idle worker waits for the next batch if
    that comes sooner than it could open a group again."""
    draw = uneven(groups.grouped([32] * 64, 100 * MS, MS), 0.1)
    case = groups.Case("uneven", 32, 4, draw)
    first, *later = [plan for _torch, plan in epochs(library, case, True, False)]
    assert first.opened < 1.06  # all workers share the first batch
    assert sum(plan.opened for plan in later) < 1.03 * len(later)


@pytest.mark.parametrize("shape", [(32, 4), (64, 8), (24, 12), (4, 8)])
@pytest.mark.parametrize("costs", ["even", "80/20"])
def test_ungrouped_first_batch_is_shared(
    library, shape: tuple[int, int], costs: str
) -> None:
    """It is ready nearly as soon as if the workers had started with it."""
    batch, workers = shape
    rng = random.Random(3)
    one = (lambda rng: 5 * MS) if costs == "even" else groups.two(0.2, 10 * MS, 5 * MS)
    case = groups.Case("alone", batch, workers, groups.alone(20 * batch, one), mixed=0)
    work = case.draw(rng)
    with groups.Plan(library, case, work, True, False) as plan:
        order = case.order(work, rng)
        bound = max(sum(work.cost[i] for i in order[:batch]) / workers, 5 * MS)
        most = 1.3 if costs == "even" else 1.6
        assert plan.epoch_of(order).first_ns < most * bound + 5 * MS


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_groups_that_end_with_batches_are_opened_once(library, seed: int, far: bool) -> None:
    """As if batches were never cut, which is optimal for equal costs; but in the first epoch all
    share the first batch. Samples made before costs are known show their groups later. The cost of
    opening a group is no reason to start its first sample early. A new plan leaves each group to its
    current worker. No worker leaves a group before its opening cost is known, or enters one while
    others end."""
    for sizes, opening, each in (([8] * 128, 50 * MS, 2 * MS), ([32] * 64, 100 * MS, MS)):
        case = shared(32, 4, sizes, opening, each, far=far)
        for n, (torch, plan) in enumerate(epochs(library, case, True, False, seed)):
            assert torch.opened == 1.0
            assert plan.opened <= (1.0 if n else 1.05)
            assert plan.ratio < (1.005 if n else 1.06) * torch.ratio


@pytest.mark.parametrize("declared", [False, True])
def test_some_groups_are_slow_to_open(library, declared: bool) -> None:
    """torch's workers wait for those that open them."""
    runs = [run for seed in range(4)
            for run in epochs(library, of_name("openings differ"), True, declared, seed)]  # fmt: skip
    assert sum(plan.opened for _torch, plan in runs) < 1.1 * len(runs)
    assert sum(plan.ratio for _torch, plan in runs) < sum(torch.ratio for torch, _plan in runs)


def test_grouped_and_shuffled_orders_alternate(library) -> None:
    """One after the other: each order is unlearned in the other."""
    case = shared(32, 4, [32] * 64, 20 * MS, MS)
    rng = random.Random(1)
    work = case.draw(rng)
    mixed = dataclasses.replace(case, mixed=0)
    with groups.Plan(library, case, work, True, False) as plan:
        for _turn in range(2):
            kept = [plan.epoch(case.order(work, rng)) for _ in range(3)]
            assert kept[-1].opened < 1.1
            spread = [plan.epoch(mixed.order(work, rng)) for _ in range(3)]
            held = [groups.Held(work, case.held) for _ in range(case.workers)]
            anybody = groups.sample(case, work, mixed.order(work, rng), held)
            assert spread[-1].ratio < 1.05 * anybody.ratio


def test_long_groups_of_small_batches_are_noticed(library) -> None:
    """Each worker opens each group once: one of the eight batches that it makes of it is slow."""
    case = shared(4, 4, [128] * 24, 400 * MS, MS // 5)
    for torch, plan in epochs(library, case, True, False)[1:]:
        assert plan.opened <= torch.opened
        assert plan.ratio < 1.2 * torch.ratio


def test_slow_consumer_causes_no_takeover(library) -> None:
    """Batches wait for the program, which needs three times as long as the workers."""
    case = shared(32, 4, [32] * 64, 100 * MS, MS, consumer=100 * MS)
    for torch, plan in epochs(library, case, True, True):
        assert torch.opened == 1.0
        assert plan.opened < 1.2


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("ms", [2, 7])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("away", [0, 1])
def test_single_active_worker_is_not_home_of_all(
    library, workers: int, ms: int, far: bool, away: int
) -> None:
    """In the first epoch one worker is enough, as while a program compiles its model. Afterwards
    all work, although each worker's first time at a sample costs more."""
    n, each = 480, ms * MS
    away *= each
    work = groups.Work([each] * n, [*range(n)], [away] * n)
    slow = 4 * (each + away)
    case = groups.Case("home", 2, workers, lambda rng: work, held=n, mixed=0, far=far, consumer=slow)
    rng, waits = random.Random(0), []
    with groups.Plan(library, case, work, True, False) as plan:
        plan.epoch_of(case.order(work, rng))
        plan.consumer_is(0)
        for _epoch in range(3):
            found = plan.epoch_of(case.order(work, rng))
            waits.append((found.wall_ns - found.opened * away / workers) / (n * each / workers))
    assert all(wait < 1.25 for wait in waits)


def test_pieces_that_open_groups_keep_their_order(library) -> None:
    """Compressed chunks of a batch each: none is slower than another."""
    case = shared(32, 4, [32] * 48, 2 * MS, 30_000)
    for torch, plan in epochs(library, case, True, True):
        assert plan.ratio < 1.2 * torch.ratio


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("name", ["two kept", "four kept, two mixed", "four kept, four mixed"])
def test_mixed_groups_are_opened_no_more_often(
    library, name: str, far: bool, declared: bool
) -> None:
    """Compared with torch's cut: neither because they are declared, nor because shuffled samples
    remember where groups began in another order."""
    case = dataclasses.replace(of_name(name), far=far)
    runs = [run for seed in range(2) for run in epochs(library, case, True, declared, seed)]
    assert all(plan.opened <= 1.1 * torch.opened for torch, plan in runs)
    assert sum(plan.opened for _torch, plan in runs) < 0.9 * sum(t.opened for t, _plan in runs)
    assert sum(plan.ratio for _torch, plan in runs) < 0.95 * sum(t.ratio for t, _plan in runs)


@pytest.mark.parametrize("far", [False, True])
@pytest.mark.parametrize("slow", [0, 200 * MS])
@pytest.mark.parametrize("shuffled", [False, True])
def test_cached_samples_are_made_at_home(
    library, shuffled: bool, slow: int, far: bool
) -> None:
    """A batch of samples that were expensive elsewhere is long, not slow; their extra cost there is
    not taken for groups. In order, torch's workers see the same samples each epoch; the plan
    matches that, except for delays by slow samples of the same worker."""
    n = 1024
    rng = random.Random(0)
    draw = groups.two(0.01, slow or MS, MS)
    work = groups.Work([draw(rng) for _ in range(n)], [*range(n)], [10 * MS] * n)
    case = groups.Case("kept", 32, 4, lambda rng: work, held=n, mixed=0 if shuffled else 1, far=far)
    held = [groups.Held(work, n) for _ in range(4)]
    with groups.Plan(library, case, work, True, False) as plan:
        for epoch in range(4):
            order = case.order(work, rng) if shuffled else [*range(n)]
            torch, found = groups.torch(case, work, order, held), plan.epoch(order)
            if epoch > 0:
                more = (0.82 if slow else 0.5) if shuffled else 1.35
                assert found.ratio < more * torch.ratio


@pytest.mark.parametrize("name", ["80/20 (24", "80/20 (4", "40/60", "log-normal"])
def test_slow_samples_show_no_locality(library, name: str) -> None:
    """Because known slow samples start alone, on any worker: then nothing is kept together or at
    home, and nothing is lost."""
    case, rng = of_name(name), random.Random(0)
    work = case.draw(rng)
    with groups.Plan(library, case, work, True, False) as plan:
        for epoch in range(4):
            order = case.order(work, rng)
            found = plan.epoch_of(order)
            assert found.near == 1 and found.home == (1 if epoch else 0), "none, once it is known"
            assert found.wall_ns < (1.015 if epoch else 1.03) * work.bound(order, case.workers)


@pytest.mark.parametrize("name", ["80/20 (24", "80/20 (4", "40/60", "log-normal"])
def test_learning_that_homes_do_not_help_costs_nothing(library, name: str) -> None:
    """In the epochs after the first one a step as long as a batch waits no longer than where nothing
    is learned."""
    walls: list[list[int]] = []
    for group_neighbours in [True, False]:
        case, rng = of_name(name), random.Random(2)
        work = case.draw(rng)
        with groups.Plan(library, case, work, group_neighbours, False) as plan:
            order = case.order(work, rng)
            plan.consumer_is(int(work.bound(order, case.workers) * case.batch / len(order)))
            plan.epoch_of(order)
            walls.append([plan.epoch_of(case.order(work, rng)).wall_ns for _ in range(2)])
    learns, knows = walls
    assert all(wall < 1.004 * least for wall, least in zip(learns, knows))


def test_batches_may_be_cut_finer_later(library) -> None:
    """Long ones, first unknown, then known not to be cheaper together, then known to be cheaper. A
    batch has more tasks each time, and can be cut into as many pieces."""
    alone, shared = 13 * 1024, 12 * 16
    group = [*range(alone)] + [alone + g for g in range(shared) for _ in range(64)]
    work = groups.Work([MS // 2] * len(group), group, [0] * alone + [20 * MS] * shared)
    case = groups.Case("cut", 1024, 16, lambda rng: None, memory=64)
    with groups.Plan(library, case, work, True, False) as plan:
        assert plan.epoch_of([*range(len(group))]).opened <= len(group)
