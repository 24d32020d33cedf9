"""Finds what lets a sample depend on those that its worker has made before.

Seeding cannot reach it: a buffer of earlier samples, a counter, a list that is shuffled in place,
an iterator, more generators in one container than are seeded. torch gives each worker the same
samples in each run; balanced workers get others, so two runs differ.
"""

from __future__ import annotations

import dis
import types
from collections import deque
from collections.abc import Callable
from typing import Any

#: of an object or a module, by name
Attributes = dict[str, Any]

#: methods that are called for a sample
_ENTRIES = ("__getitem__", "__getitems__", "__call__", "forward")
_ITERATORS = (types.GeneratorType, *(type(iter(kind())) for kind in (list, tuple, dict, set)))


class History:
    """Watches attributes. places: those of an object, with its class. crowds: containers with more
    generators than are seeded. length: of the dataset; a container with one
    generator for each sample is harmless while workers live for one epoch. tell: is called once, with
    a name. Dicts are left out: most are caches."""

    def __init__(
        self,
        places: list[tuple[Attributes, type]],
        crowds: list[Any],
        length: float,
        tell: Callable[[str], None],
    ) -> None:
        self._places, self._crowds, self._length = places, crowds, length
        self._tell: Callable[[str], None] | None = tell
        self._before, self._moved = self._now(), set[tuple[int, str]]()
        for attributes, owner in self._places:
            for name, value in attributes.items():
                if _is_iterator(value) and _uses(owner, name)[0]:
                    self._told(name)
        self.epoch(first=True)

    def epoch(self, first: bool = False) -> None:
        """Another epoch of this worker begins."""
        for crowd in self._crowds:
            size = len(crowd) if isinstance(crowd, (list, tuple, dict, set, deque)) else 0
            if not first or size < self._length:
                self._told(self._name_of(crowd))

    def _name_of(self, crowd: Any) -> str:
        names = (name for attributes, _ in self._places for name, value in attributes.items()
                 if value is crowd)
        return next(names, f"{type(crowd).__name__} of generators")

    def _told(self, name: str) -> None:
        if self._tell is not None:
            self._tell(name)
            self._tell = None

    def _now(self) -> dict[tuple[int, str], Any]:
        """What moves with samples: numbers, lengths, and the identities of a list and its first
        elements."""
        return {
            (place, name): value if type(value) in (int, float) else (len(value), _elements(value))
            for place, (attributes, _) in enumerate(self._places)
            for name, value in attributes.items()
            if type(value) in (int, float, list, set, deque)
        }

    def look(self) -> None:
        """Tells of an attribute that has moved twice. What moves once may be built at first use."""
        before, self._before = self._before, self._now()
        for key, now in self._before.items():
            if self._tell is not None and self._has_moved(key, before.get(key, now), now):
                if key in self._moved:
                    self._told(key[1])
                self._moved.add(key)

    def _has_moved(self, key: tuple[int, str], before: Any, now: Any) -> bool:
        if type(now) is not type(before):
            return False
        if type(now) in (int, float):
            loads, sums = _uses(self._places[key[0]][1], key[1]) if now != before else (0, 0)
            return loads > sums > 0
        grows = bool(now[0] > before[0])
        shuffled = now[0] == before[0] and sorted(now[1]) == sorted(before[1]) != [] and now != before
        return grows or shuffled


def _elements(value: Any) -> list[int]:
    """The identities of the elements of a list that is short enough to compare."""
    return [id(value), *map(id, value)] if type(value) is list and len(value) <= 10_000 else []


def _is_iterator(value: Any) -> bool:
    return type(value) in _ITERATORS or type(value).__module__ == "itertools"


def _uses(cls: type, attribute: str) -> tuple[int, int]:
    """How often the code of a sample reads an attribute, and how often it only adds to it."""
    methods = {name: f for base in reversed(cls.__mro__) for name, f in vars(base).items()
               if type(f) is types.FunctionType}
    reached = [name for name in _ENTRIES if name in methods]
    loads = sums = 0
    for name in reached:
        code = methods[name].__code__
        reached += [n for n in code.co_names if n in methods and n not in reached]
        steps = [s for s in dis.get_instructions(code) if s.opname not in ("SWAP", "COPY", "ROT_TWO")]
        for last, step in zip([*steps[:1], *steps], steps, strict=False):
            if step.argval == attribute:
                loads += step.opname in ("LOAD_ATTR", "LOAD_METHOD")
                sums += step.opname == "STORE_ATTR" and last.opname.startswith(("BINARY", "INPLACE"))
    return loads, sums
