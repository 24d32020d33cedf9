"""The end of workers, and reports on deaths, without real workers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from minato import WorkerLost
from minato.iterators.supervisor import Supervisor
from minato.options import Options

from .parts import Loader, position_of

HEALTHY = {"zygote_lost": False, "zygote_hung": False, "deaths": 0, "crash_loop": 0, "live": 2,
           "retries": 0, "pid": 0, "status": 0}  # fmt: skip


class Pool:
    """A pool of neither kind, which records its calls."""

    kind = "process"

    def __init__(self, fails: bool = False, **health: Any) -> None:
        self.health = {**HEALTHY, **health}
        self.engine: Any = SimpleNamespace(
            health=lambda: self.health, workers=lambda: [], wait=lambda block, left: None,
            segment=SimpleNamespace(start=1),
        )  # fmt: skip
        self.fails = fails
        self.stopped = self.started = False
        self.restartable, self.restarts = False, 0
        self.done: list[str] = []

    def start(self) -> None:
        self.done.append("start")
        if self.fails:
            raise OSError("no process")

    def mine(self) -> bool:
        return not self.stopped

    def restart(self) -> bool:
        self.restarts += 1
        return self.restartable

    def starter(self) -> int:
        return 4711

    def stop(self) -> None:
        self.done.append("stop")
        self.stopped = True


def supervisor_of(pool: Any) -> Supervisor:
    loader: Any = Loader(20)
    made = Supervisor(loader, Options.of(loader), position_of(loader), pool, balanced=True)
    made.start(loader)
    return made


def never() -> bool:
    return False


def test_failed_start_stops_the_pool() -> None:
    pool = Pool(fails=True)
    with pytest.raises(OSError, match="no process"):
        supervisor_of(pool)
    assert pool.done == ["start", "stop"]


def test_dependents_end_before_workers() -> None:
    supervisor = supervisor_of(pool := Pool())
    supervisor.before_stop += [lambda: pool.done.append("first"), lambda: pool.done.append("then")]
    supervisor.stop()
    assert pool.done == ["start", "first", "then", "stop"]


def test_failing_dependents_do_not_keep_workers() -> None:
    supervisor = supervisor_of(pool := Pool())
    supervisor.before_stop.append(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        supervisor.stop()
    assert pool.done[-1] == "stop"


def test_series_of_deaths_warns_once() -> None:
    supervisor = supervisor_of(pool := Pool(deaths=4, crash_loop=2, live=1, pid=5, status=-9))
    supervisor.check(never)
    pool.health["crash_loop"] = 3
    with pytest.warns(UserWarning, match=r"pid 5\) is killed .* one of 3 deaths in a row") as told:
        supervisor.check(never)
        supervisor.check(never)
    assert len(told) == 1
    pool.health["live"] = 0
    with pytest.raises(WorkerLost, match="one of 3 deaths in a row"):
        supervisor.check(never)


def test_lost_zygote_stops_the_workers() -> None:
    supervisor = supervisor_of(pool := Pool(zygote_lost=True))
    with pytest.raises(RuntimeError, match=r"The process that starts DataLoader workers \(pid 4711\)"):
        supervisor.check(never)
    assert pool.stopped


def test_restarted_starter_raises_nothing() -> None:
    supervisor = supervisor_of(pool := Pool(zygote_lost=True))
    pool.restartable = True
    supervisor.check(never)
    assert pool.restarts == 1 and not pool.stopped


def test_a_hung_starter_is_not_restarted() -> None:
    supervisor = supervisor_of(pool := Pool(zygote_lost=True, zygote_hung=True))
    pool.restartable = True
    with pytest.raises(RuntimeError, match="stopped responding"):
        supervisor.check(never)
    assert pool.restarts == 0 and pool.stopped


def test_zygote_that_started_no_worker_raises() -> None:
    supervisor = supervisor_of(pool := Pool(zygote_lost=True))
    pool.engine.segment.start = 0
    with pytest.raises(RuntimeError, match="died unexpectedly before .* See its output above"):
        supervisor.check(never)
    assert pool.stopped
