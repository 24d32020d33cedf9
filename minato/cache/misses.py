"""Values that the caches of a loader did not have while its latest iterator ran, for the verdict.

The caches are that of ``DataLoader(cache=)`` and those whose memoized functions the dataset calls. They are found
in its class, in the classes of its attributes, and in the globals of their methods.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._system import ranks_here
from ..dataset_calls import own_attributes
from .cache import Cache, any_open
from .datasets import leaves
from .depends import codes
from .readers import holds, parts_in, size_for

if TYPE_CHECKING:
    from .datasets import CacheOfLoader

#: share of the values for which there is room from which on a cache is full: their sizes differ
FULL = 0.8
#: share of the values that were made for which there was no room, from which on it is worth words
WORTH = 0.02


@dataclass(frozen=True)
class Missed:
    """Values that were made because the caches did not have them.

    Attributes:
        values: their number. refused: those of them that were not kept, for want of room
        seconds: what it cost to make them, in all workers of this process
        epochs: in which they were made, so far
        again: most values of an epoch were made although an earlier epoch had run
        used, size: bytes in use, and of the cache, where one cache alone refuses values
        enough: bytes of a cache that would keep all values; None: not known
        saves: seconds of workers that such a cache would save in an epoch; None: not known
        option: how the program asks for a cache
    """

    values: int
    refused: int
    seconds: float
    epochs: int = 1
    again: bool = False
    used: int = 0
    size: int = 0
    enough: float | None = None
    saves: float | None = None
    option: str = "cache="

    @property
    def too_small(self) -> bool:
        """Whether values are made again in each epoch, for want of room."""
        return self.refused > WORTH * max(1, self.values)


def caches_of(dataset: Any) -> list[Cache]:
    """Finds the caches of memoized functions that a dataset's classes and attributes show."""
    if not any_open():
        return []
    found: list[Cache] = []
    classes: set[type] = set()
    for leaf in leaves(dataset):
        for part in (leaf, *own_attributes(leaf).values()):
            if isinstance(part, types.FunctionType):
                found += _caches_in(part)
            classes.update(type(part).__mro__)
    for cls in classes:
        for member in vars(cls).values():
            if isinstance(member, (staticmethod, classmethod)):
                member = member.__func__
            if isinstance(member, types.FunctionType):
                found += _caches_in(member)
    return list({id(cache): cache for cache in found}.values())


def _caches_in(function: types.FunctionType) -> Iterator[Cache]:
    """Finds the cache of a memoized function; for another function, of those that it names."""
    memoized = vars(function).get("__minato_memoized__")
    if memoized is not None:
        yield memoized.cache
        return
    for code in codes(function.__code__):
        for name in code.co_names:
            named = function.__globals__.get(name)
            if isinstance(named, types.FunctionType) and "__minato_memoized__" in vars(named):
                yield vars(named)["__minato_memoized__"].cache


#: counts of ``Cache.stats()`` that are compared
_COUNTS = ("misses", "hits", "refused", "made_ns")


def _counts(cache: Cache) -> dict[str, int]:
    store = cache._attached()
    return {} if store is None else store.stats()


class Misses:
    """Counts of a loader's caches since an iterator began."""

    def __init__(self, dataset: Any, cached: CacheOfLoader | None, first: bool) -> None:
        """cached: with ``DataLoader(cache=)``. first: the loader has had no iterator before."""
        self._cached, self._first = cached, first
        caches = [] if cached is None else [cached.cache]
        caches += [cache for cache in caches_of(dataset) if cache not in caches]
        self._before = [(cache, _counts(cache)) for cache in caches]
        self.epochs = 0  # that the iterator has begun

    def __bool__(self) -> bool:
        return bool(self._before)

    def seen(self) -> Missed | None:
        """Returns what was missed since then. None: nothing, or that is not known, because other
        jobs share a cache and their misses count in it."""
        epochs = max(1, self.epochs)
        open_now = [(cache, _counts(cache), before) for cache, before in self._before]
        if any(now.get("jobs", 0) > 1 for _cache, now, _before in open_now):
            return None
        each = [
            (cache, now, {name: now[name] - before.get(name, 0) for name in _COUNTS})
            for cache, now, before in open_now if now
        ]  # fmt: skip
        values, hits, refused, made_ns = (sum(since[name] for _cache, _now, since in each) for name in _COUNTS)
        if not values:
            return None
        full = [one for one in each if one[2]["refused"]]
        return Missed(
            values, refused, made_ns * 1e-9 / ranks_here(), epochs,
            again=values > (0.5 + self._first) * (values + hits) / epochs,
            **(self._room(*full[0]) if len(full) == 1 else {}),
        )  # fmt: skip

    def _room(self, cache: Cache, now: dict[str, int], since: dict[str, int]) -> dict[str, Any]:
        """Describes a cache that has refused values."""
        used, size = now["used_bytes"], now["bytes"]
        own = self._cached if self._cached is not None and cache is self._cached.cache else None
        refused = since["refused"] / max(1, self.epochs)
        each = used / max(1, now["entries"])
        enough = saves = None
        if each and now["entries"] >= FULL * holds(parts_in(now), each):
            enough = size_for(now["entries"] + refused, each)
            saves = refused * since["made_ns"] * 1e-9 / max(1, since["misses"])
        option = "minato.Cache" if own is None or isinstance(own.given, Cache) else "cache="
        return {"used": used, "size": size, "enough": enough, "saves": saves, "option": option}
