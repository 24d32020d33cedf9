"""The policies together, in virtual time: nothing lost, no deadlock, the promised bounds."""

from __future__ import annotations

import statistics

import policies
import pytest
import simulate
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Case, Epoch, Loader, Minato, MinatoReady, run

MS = simulate.MS
OVERHEAD = 20_000


def loader(case: Case, epoch: Epoch, kind: str, memory: float,
           cost: policies.Cost) -> Minato:
    if kind == "ready":
        return MinatoReady(case, epoch, OVERHEAD, cost, memory)
    return Minato(case, epoch, OVERHEAD, cost, kind == "in order", memory)


class Watch(Loader):
    """Wraps a loader and records what was started and finished."""

    def __init__(self, inner: Minato) -> None:
        self.inner = inner
        self.case, self.epoch = inner.case, inner.epoch
        self.log: list[int] = []
        self.running = 0

    @property
    def peak(self) -> float:  # type: ignore[override]
        return self.inner.peak

    @property
    def displaced(self) -> int:  # type: ignore[override]
        return self.inner.displaced

    def start(self, now):
        started = self.inner.start(now)
        self.running += len(started)
        assert self.running <= self.case.workers
        return started

    def finish(self, worker, work, now):
        self.running -= 1
        _, first, n = work
        self.log += range(first, first + n)
        self.inner.finish(worker, work, now)

    def fetch(self, now):
        return self.inner.fetch(now)

    def took(self, consumer_ns):
        self.inner.took(consumer_ns)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([10_000, MS, 5 * MS, 90 * MS]), min_size=1, max_size=70),
       st.integers(1, 6), st.integers(1, 9), st.sampled_from(["in order", "ooo", "ready"]),
       st.sampled_from([0.01, 0.3, 1.0, 8.0]), st.sampled_from([0, 2 * MS, 30 * MS]))
def test_every_sample_once_and_no_deadlock(costs, batch, workers, kind, memory, consumer):
    costs = costs[: len(costs) // batch * batch] or costs[:1] * batch
    case = Case("t", batch, workers, len(costs) // batch, lambda rng: (1,))
    epoch = Epoch(list(range(len(costs))), [(c,) for c in costs])
    model = policies.Cost(len(costs))
    for _ in range(2):  # costs unknown, then known
        watch = Watch(loader(case, epoch, kind, memory, model))
        result = run([watch], consumer)
        assert sorted(watch.log) == list(range(len(costs)))
        assert result.wall >= result.bound
        if memory >= len(costs):
            continue
        window = 2 * workers
        limit = int(memory * window)
        assert result.peak_batches <= max(limit, 1)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 200).map(lambda x: x * MS), min_size=1, max_size=80),
       st.integers(1, 9), st.sampled_from(["in order", "ooo"]))
def test_slow_sample_idles_no_worker(costs, workers, kind):
    """Memory enough: the first epoch ends within work / workers + the largest cost, in
    order too, wherever the slow samples are."""
    case = Case("t", 1, workers, len(costs), lambda rng: (1,))
    epoch = Epoch(list(range(len(costs))), [(c,) for c in costs])
    result = run([loader(case, epoch, kind, 1000.0, policies.Cost(len(costs)))], 0)
    work = sum(costs) + OVERHEAD * len(costs)
    longest = max(costs) + OVERHEAD
    assert result.wall <= work / workers + longest * (1 - 1 / workers) + 1


LIMITS = {
    # case: (first epoch, second epoch), in order, as shares of the work bound
    "80% 5 ms, 20% 30 ms (24, 12)": (1.05, 1.03),
    "80% 5 ms, 20% 30 ms (4, 12)": (1.05, 1.03),
    "1% of 500 ms in 5 ms (8, 8)": (1.25, 1.05),
    "log-normal, sigma 0.4 (2, 4)": (1.05, 1.03),
    "constant 5 ms (8, 8)": (1.05, 1.03),
    "40% 40 ms, 60% 4 ms (2, 8)": (1.05, 1.03),
}


@pytest.mark.parametrize("case", simulate.background(), ids=simulate.label)
def test_sleeping_workloads_stay_near_the_work_bound(case):
    first, second = LIMITS[simulate.label(case)]
    columns = ("torch", "in order 1", "in order 2")
    runs = [simulate.simulate(case, seed, OVERHEAD, columns=columns) for seed in range(4)]
    mean = {c: statistics.fmean(r[c].ratio for r in runs) for c in columns}
    assert mean["in order 1"] <= first
    assert mean["in order 2"] <= second
    if not case.name.startswith("constant"):
        assert mean["torch"] > mean["in order 2"] + 0.02


def test_lock_step_ranks_stay_near_the_bound():
    draw = simulate.speech(3 * simulate.S)
    case = Case("speech", 24, 12, 50, draw, ranks=4, consumer=1.0)
    columns = ("torch", "torch ooo", "in order 1", "in order 2")
    out = simulate.simulate(case, 1, OVERHEAD, columns=columns)
    assert out["in order 2"].ratio < 1.08 < out["torch"].ratio
    assert out["in order 2"].ratio < out["torch ooo"].ratio


def test_ready_batches_work_with_quarter_window_memory():
    """All of it may be of batches that wait for others: then the next one passes the limit."""
    case = next(c for c in simulate.background() if c.name == "1% of 500 ms in 5 ms")
    costs = policies.Cost(case.samples)
    for epochs in simulate.make_epochs(case, 2, 2):
        outcome = run([MinatoReady(case, epochs[0], 0, costs, 0.25)], 0)
        assert outcome.peak_batches <= case.workers // 2 + 1


def test_known_slow_last_sample_does_not_delay_epoch():
    costs = [5 * MS] * 799 + [500 * MS]
    case = Case("t", 8, 8, 100, lambda rng: (1,))
    epoch = Epoch(list(range(800)), [(c,) for c in costs])
    model = policies.Cost(800)
    unknown = run([loader(case, epoch, "in order", 8.0, model)], 0)
    known = run([loader(case, epoch, "in order", 8.0, model)], 0)
    assert unknown.ratio > 1.5
    assert known.ratio < 1.03


def test_command_line(capsys, tmp_path):
    target = tmp_path / "table.png"
    assert simulate.main(["--seeds", "1", "--only", "constant", "--detail", "--plot",
                          str(target)]) == 0
    out = capsys.readouterr().out
    assert "constant 5 ms (8, 8)" in out and "first batch, ms" in out
    assert target.stat().st_size > 1000
    with pytest.raises(SystemExit):
        simulate.main(["--only", "no such case"])
