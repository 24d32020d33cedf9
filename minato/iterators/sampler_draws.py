"""Detects samplers that draw from a global generator while they are iterated. Their order depends
on what the program draws in the meantime, so the generators' initial states do not reproduce it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..progress import Progress
from ..seeding.order_generators import fingerprint
from ..stateful import Pace

#: largest share of the time spent on checks
SHARE = 0.02


class DrawDetector(Iterator[Any]):
    """An epoch's indices. Records in the epoch's progress whether drawing one of them used a
    global generator. The first index is exempt: starting an epoch may draw."""

    def __init__(self, indices: Iterator[Any], progress: Progress) -> None:
        self._indices, self._progress = indices, progress
        self._pace = Pace(0, SHARE)
        self._begins = True

    def __next__(self) -> Any:
        if self._begins or self._progress.draws_while_iterated or not self._pace.allows():
            index = next(self._indices)
            self._begins = False
            return index
        looks = time.perf_counter_ns()
        before = fingerprint()
        looked = time.perf_counter_ns()
        index = next(self._indices)
        drew = time.perf_counter_ns() - looked
        self._progress.draws_while_iterated = fingerprint() != before
        self._pace.took(looks + drew)
        return index
