"""Limits on time: of optional work, of a wait (timeout=), and of a sample (sample_timeout=)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any


class TimeShare:
    """Limits optional work to a share of the time since this object was made.

    ``with share:`` surrounds the work and measures it. Ask ``allows()`` before it, and also within
    it where the work can end early.

    first_ns: what the work may take besides its share, so that it can begin at once. cheap_ns: if
    the last work took less, the next is always allowed. All times are nanoseconds.
    """

    def __init__(self, share: float, *, first_ns: int = 0, cheap_ns: int = 0) -> None:
        self._share, self._first_ns, self._cheap_ns = share, first_ns, cheap_ns
        self._made_at = time.perf_counter_ns()
        self._begun_at: int | None = None  # work that is measured now
        self._spent = self._last = 0  # on all work that has ended, and on the last of it

    def allows(self) -> bool:
        """Whether the work may begin, or go on."""
        if self._last < self._cheap_ns:
            return True
        now = time.perf_counter_ns()
        spent = self._spent + (0 if self._begun_at is None else now - self._begun_at)
        return spent <= self._first_ns + self._share * (now - self._made_at)

    def __enter__(self) -> None:
        self._begun_at = time.perf_counter_ns()

    def __exit__(self, *_error: object) -> None:
        assert self._begun_at is not None
        self._last = time.perf_counter_ns() - self._begun_at
        self._spent += self._last
        self._begun_at = None


#: A wait wakes after this share of a timeout, and after this many seconds at the latest.
_SHARE, _MOST = 0.1, 1.0


class Deadline:
    """The deadline of one wait. If the whole program is stopped (Ctrl-Z, a debugger, a suspended
    virtual machine), its workers are stopped too, and the batch is not late afterwards. A wait is
    therefore made of short parts, and each counts for at most twice its length."""

    def __init__(self, seconds: float, under_way: Callable[[], str] = str) -> None:
        """seconds: 0 for no timeout. under_way: describes what workers do, for the error."""
        self.seconds, self._under_way = seconds, under_way
        self._left = seconds if seconds > 0 else math.inf
        self._part = min(seconds * _SHARE, _MOST) if seconds > 0 else math.inf
        self._looked = time.monotonic()

    def part(self) -> float:
        """Seconds of the next part, infinity without a timeout. Raises torch's error when the
        time is over."""
        now = time.monotonic()
        self._left -= min(now - self._looked, 2 * self._part) if self.seconds > 0 else 0.0
        self._looked = now
        if self._left <= 0:
            text = ""
            with contextlib.suppress(Exception):  # the time-out is an error in any case
                text = self._under_way()
            raise RuntimeError(f"DataLoader timed out after {self.seconds} seconds\n{text}".rstrip())
        return min(self._left, self._part)


class LateSamples:
    """Watches what workers make while the program waits for a batch. If the whole program is
    stopped (Ctrl-Z, a debugger), no sample is late afterwards. So the time between two looks
    counts for at most twice the time that a wait lasts."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._part = min(seconds * _SHARE, _MOST)
        self._looked = time.monotonic()
        #: by worker: its process and what it makes, and for how many seconds that was seen
        self._seen: dict[int, tuple[Any, float]] = {}

    def part(self, seconds: float) -> float:
        """How long the next wait may last. seconds: the limit without this; below 0: none."""
        return self._part if seconds < 0 else min(seconds, self._part)

    def look(self, pool: Any, indices_of: Callable[[int], Any]) -> None:
        """Kills the workers whose sample is late."""
        now = time.monotonic()
        passed = min(now - self._looked, 2 * self._part)
        if passed < self._part / 2:
            return
        self._looked, before, self._seen = now, self._seen, {}
        for number, entry in enumerate(pool.engine.workers()):
            if (running := entry["running"]) is None:
                continue
            what = entry["pid"], entry["since_ns"], running
            seen, seconds = before.get(number, (None, 0.0))
            seconds = seconds + passed if seen == what else 0.0
            if seconds >= self._seconds and self._is_sample(running, indices_of):
                self._end(pool, number, entry["pid"], running)
            else:
                self._seen[number] = what, seconds

    @staticmethod
    def _is_sample(running: tuple[int, int], indices_of: Callable[[int], Any]) -> bool:
        """Whether the worker makes a sample, not a batch of samples that are made."""
        indices = indices_of(running[0])
        return not hasattr(indices, "__len__") or running[1] < len(indices)

    def _end(self, pool: Any, number: int, pid: int, running: tuple[int, int]) -> None:
        stack = pool.end_late(number, *running)
        if stack is None:
            return
        where = f"It was here, latest call first:\n{stack}\n" if stack else ""
        at = f" ({stack.splitlines()[0].strip()})" if stack else ""
        text = (
            f"took longer than sample_timeout={self._seconds:g} seconds. {where}The sample's "
            f"DataLoader worker (pid {pid}) was killed for exceeding sample_timeout{at}, and the "
            "sample is not tried again."
        )
        pool.notes.ends_late(pid, text)
