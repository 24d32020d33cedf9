"""Limits on time: of optional work, and of a wait."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable


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
            text = ""
            with contextlib.suppress(Exception):  # the time-out is an error in any case
                text = self._under_way()
            raise RuntimeError(f"DataLoader timed out after {self.seconds} seconds\n{text}".rstrip())
        return min(self._left, self._part)
