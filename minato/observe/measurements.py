"""Measurements for ``stats()`` that counters do not give: taken while batches are delivered."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from .._not_linux import CORE
from . import totals
from .verdict import Alone

if CORE:
    from .. import _core
if TYPE_CHECKING:
    from .._core import CostModel, Engine

_NS = 1e-9
#: time between two looks at where workers wait; most workers in one look
LOOK_NS, LOOKED_AT = 100_000_000, 8
#: number of costliest samples among which the first batch's slowest is looked for
SLOWEST = 100

#: parts of the names of kernel functions in which a process sleeps
_SLEEPS_IN = (
    ("futex", "lock"), ("flock", "lock"), ("lock_inode", "lock"), ("setlk", "lock"),
    ("nanosleep", "sleep"),
    ("io_schedule", "storage"), ("folio", "storage"), ("wait_on_page", "storage"),
    ("read_pages", "storage"), ("blk_", "storage"), ("nfs", "storage"), ("rpc_", "storage"),
    ("fuse", "storage"), ("ext4", "storage"), ("xfs", "storage"), ("btrfs", "storage"),
)  # fmt: skip


class Watch:
    """Measures the workers of one iterator.

    Attributes:
        starting: seconds of the first wait before a worker had started a task.
        first_slowest: the costliest sample of the first batch: (index, seconds).
        first_use: each of several workers was that slow in its first sample.
        looks: how often busy workers were found in "lock", "sleep", "storage", "cpu" or "other".
    """

    def __init__(self, processes: bool = False) -> None:
        self.starting = 0.0
        self.first_slowest: tuple[Any, float] | None = None
        self.first_use = False
        self.looks: Counter[str] = Counter()
        self._processes = processes
        self._next_look = 0

    def first_came(self, engine: Engine, costs: CostModel, indices: Any) -> None:
        """Called with the iterator's first batch. The worker that has worked longest began about
        when the first worker had started. indices: of the batch's samples, if they are known."""
        now, first = time.monotonic_ns(), engine.progress()["wait_first_ns"]
        working: list[tuple[int, int]] = []  # (nanoseconds, samples) of each worker
        for entry in engine.workers():
            under_way = now - entry["since_ns"] if entry["running"] is not None else 0
            working.append((entry["busy_ns"] + max(0, under_way), entry["rows"]))
        self.starting = max(0, first - max(working, default=(0, 0))[0]) * _NS
        with suppress(Exception):  # indices of the program's own classes
            own = {int(index) for index in indices}
            known = costs.slowest(SLOWEST)
            for index, wall_ns in (one for one in known if one[0] in own):
                self.first_slowest = index, wall_ns * _NS
                others = [wall for _, wall in known if 2 * wall < wall_ns]
                usual = sum(others) / max(1, len(others))
                busy = [spent - max(0, rows - 1) * usual for spent, rows in working if spent]
                self.first_use = len(busy) > 1 and 2 * min(busy) > wall_ns
                break

    def look(self, engine: Engine) -> None:
        """Checks now and then where busy worker processes wait. Called before the trainer waits."""
        now = time.monotonic_ns()
        if now < self._next_look or not self._processes:
            return
        self._next_look = now + LOOK_NS
        busy = [entry["pid"] for entry in engine.workers()
                if entry["running"] is not None and entry["state"] == _core.WORKER_READY]  # fmt: skip
        for pid in busy[:LOOKED_AT]:
            with suppress(OSError):  # it has ended, or there is no /proc
                self.looks[_sleeps_in(pid)] += 1


def _sleeps_in(pid: int) -> str:
    with open(f"/proc/{pid}/wchan", "rb") as file:
        name = file.read().decode("ascii", "replace")
    if name in ("", "0"):
        return "cpu"
    return next((kind for part, kind in _SLEEPS_IN if part in name), "other")


class Load:
    """Measures a loader without workers: its time in ``next()``, and the program's time between two
    calls."""

    #: the core time is measured of the first ALL batches, and then of one in ONE_OF
    ALL, ONE_OF = 64, 16

    def __init__(self, batch_size: int, name: str) -> None:
        self.name = name
        self.counted = self.watched = False
        self.samples: Callable[[], int] | None = None  # None: not known, of an iterable dataset
        self.batches = 0
        self._size = batch_size
        self._load_ns = self._used_ns = self._most_ns = 0
        self._cpu_ns = self._of_ns = 0  # core time of some loads, and how long those took
        self._begun = self._ended = 0
        self._cpu_begun = -1
        self._process_begun = time.process_time()
        self._process = 0.0

    def begins(self) -> None:
        """Called at the start of ``next()``."""
        measured = self.batches < self.ALL or self.batches % self.ONE_OF == 0
        self._cpu_begun = time.thread_time_ns() if measured else -1
        self._begun = time.monotonic_ns()
        if self._ended:
            self._used_ns += self._begun - self._ended

    def ends(self, got: bool) -> None:
        """Called at the end of ``next()``. got: it returns a batch."""
        self._ended = time.monotonic_ns()
        took = self._ended - self._begun
        if not got:
            self._ended = 0
            return
        self.batches += 1
        self._load_ns += took
        self._most_ns = max(self._most_ns, took)
        if self._cpu_begun >= 0:
            self._cpu_ns += time.thread_time_ns() - self._cpu_begun
            self._of_ns += took
            self._process = time.process_time() - self._process_begun

    def __del__(self) -> None:
        totals.ends(self)

    def counts(self) -> dict[str, float]:
        """Totals, see ``minato.metrics``."""
        found: dict[str, float] = {} if self.samples is None else {"minato.samples": self.samples()}
        return {
            **found,
            "minato.batches": self.batches,
            "minato.wait.time": self._load_ns * _NS,
            "minato.program.time": self._used_ns * _NS,
        }

    def gauges(self) -> dict[str, float]:
        """Nothing: there are no workers."""
        return {}

    def waits(self) -> dict[str, float]:
        """``stats()["wait"]``."""
        elapsed = self._load_ns + self._used_ns
        return {
            "total": self._load_ns * _NS,
            "mean": self._load_ns / max(1, self.batches) * _NS,
            "max": self._most_ns * _NS,
            "between": self._used_ns * _NS,
            "share": self._load_ns / max(1, elapsed),
        }

    def facts(self, cores: int) -> Alone:
        """The facts for the verdict."""
        loading = self._load_ns * _NS
        cpu = loading * self._cpu_ns / max(1, self._of_ns)
        return Alone(
            batches=self.batches,
            loading=loading,
            between=self._used_ns * _NS,
            cpu=cpu,
            own_cpu=max(0.0, self._process - cpu),
            cores=cores,
            mean=loading / max(1, self.batches * self._size),
        )


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on this system
        return os.cpu_count() or 1
