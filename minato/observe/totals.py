"""What loaders have done since the program began, for ``minato.metrics``.

``stats()`` starts anew with each iterator. Totals never fall: what an iterator has counted is added
when its workers end, so they go on over iterators, epochs, and loaders of one name, also when a
loader is gone. Nothing here runs for a batch, unless ``minato.metrics`` was asked for.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, defaultdict
from typing import Any, Protocol

#: further names of loaders are counted together, as OTHER
NAMES_MOST, OTHER = 32, "other"


class Source(Protocol):
    """Counts of one iterator."""

    name: str
    counted: bool  # its counts were added, because it has ended
    watched: bool  # each wait for it is measured

    def counts(self) -> dict[str, float]:
        """Its totals so far, by the name of the number."""

    def gauges(self) -> dict[str, float]:
        """Its present values."""


_lock = threading.RLock()  # a garbage collection may end a source at any time
_ended: defaultdict[str, Counter[str]] = defaultdict(Counter)
_living: weakref.WeakSet[Any] = weakref.WeakSet()


def name_of(loader: Any) -> str:
    """The name of a loader: its attribute ``name`` if that is text, or its dataset's class."""
    name = vars(loader).get("name")
    return name if isinstance(name, str) and name else type(loader.dataset).__name__


def begins(source: Source) -> None:
    """An iterator begins to count."""
    with _lock:
        source.counted = False
        if source.name not in _ended and len(_ended) >= NAMES_MOST:
            source.name = OTHER
        _ended[source.name].update()  # so that the name is known
        _living.add(source)


def ends(source: Source) -> None:
    """An iterator's counts are final. Call it while they can still be read."""
    with _lock:
        if not source.counted:
            source.counted = True
            _ended[source.name].update(_of(source))
            _living.discard(source)


def totals() -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
    """By the loader's name: totals, and the present values of living iterators."""
    with _lock:
        found = {name: Counter(counts) for name, counts in _ended.items()}
        now: dict[str, Counter[str]] = {name: Counter() for name in _ended}
        for source in list(_living):
            found[source.name].update(_of(source))
            now[source.name].update(source.gauges())
        return found, now


def _of(source: Source) -> dict[str, float]:
    counts = source.counts()
    if source.watched:
        counts["watched"], counts["watched time"] = counts["minato.batches"], counts["minato.wait.time"]
    return counts


def add(name: str, number: str, value: float) -> None:
    """Adds to one total."""
    with _lock:
        _ended[name][number] += value  # type: ignore[assignment]


def _in_child() -> None:
    """A fork has done nothing yet, and its copies of its parent's iterators count nothing."""
    global _lock
    _lock = threading.RLock()
    for source in list(_living):
        source.counted = True
    _ended.clear()
    _living.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_in_child)
