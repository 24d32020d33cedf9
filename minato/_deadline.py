"""Time left until a timeout."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from .errors import timed_out

#: A wait wakes after this share of its timeout, and after this many seconds at the latest.
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
            raise timed_out(self.seconds, self._under_way())
        return min(self._left, self._part)
