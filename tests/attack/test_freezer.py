"""Processes that not even SIGKILL ends at once: in a frozen control group, as docker pause makes
one. For a trainer that is the same as a worker that waits for a hung file system."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import minato
from minato.workers import zygote as zygotes

from .datasets import Slow
from .support import SECONDS, alive, environment, kill, wait_for, worker_entries, workers_of

#: by the version of control groups: the file that freezes, and what to write to it
FILES = {1: ("freezer.state", "FROZEN", "THAWED"), 2: ("cgroup.freeze", "1", "0")}
#: for all that zygote.py allows a shutdown, on a busy machine
ENDS = 4 * (zygotes.STOP + zygotes.FINISH + 2 * zygotes.KILL)


class Freezer:
    """A control group. Its processes stand still until it thaws. Those that were killed in it
    end then, or at once if the system can do that (version 2)."""

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.name, self.frozen, self.thawed = FILES[version]
        path.mkdir()
        (path / self.name).write_text(self.thawed)

    def freeze(self, *pids: int) -> None:
        for pid in pids:
            (self.path / "cgroup.procs").write_text(str(pid))
        (self.path / self.name).write_text(self.frozen)
        wait_for(self.is_frozen, "the group to freeze")

    def is_frozen(self) -> bool:
        if self.name == "cgroup.freeze":
            return "frozen 1" in (self.path / "cgroup.events").read_text()
        return (self.path / self.name).read_text().strip() == self.frozen

    def thaw(self) -> None:
        (self.path / self.name).write_text(self.thawed)

    def close(self) -> None:
        self.thaw()
        wait_for(lambda: not (self.path / "cgroup.procs").read_text(), "its processes to end")
        self.path.rmdir()


def _make_freezer() -> Freezer | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _number, controllers, below = line.split(":", 2)
        if controllers and "freezer" not in controllers.split(","):
            continue
        version, at = (1, "/sys/fs/cgroup/freezer") if controllers else (2, "/sys/fs/cgroup")
        if not Path(at, "cgroup.procs").exists():
            continue  # nothing of that version is mounted there
        path = Path(at + below) / f"minato-test-{os.getpid()}"
        try:
            return Freezer(path, version)
        except OSError:
            if path.exists():
                path.rmdir()
    return None


@pytest.fixture
def freezer() -> Iterator[Freezer]:
    if SECONDS < 30:  # a group that does not thaw would outlive the run
        pytest.skip("one of many alike: set MINATO_STRESS_SECONDS")
    made = _make_freezer()
    if made is None:
        pytest.skip("no control group can be frozen here")
    yield made
    made.close()


def make(**options):
    options = {"num_workers": 2, "persistent_workers": True, **options}
    return minato.DataLoader(Slow(40, 0.01), batch_size=2, **options)


def starter_of(iterator) -> int:
    return psutil.Process(workers_of(iterator)[0]).ppid()


def rest_of(iterator) -> list[int]:
    """The remaining samples; a second without a batch is not long on a busy machine."""
    got = []
    while True:
        try:
            got += [int(index) for batch in iterator for index in batch]
            return got
        except RuntimeError as error:
            assert "timed out" in str(error)


def test_frozen_worker_continues_after_thaw(freezer):
    """timeout= reports the missing batch; no other worker makes its sample; no death is seen."""
    iterator = iter(make(timeout=1))
    got = next(iterator).tolist()
    wait_for(lambda: worker_entries(iterator)[0]["running"], "work")
    freezer.freeze(workers_of(iterator)[0])
    with pytest.raises(RuntimeError, match="timed out"):
        for batch in iterator:
            got += batch.tolist()
    freezer.thaw()
    assert got + rest_of(iterator) == list(range(40))
    assert iterator._engine.health()["deaths"] == 0


def test_killed_frozen_worker_is_replaced_after_exit(freezer):
    """The replacement comes only after its exit: until then it may write."""
    iterator = iter(make(timeout=1))
    got = next(iterator).tolist()
    wait_for(lambda: worker_entries(iterator)[0]["running"], "work")
    victim = workers_of(iterator)[0]
    freezer.freeze(victim)
    kill(victim)
    if alive(victim):  # control groups of version 2 let it die
        with pytest.raises(RuntimeError, match="timed out"):
            for batch in iterator:
                got += batch.tolist()
        assert iterator._engine.health()["deaths"] == 0
    freezer.thaw()
    assert got + rest_of(iterator) == list(range(40))
    assert iterator._engine.health()["deaths"] == 1


@pytest.mark.parametrize("which", ["worker", "starter", "all"])
def test_dropped_loader_does_not_wait_for_frozen_workers(freezer, which, monkeypatch):
    """The interpreter's exit does not wait either. After the thaw they end without more work."""
    monkeypatch.setattr(zygotes, "KILL", 1.0)
    iterator = iter(make())
    next(iterator)
    workers, starter = workers_of(iterator), starter_of(iterator)
    frozen = {"worker": workers[:1], "starter": [starter], "all": [*workers, starter]}[which]
    freezer.freeze(*frozen)
    begun = time.monotonic()
    del iterator
    assert time.monotonic() < begun + ENDS
    left = [pid for pid in [*workers, starter] if alive(pid)]
    assert set(left) <= set(frozen)
    freezer.thaw()
    wait_for(lambda: not any(map(alive, left)), "them to end")
    if starter in frozen:
        os.waitpid(starter, 0)  # multiprocessing was told not to wait


EXITS = """
import sys
import minato
from attack.datasets import Slow
from minato.workers import zygote as zygotes

zygotes.KILL = 1.0
loader = minato.DataLoader(Slow(40, 0.01), batch_size=2, num_workers=2)
iterator = iter(loader)
next(iterator)
print(*[worker.pid for worker in iterator._workers], flush=True)
sys.stdin.readline()
if sys.argv[1] == "dropped":
    del iterator
"""


@pytest.mark.parametrize("iterator", ["alive", "dropped"])
def test_program_exits_with_frozen_processes(freezer, iterator):
    script = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", EXITS, iterator],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        workers = [int(pid) for pid in script.stdout.readline().split()]
        frozen = [*workers, psutil.Process(workers[0]).ppid()]
        freezer.freeze(*frozen)
        script.stdin.write("go on\n")
        script.stdin.flush()
        assert script.wait(2 * ENDS) == 0  # its frozen processes still hold its output
    finally:
        freezer.thaw()
        script.kill()
        script.communicate()
    wait_for(lambda: not any(map(alive, frozen)), "them to end")


WHOLE = """
import minato
from attack.datasets import Slow

loader = minato.DataLoader(Slow(200, 0.01), batch_size=2, num_workers=2, timeout=1,
                            persistent_workers=True)
iterator = iter(loader)
got = next(iterator).tolist()
print(*[worker.pid for worker in iterator._workers], flush=True)
for batch in iterator:
    got += batch.tolist()
assert got == list(range(200))
assert iterator._engine.health()["deaths"] == 0
"""


def test_frozen_program_continues_after_thaw(freezer):
    """For longer than timeout=, as when a container is paused."""
    script = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", WHOLE],
        stdout=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip
    try:
        workers = [int(pid) for pid in script.stdout.readline().split()]
        freezer.freeze(*workers, psutil.Process(workers[0]).ppid(), script.pid)
        time.sleep(2.5)  # the length of the freeze
        freezer.thaw()
        script.communicate(timeout=ENDS)
        assert script.returncode == 0
    finally:
        freezer.thaw()
        script.kill()
        script.communicate()
    wait_for(lambda: not any(map(alive, workers)), "its workers to end")
