"""How much of its ``timeout`` a wait has left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import timed_out

#: A wait looks again after so much of its timeout, and after so many seconds at most.
_SHARE, _MOST = 0.1, 1.0


class Deadline:
    """Of one wait. Where the whole program is stopped for a while (Ctrl-Z, a debugger, a virtual
    machine), its workers make nothing meanwhile, and the batch is not late when it goes on. So a
    wait is made of short parts, and none counts for more than two of them, however long it took."""

    def __init__(self, seconds: float, under_way: Callable[[], str] = str) -> None:
        """seconds: 0 for a wait without end. under_way: says for the error what workers do."""
        self.seconds, self._under_way = seconds, under_way
        self._left = seconds if seconds > 0 else math.inf
        self._part = min(seconds * _SHARE, _MOST) if seconds > 0 else math.inf
        self._looked = time.monotonic()

    def part(self) -> float:
        """Seconds of the next part, infinity where there is no end. Raises torch's error when
        the time is over."""
        now = time.monotonic()
        self._left -= min(now - self._looked, 2 * self._part) if self.seconds > 0 else 0.0
        self._looked = now
        if self._left <= 0:
            raise timed_out(self.seconds, self._under_way())
        return min(self._left, self._part)
