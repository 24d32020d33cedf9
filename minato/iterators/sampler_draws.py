"""Detects samplers that draw from a global generator while they are iterated. Their order depends
on what the program draws in the meantime, so the generators' initial states do not reproduce it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..epoch_progress import Progress
from ..seeding.order_generators import fingerprint
from ..time_share import TimeShare

#: largest share of the time spent on checks
SHARE = 0.02


class DrawDetector(Iterator[Any]):
    """An epoch's indices. Records in the epoch's progress whether drawing one of them used a
    global generator. The first index is exempt: starting an epoch may draw."""

    def __init__(self, indices: Iterator[Any], progress: Progress) -> None:
        self._indices, self._progress = indices, progress
        self._time = TimeShare(SHARE)
        self._begins = True

    def __next__(self) -> Any:
        if self._begins or self._progress.draws_while_iterated or not self._time.allows():
            index = next(self._indices)
            self._begins = False
            return index
        with self._time:
            before = fingerprint()
        index = next(self._indices)
        with self._time:
            self._progress.draws_while_iterated = fingerprint() != before
        return index
