"""Samplers that draw from a global generator as they go: what these give depends on what the program
draws meanwhile, so an order cannot be had again from the states that the epoch began with.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from ..progress import Progress
from ..seeding.order_generators import fingerprint
from ..stateful import Pace

#: of the time, for looking
SHARE = 0.02


class LateDraws(Iterator[Any]):
    """An epoch's indices, which notes in its progress whether a global generator was drawn from
    for one of them. Not for the first, with which an epoch begins."""

    def __init__(self, indices: Iterator[Any], progress: Progress) -> None:
        self._indices, self._progress = indices, progress
        self._pace = Pace(0, SHARE)
        self._begins = True

    def __next__(self) -> Any:
        if self._begins or self._progress.draws_late or not self._pace.allows():
            index = next(self._indices)
            self._begins = False
            return index
        looks = time.perf_counter_ns()
        before = fingerprint()
        looked = time.perf_counter_ns()
        index = next(self._indices)
        drew = time.perf_counter_ns() - looked
        self._progress.draws_late = fingerprint() != before
        self._pace.took(looks + drew)
        return index
