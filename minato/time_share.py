"""Limits the time that the loader spends on optional work."""

from __future__ import annotations

import time


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
