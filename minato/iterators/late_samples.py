"""``sample_timeout=``: a worker whose sample takes too long is killed, and the sample has failed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

#: A wait wakes after this share of sample_timeout, and after this many seconds at the latest.
_SHARE, _MOST = 0.1, 1.0


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
        stack = pool.stack_of(number)
        where = f"It was here, latest call first:\n{stack}\n" if stack else ""
        text = (
            f"took longer than sample_timeout={self._seconds:g} seconds. {where}Its DataLoader worker "
            f"(pid {pid}) was killed for exceeding sample_timeout, and it is not tried again."
        )
        pool.notes.ends_late(pid, text)
        pool.engine.end_late(number, *running)
